"""The Triton kernels of norms, rope and index scores against the plain forms, on odd shapes; the same bits twice."""
import pytest
import torch

from glm52.device import relative_error
from glm52.ops.indexer import naive_index_scores, paged_index_scores, read_index_keys
from glm52.ops.norm import naive_layer_norm, naive_rms_norm
from glm52.ops.rope import cos_sin, inv_freq, rotate

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def whole(low, high, shape, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


# norms and rope

@pytest.mark.parametrize("width", [1, 63, 128, 512, 2048, 6144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms(width, dtype):
    from glm52.kernels.norm import layer_norm, rms_norm
    x = (normal(37, width + 8) * 3 + 1).to(dtype)[:, :width]
    weight, bias = normal(width, seed=1, dtype=dtype), normal(width, seed=2, dtype=dtype)
    ratio = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    assert relative_error(naive_rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5)) < ratio
    if width > 1: assert relative_error(naive_layer_norm(x, weight, bias, 1e-6), layer_norm(x, weight, bias, 1e-6)) < ratio
    assert torch.equal(rms_norm(x, weight, 1e-5)[5:6], rms_norm(x[5:6], weight, 1e-5))


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 20, 64])
def test_rope(heads, dtype, interleave):
    from glm52.kernels.rope import rotate as kernel
    x = normal(33, heads, 192, dtype=dtype)[..., 128:]
    angles = cos_sin(whole(0, 1 << 20, (33,)), inv_freq(64, 8e6).cuda())
    assert relative_error(rotate(x, *angles, interleave), kernel(x, *angles, interleave)) < (1e-5 if dtype == torch.float32 else 5e-3)


# index scores

def index_cache(pages, seed=0):
    "Random e4m3 values and power-of-two scales in the page layout."
    cache = torch.empty(pages, 64 * 132, dtype=torch.uint8, device="cuda")
    cache[:, :8192] = normal(pages, 8192, seed=seed).to(torch.float8_e4m3fn).view(torch.uint8)
    cache[:, 8192:] = torch.ldexp(torch.ones(pages, 64, device="cuda"), whole(-6, 1, (pages, 64), seed)).view(torch.uint8)
    return cache


CASES = {"decode": [1] * 5, "six rows": [6] * 3, "one to eight": list(range(1, 9)), "ragged": [1, 0, 9, 3, 17, 8], "as many rows as requests": [3, 0, 0], "prefill": [100]}


@pytest.mark.parametrize("kind", ["fp8", "bfloat16"])
@pytest.mark.parametrize("name,heads", [*((name, 32) for name in CASES), *(("ragged", heads) for heads in (1, 8, 15, 24, 64))])
def test_index_scores(name, heads, kind):
    from glm52.kernels.indexer import index_scores
    counts, context = CASES[name], 700
    pages, rows = -(-context // 64), sum(CASES[name])
    table = torch.randperm(len(counts) * pages, device="cuda").int().view(len(counts), pages)
    cache = index_cache(len(counts) * pages) if kind == "fp8" else normal(len(counts) * pages, 64, 128, dtype=torch.bfloat16)
    q, gate = normal(rows, heads, 128, dtype=torch.bfloat16), normal(rows, heads, seed=3)
    start = torch.tensor([0, *counts], device="cuda").cumsum(0)
    limit = torch.cat([torch.arange(n, device="cuda") + context - n - 7 * b for b, n in enumerate(counts)])
    got = index_scores(q, gate, cache, table, start, limit, debug=True)
    assert torch.equal(got, index_scores(q, gate, cache, table, start, limit))
    want = paged_index_scores(q.cpu(), gate.cpu(), cache.cpu(), table.cpu(), start.cpu(), limit.cpu())
    assert torch.equal(got.cpu().isinf(), want.isinf())
    assert relative_error(want, got.cpu()) < 2e-3
    if kind == "bfloat16":
        for b, (first, last) in enumerate(zip(start.tolist(), start.tolist()[1:])):
            plain = naive_index_scores(q[first:last], read_index_keys(cache, table[b]), gate[first:last], limit[first:last])
            assert relative_error(plain, got[first:last]) < 2e-3


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("kind", ["fp8", "bfloat16"])
def test_a_row_of_scores_does_not_know_its_neighbours(kind, heads):
    from glm52.kernels.indexer import index_scores
    counts, context = [6, 1, 8, 30], 500
    table = torch.randperm(32, device="cuda").int().view(4, 8)
    cache = index_cache(32) if kind == "fp8" else normal(32, 64, 128, dtype=torch.bfloat16)
    q, gate = normal(sum(counts), heads, 128, dtype=torch.bfloat16), normal(sum(counts), heads, seed=3)
    start = torch.tensor([0, *counts], device="cuda").cumsum(0)
    limit = torch.cat([torch.arange(n, device="cuda") + context - n for n in counts])
    together = index_scores(q, gate, cache, table, start, limit)
    for b, (first, last) in enumerate(zip(start.tolist(), start.tolist()[1:])):
        for t in range(first, last):
            alone = index_scores(q[t:t + 1], gate[t:t + 1], cache, table[b:b + 1], torch.tensor([0, 1], device="cuda"), limit[t:t + 1])
            assert torch.equal(together[t:t + 1], alone)


def test_index_scores_refuses():
    from glm52.kernels.indexer import index_scores
    table, start, limit = torch.zeros(1, 2, dtype=torch.int32, device="cuda"), torch.tensor([0, 2], device="cuda"), torch.tensor([99, 100], device="cuda")
    q, gate, cache = normal(2, 32, 128, dtype=torch.bfloat16), normal(2, 32), index_cache(2)
    for bad, words in ((dict(gate=gate.half()), "float32"), (dict(q=q.repeat(1, 3, 1), gate=gate.repeat(1, 3)), "96 heads"),
                       (dict(cache=cache[:, :8192].contiguous()), "FP8 pages"), (dict(table=table.long()), "int32"),
                       (dict(limit=limit.int()), "int64"), (dict(cache=cache.flatten()[1:1 + 64 * 132].view(1, -1)), "16 bytes")):
        a = dict(q=q, gate=gate, cache=cache, table=table, limit=limit) | bad
        with pytest.raises(ValueError, match=words): index_scores(a["q"], a["gate"], a["cache"], a["table"], start, a["limit"])
    with pytest.raises(ValueError, match="outside the cache"): index_scores(q, gate, cache, table + 5, start, limit, debug=True)
