"""Chapter experts: which ones, how much, and the same bits for a row in any company."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaMoE

import glm52.ops.moe as module
from glm52.device import assert_close
from glm52.ops.fp8 import Fp8Weight, dequantize_weight, linear, quantize_weight
from glm52.ops.moe import moe, naive_moe, route, sigmoid, swiglu

COUNTS = (1, 2, 7, 16, 33, 300)


def seeded(seed): return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0): return torch.randn(*shape, generator=seeded(seed))


def experts(E, d, I, dtype=torch.float32):
    return (normal(E, 2 * I, d, seed=1) / d ** 0.5).to(dtype), (normal(E, d, I, seed=2) / I ** 0.5).to(dtype)


def route_by_hand(logits, bias, k, n_group, topk_group, normalise, factor):
    "The router's rule with sorted lists, for one row of floats in fp32."
    gate = sigmoid(logits)
    choice = (gate + bias).tolist()
    size = len(choice) // n_group
    groups = [range(g * size, (g + 1) * size) for g in range(n_group)]
    def strength(g): return torch.tensor(sorted((choice[e] for e in groups[g]), reverse=True)[:2]).sum().item()
    alive = sorted(range(n_group), key=lambda g: (-strength(g), g))[:topk_group]
    ids = sorted((e for g in alive for e in groups[g]), key=lambda e: (-choice[e], e))[:k]
    weights = gate[ids].double()
    if normalise: weights = weights / (weights.sum() + 1e-20)
    return ids, weights * factor


SHAPES = st.sampled_from([(1, 1, 8), (2, 1, 8), (4, 2, 16), (8, 4, 32), (4, 4, 4), (3, 2, 9)])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), shape=SHAPES, normalise=st.booleans())
def test_route_is_the_rule(data, shape, normalise):
    "Few distinct scores, so ties are everywhere; groups of one to sixteen experts."
    n_group, topk_group, E = shape
    k = data.draw(st.integers(1, E // n_group * topk_group))
    grid = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 0.5, 3.0])
    logits = torch.tensor([data.draw(st.lists(grid, min_size=E, max_size=E)) for _ in range(3)])
    bias = torch.tensor(data.draw(st.lists(st.sampled_from([-1.5, 0.0, 0.0, 0.25]), min_size=E, max_size=E)))
    ids, weights = route(logits, bias, k, n_group, topk_group, normalise, 2.5)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32 and ids.shape == weights.shape == (3, k)
    for row in range(3):
        want_ids, want = route_by_hand(logits[row], bias, k, n_group, topk_group, normalise, 2.5)
        assert ids[row].tolist() == want_ids
        assert torch.allclose(weights[row].double(), want, rtol=1e-6)


def test_lowest_id_wins_a_tie():
    ids, weights = route(torch.zeros(2, 256), torch.zeros(256), 8, routed_scaling_factor=2.5)
    assert ids.tolist() == [list(range(8))] * 2
    assert torch.allclose(weights, torch.full((2, 8), 2.5 / 8))


def test_minus_zero_ties_with_zero():
    bias = -sigmoid(torch.zeros(4)) * torch.tensor([1, 1, 1, 1.0])
    bias[2] = -0.5
    assert route(torch.zeros(1, 4), bias, 2)[0].tolist() == [[0, 1]]


def test_the_bias_chooses_and_does_not_weigh():
    logits, bias = torch.tensor([[3.0, 2.0, 1.0, -4.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0])
    ids, weights = route(logits, bias, 2, norm_topk_prob=False)
    assert ids.tolist() == [[3, 0]]
    assert torch.equal(weights, sigmoid(logits)[:, [3, 0]])


def test_negative_bias_does_not_revive_a_group():
    "All choices are below 0, where a masked group at 0 would win."
    logits = torch.tensor([[2.0, 2.0, -1.0, -1.0]])
    ids, _ = route(logits, torch.full((4,), -3.0), 2, n_group=2, topk_group=1)
    assert ids.tolist() == [[0, 1]]


def test_scores_too_small_to_add_up():
    "The 1e-20 keeps a token whose scores all vanish finite."
    _, weights = route(torch.full((1, 4), -200.0), torch.zeros(4), 2)
    assert weights.isfinite().all()


def test_sigmoid_is_the_sigmoid():
    x = torch.cat((torch.linspace(-80, 80, 4001), torch.tensor([-1e4, 1e4, 0.0])))
    assert torch.allclose(sigmoid(x).double(), torch.sigmoid(x.double()), rtol=3e-7, atol=1e-38)


def test_bf16_logits_are_refused():
    with pytest.raises(ValueError, match=r"route: logits must be \[T, E\] float32, got \(2, 8\) torch.bfloat16"):
        route(torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(8), 2)


@pytest.mark.parametrize("call,words", [
    (dict(bias=torch.zeros(7)), "8 experts need as many biases"),
    (dict(top_k=9), "cannot take 9 of the 8 experts in 1 groups"),
    (dict(top_k=0), "cannot take 0"),
    (dict(n_group=3), "cannot take 1 of 3 groups of 8 experts"),
    (dict(n_group=4, topk_group=5), "cannot take 5 of 4 groups"),
    (dict(n_group=4, topk_group=1, top_k=3), "cannot take 3 of the 2 experts in 1 groups"),
    (dict(impl="magic"), "no implementation 'magic'"),
])
def test_router_errors_are_explained(call, words):
    with pytest.raises(ValueError, match=words): route(**(dict(logits=torch.zeros(2, 8), bias=torch.zeros(8), top_k=2) | call))


@pytest.mark.parametrize("shape", [(1, 256, 64, 16, 4), (37, 256, 64, 16, 4), (50, 96, 40, 6, 3), (5, 32, 20, 3, 1), (300, 64, 33, 8, 8)], ids=str)
@pytest.mark.parametrize("small", [True, False], ids=["batched", "looped"])
def test_moe_matches_naive(shape, small, monkeypatch):
    if not small: monkeypatch.setattr(module, "SMALL", 0)
    T, d, I, E, k = shape
    gate_up, down = experts(E, d, I)
    x = normal(T, d)
    ids, weights = route(normal(T, E, seed=3), normal(E, seed=4) / 10, k, routed_scaling_factor=2.5)
    assert_close("fp32", naive_moe(x, ids, weights, gate_up, down), moe(x, ids, weights, gate_up, down), 2e-6)
    low = [t.bfloat16() for t in (x, gate_up, down)]
    got = moe(low[0], ids, weights, *low[1:])
    assert got.dtype == torch.bfloat16
    assert_close("bf16", naive_moe(low[0], ids, weights, *low[1:]), got, 1e-2)


@pytest.mark.parametrize("shape", [(9, 256, 128, 4, 2), (20, 192, 96, 6, 3)], ids=str)
def test_fp8_experts(shape):
    "Stacked FP8 weights: against the same weights dequantised, and exactly the dense FP8 network of each expert."
    T, d, I, E, k = shape
    gate_up, down = (quantize_weight(w) for w in experts(E, d, I))
    x = normal(T, d)
    ids, weights = route(normal(T, E, seed=3), torch.zeros(E), k)
    got = moe(x, ids, weights, gate_up, down)
    plain = [dequantize_weight(w, torch.float32) for w in (gate_up, down)]
    assert_close("fp8", naive_moe(x, ids, weights, *plain), got, 6e-2)
    e = int(ids[0, 0])
    one = Fp8Weight(gate_up.weight[e], gate_up.scale_inv[e]), Fp8Weight(down.weight[e], down.scale_inv[e])
    alone = moe(x[:1], ids[:1, :1], torch.ones(1, 1), gate_up, down)
    assert torch.equal(alone, swiglu(x[:1], *one))


FORMS = {"fp32": (torch.float32, True, False), "bf16": (torch.bfloat16, True, False), "fp32-looped": (torch.float32, False, False),
         "bf16-looped": (torch.bfloat16, False, False), "fp8": (torch.float32, False, True)}


@pytest.mark.parametrize("form", FORMS)
def test_rows_do_not_feel_their_neighbours(form, monkeypatch):
    "Router and experts, any count of rows, shuffled, and beside rows that all crowd one expert: the same bits."
    dtype, small, fp8 = FORMS[form]
    if not small: monkeypatch.setattr(module, "SMALL", 0)
    T, d, I, E, k = 300, 128, 64, 16, 4
    gate_up, down = experts(E, d, I, dtype)
    if fp8: gate_up, down = quantize_weight(gate_up), quantize_weight(down)
    x, router, bias = normal(T, d).to(dtype), normal(E, d, seed=5) / d ** 0.5, normal(E, seed=6) / 20

    def layer(x):
        ids, weights = route(linear(x.float(), router), bias, k, routed_scaling_factor=2.5)
        return ids, weights, moe(x, ids, weights, gate_up, down)

    whole = layer(x)
    def same(rows, name):
        for part, all_rows in zip(layer(x[rows]), whole): assert torch.equal(part, all_rows[rows]), (form, name)

    for count in COUNTS:
        for start in (0, 5, T - count): same(torch.arange(start, start + count) % T, count)
    same(torch.randperm(T, generator=seeded(7)), "shuffled")
    crowd = torch.cat((x[:3], x[3:4].expand(200, d)))
    assert torch.equal(layer(crowd)[2][:3], whole[2][:3]), "a crowd on four experts"
    monkeypatch.setattr(module, "GATHER", 1)
    same(torch.arange(40), "one block at a time")


@pytest.mark.parametrize("width", [16, 20, 33, 64, 100])
def test_odd_widths_keep_rows_apart(width):
    "Where a vector unit leaves a rest: experts of any inner width, routers of any number of experts."
    for dtype in (torch.float32, torch.bfloat16):
        x, gate_up, down = normal(50, 48).to(dtype), normal(2 * width, 48, seed=1).to(dtype), normal(48, width, seed=2).to(dtype)
        whole = swiglu(x, gate_up, down)
        for t in (0, 1, 49): assert torch.equal(swiglu(x[t:t + 1], gate_up, down), whole[t:t + 1])
    logits = normal(50, width, seed=3)
    ids, weights = route(logits, torch.zeros(width), 5)
    for t in range(50):
        one = route(logits[t:t + 1], torch.zeros(width), 5)
        assert torch.equal(one[0], ids[t:t + 1]) and torch.equal(one[1], weights[t:t + 1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_cut_rows(threads):
    "Many rows are split among threads at places that must not show."
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        h = normal(700, 2 * 100)
        whole = module._silu_mul(h)
        for t in range(700): assert torch.equal(module._silu_mul(h[t:t + 1]), whole[t:t + 1])
        gate_up, down = experts(8, 64, 32)
        x = normal(300, 64)
        ids, weights = route(normal(300, 8, seed=1), torch.zeros(8), 2)
        together = moe(x, ids, weights, gate_up, down)
        for t in range(0, 300, 37):
            assert torch.equal(moe(x[t:t + 1], ids[t:t + 1], weights[t:t + 1], gate_up, down), together[t:t + 1])
    finally: torch.set_num_threads(before)


def test_results_are_added_in_slot_order():
    "The order of the ids is the order of the sum: reversing a row's slots may change its bits, another row's never."
    gate_up, down = experts(8, 64, 32)
    x = normal(40, 64)
    ids, weights = route(normal(40, 8, seed=1), torch.zeros(8), 6)
    slots = [linear_expert(x, ids[:, j], gate_up, down) * weights[:, j, None] for j in range(6)]
    want = slots[0]
    for part in slots[1:]: want = want + part
    assert torch.equal(moe(x, ids, weights, gate_up, down), want)


def linear_expert(x, e, gate_up, down):
    return torch.cat([swiglu(x[t:t + 1], gate_up[e[t]], down[e[t]]) for t in range(len(x))])


def test_a_nan_token_keeps_to_itself():
    gate_up, down = experts(4, 64, 32)
    x = normal(20, 64)
    ids, weights = route(normal(20, 4, seed=1), torch.zeros(4), 2)
    clean = moe(x, ids, weights, gate_up, down)
    x[3] = torch.nan
    dirty = moe(x, ids, weights, gate_up, down)
    others = torch.arange(20) != 3
    assert torch.equal(dirty[others], clean[others]) and dirty[3].isnan().all()


def test_no_rows():
    gate_up, down = experts(4, 64, 32)
    ids, weights = route(torch.zeros(0, 4), torch.zeros(4), 2)
    assert moe(torch.zeros(0, 64), ids, weights, gate_up, down).shape == (0, 64)


@pytest.mark.parametrize("change,words", [
    (dict(x=torch.zeros(3, 63)), r"do not fit \[T, d\], \[E, 2I, d\], \[E, d, I\]"),
    (dict(down=torch.zeros(4, 64, 31)), "do not fit"),
    (dict(ids=torch.zeros(2, 2, dtype=torch.int64)), r"3 rows with ids \(2, 2\)"),
    (dict(weights=torch.zeros(3, 1)), r"weights \(3, 1\)"),
    (dict(ids=torch.tensor([[0, 4]] * 3)), "ids reach from 0 to 4, of 4 experts"),
    (dict(ids=torch.tensor([[0, -1]] * 3)), "ids reach from -1 to 0"),
    (dict(impl="magic"), "no implementation 'magic'"),
])
def test_expert_errors_are_explained(change, words):
    call = dict(x=torch.zeros(3, 64), ids=torch.zeros(3, 2, dtype=torch.int64), weights=torch.zeros(3, 2),
                gate_up=torch.zeros(4, 64, 64), down=torch.zeros(4, 64, 32))
    with pytest.raises(ValueError, match=words): moe(**(call | change))


@pytest.mark.parametrize("groups,alive", [(1, 1), (4, 2)], ids=["glm-5.2", "groups"])
def test_parity_with_transformers(groups, alive):
    "The whole layer, shared expert included, with random router bias."
    config = GlmMoeDsaConfig(hidden_size=64, moe_intermediate_size=32, n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=1,
                             n_group=groups, topk_group=alive, routed_scaling_factor=2.5, norm_topk_prob=True, hidden_act="silu")
    config._experts_implementation = "eager"
    layer = GlmMoeDsaMoE(config).eval()
    with torch.no_grad():
        for i, tensor in enumerate([*layer.parameters(), layer.gate.e_score_correction_bias]):
            tensor.copy_(normal(*tensor.shape, seed=i) / tensor.shape[-1] ** 0.5)
        x = normal(50, 64, seed=99)
        want = layer(x)
        ids, weights = route(linear(x, layer.gate.weight), layer.gate.e_score_correction_bias, 4, groups, alive, True, 2.5)
        shared = layer.shared_experts
        gate_up = torch.cat((shared.gate_proj.weight, shared.up_proj.weight))
        got = moe(x, ids, weights, layer.experts.gate_up_proj, layer.experts.down_proj) + swiglu(x, gate_up, shared.down_proj.weight)
    assert_close("layer", want, got, 2e-6)
