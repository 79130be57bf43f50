"""Sparse attention over BF16 pages against the plain form; the same bits twice."""
import pytest
import torch

from glm52.device import missing_package, relative_error
from glm52.ops.cache import positions_to_slots
from glm52.ops.sparse_mla import naive_sparse_mla

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU"),
              pytest.mark.skipif(missing_package("tilelang") is not None, reason="TileLang is not installed")]
HEADS, SPLITS = [8, 16, 32, 64], (1, 2, 8)
SHAPES = [(1, 2048), (7, 2048), (7, 100), (20, 130), (64, 2048), (150, 64)]     # rows and k: from the most blocks a row to one


def kernels():
    "What these tests launch, to be compiled before them."
    from glm52.kernels.sparse_mla import plan
    plans = {(heads, *plan(rows, heads), mapped) for heads in HEADS for rows, _ in SHAPES for mapped in (True, False)}
    plans |= {(heads, *plan(150, heads, split), True) for heads in (8, 64) for split in SPLITS}
    return [("sparse_mla", *shape) for shape in sorted(plans)]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def paged(requests, context, seed=0):
    pages = -(-context // 64)
    cache = normal(requests * pages + 3, 64, 576, seed=seed, dtype=torch.bfloat16)
    table = (torch.randperm(requests * pages, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") + 3).int()
    return cache, table.view(requests, pages)


def choose(rows, context, k, seed=0):
    "Ascending positions; row r holds k, 0, 1, 63, 64, 65, ... of them."
    counts = [k, 0, 1, min(63, k), min(64, k), min(65, k), k - 1]
    keys = torch.rand(rows, context, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    out = torch.full((rows, k), -1, dtype=torch.int32, device="cuda")
    for r in range(rows):
        n = min(counts[r % len(counts)], context)
        out[r, :n] = keys[r].topk(n).indices.sort().values.int() if n else out[r, :0]
    return out


def by_the_plain_form(q, cache, table, request, positions, scale):
    out = torch.empty(*q.shape[:2], 512, device="cuda")
    for t in range(len(q)):
        kv = cache[table[request[t]].long()].flatten(0, 1).float()
        out[t:t + 1] = naive_sparse_mla(q[t:t + 1].float(), kv, positions[t:t + 1], scale)[0]
    return out


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows,k", SHAPES)
def test_sparse_mla(heads, rows, k):
    from glm52.kernels.sparse_mla import sparse_mla, sparse_mla_paged
    context, requests, scale = max(k, 200), max(1, rows // 3), 192 ** -0.5
    cache, table = paged(requests, context, rows)
    request = torch.arange(rows, device="cuda") % requests
    positions, q = choose(rows, context, k, rows), normal(rows, heads, 576, dtype=torch.bfloat16)
    want = by_the_plain_form(q, cache, table, request, positions, scale)
    got = sparse_mla_paged(q, cache, positions, table, request, scale, debug=True)
    assert relative_error(want, got.float()) < 5e-3
    assert (got[(positions < 0).all(1)] == 0).all()
    for _ in range(5): assert torch.equal(got, sparse_mla_paged(q, cache, positions, table, request, scale))
    slots = positions_to_slots(positions, table, request)
    assert torch.equal(got, sparse_mla(q, cache, slots, scale, debug=True))


@pytest.mark.parametrize("heads", [8, 64])
def test_a_fixed_split_makes_rows_independent_of_the_batch(heads):
    from glm52.kernels.sparse_mla import sparse_mla_paged
    cache, table = paged(150, 300)
    request = torch.arange(150, device="cuda")
    positions, q = choose(150, 300, 256), normal(150, heads, 576, dtype=torch.bfloat16)
    for split in SPLITS:
        all_rows = sparse_mla_paged(q, cache, positions, table, request, 0.1, split)
        for some in (slice(3, 4), slice(40, 57), slice(100, 150)):
            assert torch.equal(all_rows[some], sparse_mla_paged(q[some], cache, positions[some], table, request[some], 0.1, split))


def test_sparse_mla_refuses():
    from glm52.kernels.sparse_mla import sparse_mla, sparse_mla_paged
    cache, table = paged(2, 128)
    q, slots = normal(2, 8, 576, dtype=torch.bfloat16), torch.zeros(2, 64, dtype=torch.int64, device="cuda")
    for bad, words in ((dict(q=q.float()), "bfloat16"), (dict(q=q[:, :4].contiguous()), "4 heads"), (dict(slots=slots.int()), "int64"),
                       (dict(slots=slots.expand(2, 64).t().contiguous().t()), "contiguous"), (dict(cache=cache[:, :, :512]), "pages of 64"),
                       (dict(slots=torch.zeros(2, 5000, dtype=torch.int64, device="cuda")), "at most 4096"), (dict(split=3), "not 3")):
        arguments = dict(q=q, cache=cache, slots=slots, split=None) | bad
        with pytest.raises(ValueError, match=words): sparse_mla(arguments["q"], arguments["cache"], arguments["slots"], 0.1, split=arguments["split"])
    outside = slots.clone()
    outside[1, 5] = len(cache) * 64
    with pytest.raises(ValueError, match="row 1"): sparse_mla(q, cache, outside, 0.1, debug=True)
    positions = torch.full((2, 64), 200, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="beyond 2 pages"):
        sparse_mla_paged(q, cache, positions, table, torch.arange(2, device="cuda"), 0.1, debug=True)
