"""What recordings need, on the CPU, where a step runs padded and copied but is not recorded: the same answers, and nobody's page is touched."""
import contextlib
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings, strategies as st

from glm52.engine import graphs as module
from glm52.engine.engine import Engine
from glm52.engine.exact import answers, make_prompts
from glm52.engine.graphs import FIELDS, Graphs, Recorder, Recording, Shape, StaticPlan, new_graphs, padded, shape_of, shifted
from glm52.model.checkpoint import load_model
from glm52.model.decoder import Caches, random_model, tiny_config
from glm52.model.mtp import draft, guess, later_steps, mtp_forward, mtp_keep
from glm52.model.plan import RequestRows, StepPlan
from glm52.ops.topk import select


@pytest.fixture(scope="module")
def nano(): return load_model("glm52-nano", "float32", "cpu", notice=lambda text: None)


def words(count, seed=0): return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@given(st.integers(1, 5000))
def test_sizes(count):
    size = padded(count)
    assert count <= size <= max(count + 1, 1.25 * count) and padded(size) == size and padded(count + 1) >= size
    assert count > 8 or size == count


def test_how_far_a_step_reaches():
    plan = lambda longest: StepPlan.build([RequestRows([1], longest - 1, list(range(-(-longest // 64))))])
    found = [shape_of(plan(n), 1, 256) for n in (1, 256, 257, 512, 513, 5000)]
    assert [(s.reach, s.scored) for s in found] == [(256, False), (256, False), (512, True), (512, True), (1024, True), (8192, True)]
    assert shape_of(plan(60), 1, 16) == Shape(1, 1, 1, 64, True) and shape_of(plan(16), 1, 16).scored is False


def random_step(rng, requests):
    "Rows of some requests, each with pages of its own; page 0 belongs to nobody."
    rows, page = [], 1
    for r in range(requests):
        start, count = int(torch.randint(0, 130, (1,), generator=rng)), int(torch.randint(1, 5, (1,), generator=rng))
        pages = -(-(start + count) // 64)
        rows.append(RequestRows(words(count, r), start, list(range(page, page + pages))))
        page += pages
    return rows


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000))
def test_a_plan_is_as_new_after_a_larger_one(first, second, seed):
    rng = torch.Generator().manual_seed(seed)
    static, fresh = (StaticPlan(Shape(14, 48, 4, 256, True), 16, torch.device("cpu")) for _ in range(2))
    for count in (first, second): plan = StepPlan.build(random_step(rng, count)); static.put(plan)
    fresh.put(plan)
    for name in FIELDS:
        ours, theirs = getattr(static.plan, name), getattr(plan, name)
        assert torch.equal(ours, getattr(fresh.plan, name)) and torch.equal(ours[:len(theirs)], theirs)
    assert (static.plan.slot[len(plan):] == -1).all() and (static.plan.limit[len(plan):] == 0).all()
    assert (static.plan.query_start[second:] == len(plan)).all()
    assert torch.equal(static.plan.page_table[:second, :plan.page_table.shape[1]], plan.page_table)


@pytest.mark.parametrize("kinds", [("auto", "auto"), ("fp8", "fp8")], ids=["plain pages", "FP8 pages"])
@pytest.mark.parametrize("requests", [1, 5, 9])
def test_padding_touches_no_page(tiny_model, kinds, requests):
    "Every byte of every cache, the MTP layer's rows and the hidden states are those of the step without padding."
    rows = random_step(torch.Generator().manual_seed(requests), requests)
    most, plan = max(len(r.token_ids) for r in rows), StepPlan.build(rows)
    pages, before, found = 1 + max(p for r in rows for p in r.pages), torch.randn(requests, tiny_model.config.hidden_size), []
    for way in ("eager", "padded"):
        caches = Caches.new(tiny_model.config, pages, tiny_model.dtype, "cpu", *kinds)
        tiny_model.forward(StepPlan.build([RequestRows(words(r.start, 7), 0, r.pages) for r in rows if r.start]), caches)
        for t in (*caches.latent.values(), *caches.index.values()): t[0] = 7
        if way == "eager":
            hidden = tiny_model.forward(plan, caches)
            mtp_keep(tiny_model, plan, shifted(plan, hidden, before), caches)
        else:
            graphs = Graphs(tiny_model, caches, drafts=True, record=False)
            graphs.step(plan, most, before)                          # a step that runs twice writes the same
            hidden = graphs.step(plan, most, before)
            assert len(graphs.steps) == 1 and next(iter(graphs.steps)).tokens == padded(len(plan))
        found.append([hidden, *caches.latent.values(), *caches.index.values()])
        assert all((t[0] == 7).all() for t in found[-1][1:])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_shifted_rows():
    plan = StepPlan.build([RequestRows([1, 2], 5, [0]), RequestRows([3], 0, [1]), RequestRows([4, 5, 6], 9, [2])])
    hidden, before = torch.arange(6.0)[:, None], torch.tensor([[10.0], [20.0], [30.0]])
    assert shifted(plan, hidden, before).flatten().tolist() == [10, 0, 20, 30, 3, 4]


def test_drafts_between_other_steps(tiny_model):
    rows = [RequestRows([5 + i], 60 + i, [2 * i, 2 * i + 1]) for i in range(3)]
    plan, before = StepPlan.build(rows), torch.randn(3, tiny_model.config.hidden_size)
    caches = Caches.new(tiny_model.config, 6)
    want = draft(tiny_model, mtp_forward(tiny_model, plan, before, caches), torch.arange(3), caches, 4)[0]
    graphs = Graphs(tiny_model, caches, drafts=True, record=False)
    for _ in range(2):
        g, again = graphs.first_draft(plan, before)

        def between(tokens, k):
            graphs.step(plan, 1, before)
            return again(tokens, k)
        assert torch.equal(guess(tiny_model, g, between, 4)[0], want)
    assert torch.equal(guess(tiny_model, *later_steps(tiny_model, mtp_forward(tiny_model, plan, before, caches), torch.arange(3), caches), 4)[0], want)


@pytest.mark.parametrize("scratch", [64 << 20, 2048])
def test_a_selection_that_scores_every_row_is_the_same(monkeypatch, scratch):
    monkeypatch.setattr("glm52.ops.topk.SCRATCH", scratch)
    g = torch.Generator().manual_seed(0)
    starts, limits = torch.tensor([0, 1, 4, 4, 9]), torch.tensor([3, 60, 61, 62, 10, 16, 17, 100, 101])
    q, gate, cache = torch.randn(9, 4, 32, generator=g), torch.randn(9, 4, generator=g), torch.randn(8, 64, 32, generator=g)
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    wanted = select(q, gate, cache, table, starts, limits, 16)
    assert torch.equal(select(q, gate, cache, table, starts, limits, 16, max_rows=5), wanted)


@pytest.mark.parametrize("drafts,acceptance", [(0, "coupled"), (3, "coupled"), (2, "rejection")])
def test_an_engine_gives_the_same_tokens(nano, drafts, acceptance):
    "Chunked prompts, shared pages, preemption, sleep; lengths on both sides of top-k, greedy and sampled."
    prompts = dict(enumerate(make_prompts(7, range(341, 1948))))
    prompts[7] = (prompts[4] + prompts[5] + prompts[3])[:280]
    found = []
    for way in ("eager", "padded"):
        engine = Engine(nano, None, max_model_len=512, num_pages=40, max_num_seqs=5, max_num_batched_tokens=200, num_speculative_tokens=drafts, acceptance=acceptance, graphs=way)
        found.append([answers(engine, prompts, t, 10, preempt=True) for t in (0.0, 1.0)])
        if way == "padded": assert any(s.scored for s in engine.runner.graphs.steps) and any(s.rows > 1 for s in engine.runner.graphs.steps) == (drafts > 0)
        engine.sleep(1)
        if way == "padded": assert not engine.runner.graphs.steps and not engine.runner.graphs.chains
        engine.wake_up()
        found[-1].append(answers(engine, prompts, 1.0, 10))
    assert found[0] == found[1]


def test_sleep_forgets_recordings(nano):
    engine = Engine(nano, None, max_model_len=128, num_pages=8, num_speculative_tokens=2, graphs="padded")
    before = answers(engine, {0: words(5)}, 0.0, 5)
    assert engine.runner.graphs.steps and engine.runner.graphs.chains
    engine.sleep(1)
    assert not engine.runner.graphs.steps and not engine.runner.graphs.chains
    engine.wake_up()
    assert answers(engine, {0: words(5)}, 0.0, 5) == before and engine.runner.graphs.steps


def test_forgotten_recordings_leave_at_once(tiny_model):
    "Their memory is wanted when an engine falls asleep, not when Python next looks for cycles."
    caches, plan = Caches.new(tiny_model.config, 3, tiny_model.dtype), StepPlan.build([RequestRows([1], 2, [1]), RequestRows([2], 2, [2])])
    graphs, before = Graphs(tiny_model, caches, drafts=True, record=False), torch.zeros(2, tiny_model.config.hidden_size)
    graphs.step(plan, 1, before), graphs.first_draft(plan, before)
    parts = [weakref.ref(part) for r in (*graphs.steps.values(), *graphs.chains.values()) for part in (r, r.hidden, *(x for x in vars(r).values() if isinstance(x, Recording)))]
    gc.disable()
    try: graphs.forget(); assert len(parts) == 7 and not any(part() for part in parts)
    finally: gc.enable()


def test_a_recording_begins_and_ends_outside_of_inference_mode(monkeypatch):
    "torch makes its places for random numbers when the first recording begins; made in inference mode, they refuse every later recording outside of it."
    log, note = [], lambda what: log.append((what, torch.is_inference_mode_enabled()))

    @contextlib.contextmanager
    def graph(*args, **kwargs): note("begin"); yield; note("end")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    recorder = object.__new__(Recorder)
    recorder.pool = recorder.stream = None
    with torch.inference_mode(): recorder.record(lambda: note("call"))
    assert log == [("begin", False), ("call", True), ("end", False)]


def test_a_call_runs_once_whether_warm_recorded_or_replayed():
    log = []

    class Replay:
        def replay(self): log.append("replay")

    class Recorder:
        def warm_up(self, call): log.append("warm"); call()
        def record(self, call): log.append("record"); return Replay()

    run = Recording(lambda: log.append("call"), Recorder())
    for _ in range(4): run()
    assert log == ["warm", "call", "record", "replay", "replay", "replay"]
    plain = Recording(lambda: log.append("plain"), None)
    plain(), plain()
    assert log[6:] == ["plain", "plain"]


def test_what_runs_and_why(tiny_model):
    caches = Caches.new(tiny_model.config, 2)
    assert new_graphs(tiny_model, caches) == (None, "eager", "no GPU")
    assert new_graphs(tiny_model, caches, way="eager")[1:] == ("eager", "asked for")
    with pytest.raises(ValueError, match="cannot be recorded in CUDA graphs: no GPU"): new_graphs(tiny_model, caches, way="graph")
    with pytest.raises(ValueError, match="graphs is 'fast'; it can be eager, padded, graph"): Engine(tiny_model, None, num_pages=2, graphs="fast")
    assert Engine(tiny_model, None, num_pages=2).implementations()[-1] == {"op": "decode step", "implementation": "eager", "why": "no GPU"}


def test_what_waits_for_the_device():
    from dataclasses import replace
    from types import SimpleNamespace

    from glm52.device import Implementation
    from glm52.model.decoder import Decoder
    config = tiny_config(num_nextn_predict_layers=0)
    model = Decoder(config, torch.float32, "cpu")
    kernels = {op: Implementation(op, "triton", print, "") for op in ("prepare_key", "prepare_latent", "moe", "index_scores")} | {op: Implementation(op, "tilelang", print, "") for op in ("sparse_mla", "topk")}
    on_gpu = lambda **other: SimpleNamespace(config=config, device=torch.device("cuda"), mtp=None, layers=model.layers, backends=replace(model.backends, **kernels | {op: Implementation(op, name, print, "") for op, name in other.items()}))
    caches, packed = Caches.new(config, 1), Caches.new(config, 1, latent="fp8")
    assert module.waits(on_gpu(), caches) is None and module.can_score(on_gpu())          # tiny experts: all at once
    assert "FP8 pages" in module.waits(on_gpu(), packed) and module.waits(on_gpu(sparse_mla="tilelang_pair"), packed) is None
    assert "prepare_key" in module.waits(on_gpu(prepare_key="torch"), caches) and "experts of layer 3" in module.waits(on_gpu(moe="torch"), caches)
    assert "experts of layer 3" in module.waits(on_gpu(moe="batch_invariant"), caches)
    assert not module.can_score(on_gpu(topk="torch"))
    large = on_gpu()
    large.layers = Decoder(tiny_config(num_nextn_predict_layers=0, moe_intermediate_size=1024), torch.float32, "cpu").layers
    assert "experts of layer 3" in module.waits(large, caches)
