"""Top-k on Hopper is the rule, bit for bit, on odd and on hard rows; the same bits twice."""
import math

import pytest
import torch

from glm52.device import missing_package
from glm52.ops.topk import naive_topk, topk_torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU"),
              pytest.mark.skipif(missing_package("tilelang") is not None, reason="TileLang is not installed")]
INF, NAN = math.inf, math.nan
ROWS, LENGTHS = [1, 5, 20, 50, 200], [1, 63, 2048, 2049, 8193, 32768, 131072 + 5]     # clusters of 8, 8, 4, 2 blocks; one block


def kernels():
    "What these tests launch, to be compiled before them."
    from glm52.kernels.topk import plan
    shapes = {plan(rows, length, k) for rows in ROWS for length in LENGTHS for k in (2048, 4096)}
    return [("topk", *shape) for shape in sorted(shapes)]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def whole(low, high, shape, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("length", LENGTHS)
def test_topk_is_the_rule(rows, length):
    from glm52.kernels.topk import topk
    limit = whole(0, length + 1, (rows,), 1)
    limit[0] = length
    for k in (1, 37, 2048):
        smooth = normal(rows, length, seed=k)
        for scores in (smooth, whole(0, 3, (rows, length), k).float(), (smooth * 4).round()):
            got = topk(scores, limit, k)
            assert torch.equal(got, topk_torch(scores, limit, k)), (k,)
            assert torch.equal(got, topk(scores, limit, k))


@pytest.mark.parametrize("length", [100, 9000, 70000])
def test_topk_of_hard_rows(length):
    from glm52.kernels.topk import topk
    scores = normal(9, length)
    scores[0] = 1.0
    scores[1] = NAN
    scores[2] = -INF
    scores[3, ::2] = NAN
    scores[4] = torch.where(scores[4] > 0, 0.0, -0.0)
    scores[5] = 0.0
    scores[5, length // 2:] = -0.0
    scores[6] = torch.arange(length, device="cuda").float()
    scores[7] = -torch.arange(length, device="cuda").float()
    scores[8, ::3] = INF
    limit = torch.full((9,), length, device="cuda")
    for k in (1, 64, 2048, 4096):
        assert torch.equal(topk(scores, limit, k), topk_torch(scores, limit, k)), k
        assert torch.equal(topk(scores[:2].contiguous(), limit[:2], k).cpu(), naive_topk(scores[:2].cpu(), limit[:2].cpu(), k))


def test_topk_of_a_million_and_of_unaligned_rows():
    from glm52.kernels.topk import topk
    for rows in (1, 3, 80):
        scores, limit = normal(rows, 1 << 20), torch.full((rows,), 1 << 20, device="cuda")
        assert torch.equal(topk(scores, limit, 2048), topk_torch(scores, limit, 2048))
    flat = normal(5 * 4000 + 1)
    scores, limit = flat[1:].view(5, 4000), torch.full((5,), 4000, device="cuda")
    assert torch.equal(topk(scores, limit, 500), topk_torch(scores, limit, 500))
    assert topk(scores[:0], limit[:0], 7).shape == (0, 7)
    with pytest.raises(ValueError, match="1 to 4096"): topk(scores, limit, 5000)
    with pytest.raises(ValueError, match="contiguous"): topk(scores[:, ::2], limit, 5)
