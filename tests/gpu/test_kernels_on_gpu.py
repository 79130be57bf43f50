"""The Hopper kernels against the plain forms, on odd shapes; the same bits twice."""
import math

import pytest
import torch

from glm52.device import missing_package, relative_error
from glm52.ops.cache import positions_to_slots
from glm52.ops.indexer import naive_index_scores, paged_index_scores, read_index_keys
from glm52.ops.norm import naive_layer_norm, naive_rms_norm
from glm52.ops.rope import cos_sin, inv_freq, rotate
from glm52.ops.sparse_mla import naive_sparse_mla
from glm52.ops.topk import naive_topk, topk_torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]
tilelang = pytest.mark.skipif(missing_package("tilelang") is not None, reason="TileLang is not installed")
INF, NAN = math.inf, math.nan


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def whole(low, high, shape, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


# top-k

@tilelang
@pytest.mark.parametrize("rows", [1, 5, 20, 70, 200])
@pytest.mark.parametrize("length", [1, 63, 2048, 2049, 8193, 32768, 131072 + 5])
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


@tilelang
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


@tilelang
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


# sparse attention

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


@tilelang
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("rows,k", [(1, 2048), (7, 2048), (7, 100), (20, 130), (64, 2048), (150, 64)])
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


@tilelang
@pytest.mark.parametrize("heads", [8, 64])
def test_a_fixed_split_makes_rows_independent_of_the_batch(heads):
    from glm52.kernels.sparse_mla import sparse_mla_paged
    cache, table = paged(150, 300)
    request = torch.arange(150, device="cuda")
    positions, q = choose(150, 300, 256), normal(150, heads, 576, dtype=torch.bfloat16)
    for split in (1, 2, 8):
        all_rows = sparse_mla_paged(q, cache, positions, table, request, 0.1, split)
        for some in (slice(3, 4), slice(40, 57), slice(100, 150)):
            assert torch.equal(all_rows[some], sparse_mla_paged(q[some], cache, positions[some], table, request[some], 0.1, split))


@tilelang
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
