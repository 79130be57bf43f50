"""Chapter norm: two norms in fp32, whose rows know nothing of each other."""
import pytest
import torch

from glm52.device import assert_close
from glm52.ops.norm import layer_norm, naive_layer_norm, naive_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_definition(x, weight, bias, eps):
    "Both norms in float64; `bias` None means RMS."
    x, weight = x.double(), weight.double()
    if bias is None: return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(5, 128), (3, 2, 512), (1, 1), (4, 7), (0, 128)], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_norms_match_their_definition(shape, scale, dtype):
    x, w, b = (normal(*shape) * scale + scale).to(dtype), normal(shape[-1], seed=1).to(dtype), normal(shape[-1], seed=2).to(dtype)
    for eps in (1e-5, 1e-6):
        for got, bias in ((rms_norm(x, w, eps), None), (layer_norm(x, w, b, eps), b)):
            assert got.dtype == dtype and got.shape == x.shape
            assert_close("norm", by_definition(x, w, bias, eps), got, 2e-5 if dtype == torch.float32 else 3e-3)


def test_eps_is_inside_the_root():
    x, w = torch.full((1, 4), 1e-3), torch.ones(4)
    assert rms_norm(x, w, 3e-6)[0, 0].item() == pytest.approx(0.5, rel=1e-5)       # 1e-3 / sqrt(1e-6 + 3e-6)
    assert layer_norm(torch.tensor([[1e-3, -1e-3]]), torch.ones(2), torch.zeros(2), 3e-6)[0, 0].item() == pytest.approx(0.5, rel=1e-5)


def test_layer_norm_takes_the_mean_away_and_rms_norm_does_not():
    x = normal(2, 128)
    w, b = normal(128, seed=1), normal(128, seed=2)
    assert_close("shifted", layer_norm(x, w, b, 1e-6), layer_norm(x + 5, w, b, 1e-6), 1e-4)
    assert (rms_norm(x, w, 1e-6) - rms_norm(x + 5, w, 1e-6)).abs().max() > 0.5
    assert torch.allclose(layer_norm(torch.full((1, 128), 7.0), w, b, 1e-6)[0], b, atol=1e-4), "a flat row becomes the bias"


def test_transformers_norms():
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm
    x, w = normal(9, 256), normal(256, seed=1)
    theirs = GlmMoeDsaRMSNorm(256, eps=1e-5)
    theirs.weight.data.copy_(w)
    assert_close("rms fp32", theirs(x), rms_norm(x, w, 1e-5), 1e-6)
    theirs.bfloat16()
    assert_close("rms bf16", theirs(x.bfloat16()), rms_norm(x.bfloat16(), w.bfloat16(), 1e-5), 5e-3)
    b = normal(256, seed=2)
    assert_close("layer", torch.nn.functional.layer_norm(x, (256,), w, b, 1e-6), layer_norm(x, w, b, 1e-6), 1e-6)


def test_the_weight_is_multiplied_before_the_cast():
    "Rounding x / rms(x) to BF16 first, as transformers does, is one rounding more and further from the truth."
    x, w = normal(200, 512).bfloat16(), normal(512, seed=1).bfloat16()
    exact = by_definition(x, w, None, 1e-5)
    early = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).bfloat16() * w
    ours = rms_norm(x, w, 1e-5)
    assert torch.equal(ours, exact.bfloat16()) or (ours != exact.bfloat16()).float().mean() < 1e-3
    assert (ours.double() - exact).norm() < 0.8 * (early.double() - exact).norm()


def test_squares_of_large_bf16_values_do_not_overflow():
    x = torch.full((1, 8), 3e4).bfloat16()
    assert torch.equal(rms_norm(x, torch.ones(8).bfloat16(), 1e-5), torch.ones(1, 8).bfloat16())
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5).any(), "zeros stay zeros, no nan"


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 300])
def test_a_row_keeps_its_bits_in_any_company(rows, dtype):
    x, w, b = normal(300, 576).to(dtype), normal(576, seed=1).to(dtype), normal(576, seed=2).to(dtype)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:rows]
    for norm in (lambda x: naive_rms_norm(x, w, 1e-5), lambda x: naive_layer_norm(x, w, b, 1e-6)):
        full = norm(x)
        assert torch.equal(norm(x[:rows]), full[:rows]) and torch.equal(norm(x[order]), full[order])


@pytest.mark.parametrize("call,words", [
    (lambda: rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5), "weight \\(7,\\) does not fit x \\(2, 8\\)"),
    (lambda: layer_norm(torch.zeros(2, 8), torch.zeros(8), torch.zeros(9), 1e-5), "bias"),
    (lambda: rms_norm(torch.zeros(2, 8), torch.zeros(8), 0.0), "eps must be positive"),
    (lambda: rms_norm(torch.zeros(2, 8), torch.zeros(8), float("nan")), "eps must be positive"),
], ids=["weight", "bias", "zero", "nan"])
def test_errors_for_people(call, words):
    with pytest.raises(ValueError, match=words): call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_engines_rms_norm_has_the_bits_of_the_plain_one(dtype):
    for d in (33, 64, 256, 512, 2048):
        for rows in (1, 2, 7, 16, 33, 300):
            x, w = (3 * torch.randn(rows, d)).to(dtype), torch.randn(d).to(dtype)
            assert torch.equal(rms_norm(x, w, 1e-6), naive_rms_norm(x, w, 1e-6))
