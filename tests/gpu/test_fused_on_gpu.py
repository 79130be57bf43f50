"""The fused kernels on a Hopper GPU, in BF16 and FP8, against the separate ops; the same bits twice and alone; large addresses; a captured graph."""
import pytest
import torch

from glm52.device import relative_error
from glm52.ops import cache as cache_op, indexer as indexer_op
from glm52.ops.fp8 import quantize_activation
from glm52.ops.norm import add_rms_norm, naive_rms_norm
from glm52.ops.rope import cos_sin, inv_freq, rotate

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RATIO = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 3e-3}      # a rounding of the model's dtype


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def angles(tokens, seed=0):
    positions = torch.randint(0, 1 << 20, (tokens,), generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return cos_sin(positions, inv_freq(64, 8e6).cuda())


def places(tokens, pages, seed=0): return torch.randperm(64 * pages, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")[:tokens]
def same(a, b): return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
def row_of(t, *tensors): return [x[t:t + 1].contiguous() for x in tensors]


@pytest.mark.parametrize("spread", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("fp8", [False, True], ids=["own dtype", "fp8"])
@pytest.mark.parametrize("interleave", [True, False], ids=["adjacent", "half-split"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_are_the_same_bytes(dtype, interleave, fp8, spread):
    from glm52.kernels.indexer_prepare import prepare_queries
    for rows in (1, 37, 300):                # small and large programs
        q, gate, turned = normal(rows, 32, 128, dtype=dtype) * 3, normal(rows, 32, seed=1, dtype=torch.float32), angles(rows)
        got = prepare_queries(q, gate, *turned, interleave, fp8, spread)
        assert all(same(a, b) for a, b in zip(indexer_op.prepare_queries(q, gate, *turned, interleave, fp8, spread), got))
        assert all(same(a[:1], b) for a, b in zip(got, prepare_queries(*row_of(0, q, gate, *turned), interleave, fp8, spread)))


@pytest.mark.parametrize("spread", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("interleave", [True, False], ids=["adjacent", "half-split"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_go_to_their_pages(dtype, interleave, kind, spread):
    from glm52.kernels.indexer_prepare import prepare_key
    rows, pages = 1037, 40
    key, weight, bias, turned, slot = normal(rows, 200, dtype=dtype)[:, :128] * 2 + 1, normal(128, seed=1, dtype=dtype), normal(128, seed=2, dtype=dtype), angles(rows), places(rows, pages)
    slot[5] = -1
    ours, theirs, again, alone = (cache_op.new_index_cache(pages, kind, dtype=dtype, device="cuda") for _ in range(4))
    cache_op.prepare_key(theirs, slot, key, weight, bias, 1e-6, *turned, interleave, spread)
    for cache in (ours, again): prepare_key(cache, slot, key, weight, bias, 1e-6, *turned, interleave, spread, debug=True)
    read = lambda cache: cache_op.read_index_keys(cache, torch.arange(pages, device="cuda")).float()
    unwritten = torch.ones(64 * pages, dtype=torch.bool, device="cuda")
    unwritten[slot[slot >= 0]] = False
    assert same(ours, again) and not read(ours)[unwritten].any() and relative_error(read(theirs), read(ours)) < RATIO[dtype]
    for t in (0, 1, 6, rows - 1):
        prepare_key(alone, *row_of(t, slot, key), weight, bias, 1e-6, *row_of(t, *turned), interleave, spread)
        assert same(read(alone)[slot[t]], read(ours)[slot[t]])


@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("interleave", [True, False], ids=["adjacent", "half-split"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_rows_go_to_their_pages(dtype, interleave, kind):
    from glm52.kernels.cache import prepare_latent
    rows, pages = 1037, 40
    kv, weight, turned, slot = normal(rows, 600, dtype=dtype)[:, :576] * 2, normal(512, seed=1, dtype=dtype), angles(rows), places(rows, pages)
    slot[5] = -1
    ours, theirs, again, alone = (cache_op.new_latent_cache(pages, kind, dtype=dtype, device="cuda") for _ in range(4))
    cache_op.prepare_latent(theirs, slot, kv, weight, 1e-5, *turned, interleave, rms_norm=naive_rms_norm)
    for cache in (ours, again): prepare_latent(cache, slot, kv, weight, 1e-5, *turned, interleave, debug=True)
    read = lambda cache: cache_op.read_latent(cache, torch.arange(64 * pages, device="cuda"), dtype=torch.float32)
    assert same(ours, again) and relative_error(read(theirs), read(ours)) < RATIO[dtype] and same(read(theirs)[:, 512:], read(ours)[:, 512:])
    for t in (0, 1, 6, rows - 1):
        prepare_latent(alone, *row_of(t, slot, kv), weight, 1e-5, *row_of(t, *turned), interleave)
        assert same(read(alone)[slot[t]], read(ours)[slot[t]])


def test_addresses_beyond_32_bits():
    from glm52.kernels.cache import prepare_latent
    from glm52.kernels.indexer_prepare import prepare_key
    for kind, pages in (("fp8", 60_000), ("auto", 40_000)):
        kv, weight, turned = normal(2, 576), normal(512, seed=1), angles(2)
        large, small = (cache_op.new_latent_cache(n, kind, device="cuda") for n in (pages, 1))
        prepare_latent(large, torch.tensor([64 * pages - 1, 5], device="cuda"), kv, weight, 1e-5, *turned)
        prepare_latent(small, torch.tensor([63, 5], device="cuda"), kv, weight, 1e-5, *turned)
        assert same(large[-1, 63], small[0, 63]) and same(large[0, :63], small[0, :63])
        large[0].zero_(); large[-1].zero_()
        assert not large.any()
    for kind, pages in (("fp8", 300_000), ("auto", 150_000)):
        key, weight, bias = normal(2, 128), normal(128, seed=1), normal(128, seed=2)
        large, small = (cache_op.new_index_cache(n, kind, device="cuda") for n in (pages, 1))
        prepare_key(large, torch.tensor([64 * pages - 1, 64 * pages - 9], device="cuda"), key, weight, bias, 1e-6, *turned)
        prepare_key(small, torch.tensor([63, 55], device="cuda"), key, weight, bias, 1e-6, *turned)
        assert same(large[-1], small[0])
        large[-1].zero_()
        assert not large.any()


@pytest.mark.parametrize("width", [6144, 2048, 200, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_norm_and_fp8(width, dtype):
    from glm52.kernels.norm_quant import norm_quant
    x, delta, weight = normal(65, width, dtype=dtype) * 2, normal(65, width + 8, seed=1, dtype=dtype)[:, :width], normal(width, seed=2, dtype=dtype)
    total, norm, values, scales = got = norm_quant(x, delta, weight, 1e-5)
    plain = add_rms_norm(x, delta, weight, 1e-5, naive_rms_norm)
    assert same(total, plain[0]) and relative_error(plain[1], norm) < RATIO[dtype]
    assert all(same(a.cuda(), b) for a, b in zip(quantize_activation(norm.cpu()), (values, scales)))       # the CPU divides; a GPU multiplies by 1/448
    assert all(same(a, b) for a, b in zip(got, norm_quant(x, delta, weight, 1e-5)))
    assert all(same(a[7:8], b) for a, b in zip(got, norm_quant(*row_of(7, x, delta), weight, 1e-5)))
    assert same(norm_quant(x, delta, weight, 1e-5, norm=False)[2], values) and same(norm_quant(x, delta, weight, 1e-5, quantised=False)[1], norm)


def test_positions_become_the_same_slots():
    from glm52.kernels.cache import positions_to_slots
    table, request = torch.randint(0, 1 << 30, (5, 70), device="cuda", dtype=torch.int32), torch.arange(37, device="cuda") % 5
    for positions in (torch.randint(-1, 64 * 70, (37, 2048), device="cuda"), torch.randint(-1, 64 * 70, (37, 300), device="cuda").int()[:, :77]):
        assert same(positions_to_slots(positions, table, request, debug=True), cache_op.positions_to_slots(positions, table, request))


@pytest.mark.parametrize("interleave", [True, False], ids=["adjacent", "half-split"])
def test_rotations_are_the_same_bytes_at_the_end_of_the_context(interleave):
    from glm52.kernels.rope import rotate as kernel
    positions, frequency = torch.tensor([0, 1, 131_071, 1_048_574, 1_048_575], device="cuda"), inv_freq(64, 8e6)
    turned = cos_sin(positions, frequency.cuda())
    exact = (positions.cpu().float()[:, None] * frequency).double()
    assert max((turned[0].cpu() - exact.cos()).abs().max(), (turned[1].cpu() - exact.sin()).abs().max()) < 1e-6
    for dtype in DTYPES:
        x = normal(5, 64, 256, dtype=dtype)[..., 192:]
        assert same(rotate(x, *turned, interleave), kernel(x, *turned, interleave))


def test_a_captured_graph_replays_on_new_inputs():
    from glm52.kernels import cache, indexer_prepare, norm_quant
    x, delta, w, kv, key, slot, turned = normal(8, 6144), normal(8, 6144, seed=1), normal(6144, seed=2), normal(8, 576), normal(8, 128), places(8, 4), angles(8)
    q, gate = normal(8, 32, 128), normal(8, 32, dtype=torch.float32)

    def run(latents, keys):
        cache.prepare_latent(latents, slot, kv, w[:512], 1e-5, *turned)
        indexer_prepare.prepare_key(keys, slot, key, w[:128], w[128:256], 1e-6, *turned)
        return *norm_quant.norm_quant(x, delta, w, 1e-5), *indexer_prepare.prepare_queries(q, gate, *turned, True, True)

    new = lambda: (cache_op.new_latent_cache(4, "fp8", device="cuda"), cache_op.new_index_cache(4, "fp8", device="cuda"))
    pages, side = new(), torch.cuda.Stream()
    with torch.cuda.stream(side): run(*pages)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = run(*pages)
    for n, t in enumerate((x, delta, kv, key, q)): t.copy_(normal(*t.shape, seed=10 + n))
    for t in pages: t.zero_()
    slot.copy_(places(8, 4, 3))
    graph.replay()
    fresh = new()
    assert all(same(a, b) for a, b in zip((*out, *pages), (*run(*fresh), *fresh)))
