"""The fused kernels in Triton's interpreter, against the separate ops they join; how a model binds them; what bad input meets."""
import inspect
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st

from glm52 import bench_kernels
from glm52.config import ConfigError
from glm52.device import relative_error
from glm52.kernels import cache as cache_kernel, indexer as score_kernel, indexer_prepare, norm_quant
from glm52.model.decoder import SEPARATE, Backends, Caches, Capture, Decoder, fill, random_tensors, tiny_config as make_config
from glm52.model.plan import RequestRows, StepPlan
from glm52.ops import cache as cache_op, indexer as indexer_op
from glm52.ops.fp8 import hadamard, quantize_activation, quantize_index
from glm52.ops.norm import add_rms_norm, naive_layer_norm, naive_rms_norm
from glm52.ops.rope import cos_sin, inv_freq, naive_rope

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only where there is no GPU")
FUSED = ("prepare_queries", "prepare_key", "prepare_latent", "slots", "add_rms_norm")


def same(a, b): return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def normal(*shape, seed=0, dtype=torch.float32): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(tokens, half=32, seed=0):
    return cos_sin(torch.randint(0, 1 << 20, (tokens,), generator=torch.Generator().manual_seed(seed)), inv_freq(2 * half, 8e6))


def row_of(t, *tensors): return [x[t:t + 1].contiguous() for x in tensors]


# queries and keys

@interpreted
@pytest.mark.parametrize("spread", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("fp8", [False, True], ids=["own dtype", "fp8"])
@pytest.mark.parametrize("interleave", [True, False], ids=["adjacent", "half-split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_queries_are_the_same_bytes(dtype, interleave, fp8, spread):
    for rows, heads, width, half in ((3, 32, 128, 32), (2, 5, 32, 8)):
        wide, turned = normal(rows, heads * width + 8, seed=heads, dtype=dtype) * 3, angles(rows, half)
        q, gate = wide[:, :heads * width].unflatten(1, (heads, width)), normal(rows, heads + 3, seed=1)[:, :heads]          # rows lie apart
        want = indexer_op.prepare_queries(q, gate, *turned, interleave, fp8, spread)
        got = indexer_prepare.prepare_queries(q, gate, *turned, interleave, fp8, spread)
        assert all(same(a, b) for a, b in zip(want, got))
        alone = indexer_prepare.prepare_queries(*row_of(1, q, gate, *turned), interleave, fp8, spread)
        assert all(same(a[1:2], b) for a, b in zip(got, alone))


@interpreted
def test_scales_are_powers_of_two_at_the_edges():
    exact = torch.tensor([448.0 * 2.0 ** n for n in (-3, 0, 5)])
    amax = torch.cat([exact, exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(0.0)), torch.tensor([0.0, 1e-5, 1e-4, 3e4])])
    q = torch.zeros(1, len(amax), 32)
    q[0, :, 31] = -amax
    want, got = (form.prepare_queries(q, torch.ones(1, len(amax)), *angles(1, 4), fp8=True) for form in (indexer_op, indexer_prepare))
    scale = quantize_index(q)[1]
    assert all(same(a, b) for a, b in zip(want, got)) and torch.equal(got[1], (len(amax) * 32) ** -0.5 * scale)
    assert scale[0, :6].log2().tolist() == [-3, 0, 5, -2, 1, 6]


@interpreted
@pytest.mark.parametrize("spread", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("interleave", [True, False], ids=["adjacent", "half-split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_keys_go_to_their_pages(dtype, interleave, kind, spread):
    for rows, width, half in ((5, 128, 32), (3, 32, 8)):
        key, weight, bias = normal(rows, width + 8, dtype=dtype)[:, :width] * 2 + 1, normal(width, seed=1), normal(width, seed=2)
        slot, turned = torch.tensor([7, 191, -1, 64, 63])[:rows], angles(rows, half)
        ours, theirs, single = (cache_op.new_index_cache(3, kind, width, dtype) for _ in range(3))
        indexer_prepare.prepare_key(ours, slot, key, weight, bias, 1e-6, *turned, interleave, spread, debug=True)
        cache_op.prepare_key(theirs, slot, key, weight, bias, 1e-6, *turned, interleave, spread)
        read = lambda cache: cache_op.read_index_keys(cache, torch.arange(3)).float()
        unwritten = torch.ones(192, dtype=torch.bool)
        unwritten[slot[slot >= 0]] = False
        assert not read(ours)[unwritten].any() and relative_error(read(theirs), read(ours)) < (1e-6 if dtype == torch.float32 else 1e-3)
        for t in range(rows):
            if slot[t] >= 0: indexer_prepare.prepare_key(single, *row_of(t, slot, key), weight, bias, 1e-6, *row_of(t, *turned), interleave, spread)
        assert same(ours, single)


@interpreted
def test_queries_in_fp8_score_as_those_that_are_quantised_later():
    q, gate, turned, limit = normal(4, 16, 32), normal(4, 16, seed=1), angles(4, 8), torch.tensor([97, 98, 99, 100])
    values, scale = quantize_index(normal(128, 32, seed=2))
    cache = torch.cat([values.view(torch.uint8).view(2, -1), scale.view(2, -1).contiguous().view(torch.uint8)], 1)
    rest = cache, torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([0, 4]), limit
    plain, small = (indexer_op.prepare_queries(q, gate, *turned, fp8=fp8) for fp8 in (False, True))
    for form in (indexer_op.index_scores, score_kernel.index_scores): assert same(form(*plain, *rest), form(*small, *rest))
    with pytest.raises(ValueError, match="need FP8 pages"): indexer_op.index_scores(*small, torch.zeros(2, 64, 32), *rest[1:])


@given(st.integers(0, 1000), st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_plain_forms_are_the_ops_one_after_another(seed, spread):
    "Written out: turn the first P, transform, quantise, fold."
    q, gate, positions, freq = normal(3, 4, 32, seed=seed), normal(3, 4, seed=seed + 1), torch.randint(0, 99, (3,), generator=torch.Generator().manual_seed(seed)), inv_freq(16, 1e4)
    turned = torch.cat([naive_rope(q[..., :16], positions, freq), q[..., 16:]], -1)
    turned = hadamard(turned) if spread else turned
    got, folded = indexer_op.prepare_queries(q, gate, *cos_sin(positions, freq), spread=spread)
    assert torch.equal(got, turned) and torch.equal(folded, gate * 128 ** -0.5)
    small, scaled = indexer_op.prepare_queries(q, gate, *cos_sin(positions, freq), fp8=True, spread=spread)
    values, scale = quantize_index(turned)
    assert same(small, values) and torch.equal(scaled, folded * scale)
    key, cache = normal(3, 32, seed=seed + 2), cache_op.new_index_cache(1, dim=32, dtype=torch.float32)
    cache_op.prepare_key(cache, torch.tensor([5, -1, 0]), key, torch.ones(32), torch.zeros(32), 1e-6, *cos_sin(positions, freq), spread=spread)
    normed = naive_layer_norm(key, torch.ones(32), torch.zeros(32), 1e-6)
    normed = torch.cat([naive_rope(normed[:, :16], positions, freq), normed[:, 16:]], -1)
    assert torch.equal(cache[0, [5, 0]], (hadamard(normed) if spread else normed)[[0, 2]]) and not cache[0, 1:5].any()


# latent rows and slots

@interpreted
@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("interleave", [True, False], ids=["adjacent", "half-split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_latent_rows_go_to_their_pages(dtype, interleave, kind):
    for latent, half in ((512, 32), (200, 8), (32, 8)):
        kv, weight, slot, turned = normal(5, latent + 2 * half + 8, dtype=dtype)[:, :latent + 2 * half] * 2, normal(latent, seed=1), torch.tensor([7, 191, -1, 64, 63]), angles(5, half)
        ours, theirs, single = (cache_op.new_latent_cache(3, kind, latent + 2 * half, 2 * half, dtype) for _ in range(3))
        cache_kernel.prepare_latent(ours, slot, kv, weight, 1e-5, *turned, interleave, debug=True)
        cache_op.prepare_latent(theirs, slot, kv, weight, 1e-5, *turned, interleave, rms_norm=naive_rms_norm)
        read = lambda cache: cache_op.read_latent(cache, torch.arange(192), 2 * half, torch.float32)
        assert relative_error(read(theirs), read(ours)) < (1e-6 if dtype == torch.float32 else 1e-3)
        assert same(read(theirs)[:, -2 * half:], read(ours)[:, -2 * half:])               # a rotation adds in one order only
        for t in range(5): cache_kernel.prepare_latent(single, *row_of(t, slot, kv), weight, 1e-5, *row_of(t, *turned), interleave)
        assert same(ours, single)


@interpreted
def test_slot_minus_one_is_not_written():
    turned, nowhere = angles(2), torch.tensor([-1, -1])
    for kind in ("auto", "fp8"):
        latents, keys = cache_op.new_latent_cache(1, kind, dtype=torch.float16), cache_op.new_index_cache(1, kind, dtype=torch.float16)
        cache_kernel.prepare_latent(latents, nowhere, normal(2, 576, dtype=torch.float16), torch.ones(512), 1e-5, *turned)
        indexer_prepare.prepare_key(keys, nowhere, normal(2, 128, dtype=torch.float16), torch.ones(128), torch.zeros(128), 1e-6, *turned)
        assert not latents.any() and not keys.any()


@interpreted
@given(st.integers(1, 5), st.integers(1, 70), st.integers(1, 9), st.integers(0, 100), st.booleans())
@settings(max_examples=25, deadline=None)
def test_positions_become_the_same_slots(rows, width, pages, seed, wide):
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 1 << 30, (3, pages), generator=g, dtype=torch.int32)
    positions = torch.randint(-1, 64 * pages, (rows, width + 2), generator=g)[:, :width]
    request = torch.randint(0, 3, (rows,), generator=g)
    positions = positions if wide else positions.int()
    assert same(cache_kernel.positions_to_slots(positions, table, request, debug=True), cache_op.positions_to_slots(positions, table, request))


# residual, norm, FP8

@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("rows,width", [(3, 6144), (2, 200), (1, 1), (4, 128), (0, 256)])
def test_sum_norm_and_fp8(rows, width, dtype):
    x, delta, weight = normal(rows, width + 8, dtype=dtype)[:, :width], normal(rows, width, seed=1, dtype=dtype), normal(width, seed=2)
    total, norm, values, scales = norm_quant.norm_quant(x, delta, weight, 1e-5)
    plain = add_rms_norm(x, delta, weight, 1e-5, naive_rms_norm)
    assert same(total, plain[0]) and relative_error(plain[1], norm) < (1e-6 if dtype == torch.float32 else 1e-3)
    assert all(same(a, b) for a, b in zip(quantize_activation(norm), (values, scales)))
    assert same(norm_quant.norm_quant(x, delta, weight, 1e-5, norm=False)[2], values) and norm_quant.norm_quant(x, delta, weight, 1e-5, norm=False)[1] is None
    assert all(same(a, b) for a, b in zip(norm_quant.add_rms_norm(x, delta, weight, 1e-5), (total, norm)))
    assert same(norm_quant.norm_quant(total, None, weight, 1e-5)[1], norm)
    if rows > 1: assert all(same(a[1:2], b) for a, b in zip((total, norm, values, scales), norm_quant.norm_quant(*row_of(1, x, delta), weight, 1e-5)))


def test_one_binary_makes_every_form_of_the_norm():
    "A compiler that knows what is not stored lays rows out in another way, and adds in another order: on a GPU that showed in the bits."
    import triton
    if isinstance(kernel := norm_quant._add_norm_kernel, triton.runtime.JITFunction):
        constant = {p.name for p in kernel.params if p.is_constexpr}
        assert {p.name for p in kernel.params if p.do_not_specialize} == {"norm", "quantised"}
    else: constant = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
    assert constant == {"ADD", "GROUPS", "INTERPRETED"}
    assert norm_quant.norm_quant(normal(2, 200), None, torch.ones(200), 1e-5, norm=False, quantised=False)[1:] == (None, None, None)


@interpreted
def test_the_sum_is_rounded_before_it_is_normed():
    x, delta = torch.full((1, 128), 2048.0).half(), torch.full((1, 128), 1.0).half()          # 2,049 is not an fp16 number
    total, norm = norm_quant.add_rms_norm(x, delta, torch.full((128,), 2048.0), 1e-5)
    assert (total == 2048).all() and (norm == 2048).all()


@interpreted
def test_a_row_of_zeros_stays_zero():
    zeros = torch.zeros(2, 256)
    total, norm, values, scales = norm_quant.norm_quant(zeros, zeros, torch.ones(256), 1e-5)
    assert not total.any() and not norm.any() and not values.float().any() and torch.equal(scales, torch.full((2, 2), 1e-10) / 448)


# a model

def two_steps(backends, config, kind):
    ids = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    steps = ([RequestRows(ids[:22], 0, [3]), RequestRows(ids[:9], 0, [5])], [RequestRows(ids[22:24], 22, [3]), RequestRows(ids[9:10], 9, [5])])
    model, said = Decoder(config, torch.float32, "cpu", backends), []
    fill(model, random_tensors(config, 0))
    caches = Caches.new(config, 6, torch.float32, "cpu", index=kind)
    for rows in steps:
        capture = Capture()
        said.append((model.logits(model.forward(StepPlan.build(rows, model.device), caches, capture)), capture.positions))
    return said


@interpreted
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_a_model_bound_to_the_fused_kernels_says_and_selects_the_same(kind):
    config = make_config(num_hidden_layers=4, num_nextn_predict_layers=0)
    plain, fused = (two_steps(Backends.choose("cpu", **wishes), config, kind) for wishes in ({}, dict.fromkeys(FUSED, "triton")))
    for (want, positions), (got, chosen) in zip(plain, fused):
        assert relative_error(want, got) < 1e-5
        assert all(torch.equal(positions[layer], chosen[layer]) for layer in positions)


def test_the_hadamard_transform_is_a_choice_of_the_config():
    config = make_config(num_hidden_layers=4, num_nextn_predict_layers=0)
    spread = make_config(num_hidden_layers=4, num_nextn_predict_layers=0, index_hadamard=True)
    assert not config.index_hadamard and spread.index_hadamard and type(spread).from_dict(spread.to_dict()) == spread
    for (want, positions), (got, chosen) in zip(two_steps(Backends.choose("cpu"), config, "auto"), two_steps(Backends.choose("cpu"), spread, "auto")):
        assert relative_error(want, got) < 1e-5           # orthogonal: scores change by roundings only
        assert all(torch.equal(positions[layer], chosen[layer]) for layer in positions)
    with pytest.raises(ConfigError, match="power of two"): make_config(index_hadamard=True, index_head_dim=48)


def test_separate_forms_run_the_parts_that_were_chosen():
    chosen = Backends.choose("cpu", rope="triton", layer_norm="triton")
    for op, parts in SEPARATE.items():
        bound = getattr(chosen, op).function
        assert isinstance(bound, partial) and bound.keywords == {part: getattr(chosen, part).function for part in parts}
    table = {op: (name, why) for op, name, why in Backends.choose("cpu", prepare_key="triton").table()}
    assert table["prepare_key"] == ("triton", "asked for") and table["prepare_queries"][0] == "torch"


def test_a_kernel_hash_covers_what_the_kernel_takes_from_its_neighbours():
    borrowed = "".join(bench_kernels._borrowed(inspect.getsource(indexer_prepare), "glm52.kernels"))
    for name in ("split_pairs", "join_pairs", "e4m3"): assert f"def {name}(" in borrowed
    assert "_rotate_kernel" not in borrowed and not list(bench_kernels._borrowed(inspect.getsource(score_kernel), "glm52.kernels"))


# bad input

def test_queries_and_keys_refuse():
    q, gate, (cos, sin) = torch.zeros(2, 4, 32), torch.zeros(2, 4), angles(2, 8)
    for arguments, words in (((q.double(), gate, cos, sin), "float64"), ((q[..., :24].contiguous(), gate, cos, sin), "powers of two"), ((q, gate.half(), cos, sin), "float32, got"),
                             ((q, gate[:, :3], cos, sin), r"gate must be \[2, 4\]"), ((q, gate, cos[:1], sin), "cos must be"), ((q, gate, cos, sin.double()), "sin must be"),
                             ((q[:, 0], gate, cos, sin), r"\[T, Hi, Di\]"), ((torch.zeros(2, 8, 32)[:, ::2], gate, cos, sin), "heads of a row"), ((q, gate, *angles(2, 32)), "powers of two")):
        with pytest.raises(ValueError, match=words): indexer_prepare.prepare_queries(*arguments)
    good = dict(cache=cache_op.new_index_cache(2, "fp8", 32), slot=torch.tensor([0, 5]), key=torch.zeros(2, 32), weight=torch.ones(32), bias=torch.zeros(32), eps=1e-6, cos=cos, sin=sin)
    for change, words in ((dict(cache=cache_op.new_index_cache(2, "fp8", 64)), "do not fit a cache"), (dict(cache=torch.zeros(2, 64, 32).half()), "do not fit a cache"),
                          (dict(slot=torch.tensor([0, 5]).int()), "int64"), (dict(slot=torch.tensor([0])), r"slots must be \[2\]"), (dict(weight=torch.ones(31)), "weight must be"),
                          (dict(bias=torch.ones(64)[::2]), "bias must be"), (dict(key=torch.zeros(32, 2).t()), "side by side"), (dict(key=torch.zeros(2, 1, 32)), r"\[T, Di\]"),
                          (dict(cache=torch.zeros(2 * 64 * 36 + 4, dtype=torch.uint8)[4:].view(2, -1)), "16 bytes")):
        with pytest.raises(ValueError, match=words): indexer_prepare.prepare_key(**good | change)
    for slot in ([0, 128], [-2, 0]):
        with pytest.raises(ValueError, match="slots outside"): indexer_prepare.prepare_key(**good | dict(slot=torch.tensor(slot)), debug=True)


def test_cache_rows_and_slots_refuse():
    cos, sin = angles(2, 8)
    good = dict(cache=cache_op.new_latent_cache(2, "fp8", 48, 16), slot=torch.tensor([0, 5]), kv=torch.zeros(2, 48), weight=torch.ones(32), eps=1e-5, cos=cos, sin=sin)
    for change, words in ((dict(cache=cache_op.new_latent_cache(2, "fp8", 64, 16)), "do not fit a cache"), (dict(cache=torch.zeros(2, 64, 48).half()), "do not fit a cache"),
                          (dict(cache=torch.zeros(2, 32, 68, dtype=torch.uint8)), "do not fit"), (dict(slot=torch.tensor([0, 5]).int()), "slots must be"), (dict(kv=torch.zeros(2, 40)), r"\[T, 32 \+ 16\]"),
                          (dict(kv=torch.zeros(48, 2).t()), "side by side"), (dict(kv=torch.zeros(2, 48).double()), "float64"), (dict(cos=cos.double()), "cos must be"), (dict(sin=sin[:1]), "sin must be")):
        with pytest.raises(ValueError, match=words): cache_kernel.prepare_latent(**good | change)
    with pytest.raises(ValueError, match="multiples of 4"): cache_kernel.prepare_latent(**good | dict(kv=torch.zeros(2, 46), weight=torch.ones(30)))
    with pytest.raises(ValueError, match="slots outside"): cache_kernel.prepare_latent(**good | dict(slot=torch.tensor([0, 128])), debug=True)
    positions, table, request = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    for arguments, words in (((positions.float(), table, request), "int32 or int64"), ((positions, table.long(), request), "page table int32"), ((positions, table, request[:1]), "as many requests"),
                             ((positions.t().contiguous().t(), table, request), "side by side")):
        with pytest.raises(ValueError, match=words): cache_kernel.positions_to_slots(*arguments)
    for bad in ((positions + 128, table, request), (positions, table, request + 1)):
        with pytest.raises(ValueError, match="beyond the page table"): cache_kernel.positions_to_slots(*bad, debug=True)


def test_norm_and_fp8_refuse():
    x, w = torch.zeros(2, 8), torch.zeros(8)
    for arguments, words in (((x.double(), None, w), "float64"), ((x, x[:1], w), "delta must be"), ((x, x.half(), w), "delta must be"), ((x, x, w[:7]), "weight must be"), ((x[0], x[0], w), r"\[T, d\]"),
                             ((x.t().contiguous().t(), None, w), "side by side"), ((torch.zeros(1, 20000), None, torch.zeros(20000)), "16,384")):
        with pytest.raises(ValueError, match=words): norm_quant.norm_quant(*arguments, 1e-5)
