"""Chapter fp8: scales by block and by row, and a `linear` whose rows do not feel their neighbours."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52.device import assert_close
from glm52.ops.fp8 import (BLOCK, CHUNK, E4M3_MAX, Fp8Weight, cancelling, dequantize_activation, dequantize_weight, hadamard, linear,
                           naive_linear_fp8, quantize_activation, quantize_index, quantize_weight, row_invariance_report)

DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_to_e4m3(x):
    "Nearest e4m3 value, ties to even, from the definition of the format: 3 mantissa bits, exponents down to 2^-6, steps of 2^-9 below."
    x = x.double()
    exponent = torch.floor(torch.log2(x.abs().clamp_min(2.0 ** -6))).clamp(-6, 8)
    step = torch.exp2(exponent - 3)
    return (torch.round(x / step) * step).clamp(-448, 448)


def test_torch_rounds_to_e4m3_as_the_format_says():
    x = torch.cat((normal(4000) * 100, normal(2000) * 0.01, torch.tensor([448.0, -448.0, 0.0, 17.0, 18.0, 2.0 ** -9, 2.0 ** -10]))).clamp(-448, 448)
    assert torch.equal(x.to(torch.float8_e4m3fn).double(), round_to_e4m3(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (576, 300), (1, 1), (130, 127), (2, 200, 150)], ids=str)
def test_quantize_weight_block_by_block(shape, dtype):
    w = (normal(*shape) * torch.logspace(-3, 3, shape[-1])).to(dtype)
    q, scale = quantize_weight(w)
    assert q.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and q.shape == w.shape
    back = dequantize_weight(Fp8Weight(q, scale), torch.float32)
    rows, cols = shape[-2:]
    assert scale.shape == (*shape[:-2], -(-rows // 128), -(-cols // 128))
    for i in range(scale.shape[-2]):
        for j in range(scale.shape[-1]):
            block = (..., slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            part, s = w[block].float(), scale[..., i, j, None, None]
            amax = part.abs().amax((-1, -2), keepdim=True)
            assert torch.allclose(s, amax / 448, rtol=1e-6), "each block has its own scale, from its own largest value"
            assert ((q[block].float().abs().amax((-1, -2))) == 448).all()
            assert torch.equal(back[block], q[block].float() * s)
            error = (back[block] - part).abs()
            assert (error <= (part.abs() / 16).maximum(s * 2.0 ** -10) * 1.0001).all(), "half a step of three mantissa bits"


def test_zero_blocks_stay_zero():
    w = torch.zeros(256, 256)
    w[:128, 128:] = normal(128, 128)
    q, scale = quantize_weight(w)
    back = dequantize_weight(Fp8Weight(q, scale), torch.float32)
    assert scale.isfinite().all() and (scale > 0).all() and back.isfinite().all()
    assert not back[128:].any() and not back[:, :128].any() and back[:128, 128:].any()
    q, scale = quantize_activation(torch.zeros(3, 200))
    assert (scale > 0).all() and not dequantize_activation(q, scale).any()
    q, scale = quantize_index(torch.zeros(3, 128))
    assert (scale > 0).all() and not q.float().any()


@pytest.mark.parametrize("amplitude", [1e-30, 1e-9, 1e4, 3e38])
def test_nothing_becomes_infinite_or_nan(amplitude):
    "e4m3fn has no infinity: a value beyond 448 would be a nan."
    x = normal(300, 130).clamp(-1, 1) * amplitude
    for q, s in (quantize_weight(x), quantize_activation(x), quantize_index(x[:, :128])):
        assert q.float().isfinite().all() and s.isfinite().all() and q.float().abs().max() <= E4M3_MAX


@pytest.mark.parametrize("shape", [(3, 512), (1, 128), (2, 130), (5, 100), (2, 3, 256), (0, 256)], ids=str)
def test_quantize_activation_row_by_row(shape):
    x = normal(*shape) * torch.logspace(-2, 2, shape[-1])
    q, scale = quantize_activation(x)
    assert scale.shape == (*shape[:-1], -(-shape[-1] // 128))
    for g in range(scale.shape[-1]):
        part = x[..., 128 * g:128 * g + 128]
        assert torch.equal(scale[..., g], part.abs().amax(-1) / 448)
        assert torch.equal(q[..., 128 * g:128 * g + 128].double(), round_to_e4m3(part / scale[..., g, None]))
    assert_close("round trip", x, dequantize_activation(q, scale), 0.04)


def test_a_scale_belongs_to_one_row():
    x = normal(40, 256)
    alone = quantize_activation(x[7:8])
    loud = x.clone() * 1000
    loud[7] = x[7]
    together = quantize_activation(loud)
    assert torch.equal(alone[0][0].float(), together[0][7].float()) and torch.equal(alone[1][0], together[1][7])


def test_index_scales_are_powers_of_two():
    x = normal(500, 128) * torch.logspace(-8, 6, 500)[:, None]
    q, scale = quantize_index(x)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    expect = torch.exp2(torch.ceil(torch.log2(x.double().abs().amax(-1).clamp_min(1e-4) / 448)))
    assert torch.equal(scale.double(), expect)
    assert torch.equal(q.double(), round_to_e4m3(x.double() / expect[:, None]))
    assert (q.float().abs().amax(-1)[x.abs().amax(-1) > 1e-4] > 223).all(), "no bit of range is given away"


def test_an_exact_power_of_two_is_not_rounded_up():
    for exponent in (-10, 0, 5):
        x = torch.zeros(1, 128)
        x[0, 3] = 448 * 2.0 ** exponent
        q, scale = quantize_index(x)
        assert scale.item() == 2.0 ** exponent and q[0, 3].float() == 448
        x[0, 3] = torch.nextafter(x[0, 3], torch.tensor(float("inf")))
        assert quantize_index(x)[1].item() == 2.0 ** (exponent + 1)


def test_index_products_ignore_the_order_of_scales():
    "Powers of two commute with rounding: scaling keys before or after the product gives the same bits."
    (q, qs), (k, ks) = quantize_index(normal(5, 128)), quantize_index(normal(9, 128, seed=1) * 37)
    before = (q.float() * qs[:, None]) @ (k.float() * ks[:, None]).T
    assert torch.equal(before, (q.float() @ k.float().T) * qs[:, None] * ks)


def test_dequantise_first_then_cut():
    "kv_b: 448 rows a head are 3.5 blocks and the cut at 192 rows is 1.5 blocks, so no slice of the scales fits a slice of the weight."
    w = normal(2 * 448, 256) * torch.logspace(-2, 2, 896)[:, None]
    whole = dequantize_weight(quantize_weight(w), torch.float32)
    q, scale = quantize_weight(w)
    wrong = dequantize_weight(Fp8Weight(q[448:640], scale[3:5]), torch.float32)
    assert (whole[448:640] - wrong).norm() > 0.05 * whole[448:640].norm()
    with pytest.raises(ValueError, match="scale_inv of a"): dequantize_weight(Fp8Weight(q[448:640], scale[3:]))


@pytest.mark.parametrize("n", [1, 2, 64, 128])
def test_hadamard_is_orthogonal_and_its_own_inverse(n):
    x, y = normal(4, n), normal(4, n, seed=1)
    assert_close("inverse", x, hadamard(hadamard(x)), 1e-6)
    assert_close("dots", (x * y).sum(-1), (hadamard(x) * hadamard(y)).sum(-1), 1e-5)
    matrix = hadamard(torch.eye(n))
    assert torch.allclose(matrix.abs(), torch.full((n, n), n ** -0.5)) and torch.allclose(matrix, matrix.T)
    with pytest.raises(ValueError, match="power of two"): hadamard(normal(2, 3 * n))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows,k,n", [(1, 128, 64), (5, 300, 130), (17, 7, 3), (300, 256, 33), (0, 64, 8), (2, 1, 1)], ids=str)
def test_linear_is_x_times_w_transposed(rows, k, n, dtype):
    x, w = normal(rows, k).to(dtype), normal(n, k, seed=1).to(dtype)
    got = linear(x, w)
    assert got.dtype == dtype and got.shape == (rows, n)
    assert_close("linear", x.double() @ w.double().T, got, 1e-6 if dtype == torch.float32 else 3e-3)
    wide = linear(x, w, torch.float32)
    assert wide.dtype == torch.float32
    assert_close("fp32 on request is fp32 all the way", x.double() @ w.double().T, wide, 1e-6)


@pytest.mark.parametrize("rows,k,n", [(1, 256, 64), (5, 300, 130), (33, 128, 576)], ids=str)
def test_fp8_linear_is_the_product_of_what_was_kept(rows, k, n):
    x, w = normal(rows, k), quantize_weight(normal(n, k, seed=1))
    kept = dequantize_activation(*quantize_activation(x)).double() @ dequantize_weight(w, torch.float32).double().T
    for got in (linear(x, w), naive_linear_fp8(x, w)): assert_close("fp8 linear", kept, got, 1e-6)
    assert_close("against what was lost", x.double() @ dequantize_weight(w, torch.float32).double().T, linear(x, w), 0.04)
    assert linear(x.bfloat16(), w).dtype == torch.bfloat16 and linear(x.bfloat16(), w, torch.float32).dtype == torch.float32


# (in, out): a nano model's projections, GLM-5.2's router and index gate cut small, and odd ones
SHAPES = [(256, 576), (576, 256), (128, 512), (512, 32), (100, 37), (7, 5)]
KINDS = {"fp32": (torch.float32, None), "bf16": (torch.bfloat16, None), "bf16-to-fp32": (torch.bfloat16, torch.float32),
         "fp8": ("fp8", torch.float32), "fp8-bf16": ("fp8", torch.bfloat16)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_linear_keeps_a_row_whatever_is_beside_it(kind, shape):
    "The noise cancels, so any other order of summation shows in every element."
    dtype, out = KINDS[kind]
    x, w = cancelling(300, *shape, torch.float32 if dtype == "fp8" else dtype)
    if dtype == "fp8": x, w = normal(300, shape[0]).to(out), quantize_weight(normal(shape[1], shape[0], seed=1))
    full = linear(x, w, out)
    for rows in (1, 2, 7, 16, 33, 300):
        assert torch.equal(linear(x[:rows], w, out), full[:rows]), rows
        order = torch.randperm(300, generator=torch.Generator().manual_seed(rows))[:rows]
        assert torch.equal(linear(x[order], w, out), full[order]), rows
        assert torch.equal(linear(x[300 - rows:], w, out), full[300 - rows:]), rows


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2 * CHUNK), st.integers(0, 100), st.sampled_from(DTYPES))
def test_linear_any_slice_of_rows(rows, start, dtype):
    x, w = cancelling(3 * CHUNK, 96, 64, dtype)
    assert torch.equal(linear(x[start:start + rows], w), linear(x, w)[start:start + rows])


def test_linear_takes_rows_with_strides():
    x, w = cancelling(40, 192, 64, torch.float32)
    wide = torch.cat((x, x), 1)
    assert torch.equal(linear(wide[:, :192], w), linear(x, w)) and torch.equal(linear(x.T.contiguous().T, w), linear(x, w))


def test_this_machine_keeps_rows():
    assert all(check.ours for check in row_invariance_report(shapes=((256, 64), (100, 37))))


@pytest.mark.parametrize("call,words", [
    (lambda: linear(torch.zeros(2, 3, 8), torch.zeros(4, 8)), "x must be \\[T, 8\\]"),
    (lambda: linear(torch.zeros(2, 9), torch.zeros(4, 8)), "got \\(2, 9\\)"),
    (lambda: linear(torch.zeros(2, 9), quantize_weight(torch.zeros(4, 8))), "weight \\(4, 8\\)"),
    (lambda: dequantize_weight(Fp8Weight(torch.zeros(130, 8).to(torch.float8_e4m3fn), torch.ones(1, 1))), "must be \\(2, 1\\)"),
], ids=["axes", "width", "fp8 width", "scales"])
def test_errors_for_people(call, words):
    assert BLOCK == 128
    with pytest.raises(ValueError, match=words): call()
