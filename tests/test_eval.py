"The judge judged: intervals against brute force, questions of the asked length, nothing lost on the way, drafts equal to the plain loop."
import asyncio
import json
import math
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from typer.testing import CliRunner

import glm52.eval as module
from glm52.chat.template import render as render_prompt
from glm52.cli import app
from glm52.engine.sampling import SamplingParams
from glm52.eval import (COLUMNS, GREEDY, Answer, Drafts, EvalError, Group, Plan, Way, acceptance, acceptance_table, accuracy_table, ask, compare_columns,
                        column_table, correct, draft_along, engine_acceptance, evaluate, from_engine, from_transformers, from_url, new_llm, paired, raw_text, speculation_table, tally, verdict,
                        wilson, wire_messages, wire_request, with_selection)
from glm52.model.checkpoint import resolve_model
from glm52.model.decoder import Backends, random_model, tiny_config
from glm52.model.mtp import naive_draft
from glm52.nano.tasks import FAMILIES, is_held_out, prompt_and_answer
from glm52.ops.fp8 import quantize_weight
from glm52.ops.indexer import paged_index_scores
from glm52.ops.moe import moe_torch, moe_wide


@pytest.fixture(scope="module")
def llm(): return new_llm("glm52-nano", "float32", "cpu", max_model_len=2048, num_pages=200)


@pytest.fixture(scope="module")
def questions(llm): return [q for family in ("sort", "tools", "lookup", "json") for q in ask(Group(family), 2, llm.tokenizer)]


def test_wilson_is_what_the_textbook_says():
    assert np.allclose(wilson(400, 400), (0.99049, 1.0), atol=1e-4) and np.allclose(wilson(8, 10), (0.4902, 0.9433), atol=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 2000), st.data())
def test_wilson_inverts_the_score_test(n, data):
    "Its ends are the shares whose distance to what was seen is 1.96 standard errors."
    right = data.draw(st.integers(0, n))
    for end in wilson(right, n):
        if 0 < end < 1 and end != right / n: assert math.isclose(abs(right / n - end), 1.959964 * math.sqrt(end * (1 - end) / n), abs_tol=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=300))
def test_paired_differences_turn_with_their_sides(pairs):
    first, second = zip(*pairs)
    middle, low, high = paired(first, second)
    assert math.isclose(middle, np.mean(second) - np.mean(first), abs_tol=1e-12) and low < high
    assert np.allclose(paired(second, first), (-middle, -high, -low))
    assert paired(first, first)[1] < 0 < paired(first, first)[2]


def test_paired_intervals_cover():
    "Of 400 simulated comparisons with a true difference of -2 %, about 95 % of the intervals hold it."
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        u = rng.random(500)
        first, second = u > 0.02, (u > 0.02) & (rng.random(500) > 0.02 / 0.98)
        low, high = paired(first.tolist(), second.tolist())[1:]
        held += low <= -0.02 <= high
    assert 365 <= held <= 396


def test_groups_are_read_and_refused():
    assert Group.parse("lookup:4000-8000").name == "lookup 4,000-8,000" and Group.parse("json") == Group("json")
    for text in ("sums", "sort:100-200", "lookup:8000-4000", "lookup:far", "lookup:10-50"):
        with pytest.raises(EvalError): Group.parse(text)


def test_questions_have_the_length_that_was_asked_for_and_repeat(llm):
    for family in ("lookup", "two-hop"):
        group = Group(family, (700, 1200))
        found = ask(group, 6, llm.tokenizer)
        assert all(700 <= len(q.ids) <= 1200 for q in found) and len({q.item.key for q in found}) == 6
        assert [q.prompt for q in found] == [q.prompt for q in ask(group, 6, llm.tokenizer)] != [q.prompt for q in ask(group, 6, llm.tokenizer, seed=1)]
        assert all(q.ids == llm.tokenizer.encode(prompt_and_answer(q.item)[0]) and q.item.family == family for q in found)


def test_every_expected_answer_is_right_and_a_capped_one_is_wrong(llm):
    for family in FAMILIES:
        for q in ask(Group(family), 4, llm.tokenizer):
            expected = prompt_and_answer(q.item)[1]
            assert correct(q, Answer(expected, 9, "stop")) and not correct(q, Answer(expected, 9, "length")) and not correct(q, Answer(expected, 9, "stop", failure="gone"))
            assert not correct(q, Answer("", 1, "stop"))


def test_what_is_sent_renders_to_the_same_prompt_and_comes_back_as_the_same_text(llm):
    "Over HTTP the conversation is taken apart and put together again: nothing may change on the way."
    from glm52.chat.parsers import OutputParser
    for family in FAMILIES:
        for q in ask(Group(family), 3, llm.tokenizer, seed=3):
            body = json.loads(json.dumps(wire_request(q, "m", GREEDY)))
            assert render_prompt(body["messages"], body.get("tools"), tokenizer=llm.tokenizer, **body["chat_template_kwargs"]) == q.prompt
            parser = OutputParser(body.get("tools"), q.prompt)
            text = prompt_and_answer(q.item)[1].rsplit("<|", 1)[0]
            parser.feed(text)
            parser.finish("stop")
            assert correct(q, Answer(raw_text(parser.message.to_openai(), q.item.thinking), 9, "stop"))


def test_calls_get_ids_and_results_name_them():
    call = lambda name: {"type": "function", "function": {"name": name, "arguments": {"x": 1}}}
    sent = wire_messages([{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call("f"), call("g")]},
                          {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, {"role": "assistant", "tool_calls": [call("h")]}, {"role": "tool", "content": "3"}])
    ids = [c["id"] for m in sent for c in m.get("tool_calls", ())]
    assert ids == [m["tool_call_id"] for m in sent if m["role"] == "tool"] and len(set(ids)) == 3
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"x": 1}


def test_the_table_counts_everything(questions):
    few = questions[:4]
    answers = [Answer(prompt_and_answer(few[0].item)[1], 30, "stop"), Answer("wrong", 320, "length"), Answer("", 1, "stop", errors=1), Answer(errors=3, failure="HTTP 500")]
    rows = {r["group"]: r for r in tally(few, answers)}
    assert (rows["sort"]["right"], rows["sort"]["capped"], rows["sort"]["tokens"]) == (1, 1, 175)
    assert (rows["tools"]["empty"], rows["tools"]["errors"], rows["tools"]["failed"], rows["tools"]["n"], rows["tools"]["right"]) == (1, 4, 1, 2, 0)
    with pytest.raises(EvalError, match="none may get lost"): tally(few, answers[:3])


@pytest.fixture(scope="module")
def service(llm):
    "The real application over the nano model, in this process."
    from glm52.engine.engine import AsyncEngine
    from glm52.server.app import create_app
    from glm52.server.protocol import Service
    return lambda: create_app(Service(AsyncEngine("glm52-nano", dtype="float32", device="cpu", max_model_len=2048, num_pages=200), "glm52-nano"))


def over_http(app, questions, monkeypatch, before=lambda request: None, **options):
    "`from_url` against an application in this process, through its real lifespan."
    transport = httpx.ASGITransport(app)

    class Client(httpx.AsyncClient):
        def __init__(self, **kwargs): super().__init__(**{k: v for k, v in kwargs.items() if k != "limits"}, transport=transport)

        async def post(self, url, **kwargs):
            if (reply := before(kwargs)) is not None: return reply
            return await super().post(url, **kwargs)

    monkeypatch.setattr(module.httpx, "AsyncClient", Client)

    async def run():
        async with app.router.lifespan_context(app): return await from_url("http://test/v1", questions, **options)

    return asyncio.run(run())


def test_a_server_and_the_engine_in_process_say_the_same(llm, questions, service, monkeypatch):
    ours = from_engine(llm, questions)
    theirs = over_http(service(), questions, monkeypatch, concurrency=3)
    assert [a.failure for a in theirs] == [None] * len(questions)
    assert [a.text for a in ours] == [a.text for a in theirs] and [a.tokens for a in ours] == [a.tokens for a in theirs]
    assert [a.finish_reason for a in ours] == ["stop"] * len(ours)      # the server says tool_calls where it found some
    assert tally(questions, ours) == tally(questions, theirs)


def test_failed_attempts_are_counted_even_when_a_later_one_succeeds(questions, service, monkeypatch):
    monkeypatch.setattr(module.asyncio, "sleep", lambda seconds, real=asyncio.sleep: real(0))
    first, second = (q.item.messages[-2]["content"] for q in questions[:2])
    calls = []

    def flaky(kwargs):
        calls.append(kwargs["json"]["messages"][-1]["content"])
        if calls[-1] == first or calls[-1] == second and calls.count(second) == 1: return httpx.Response(503, text="busy")

    answers = over_http(service(), questions[:3], monkeypatch, flaky, concurrency=1, retries=1, way=Way(max_tokens=4))
    assert sum(a.errors for a in answers) == 3 and [a.failure is None for a in answers] == [False, True, True]
    assert "HTTP 503: busy" in answers[0].failure and answers[0].errors == 2 and len(calls) == 5
    assert [a.finish_reason for a in answers[1:]] == ["length", "length"]


def test_a_server_that_is_not_there_fails_every_question_and_says_so(questions):
    answers = asyncio.run(from_url("http://127.0.0.1:9/v1", questions[:2], retries=0))
    assert all(a.failure and a.errors == 1 for a in answers) and len(answers) == 2


def test_replaced_selections_choose_what_they_say():
    backends, limit = Backends.choose("cpu"), torch.tensor([10, 70, 128])
    args = torch.zeros(3, 8, 16), torch.zeros(3, 8), torch.zeros(4, 64, 16), torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 3]), limit
    recent = with_selection(backends, "recent")
    chosen = recent.topk(recent.index_scores(*args), limit, 4)
    assert chosen.tolist() == [[6, 7, 8, 9], [66, 67, 68, 69], [124, 125, 126, 127]]
    scores = with_selection(backends, "random", seed=5).index_scores(*args)
    assert torch.equal(scores, with_selection(backends, "random", seed=5).index_scores(*args)) and not torch.equal(scores, with_selection(backends, "random").index_scores(*args))
    assert (scores.isinf() == (torch.arange(128) >= limit[:, None])).all() and 0 <= scores[2].min() and scores[2].max() <= 1
    assert ("index_scores", "random") in [row[:2] for row in with_selection(backends, "random").table()] and with_selection(backends, "model") is backends
    with pytest.raises(EvalError, match="none of model, random, recent"): with_selection(backends, "oldest")


def test_the_indexer_does_the_work(llm):
    "Beyond top-k a look-up survives only with the model's own selection."
    found = ask(Group("lookup", (500, 700)), 3, llm.tokenizer)
    assert sum(correct(*pair) for pair in zip(found, from_engine(llm, found, Way(max_tokens=20)))) >= 2
    other = new_llm("glm52-nano", "float32", "cpu", "random", max_model_len=2048, num_pages=80)
    assert sum(correct(*pair) for pair in zip(found, from_engine(other, found, Way(max_tokens=20)))) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [(), ("down",), ("gate_up", "down")])
def test_all_experts_at_once_are_the_experts_one_by_one(dtype, fp8):
    g = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(*shape, generator=g).mul(scale).to(dtype) for shape, scale in (((37, 256), 1), ((8, 128, 256), 1 / 16), ((8, 256, 64), 1 / 8)))
    ids, weights = torch.stack([torch.randperm(8, generator=g)[:3] for _ in range(37)]), torch.rand(37, 3, generator=g)
    if "gate_up" in fp8: gate_up = quantize_weight(gate_up)
    if "down" in fp8: down = quantize_weight(down)
    got, want = moe_wide(x, ids, weights, gate_up, down).float(), moe_torch(x, ids, weights, gate_up, down).float()
    assert (got - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 0.04)


@pytest.fixture(scope="module")
def draft_model(): return random_model(tiny_config(), seed=4)


@pytest.mark.parametrize("lengths", [[(20, 9)], [(3, 12), (70, 5), (40, 2), (10, 1)]])
def test_drafts_along_a_text_are_those_of_the_plain_loop(draft_model, lengths):
    "Contexts beyond top-k (16) and beyond a page, several texts at once, answers of one token."
    g = torch.Generator().manual_seed(1)
    texts = [(torch.randint(3, 500, (prompt + answer,), generator=g).tolist(), prompt) for prompt, answer in lengths]
    for position in range(len(texts)):          # make some guesses right: take them into the text
        ids, prompt = texts[position]
        for p in range(prompt, len(ids) - 1, 3): ids[p + 1] = naive_draft(draft_model, ids[:p + 1], 1)[0][0]
    hits = 0
    for (ids, prompt), found in zip(texts, draft_along(draft_model, texts, 3)):
        assert found.hits.shape == (len(ids) - 1 - prompt, 3)
        for i, p in enumerate(range(prompt, len(ids) - 1)):
            drafts, truth = naive_draft(draft_model, ids[:p + 1], 3)[0], ids[p + 1:p + 4]
            assert found.hits[i].tolist() == [k < len(truth) and drafts[k] == truth[k] for k in range(3)]
            hits += found.hits[i].sum()
    assert hits or lengths[0][1] < 3


def test_a_walk_makes_the_steps_of_an_engine():
    T, F = True, False
    hits = np.array([[T, T], [F, T], [T, F], [F, F], [T, F], [T, T]])
    walked = Drafts(hits).walk()        # 6 tokens to come: 3 + 1 (its guess was wrong) + ...
    assert walked == [(2, 6), (0, 3), (1, 2)]
    row = module._acceptance_row("x", [walked], 2)
    assert (row["answers"], row["mean"], row["most"]) == (1, 2.0, 3.0)
    assert row["reached"] == [3, 2] and row["accepted"] == [2, 1] and (row["full_steps"], row["mean_full"]) == (2, 2.0)
    assert row["interval"] == (2.0, 2.0)          # one answer says nothing of the spread


def test_the_interval_of_tokens_a_step_holds_the_truth_as_often_as_it_says():
    "Answers differ more than their steps: an interval over steps would be too narrow."
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        share = rng.beta(4, 2, 60)                                   # of guesses accepted in each answer
        steps = rng.integers(4, 30, 60)
        tokens = [1 + rng.binomial(5, p, n).mean() for p, n in zip(share, steps)] * steps
        low, high = module.ratio_interval(tokens, steps)
        held += low <= 1 + 5 * 4 / 6 <= high
    assert 0.91 < held / 400 < 0.98


def test_sampled_drafts_use_the_noise_of_the_target(llm, questions):
    "At temperature 1 a draft distribution that is the target's own accepts nearly everything, with the request's own seed only."
    way = Way(1.0, 0.95, 60)
    answers = from_engine(llm, questions[2:4], way)
    rows = acceptance(llm.engine.decoder, questions[2:4], answers, 3, way)
    assert all(r["accepted"][0] / r["reached"][0] > 0.5 for r in rows) and all(1 <= r["mean"] <= 4 for r in rows)
    pairs = list(zip(questions[2:4], answers))
    strange = draft_along(llm.engine.decoder, [(q.ids + a.ids, len(q.ids)) for q, a in pairs], 3, way, [q.number + 100 for q, _ in pairs])
    own = draft_along(llm.engine.decoder, [(q.ids + a.ids, len(q.ids)) for q, a in pairs], 3, way, [q.number for q, _ in pairs])
    assert sum(d.hits.sum() for d in own) >= sum(d.hits.sum() for d in strange)


@pytest.mark.parametrize("way", [GREEDY, Way(1.0, 0.95)], ids=lambda way: way.name)
def test_the_engine_counts_what_the_plain_loop_finds(llm, questions, way):
    "Speculating, and walking through the table of the plain loop's hits: the same steps, and the same drafts accepted but for those behind an answer's end."
    speculating = new_llm("glm52-nano", "float32", "cpu", max_model_len=2048, num_pages=200, num_speculative_tokens=3)
    few = questions[::2]
    own, walked = engine_acceptance(speculating, few, way), acceptance(llm.engine.decoder, few, from_engine(llm, few, way), 3, way)
    for a, b in zip(own, walked, strict=True):
        assert (a["group"], a["steps"], a["mean"]) == (b["group"], b["steps"], b["mean"])
        assert all(0 <= x - y <= a["answers"] for x, y in zip(a["accepted"], b["accepted"]))      # the engine also counts behind the end
        assert all(p >= r for p, r in zip(a["proposed"], b["reached"]))


def test_one_command_and_its_tables(llm, tmp_path):
    kept = []
    plan = Plan((Group("talk"), Group("lookup", (270, 300))), 1, (Way(max_tokens=12), Way(1.0, 0.95, 12)), ("model", "recent"), drafts=2, speculate=2)
    result = evaluate("glm52-nano", plan, dtype="float32", device="cpu", keep=lambda r: kept.append(json.dumps(r)))
    assert [(p["way"], p["selection"]) for p in result["accuracy"]] == [(w.name, s) for s in ("model", "recent") for w in plan.ways]
    assert len(result["acceptance"]) == 2 and len(kept) == 5 and json.loads(kept[-1]) == json.loads(json.dumps(result))
    assert accuracy_table(result).row_count == 8 and acceptance_table(result).row_count == speculation_table(result).row_count == 4
    module.plot(result).savefig(tmp_path / "a.png")
    with pytest.raises(EvalError, match="in this process"): evaluate("glm52-nano", plan, url="http://x/v1")


def test_columns_are_compared_on_the_same_questions(llm, monkeypatch):
    few = ask(Group("lists"), 2, llm.tokenizer)
    monkeypatch.setattr(module, "from_transformers", lambda *a, **k: (_ for _ in ()).throw(ImportError("no such class")))
    result = compare_columns("glm52-nano", ("transformers", "bf16", "fp8-experts", "fp8-latent"), few, "cpu", say=lambda text: None)
    assert "no such class" in result["cannot"]["transformers"] and result["against"] == "bf16" and list(result["columns"]) == ["bf16", "fp8-experts", "fp8-latent"]
    assert result["columns"]["bf16"]["difference"][0] == 0 and result["verdict"] == [] and verdict(result).startswith("no column: below bf16")
    assert column_table(result).row_count == 4
    with pytest.raises(EvalError, match="no column called int4"): compare_columns("glm52-nano", ("int4",), few)


def test_a_column_that_loses_is_named(questions, monkeypatch):
    "Thirty wrong answers against thirty right ones are below by more than the interval."
    many = questions[:1] * 30
    good, bad = [Answer(prompt_and_answer(many[0].item)[1], 3, "stop")] * 30, [Answer("no", 3, "stop")] * 30
    monkeypatch.setattr(module, "new_llm", lambda model, dtype, device, **options: options.get("quantize"))
    monkeypatch.setattr(module, "from_engine", lambda engine, qs: bad if engine else good)
    result = compare_columns("glm52-nano", ("bf16", "fp8", "fp8-latent"), many, say=lambda text: None)
    assert result["verdict"] == ["fp8"] and verdict(result).startswith("fp8: below bf16 by more than the interval")


def test_transformers_answers_alike_padded_and_alone(llm, questions):
    few = [questions[4], ask(Group("lists"), 1, llm.tokenizer)[0]]
    path = resolve_model("glm52-nano")
    padded = from_transformers(path, few, device="cpu", dtype=torch.float32)
    alone = from_transformers(path, few, device="cpu", dtype=torch.float32, budget=0)
    assert [a.ids for a in padded] == [a.ids for a in alone] == [a.ids for a in from_engine(llm, few)]


def test_the_commands(tmp_path):
    run = CliRunner().invoke
    done = run(app, ["eval", "-n", "1", "--family", "talk", "--device", "cpu", "--out", str(tmp_path / "r.json"), "--drafts", "2"])
    assert done.exit_code == 0 and "talk" in done.output and "guess 2" in done.output and json.loads((tmp_path / "r.json").read_text())["accuracy"][0]["rows"][0]["n"] == 1
    assert run(app, ["eval", "--family", "sums"]).exit_code == 1
    assert run(app, ["quantize", "glm52-nano", str(tmp_path / "q"), "--scope", "moe-only"]).exit_code == 0
    assert run(app, ["quantize", str(tmp_path / "q"), str(tmp_path / "r")]).exit_code == 3 and not (tmp_path / "r").exists()
    assert run(app, ["quantize", "glm52-nano", str(tmp_path / "q")]).exit_code == 1


HARNESS = Path(__file__).parent / "lm_eval"


def test_harness_tasks_name_a_data_set_that_is_here():
    import yaml
    rows = [json.loads(line) for line in (HARNESS / "lookup.jsonl").read_text().splitlines()]
    assert len(rows) == 40 and all(row["choices"][row["gold"]] == row["answer"] and len(set(row["choices"])) == 4 for row in rows)
    assert all(is_held_out(row["answer"].replace(": ", "=")) and row["answer"] in row["question"] for row in rows)
    for name in ("chat", "choice"):
        task = yaml.safe_load((HARNESS / f"glm52_lookup_{name}.yaml").read_text())
        assert task["task"] == f"glm52_lookup_{name}" and (HARNESS.parent.parent / task["dataset_kwargs"]["data_files"]["test"]).exists()


@pytest.mark.parametrize("as_ids", [True, False])
def test_log_likelihoods_as_the_harness_reads_them(llm, service, as_ids):
    "Prompt and continuation sent with echo, one token too many asked for and cut off, the context's tokens skipped: what is left is the continuation's log-likelihood."
    row = json.loads((HARNESS / "lookup.jsonl").read_text().splitlines()[1])
    context = f"[gMASK]<sop><|user|>{row['question']}<|assistant|><think></think>"
    start, application = llm.tokenizer.encode(context), service()
    texts = [context + choice for choice in row["choices"]]
    prompts = [llm.tokenizer.encode(text) for text in texts]
    assert all(ids[:len(start)] == start for ids in prompts)
    body = {"model": "glm52-nano", "prompt": prompts if as_ids else texts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}

    async def run():
        async with application.router.lifespan_context(application), httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://test") as client:
            return (await client.post("/v1/completions", json=body, timeout=60)).json()

    choices = sorted(asyncio.run(run())["choices"], key=lambda c: c["index"])
    got = [sum(c["logprobs"]["token_logprobs"][len(start):-1]) for c in choices]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    want = [sum(entry[token].logprob for token, entry in list(zip(ids, out.prompt_logprobs))[len(start):]) for ids, out in zip(prompts, outputs)]
    assert np.allclose(got, want, atol=1e-4) and max(got) < 0 and int(np.argmax(got)) == row["gold"]
    for choice, ids in zip(choices, prompts): assert len(choice["logprobs"]["top_logprobs"]) == len(ids) + 1 and choice["logprobs"]["top_logprobs"][0] is None
