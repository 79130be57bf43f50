"""FP8 linears and experts on a Hopper GPU, at GLM-5.2's widths: the plain forms, the same bits twice, alone and in a graph."""
import pytest
import torch

from glm52.bench_moe import plain_experts, random_weight, some_tokens
from glm52.device import relative_error
from glm52.kernels import fp8, moe
from glm52.ops.fp8 import naive_linear_fp8, quantize_activation, quantize_weight
from glm52.ops.moe import naive_route

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


@pytest.mark.parametrize("n,k", [(2048, 6144), (576, 6144), (6144, 2048), (4096, 2048), (200, 384), (100, 80)])
@pytest.mark.parametrize("form", ["few", "many"])
def test_linear(n, k, form):
    w = quantize_weight(normal(n, k))
    x = normal(700, k, seed=1).bfloat16()
    for rows in (1, 2, 7, 16, 17, 33, 64, 65, 300, 700):
        got, wide = (fp8.linear_fp8(x[:rows], w, kind, form) for kind in (torch.bfloat16, torch.float32))
        assert relative_error(naive_linear_fp8(x[:rows], w, torch.float32), wide) < 1e-3, rows      # the matrix unit's sums; one value of e4m3 beside its place is 4e-3 in a row of 2,048
        assert torch.equal(got, wide.bfloat16())
        assert torch.equal(got, fp8.linear_fp8(x[:rows], w, form=form))
        assert torch.equal(got[-1:], fp8.linear_fp8(x[rows - 1:rows], w, form=form)), f"a row alone has other bits than among {rows}"
    assert fp8.linear_fp8(x[:3], w, torch.float32).dtype == torch.float32
    assert not fp8.counters(x.device, 1).any()


def test_weights_that_share_rows_have_the_bits_they_have_alone():
    weights = [quantize_weight(normal(n, 2048, seed=n)) for n in (16384, 4096, 576)]
    for rows in (1, 9, 40, 600):
        x = normal(rows, 2048, seed=rows).bfloat16()
        for w, got in zip(weights, fp8.linears_fp8(x, weights), strict=True): assert torch.equal(got, fp8.linear_fp8(x, w))


def test_rows_are_quantised_to_the_bits_of_the_plain_form_and_of_the_cpu():
    x = (normal(33, 6144) * torch.logspace(-5, 5, 33, device="cuda")[:, None]).bfloat16()
    x[7] = 0
    q, scale = fp8.quantize_rows(x)
    want, want_scale = quantize_activation(x)
    for here, there in zip((want.view(torch.uint8), want_scale), quantize_activation(x.cpu())): assert torch.equal(here.cpu(), there.view(here.dtype))
    assert torch.equal(scale[:, :33].T, want_scale) and torch.equal(q.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("launch", [dict(), dict(pdl=True), dict(pdl=True, ahead=2)], ids=["plain", "programmatic", "two blocks ahead"])
def test_a_chain_of_linears_in_a_graph(launch):
    down, up = quantize_weight(normal(2048, 6144) / 78), quantize_weight(normal(6144, 2048, seed=1) / 45)

    def chain(x):
        for _ in range(6):
            h, = fp8.few_rows(x, [down], [torch.empty(len(x), 2048, dtype=x.dtype, device="cuda")], **launch)
            x, = fp8.few_rows(h, [up], [torch.empty(len(x), 6144, dtype=x.dtype, device="cuda")], **launch)
        return x

    x = normal(5, 6144).bfloat16()
    want = x
    for _ in range(6): want = fp8.linear_fp8(fp8.linear_fp8(want, down), up)
    assert torch.equal(want, chain(x))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side): chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = chain(x)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("experts,k", [(256, 8), (64, 4), (16, 6)])
def test_route_and_router(experts, k):
    bias, weight = normal(experts, seed=2) * 0.1, (normal(experts, 6144, seed=3) / 78).bfloat16()
    for rows in (1, 5, 16, 17, 300, 1500):
        x = normal(rows, 6144, seed=rows).bfloat16()
        logits, ids, weights = moe.router(x, weight, bias, k, True, 2.5)
        assert relative_error(x.double() @ weight.double().T, logits) < 1e-5
        want = naive_route(logits, bias, k, routed_scaling_factor=2.5)
        assert torch.equal(ids, want[0]) and relative_error(want[1], weights) < 1e-6
        assert torch.equal(moe.route(logits, bias, k, 1, 1, True, 2.5)[0], ids)
        assert torch.equal(moe.router(x, weight, bias, k, True, 2.5, split=rows > 1024)[0], logits), "both forms add in the same order"
        for t in (0, rows - 1): assert torch.equal(moe.router(x[t:t + 1], weight, bias, k)[0], logits[t:t + 1])
    tied = torch.zeros(9, experts, device="cuda")
    assert (moe.route(tied, torch.zeros(experts, device="cuda"), k)[0] == torch.arange(k, device="cuda")).all()


@pytest.fixture(scope="module")
def layer(): return random_weight(256, 4096, 6144), random_weight(256, 6144, 2048), (random_weight(4096, 6144), random_weight(6144, 2048))


@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 17, 64, 256, 700, 4096])
def test_experts(layer, tokens):
    x, ids, weights = some_tokens(tokens)
    got = moe.moe_fp8(x, ids, weights, *layer, debug=True)
    assert torch.equal(got, moe.moe_fp8(x, ids, weights, *layer))
    last = slice(max(0, tokens - 2), tokens)
    assert relative_error(plain_experts(x[last], ids[last], weights[last], *layer), got[last]) < 1.2e-2
    assert torch.equal(got[-1:], moe.moe_fp8(x[-1:], ids[-1:], weights[-1:], *layer, how=moe.plan(tokens)))
    for how in moe.PLANS.values():
        if how["rows"] <= 16 and tokens > 700: continue
        assert relative_error(got, moe.moe_fp8(x, ids, weights, *layer, how=how)) < 1.2e-2
    routed = moe.moe_fp8(x, ids, weights, *layer[:2])
    assert not torch.equal(routed, got)


def test_everybody_chooses_the_same_experts(layer):
    for tokens in (3, 40, 2000):
        x, _, weights = some_tokens(tokens)
        ids = torch.tensor([250, 3, 255, 0, 77, 12, 128, 9], device="cuda").expand(tokens, 8)
        got = moe.moe_fp8(x, ids, weights, *layer)
        assert relative_error(plain_experts(x[-2:], ids[-2:], weights[-2:], *layer), got[-2:]) < 1.2e-2


def test_a_captured_graph_serves_other_choices(layer):
    for tokens in (1, 8, 64, 2000):
        steps = [some_tokens(tokens) for _ in range(3)]
        wants = [moe.moe_fp8(*s, *layer) for s in steps]
        given = [t.clone() for t in steps[0]]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph): out = moe.moe_fp8(*given, *layer)
        for step, want in zip(steps, wants):
            for to, t in zip(given, step): to.copy_(t)
            graph.replay()
            assert torch.equal(out, want)


def test_refusals():
    x, w = normal(4, 256).bfloat16(), quantize_weight(normal(128, 256))
    with pytest.raises(ValueError, match="weight is on cpu"): fp8.linear_fp8(x, (w.weight.cpu(), w.scale_inv.cpu()))
    with pytest.raises(ValueError, match="one piece"): fp8.linear_fp8(x.T.contiguous().T, w)
    experts = random_weight(8, 256, 128), random_weight(8, 128, 128)
    y, ids, weights = x[:, :128].contiguous(), torch.zeros(4, 2, dtype=torch.int64, device="cuda"), torch.ones(4, 2, device="cuda")
    ids[:, 1] = 8
    with pytest.raises(ValueError, match="row 0 names expert 8 of 8"): moe.moe_fp8(y, ids, weights, *experts, debug=True)
