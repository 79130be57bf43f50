"""The FP8 linear's kernels in Triton's interpreter: the plain form's numbers, a row's bits alone, what bad input meets."""
import pytest
import torch

from glm52.device import relative_error
from glm52.kernels import fp8
from glm52.model.decoder import Backends
from glm52.ops.fp8 import Fp8Weight, linear, linear_batch_invariant, linear_triton, naive_linear_fp8, quantize_activation, quantize_weight

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only where there is no GPU")
SHAPES = [(1, 192, 512), (5, 64, 384), (16, 128, 640), (3, 100, 80), (20, 200, 256)]


def case(rows, n, k, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, k, generator=g), quantize_weight(torch.randn(n, k, generator=g))


@pytest.mark.parametrize("rows,n,k", SHAPES)
@pytest.mark.parametrize("form", ["few", "many", None])
def test_linear_is_the_plain_form(rows, n, k, form):
    x, w = case(rows, n, k)
    got = fp8.linear_fp8(x, w, form=form)
    assert got.shape == (rows, n) and got.dtype == torch.float32
    assert relative_error(naive_linear_fp8(x, w), got) < 1e-6
    if n == 200: return
    half = fp8.linear_fp8(x.half(), w, torch.float32, form)
    assert half.dtype == torch.float32 and relative_error(naive_linear_fp8(x.half(), w, torch.float32), half) < 1e-6


@pytest.mark.parametrize("form", ["few", "many"])
def test_a_row_does_not_know_its_neighbours(form):
    x, w = case(21, 72, 640)
    together = fp8.linear_fp8(x, w, form=form)
    for rows in (slice(0, 1), slice(5, 7), slice(8, 20)): assert torch.equal(together[rows], fp8.linear_fp8(x[rows], w, form=form))


@pytest.mark.parametrize("form", ["few", "many"])
def test_a_weight_has_the_same_bits_beside_another(form):
    x, first = case(3, 72, 1024)
    weights = [first, case(3, 192, 1024, 1)[1], case(3, 64, 1024, 2)[1]]
    for w, got in zip(weights, fp8.linears_fp8(x, weights, form=form), strict=True): assert torch.equal(fp8.linear_fp8(x, w, form=form), got)


def test_the_counters_are_left_at_zero():
    x, w = case(4, 128, 2048)
    assert fp8.plan_splits(128, 2048)[0] > 1
    for _ in range(2): fp8.linear_fp8(x, w)
    assert not fp8.counters(x.device, 1).any()


@pytest.mark.parametrize("n,k", [(2048, 6144), (16384, 2048), (576, 6144), (6144, 16384), (24576, 6144), (6144, 12288), (64, 128), (10, 16)])
def test_splits_cover_the_columns_once(n, k):
    splits, per = fp8.plan_splits(n, k)
    blocks = -(-k // 128)
    assert splits >= 1 and (splits - 1) * per < blocks <= splits * per


def test_rows_are_quantised_as_the_plain_form_does():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(9, 320, generator=g) * torch.logspace(-6, 6, 9)[:, None]
    x[4] = 0
    q, scale = fp8.quantize_rows(x)
    want, want_scale = quantize_activation(x)
    assert torch.equal(scale[:, :9].T, want_scale)
    assert (q.float() != want.float()).float().mean() < 1e-3      # x · (1 / s) and x / s part at ties


def test_rows_may_lie_apart_and_none_may_be_there():
    x, w = case(6, 96, 256)
    wide = torch.cat([x, x], 1)
    assert torch.equal(fp8.linear_fp8(wide[:, :256], w), fp8.linear_fp8(x, w))
    assert fp8.linear_fp8(x[:0], w).shape == (0, 96)


def test_linear_refuses_what_would_go_wrong_on_the_device():
    x, w = case(2, 128, 256)
    for bad_x, bad_w, words in ((x[:, :128], w, "must be \\[T, 256\\]"), (x.double(), w, "float64"), (x.T.contiguous().T, w, "one piece"),
                                (torch.cat([x.flatten(), x[0]])[1:513].view(2, 256), w, "multiples of 16 bytes"),
                                (x, (w.weight.float(), w.scale_inv), "float8_e4m3fn"), (x, (w.weight, w.scale_inv.half()), "float16"),
                                (x, (w.weight, w.scale_inv[:, :1]), "scale_inv of a"), (x, (w.weight.T.contiguous().T, w.scale_inv), "weight must be contiguous"),
                                (x[:, :24].contiguous(), (w.weight[:, :24].contiguous(), w.scale_inv[:, :1].contiguous()), "24 columns")):
        with pytest.raises(ValueError, match=words): fp8.linear_fp8(bad_x, bad_w)
    with pytest.raises(ValueError, match="form 'other'"): fp8.linear_fp8(x, w, form="other")
    with pytest.raises(ValueError, match="not torch.int32"): fp8.linear_fp8(x, w, torch.int32)


def test_deterministic_mode_has_one_form_for_every_number_of_rows():
    x, w = case(520, 64, 1024)             # more rows than the first form takes by itself
    whole = linear_batch_invariant(x, w)
    assert not torch.equal(whole, fp8.linear_fp8(x, w, form="many"))
    for rows in (slice(3, 4), slice(500, 520)): assert torch.equal(linear_batch_invariant(x[rows], w), whole[rows])


def test_the_model_takes_it_by_name():
    assert Backends.choose("cpu", linear="triton").linear.function is linear_triton and Backends.choose("cpu").linear.name == "torch"
    x, w = case(3, 64, 128)
    assert torch.equal(linear_triton(x, w), fp8.linear_fp8(x, w))
    plain = torch.randn(64, 128)
    assert torch.equal(linear_triton(x, plain), linear(x, plain))
    assert isinstance(w, Fp8Weight)
