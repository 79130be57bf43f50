"""Chapter rope: both pairings, YaRN, and angles that still mean something at position 1,048,575."""
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52.device import assert_close
from glm52.ops.rope import cos_sin, cos_sin_scale, inv_freq, naive_rope, rope, rotate, yarn_mscale

CASES = {case["id"]: case for line in (Path(__file__).parent / "cases" / "public-reports.jsonl").read_text().splitlines()
         if (case := json.loads(line))["area"] == "dsa-indexer"}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}
LAST = 1_048_575


def normal(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_complex_numbers(x, positions, speeds, interleave):
    "Another way to the same thing: a pair is a complex number, a rotation is a product."
    if interleave: a, b = x[..., 0::2], x[..., 1::2]
    else: a, b = x.chunk(2, -1)
    angle = positions.double()[:, None] * speeds.double()
    if x.dim() == 3: angle = angle[:, None]
    z = torch.complex(a.double(), b.double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.stack((z.real, z.imag), -1).flatten(-2) if interleave else torch.cat((z.real, z.imag), -1)


@pytest.mark.parametrize("dtype,ratio", [(torch.float32, 2e-5), (torch.bfloat16, 3e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("interleave", [True, False], ids=["adjacent", "half-split"])
@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64), (1, 1, 2), (4, 7, 6), (0, 2, 64)], ids=str)
def test_rope_matches_complex_rotation(shape, interleave, dtype, ratio):
    speeds = inv_freq(shape[-1], 8e6)
    x, positions = normal(*shape).to(dtype), torch.tensor([0, 1, 17, 301, 2048])[:shape[0]]
    got = rope(x, positions, speeds, interleave)
    assert got.dtype == dtype and got.shape == x.shape
    assert_close("rope", by_complex_numbers(x.float(), positions, speeds, interleave), got, ratio)


@pytest.mark.parametrize("interleave", [True, False], ids=["adjacent", "half-split"])
def test_position_zero_changes_nothing(interleave):
    x = normal(3, 2, 64)
    assert torch.equal(rope(x, torch.zeros(3, dtype=torch.int64), inv_freq(64, 8e6), interleave), x)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 5000), st.booleans())
def test_a_dot_product_depends_on_the_distance_alone(p, s, shift, interleave):
    speeds = inv_freq(16, 1e4)
    q, k = normal(1, 16, seed=1), normal(1, 16, seed=2)

    def dot(a, b):
        return (rope(q, torch.tensor([a]), speeds, interleave) * rope(k, torch.tensor([b]), speeds, interleave)).sum().item()

    assert dot(p, s) == pytest.approx(dot(p + shift, s + shift), abs=5e-3)


@pytest.mark.parametrize("interleave", [True, False], ids=["adjacent", "half-split"])
def test_the_two_pairings_are_one_rotation_of_permuted_columns(interleave):
    x, positions, speeds = normal(6, 64), torch.arange(6) * 100, inv_freq(64, 8e6)
    order = torch.arange(64).view(2, 32).t().flatten()       # (i, i + 32) becomes (2i, 2i + 1)
    if not interleave: order = order.argsort()
    assert torch.equal(rope(x[:, order], positions, speeds, interleave), rope(x, positions, speeds, not interleave)[:, order])


def test_transformers_rotates_adjacent_pairs_the_same_way():
    "Its result is de-interleaved, [evens | odds]; the values are ours to the bit."
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf
    speeds, positions = inv_freq(64, 8e6), torch.tensor([0, 5, 2049, 70_000, LAST])
    q, k = normal(1, 5, 4, 64, seed=1), normal(1, 5, 1, 64, seed=2)
    angles = positions.float()[:, None] * speeds
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None] for f in (torch.cos, torch.sin))
    for x, theirs in zip((q, k), hf.apply_rotary_pos_emb_interleave(q, k, cos, sin, unsqueeze_dim=2)):
        ours = rope(x[0], positions, speeds, True)
        assert torch.equal(torch.cat((ours[..., 0::2], ours[..., 1::2]), -1), theirs[0])


def test_transformers_rotates_halves_the_same_way():
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf
    speeds, positions = inv_freq(64, 1e4), torch.tensor([0, 5, 2049, 70_000])
    q, k = normal(1, 4, 4, 64, seed=1), normal(1, 4, 1, 64, seed=2)
    cos, sin = (torch.cat([table] * 2, -1)[None] for table in cos_sin(positions, speeds))
    for x, theirs in zip((q, k), hf.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)):
        assert torch.equal(rope(x[0], positions, speeds, False), theirs[0])


def hf_config(scaling, theta, dim=64, positions=163_840):
    from transformers import DeepseekV3Config
    parameters = {k: v for k, v in (scaling or {}).items() if k != "type"}
    parameters |= {"rope_theta": theta, "rope_type": "yarn" if scaling else "default"}
    return DeepseekV3Config(rope_parameters=parameters, qk_rope_head_dim=dim, max_position_embeddings=positions,
                            num_attention_heads=4, hidden_size=4 * dim)


@pytest.mark.parametrize("change", [{}, {"factor": 4}, {"beta_fast": 8, "beta_slow": 2}, {"original_max_position_embeddings": 32_768}],
                         ids=str)
@pytest.mark.parametrize("theta", [1e4, 8e6])
def test_yarn_speeds_are_transformers(theta, change):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    scaling = YARN | change
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](hf_config(scaling, theta), "cpu")
    assert_close("yarn", theirs, inv_freq(64, theta, scaling), 1e-6)
    assert factor == pytest.approx(cos_sin_scale(scaling)) == 1.0, "DeepSeek-V3.2 puts all of it on the softmax scale"


@pytest.mark.parametrize("change", [{"mscale": None, "mscale_all_dim": None}, {"mscale": 0.7, "mscale_all_dim": 1.0}], ids=str)
def test_yarn_scale_of_cos_and_sin_is_transformers(change):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    scaling = {k: v for k, v in (YARN | change).items() if v is not None}
    assert cos_sin_scale(scaling) == pytest.approx(ROPE_INIT_FUNCTIONS["yarn"](hf_config(scaling, 1e4), "cpu")[1])


def test_yarn_by_hand():
    "Fast pairs keep their speed, slow ones are divided by 40; the softmax scale of DeepSeek-V3.2 grows by (0.1 ln 40 + 1)²."
    plain, stretched = inv_freq(64, 1e4), inv_freq(64, 1e4, YARN)
    turns = 4096 * plain / (2 * math.pi)
    assert torch.equal(stretched[turns > 40], plain[turns > 40])
    assert torch.allclose(stretched[turns < 0.5], plain[turns < 0.5] / 40)
    assert ((stretched <= plain) & (stretched >= plain / 40.01)).all()
    assert yarn_mscale(YARN) == pytest.approx((0.1 * math.log(40) + 1) ** 2) and yarn_mscale(None) == 1.0 == cos_sin_scale(None)


def test_plain_speeds_are_theta_to_minus_2i_over_p():
    exact = torch.tensor([8e6 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    assert ((inv_freq(64, 8e6).double() / exact - 1).abs() < 5e-7).all()


def angle_error(positions):
    "Error of cos and sin against float64, given the fp32 speeds: what the product alone loses."
    speeds = inv_freq(64, 8e6)
    cos, sin = cos_sin(positions, speeds)
    angle = positions.double()[:, None] * speeds.double()
    return max((cos.double() - angle.cos()).abs().max().item(), (sin.double() - angle.sin()).abs().max().item())


def test_fp32_angles_of_the_last_position():
    "Half a unit in the last place of an angle below 2^20 is 1/32 rad; a short context loses a thousandth of that."
    assert angle_error(torch.tensor([LAST, LAST - 1, LAST - 12_345])) <= 1 / 32 + 1e-6
    assert angle_error(torch.arange(4096)) <= 2 ** -13 + 1e-6
    speeds = inv_freq(64, 8e6)
    whole = torch.tensor([LAST]).double()[:, None] * speeds.double()
    exact = torch.tensor([LAST * 8e6 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    assert (whole - exact).abs().max() < 0.25, "the speeds' own rounding turns every row alike; it stays below a quarter radian"


def test_positions_are_not_rounded_to_bf16():
    "In BF16, neighbours at 1M share a position: the last two tokens would be turned alike."
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    a, b = rope(x, torch.tensor([LAST - 1, LAST]), inv_freq(64, 8e6))
    assert (a - b).abs().max() > 0.5
    exact = by_complex_numbers(x.float(), torch.tensor([LAST - 1, LAST]), inv_freq(64, 8e6), True)
    assert_close("rope at 1M", exact, torch.stack((a, b)), 2e-2)


def test_tables_are_fp32_for_bf16_rows():
    cos, sin = cos_sin(torch.tensor([LAST]), inv_freq(64, 8e6))
    assert cos.dtype == sin.dtype == torch.float32
    x = normal(1, 64).bfloat16()
    assert torch.equal(rope(x, torch.tensor([LAST]), inv_freq(64, 8e6)), rotate(x.float(), cos, sin).bfloat16()), "one rounding, at the end"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 300])
def test_a_row_keeps_its_bits_in_any_company(rows, dtype):
    x, positions, speeds = normal(300, 5, 64).to(dtype), torch.arange(300) * 3491, inv_freq(64, 8e6)
    full = rope(x, positions, speeds)
    assert torch.equal(rope(x[:rows], positions[:rows], speeds), full[:rows])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:rows]
    assert torch.equal(rope(x[order], positions[order], speeds), full[order])


def test_public_case_ix01_adjacent_pairs():
    given_, expect = CASES["IX01"]["given"], CASES["IX01"]["expect"]
    x, speeds = torch.tensor([given_["x"]]), torch.tensor(given_["inv_freq"])
    turned = {interleave: naive_rope(x, torch.tensor([given_["position"]]), speeds, interleave)[0].tolist() for interleave in (True, False)}
    assert turned[given_["indexer_rope_interleave"]] == pytest.approx(expect["y"], abs=1e-5)
    assert turned[False] == pytest.approx(expect["wrong_half_split"], abs=1e-5)


@pytest.mark.parametrize("call,words", [
    (lambda: rope(torch.zeros(2, 62), torch.zeros(2), inv_freq(64, 1e4)), "P = 64"),
    (lambda: rope(torch.zeros(2, 1, 1, 64), torch.zeros(2), inv_freq(64, 1e4)), "T, heads, P"),
    (lambda: rope(torch.zeros(2, 64), torch.zeros(3), inv_freq(64, 1e4)), "2 rows need as many positions"),
    (lambda: inv_freq(64, 1e4, {"rope_type": "linear", "factor": 2}), "'linear' is not known"),
    (lambda: inv_freq(64, 1e4, {"rope_type": "yarn"}), "factor and original_max_position_embeddings"),
], ids=["width", "axes", "positions", "type", "yarn"])
def test_errors_for_people(call, words):
    with pytest.raises(ValueError, match=words): call()
