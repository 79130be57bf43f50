"""The experts' kernels in Triton's interpreter: choice, schedule and sums of the plain forms; what bad input meets."""
import pytest
import torch

from glm52.bench_moe import OTHER_PLANS, SHAPES, TOKENS, five_layers, plain_experts, random_weight
from glm52.config import checkpoint_tensors
from glm52.device import H200, relative_error
from glm52.kernels import moe
from glm52.model.decoder import Backends, Caches, Decoder, fill, random_tensors, tiny_config
from glm52.model.plan import RequestRows, StepPlan
from glm52.ops.fp8 import quantize_weight
from glm52.ops.moe import moe_batch_invariant, moe_torch, moe_triton, naive_route, swiglu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only where there is no GPU")


def layer(experts=8, inner=128, width=128, seed=0):
    g = torch.Generator().manual_seed(seed)
    gate_up, down = torch.randn(experts, 2 * inner, width, generator=g) / 16, torch.randn(experts, width, inner, generator=g) / 8
    return (quantize_weight(gate_up), quantize_weight(down)), (quantize_weight(gate_up[0] * 0.7), quantize_weight(down[1] * 0.9))


def routed(tokens, experts=8, k=3, width=128, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=g)
    return x, *naive_route(torch.randn(tokens, experts, generator=g), torch.zeros(experts), k, routed_scaling_factor=2.5)


@pytest.mark.parametrize("experts,k,rows", [(16, 4, 5), (32, 6, 9), (256, 8, 3), (8, 1, 4), (8, 8, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_route_is_the_rule(experts, k, rows, tied):
    g = torch.Generator().manual_seed(experts + k)
    logits, bias = torch.randn(rows, experts, generator=g), torch.randn(experts, generator=g)
    if tied: logits, bias = logits.round(decimals=0), bias.round(decimals=0)
    for norm in (True, False):
        want, got = (f(logits, bias, k, 1, 1, norm, 2.5) for f in (naive_route, moe.route))
        assert torch.equal(want[0], got[0]) and relative_error(want[1], got[1]) < 1e-6


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_router_in_one_launch(tokens):
    x, _, _ = routed(tokens, width=256)
    g = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(16, 256, generator=g) / 16, torch.randn(16, generator=g) * 0.1
    logits, ids, weights = moe.router(x, weight, bias, 4, True, 2.5)
    assert relative_error(x @ weight.T, logits) < 1e-6
    want = naive_route(logits, bias, 4, routed_scaling_factor=2.5)
    assert torch.equal(want[0], ids) and relative_error(want[1], weights) < 1e-6
    whole = moe.router(x, weight, bias, 4, True, 2.5, split=False)
    assert all(torch.equal(a, b) for a, b in zip((logits, ids, weights), whole)), "both forms add in the same order"
    alone = moe.router(x[-1:], weight, bias, 4, True, 2.5)
    assert all(torch.equal(a[-1:], b) for a, b in zip((logits, ids, weights), alone))


@pytest.mark.parametrize("experts,tokens,k,rows", [(6, 50, 3, 16), (16, 200, 4, 32), (256, 40, 8, 16), (8, 3, 8, 128), (8, 90, 1, 16)])
def test_schedule_names_every_pair_once_and_no_empty_tile(experts, tokens, k, rows):
    g = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(tokens)])
    tiles = moe.most_tiles(tokens * k, experts, rows)
    order, table = moe.schedule(ids, experts, rows, tiles)
    used = table[:-1].view(-1, 3)[:int(table[-1])].tolist()
    flat = ids.flatten()
    assert len(used) == sum(-(-int(n) // rows) for n in flat.bincount()) <= tiles
    assert torch.equal(order.long(), flat.sort(stable=True).indices)
    place = 0
    for expert, first, count in used:
        assert first == place and 0 < count <= rows and (flat[order[first:first + count].long()] == expert).all()
        place += count
    assert place == tokens * k


FORMS = {"as planned": None, "32 rows": dict(rows=32, tile1=64, stages1=3, warps1=4, tile2=128, stages2=3, warps2=4),
         "many": dict(rows=64, many=True, stages1=3, warps1=4, tile2=128, stages2=3, warps2=4),
         "two sizes": dict(rows=16, many=True, stages1=3, warps1=4, tile2=128, stages2=3, warps2=4,
                           rest=dict(rows=4, stages1=3, warps1=4, tile2=128, stages2=3, warps2=4))}


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("form", FORMS)
def test_experts_are_the_plain_form(tokens, form):
    (gate_up, down), shared = layer()
    x, ids, weights = routed(tokens)
    want = moe_torch(x, ids, weights, gate_up, down)
    if tokens == 3: assert relative_error(want, moe.moe_fp8(x, ids, weights, gate_up, down, how=FORMS[form])) < 1e-4
    assert relative_error(want + swiglu(x, *shared), moe.moe_fp8(x, ids, weights, gate_up, down, shared, FORMS[form])) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_a_token_does_not_know_its_neighbours(form):
    (gate_up, down), shared = layer()
    x, ids, weights = routed(9)
    together = moe.moe_fp8(x, ids, weights, gate_up, down, shared, FORMS[form])
    for some in (slice(3, 4), slice(4, 9)):
        assert torch.equal(together[some], moe.moe_fp8(x[some], ids[some], weights[some], gate_up, down, shared, FORMS[form]))


def test_everybody_chooses_the_same_experts():
    (gate_up, down), shared = layer()
    x, _, weights = routed(18)
    ids = torch.tensor([5, 2, 7]).expand(18, 3)
    for form in FORMS.values():
        assert relative_error(moe_torch(x, ids, weights, gate_up, down), moe.moe_fp8(x, ids, weights, gate_up, down, how=form)) < 1e-4
    assert moe.moe_fp8(x[:0], ids[:0], weights[:0], gate_up, down).shape == (0, 128)


def test_experts_refuse_what_would_go_wrong_on_the_device():
    (gate_up, down), shared = layer()
    x, ids, weights = routed(4)
    good = dict(x=x, ids=ids, weights=weights, gate_up=gate_up, down=down, shared=shared)
    narrow = quantize_weight(torch.randn(8, 256, 96)), quantize_weight(torch.randn(8, 96, 128))
    for change, words in ((dict(x=x.double()), "float64"), (dict(x=x[:, :64]), "do not fit"), (dict(ids=ids.int()), "ids must be int64"),
                          (dict(weights=weights.half()), "weights float32"), (dict(ids=ids[:2]), "4 rows with ids"), (dict(gate_up=gate_up.weight.float()), "FP8"),
                          (dict(down=(down.weight, down.scale_inv[:4])), "scale_inv"), (dict(x=x.T.contiguous().T), "one piece"),
                          (dict(shared=(shared[0], gate_up)), "shared expert"), (dict(x=x[:, :96].contiguous(), gate_up=narrow[0], down=narrow[1], shared=None), "multiples of 128")):
        with pytest.raises(ValueError, match=words): moe.moe_fp8(**good | change)
    outside = ids.clone()
    outside[2, 1] = 8
    with pytest.raises(ValueError, match="row 2 names expert 8 of 8"): moe.moe_fp8(**good | dict(ids=outside), debug=True)
    with pytest.raises(ValueError, match="groups"): moe.route(torch.randn(2, 8), torch.zeros(8), 2, n_group=2)
    with pytest.raises(ValueError, match="power of two"): moe.route(torch.randn(2, 12), torch.zeros(12), 2)


def test_the_model_takes_it_by_name():
    chosen = Backends.choose("cpu", moe="triton", route="triton")
    assert chosen.moe.function is moe_triton and chosen.route.function is moe.route
    assert Backends.choose("cpu").moe.name == Backends.choose("cpu").route.name == "torch"


@pytest.mark.parametrize("shared_too", [True, False], ids=["shared in FP8", "shared plain"])
def test_deterministic_mode_has_one_plan_for_every_number_of_tokens(shared_too):
    experts, shared = layer(width=512)
    if not shared_too: shared = tuple(torch.randn(w.weight.shape, generator=torch.Generator().manual_seed(3)) / 16 for w in shared)
    x, ids, weights = routed(18, width=512)
    whole = moe_batch_invariant(x, ids, weights, *experts, shared)
    assert relative_error(moe_torch(x, ids, weights, *experts) + swiglu(x, *shared), whole) < 3e-2
    for some in (slice(4, 5), slice(0, 17)): assert torch.equal(moe_batch_invariant(x[some], ids[some], weights[some], *experts, shared), whole[some])


def test_experts_that_are_not_in_fp8_take_the_plain_form():
    g = torch.Generator().manual_seed(0)
    stacks = torch.randn(8, 64, 96, generator=g) / 10, torch.randn(8, 96, 32, generator=g) / 6
    shared, (x, ids, weights) = (stacks[0][0], stacks[1][0]), routed(5, width=96)
    assert torch.equal(moe_triton(x, ids, weights, *stacks, shared), moe_torch(x, ids, weights, *stacks) + swiglu(x, *shared))


def test_the_bench_measures_the_weights_of_five_layers():
    together, single = five_layers(), five_layers(together=False)
    assert len(together) == 25 and len(single) == 33 and [n for names in together for n in names] == [n for names in single for n in names]
    assert 342 < H200.floor_us(sum(SHAPES[n][0] * SHAPES[n][1] for names in single for n in names)) < 344
    assert OTHER_PLANS.keys() == set(TOKENS) and all(how["rows"] >= 16 for plans in OTHER_PLANS.values() for how in plans.values())
    w = random_weight(3, 128, 256, device="cpu")
    assert w.weight.float().isfinite().all() and w.scale_inv.shape == (3, 1, 2)


def test_the_bench_judges_by_the_plain_form():
    layer = random_weight(8, 256, 128, device="cpu"), random_weight(8, 128, 128, device="cpu"), tuple(random_weight(*s, device="cpu") for s in ((256, 128), (128, 128)))
    x, ids, weights = routed(2)
    want = moe_torch(x, ids, weights, *layer[:2]) + swiglu(x, *layer[2])
    assert relative_error(want, plain_experts(x, ids, weights, *layer)) < 1e-4


def test_a_model_in_fp8_runs_on_the_kernels():
    "Dense layers, attention, shared and routed experts, MTP's too: the plain model's hidden states."
    config = tiny_config(moe_intermediate_size=128, intermediate_size=256, num_hidden_layers=4, index_topk_freq=1)
    specs, kept = checkpoint_tensors(config), ("embed", "lm_head", "norm", "weights_proj", "eh_proj", "mlp.gate.", "bias")
    names = frozenset(n for n, spec in specs.items() if len(spec.shape) == 2 and not any(k in n for k in kept))
    tensors = [(n, quantize_weight(t) if n in names else t) for n, t in random_tensors(config)]
    found = []
    for backends in (Backends.choose("cpu"), Backends.choose("cpu", linear="triton", moe="triton", route="triton")):
        model = Decoder(config, torch.float32, "cpu", backends, names)
        fill(model, tensors)
        found.append(model.forward(StepPlan.build([RequestRows([5, 9, 200], 0, [0])]), Caches.new(config, 2, torch.float32)))
    assert relative_error(*found) < 1e-3
