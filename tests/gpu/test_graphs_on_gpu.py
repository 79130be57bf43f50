"""Decode steps replayed from CUDA graphs: the bits of the same step run eagerly, the same tokens, the same after sleep and new weights; time a step."""
import statistics
import time

import pytest
import torch

from glm52.config import ModelConfig, checkpoint_tensors
from glm52.device import measure
from glm52.engine.engine import Engine
from glm52.engine.exact import answers, make_prompts
from glm52.engine.graphs import Graphs, can_score, padded, waits
from glm52.engine.memory import weight_tensors
from glm52.model.checkpoint import load_model
from glm52.model.decoder import Caches, Decoder
from glm52.model.mtp import guess, later_steps, mtp_forward
from glm52.model.plan import RequestRows, StepPlan
from glm52.ops.fp8 import Fp8Weight

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]


def kernels():
    "Of nano and of the wide cut: attention of each number of rows, alone and with a fixed split, and the lists that either chooses."
    from glm52.kernels import sparse_mla, topk
    few, many = (*range(1, 40), 64, 200), (1, 2, 4, 6, 8, 11, 12, 64, 256)
    attention = {(heads, *sparse_mla.plan(rows, heads), False) for heads, numbers in ((8, few), (64, many)) for rows in numbers} | {(8, *sparse_mla.plan(1, 8, 2), False)}
    lists = {topk.plan(rows, length, k) for k, numbers, lengths in ((256, few, (512,)), (257, few, (512,)), (2048, many, (5056, 8192)), (2049, many, (5056, 8192))) for rows in numbers for length in lengths}
    return [("sparse_mla", *job) for job in sorted(attention)] + [("topk", *job) for job in sorted(lists)]


def wide_config(**changes):
    "GLM-5.2's widths, three layers and the MTP layer: dense with an indexer, sparse with one, sparse without."
    return ModelConfig.from_dict(dict(
        model_type="glm_moe_dsa", vocab_size=154880, hidden_size=6144, intermediate_size=12288, moe_intermediate_size=2048, num_hidden_layers=3,
        num_nextn_predict_layers=1, num_attention_heads=64, n_shared_experts=1, n_routed_experts=256, num_experts_per_tok=8, routed_scaling_factor=2.5,
        norm_topk_prob=True, q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, index_topk=2048,
        index_head_dim=128, index_n_heads=32, first_k_dense_replace=1, rms_norm_eps=1e-5, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 8e6}, indexer_types=["full", "full", "shared"], index_share_for_mtp_iteration=True,
        eos_token_id=[1], dtype="bfloat16") | changes)


def fill_with_noise(model, seed):
    "FP8 values and all else, made on the GPU."
    g = torch.Generator("cuda").manual_seed(seed)
    places = model.weights.places
    for name, place in places.items():
        if isinstance(place, Fp8Weight):
            place.weight.copy_((torch.randint(0, 256, place.weight.shape, dtype=torch.uint8, generator=g, device="cuda") & 0xBF).view(torch.float8_e4m3fn))
            place.scale_inv.uniform_(0.8 * place.weight.shape[1] ** -0.5, 2.4 * place.weight.shape[1] ** -0.5, generator=g)
        else:
            for t in (place,) if isinstance(place, torch.Tensor) else (place.w_uk, place.w_uv):
                if "norm" in name and not name.endswith("bias"): t.fill_(1)
                else: t.normal_(0, 0.01 if t.dim() == 1 else 1.0 if "embed" in name else t.shape[-1] ** -0.5, generator=g)


@pytest.fixture(scope="module")
def wide():
    config = wide_config()
    specs, kept = checkpoint_tensors(config), ("embed", "lm_head", "norm", "weights_proj", "eh_proj", "mlp.gate.", "bias")
    model = Decoder(config, torch.bfloat16, "cuda", fp8=frozenset(n for n, spec in specs.items() if len(spec.shape) == 2 and not any(k in n for k in kept)))
    fill_with_noise(model, 0)
    return model


def steps(model, batch, rows, context, seed=0):
    "Caches full of noise, and a step of `batch` requests."
    g = torch.Generator("cuda").manual_seed(seed)
    pages = -(-(context + rows) // 64)
    caches = Caches.new(model.config, batch * pages, model.dtype, model.device)
    for t in (*caches.latent.values(), *caches.index.values()): t.normal_(generator=g)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(seed)).view(batch, pages).tolist()
    words = torch.randint(300, 1900, (batch, rows), generator=torch.Generator().manual_seed(seed)).tolist()
    lengths = [context - i % 50 for i in range(batch)]
    return caches, StepPlan.build([RequestRows(words[i], lengths[i], order[i], "all") for i in range(batch)], model.device)


def snapshot(caches): return [t.clone() for t in (*caches.latent.values(), *caches.index.values())]


def time_of(call, repeats=12):
    "Median milliseconds from the call to the end of what it started."
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


@pytest.mark.parametrize("batch,rows,context", [(1, 1, 500), (8, 1, 500), (1, 1, 5000), (8, 1, 5000), (1, 6, 5000), (11, 1, 5000), (64, 1, 5000), (256, 1, 5000)])
def test_a_step_at_full_width(wide, batch, rows, context):
    "Graph and padded step: the same bits in hidden states and caches. Eager: the same where nothing is padded, for attention splits and products follow the number of rows."
    caches, plan = steps(wide, batch, rows, context)
    before = torch.randn(batch, wide.config.hidden_size, device="cuda").bfloat16()
    clean, found = snapshot(caches), {}
    graph, plain = Graphs(wide, caches, drafts=True), Graphs(wide, caches, drafts=True, record=False)
    assert graph.scores and waits(wide, caches) is None
    for name, run in (("padded", lambda: plain.step(plan, rows, before)), *((f"graph {i}", lambda: graph.step(plan, rows, before)) for i in range(3)),
                      ("eager", lambda: wide.forward(plan, caches))):
        for t, c in zip((*caches.latent.values(), *caches.index.values()), clean): t.copy_(c)
        found[name] = [run().clone(), *snapshot(caches)]
    for i in range(3): assert all(torch.equal(a, b) for a, b in zip(found["padded"], found[f"graph {i}"])), f"call {i + 1} of the recorded step differs from the padded one"
    assert found["padded"][0].isfinite().all()
    same = torch.equal(found["eager"][0], found["padded"][0])
    if padded(batch * rows) == batch * rows: assert same
    eager, replayed = time_of(lambda: wide.forward(plan, caches)), time_of(lambda: graph.step(plan, rows, before))
    print(f"\nwide cut, batch {batch}, {rows} rows, context {context}: eager {eager:.2f} ms, graph {replayed:.2f} ms (MTP rows included); eager has the same bits: {same}")


def test_drafts_between_other_replays(wide):
    "Step 0's slots and the chain's state outlive other recordings of the same pool."
    caches, plan = steps(wide, 4, 1, 5000)
    before = torch.randn(4, wide.config.hidden_size, device="cuda").bfloat16()
    g, again = later_steps(wide, mtp_forward(wide, plan, before, caches), torch.arange(4, device="cuda"), caches)
    want = guess(wide, g, again, 4)[0]
    graphs = Graphs(wide, caches, drafts=True)
    for call in range(4):
        g, again = graphs.first_draft(plan, before)

        def between(tokens, k):
            graphs.step(plan, 1, before)      # another recording works in the pool
            return again(tokens, k)
        assert torch.equal(guess(wide, g, between, 4)[0], want), f"call {call + 1}"
    eager = time_of(lambda: guess(wide, *later_steps(wide, mtp_forward(wide, plan, before, caches), torch.arange(4, device="cuda"), caches), 4), 6)
    print(f"\nwide cut, four drafts of 4 requests: eager {eager:.2f} ms, graph {time_of(lambda: guess(wide, *graphs.first_draft(plan, before), 4), 6):.2f} ms")


def test_new_weights_need_no_new_recording(wide):
    caches, plan = steps(wide, 2, 1, 700)
    graphs = Graphs(wide, caches)
    for _ in range(2): old = graphs.step(plan, 1).clone()
    assert measure(lambda: plan.limit + 1, repeats=1) > 0          # others may still record, outside of inference mode
    kept = [t.clone() for t in weight_tensors(wide) if t.dim() == 1]
    for t in weight_tensors(wide):
        if t.dim() == 1: t.mul_(1.25)
    new = graphs.step(plan, 1).clone()
    assert not torch.equal(old, new) and torch.equal(new, wide.forward(plan, caches))
    for t, k in zip((t for t in weight_tensors(wide) if t.dim() == 1), kept): t.copy_(k)


def through(model, way, drafts, prompts, temperature=0.0, **limits):
    engine = Engine(model, None, max_model_len=512, num_pages=60, num_speculative_tokens=drafts, graphs=way, **{"max_num_seqs": 4, "max_num_batched_tokens": 300} | limits)
    found = answers(engine, prompts, temperature, 24, preempt=True)
    return engine, found


@pytest.fixture(scope="module")
def nano(): return load_model("glm52-nano", "bfloat16", "cuda", notice=lambda text: None)


@pytest.mark.parametrize("drafts", [0, 3])
def test_nano_says_the_same(nano, drafts):
    "Chunked prompts, shared pages, preemption, and lengths on both sides of top-k."
    prompts = dict(enumerate(make_prompts(12, range(341, 1948))))
    prompts[12] = (prompts[4] + prompts[9])[:300]
    engine, got = through(nano, "graph", drafts, prompts)
    assert engine.runner.way == "graph" and can_score(nano) and any(s.scored for s in engine.runner.graphs.steps) and any(r.run.graph for r in engine.runner.graphs.steps.values())
    assert got == through(nano, "padded", drafts, prompts)[1]
    eager = through(nano, "eager", drafts, prompts)[1]
    times = {way: time_of(lambda e=Engine(nano, None, max_model_len=512, num_pages=60, num_speculative_tokens=drafts, graphs=way, max_num_seqs=4): answers(e, {i: prompts[i] for i in range(4)}, 0.0, 32), 3)
             for way in ("eager", "graph")}
    print(f"\nnano, {drafts} drafts: {sum(got[i] == eager[i] for i in got)} of {len(got)} answers are the eager ones; four answers of 32 tokens: eager {times['eager']:.0f} ms, graph {times['graph']:.0f} ms")


def test_sleep_and_wake(nano):
    prompts = dict(enumerate(make_prompts(6, range(341, 1948))))
    engine = Engine(nano, None, max_model_len=512, num_pages=60, num_speculative_tokens=3, max_num_seqs=4, graphs="graph")
    before = answers(engine, prompts, 1.0, 16)
    engine.sleep(1)
    assert not engine.runner.graphs.steps and not engine.runner.graphs.chains
    hold = torch.full((1 << 28,), 7.0, device="cuda")            # somebody else takes the memory meanwhile
    engine.wake_up()
    assert answers(engine, prompts, 1.0, 16) == before and any(r.run.graph for r in engine.runner.graphs.steps.values())
    assert (hold == 7).all()


@pytest.mark.parametrize("drafts", [0, 3])
def test_deterministic_mode_gives_one_answer_with_graphs(drafts):
    "Here padding may not show at all."
    model = load_model("glm52-nano", "bfloat16", "cuda", quantize="all", deterministic=True, notice=lambda text: None)
    prompts = dict(enumerate(make_prompts(10, range(341, 1948))))
    engine, got = through(model, "graph", drafts, prompts, 1.0, max_num_seqs=10)
    assert engine.runner.way == "graph"
    assert got == through(model, "eager", drafts, prompts, 1.0, max_num_seqs=1)[1]
