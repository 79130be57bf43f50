"""The engine's rules on a decoder that says what it is told, and its promises on the tiny random model."""
import asyncio
import dataclasses
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52.chat.tokenizer import byte_tokenizer
from glm52.engine.engine import AsyncEngine, Engine, EngineError, LLM, StopStrings, generation_defaults
from glm52.engine.sampling import SamplingError, SamplingParams
from glm52.engine.scheduler import QueueFull, RequestRefused
from glm52.model.checkpoint import CheckpointError
from glm52.model.decoder import Backends, tiny_config

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_ids[0]


class Told:
    "A decoder whose logits are a function of the token and its position; the hidden state is just the two."

    def __init__(self, logits, vocab_size=292):
        self.config = dataclasses.replace(tiny_config(), vocab_size=vocab_size)
        self.dtype, self.device, self.backends, self.tell = torch.float32, torch.device("cpu"), Backends.choose("cpu"), logits

    def forward(self, plan, caches): return torch.stack([plan.token_ids, plan.positions], 1).float()

    def logits(self, hidden): return torch.stack([self.tell(int(token), int(position)) for token, position in hidden])


def saying(text, start):
    "Logits that make the answer `text`, then the end, after a prompt of `start` tokens."
    ids = TOKENIZER.encode(text) + [EOS]

    def logits(token, position):
        row = torch.zeros(292)
        row[ids[min(max(position - start + 1, 0), len(ids) - 1)]] = 20.0
        return row
    return Told(logits)


def say(text, prompt="??", **fields):
    "The answer to `prompt` of a model that wants to say `text`."
    llm = LLM(saying(text, len(prompt)), tokenizer=TOKENIZER, num_pages=20)
    result = llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 50} | fields), use_tqdm=False)[0]
    llm.engine.check_integrity()
    assert not llm.engine.requests and llm.engine.stats()["pages_free"] == 20
    return result.outputs[0]


def test_the_models_own_end():
    out = say("Hello")
    assert (out.text, out.finish_reason, out.stop_reason, out.token_ids[-1]) == ("Hello", "stop", None, EOS)


def test_length_and_ignore_eos():
    out = say("Hello", max_tokens=3)
    assert (out.text, out.finish_reason, len(out.token_ids)) == ("Hel", "length", 3)
    out = say("Hi", ignore_eos=True, max_tokens=5)
    assert out.finish_reason == "length" and out.token_ids == TOKENIZER.encode("Hi") + [EOS] * 3 and out.text == "Hi"


def test_stop_ids_are_counted_and_not_shown():
    out = say("a.b", stop_token_ids=[ord(".")])
    assert (out.text, out.finish_reason, out.stop_reason) == ("a", "stop", ord(".")) and len(out.token_ids) == 2
    assert say("a.b", stop_token_ids=[ord(".")], include_stop_str_in_output=True).text == "a."


def test_stop_strings():
    out = say("one two three", stop=["tw", "three"])
    assert (out.text, out.finish_reason, out.stop_reason) == ("one ", "stop", "tw") and len(out.token_ids) == len("one tw")
    assert say("one two", stop=["tw"], include_stop_str_in_output=True).text == "one tw"
    assert say("one two", stop=["zzz", "two or"]).text == "one two"          # held back, then released at the end
    assert say("naïve 🙂!", stop=["🙂"]).text == "naïve "


def test_min_tokens_holds_every_end_back():
    out = say("Hi", min_tokens=5, max_tokens=9)
    assert len(out.token_ids) >= 5 and EOS not in out.token_ids[:5]
    assert say("a.b.c", stop=["."], min_tokens=3).text == "a.b"
    assert say("a.b.c", stop_token_ids=[ord(".")], min_tokens=3).token_ids[:1] != [ord(".")]


@settings(max_examples=300, deadline=None)
@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_stop_strings_like_a_whole_text(text, stops, data):
    "However the text is cut, what comes out is the text before the stop string that is complete first."
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    finder, out, found = StopStrings(stops), "", None
    for a, b in zip([0, *cuts], [*cuts, len(text)]):
        certain, found = finder.push(text[a:b])
        out += certain
        assert text.startswith(out) and not any(out.endswith(s) for s in stops)
        if found: break
    else: out += finder.flush()
    if found is None: assert out == text and not any(s in text for s in stops)
    else: assert text.startswith(out + found) and not any(s in out for s in stops)


def test_logprobs_are_the_models_own():
    row = torch.randn(292, generator=torch.Generator().manual_seed(0))
    llm = LLM(Told(lambda token, position: row.roll(token + position)), tokenizer=TOKENIZER, num_pages=20)
    params = SamplingParams(temperature=0.7, top_p=0.5, seed=3, max_tokens=6, logprobs=3, prompt_logprobs=2, presence_penalty=1.5, ignore_eos=True)
    result = llm.generate({"prompt_token_ids": [5, 9, 77]}, params, use_tqdm=False)[0]
    out, seen = result.outputs[0], [5, 9, 77]
    assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == 3 and result.seed == 3
    for place, token in enumerate((9, 77), 1):
        want = row.roll(seen[place - 1] + place - 1).log_softmax(0)
        entry = result.prompt_logprobs[place]
        assert abs(entry[token].logprob - want[token]) < 1e-5 and entry[token].rank == int((want > want[token]).sum()) + 1
    for token, entry in zip(out.token_ids, out.logprobs):
        want = row.roll(seen[-1] + len(seen) - 1).log_softmax(0)
        assert next(iter(entry)) == token and abs(entry[token].logprob - want[token]) < 1e-5
        assert [lp.logprob for lp in entry.values() if lp.rank <= 3] == pytest.approx(want.topk(3).values.tolist(), abs=1e-5) or entry[token].rank <= 3
        seen.append(token)
    assert out.cumulative_logprob == pytest.approx(sum(e[t].logprob for t, e in zip(out.token_ids, out.logprobs)))


def test_zero_tokens_score_the_prompt(tiny_model):
    llm = LLM(tiny_model, num_pages=70)
    prompt = list(range(40, 140))
    scored = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)[0]
    assert scored.outputs[0].token_ids == [] and scored.outputs[0].finish_reason == "length"
    small = LLM(tiny_model, num_pages=70, max_num_batched_tokens=16, max_num_seqs=4)
    again = small.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True), use_tqdm=False)[0]
    assert again.prompt_logprobs == scored.prompt_logprobs and len(scored.prompt_logprobs) == 100


def test_choices_have_noise_of_their_own(tiny_model):
    llm, params = LLM(tiny_model, num_pages=70), SamplingParams(n=4, temperature=1, seed=11, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)[0] for _ in range(2))
    texts = [tuple(c.token_ids) for c in first.outputs]
    assert len(set(texts)) == 4 and texts == [tuple(c.token_ids) for c in second.outputs]
    one = llm.generate({"prompt_token_ids": [1, 2, 3]}, dataclasses.replace(params, n=1), use_tqdm=False)[0]
    assert tuple(one.outputs[0].token_ids) == texts[0]


def test_a_drawn_seed_is_reported_and_repeats(tiny_model):
    llm, params = LLM(tiny_model, num_pages=70), SamplingParams(temperature=1, max_tokens=8, ignore_eos=True)
    drawn = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)[0]
    again = llm.generate({"prompt_token_ids": [1, 2, 3]}, dataclasses.replace(params, seed=drawn.seed), use_tqdm=False)[0]
    assert drawn.outputs[0].token_ids == again.outputs[0].token_ids
    a, b = (LLM(tiny_model, num_pages=70, seed=5).generate([{"prompt_token_ids": [1, 2, 3]}] * 2, params, use_tqdm=False) for _ in range(2))
    assert [r.outputs[0].token_ids for r in a] == [r.outputs[0].token_ids for r in b] and a[0].seed != a[1].seed


def requests(count, seed, most=40):
    "Prompts of 1 to 150 tokens with all kinds of wishes."
    rng = random.Random(seed)
    prompts = [[rng.randrange(512) for _ in range(rng.choice((1, 5, 30, 63, 64, 65, 150)))] for _ in range(count)]
    params = [SamplingParams(temperature=rng.choice((0, 0, 1, 0.5)), top_p=rng.choice((1, 0.9)), top_k=rng.choice((0, 5)), seed=rng.randrange(2**40), ignore_eos=True,
                             repetition_penalty=rng.choice((1, 1.3)), frequency_penalty=rng.choice((0, 0.7)), max_tokens=rng.randrange(1, most)) for _ in range(count)]
    return [{"prompt_token_ids": p} for p in prompts], params


def ids(results): return [[c.token_ids for c in r.outputs] for r in results]


FEW = dict(num_pages=6, max_model_len=384)
CHUNKS = dict(max_num_batched_tokens=16, max_num_seqs=16)


@pytest.mark.parametrize("dtype, limits", [(torch.float32, dict(num_pages=200)), (torch.float32, FEW), (torch.float32, FEW | dict(max_num_batched_tokens=33, max_num_seqs=5)),
                                           (torch.bfloat16, dict(num_pages=200) | CHUNKS)], ids=["all together", "few pages", "few pages, small chunks", "bfloat16, small chunks"])
def test_mixed_requests_are_what_each_is_alone(tiny_model, dtype, limits):
    from glm52.model.decoder import random_model
    model = tiny_model if dtype == torch.float32 else random_model(tiny_config(), dtype=dtype)
    few = limits["num_pages"] < 10
    prompts, params = requests(12 if few else 32, seed=1, most=180 if few else 40)
    llm = LLM(model, **limits)
    together = ids(llm.generate(prompts, params, use_tqdm=False))
    llm.engine.check_integrity()
    if few: assert llm.engine.scheduler.preemptions > 0
    alone = LLM(model, num_pages=60)
    for prompt, p, got in list(zip(prompts, params, together))[::1 if limits == dict(num_pages=200) else 3]:
        assert ids(alone.generate(prompt, p, use_tqdm=False)) == [got]


def test_penalties_survive_preemption(tiny_model):
    "Counts go on where they stood when the prompt is computed again."
    prompts = [{"prompt_token_ids": [i] * 60} for i in range(6)]
    params = [SamplingParams(temperature=0, frequency_penalty=1.5, presence_penalty=1.0, max_tokens=90, ignore_eos=True) for _ in prompts]
    tight = LLM(tiny_model, num_pages=6, max_model_len=256)
    assert ids(tight.generate(prompts, params, use_tqdm=False)) == ids(LLM(tiny_model, num_pages=60).generate(prompts, params, use_tqdm=False))
    assert tight.engine.scheduler.preemptions > 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_random_requests_keep_the_books(seed):
    "Adds, steps and aborts in any order: pages, lines and requests add up after each."
    rng, told = random.Random(seed), Told(lambda token, position: torch.zeros(292).index_fill(0, torch.tensor([(token * 7 + position) % 256]), 9.0))
    engine = Engine(told, TOKENIZER, num_pages=rng.choice((4, 6, 12)), max_model_len=200, max_num_seqs=rng.choice((2, 5)), max_num_batched_tokens=rng.choice((5, 40)), max_waiting=8)
    ended, alive, refused = {}, set(), 0
    for turn in range(80):
        action = rng.random()
        if action < 0.3:
            params = SamplingParams(n=rng.choice((1, 1, 3)), temperature=rng.choice((0, 1)), max_tokens=rng.randrange(0, 60), prompt_logprobs=rng.choice((None, None, 1)),
                                    stop=rng.choice(((), ("ab",))), frequency_penalty=rng.choice((0, 1)))
            try: engine.add(f"r{turn}", [rng.randrange(256) for _ in range(rng.randrange(1, 140))], params)
            except QueueFull: refused += 1
            else: alive.add(f"r{turn}"); ended[f"r{turn}"] = params.n
        elif action < 0.4 and alive:
            for out in engine.abort(rng.choice(sorted(alive))): ended[out.request_id] -= 1
        else:
            for out in engine.step()[0]: ended[out.request_id] -= out.finish_reason is not None
        alive = set(engine.requests)
        engine.check_integrity()
    while engine.busy:
        for out in engine.step()[0]: ended[out.request_id] -= out.finish_reason is not None
    engine.check_integrity()
    assert not any(ended.values()) and engine.scheduler.pages.free == engine.scheduler.pages.num_pages and not engine.runner.score_prompt


def test_refusals_name_the_numbers(tiny_model):
    llm = LLM(tiny_model, num_pages=70, max_model_len=100)
    ask = lambda prompt, **fields: llm.generate({"prompt_token_ids": prompt}, SamplingParams(**fields), use_tqdm=False)
    for prompt, fields, said in (([], {}, "empty"), ([1] * 101, dict(max_tokens=1), "101"), ([1] * 90, dict(max_tokens=20), "110"), ([512], {}, "512"), ([-1], {}, "-1"),
                                 ([1] * 100, dict(max_tokens=None), "100")):
        with pytest.raises(RequestRefused, match=said): ask(prompt, **fields)
    with pytest.raises(SamplingError, match="logit_bias"): ask([1], logit_bias={600: 1.0})
    with pytest.raises(RequestRefused, match="stop_token_ids"): ask([1], stop=["x"])
    with pytest.raises(ValueError, match="4096 positions"): LLM(tiny_model, max_model_len=5000)
    assert not llm.engine.requests


def test_a_row_without_finite_logits_fails_alone():
    "One request overflows, the other goes on."
    def logits(token, position):
        return torch.full((292,), torch.nan) if token == 13 else torch.zeros(292).index_fill(0, torch.tensor([65]), 5.0)
    engine = Engine(Told(logits), TOKENIZER, num_pages=10)
    for name, prompt in (("good", [1]), ("bad", [13])): engine.add(name, prompt, SamplingParams(temperature=0, max_tokens=3))
    outputs, failed = engine.step()
    assert list(failed) == ["bad"] and "position 1" in str(failed["bad"]) and [o.request_id for o in outputs] == ["good"]
    while engine.busy: engine.step()
    engine.check_integrity()


def test_an_interrupt_leaves_nothing_behind(tiny_model, monkeypatch):
    llm = LLM(tiny_model, num_pages=70)
    step, count = llm.engine.step, iter(range(100))
    def interrupted():
        if next(count) == 3: raise KeyboardInterrupt
        return step()
    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt): llm.generate([{"prompt_token_ids": [1, 2]}] * 5, SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    llm.engine.check_integrity()
    assert not llm.engine.requests and llm.engine.scheduler.pages.free == 70


def run_async(model, body, **limits):
    async def main():
        engine = AsyncEngine(model, tokenizer=TOKENIZER, **{"num_pages": 80} | limits)
        await engine.start()
        try: return await body(engine)
        finally: await engine.stop()
    return asyncio.run(main())


async def collect(engine, name, prompt, params):
    "Token ids of each choice."
    got = [[] for _ in range(params.n)]
    async for out in engine.generate(name, prompt, params): got[out.index] += out.token_ids
    return got


def test_the_engines_thread_has_the_models_gpu_as_its_current_one(tiny_model, monkeypatch):
    asked = []
    monkeypatch.setattr("glm52.engine.engine.pick_device", lambda device: asked.append((device, threading.current_thread().name)))
    async def body(engine): await collect(engine, "one", [1, 2], SamplingParams(max_tokens=1))
    run_async(tiny_model, body)
    assert asked == [(tiny_model.device, "glm52-engine")]


def test_streams_are_what_the_llm_says(tiny_model):
    prompts, params = requests(12, seed=4)
    async def body(engine): return await asyncio.gather(*(collect(engine, str(i), p["prompt_token_ids"], q) for i, (p, q) in enumerate(zip(prompts, params))))
    assert run_async(tiny_model, body) == ids(LLM(tiny_model, num_pages=80).generate(prompts, params, use_tqdm=False))


def test_choices_that_end_in_one_step(tiny_model):
    "All choices of a request end together, and one of another goes on."
    async def body(engine): return await asyncio.gather(collect(engine, "three", [1, 2], SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)),
                                                        collect(engine, "one", [3], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    assert [list(map(len, got)) for got in run_async(tiny_model, body)] == [[4, 4, 4], [9]]


def test_thousands_of_aborts():
    "Clients that come and go at once; whoever stays is not disturbed, and nothing is lost."
    told = Told(lambda token, position: torch.zeros(292).index_fill(0, torch.tensor([66]), 9.0))
    async def hasty(engine, i):
        async for _ in engine.generate(f"hasty{i}", [1, 2, 3], SamplingParams(max_tokens=50)):
            if i % 3: return
            engine.abort(f"hasty{i}")
    async def body(engine):
        stays = asyncio.create_task(collect(engine, "stays", [7], SamplingParams(temperature=0, max_tokens=40)))
        await asyncio.gather(*(hasty(engine, i) for i in range(1500)))
        got = await stays
        while engine.stats()["running"] or engine.stats()["waiting"]: await asyncio.sleep(0.01)
        engine.engine.check_integrity()
        return got, engine.stats()["pages_free"], len(engine.streams)
    assert run_async(told, body) == ([[66] * 40], 80, 0)


def test_refusals_reach_the_one_who_asked(tiny_model):
    async def body(engine):
        with pytest.raises(RequestRefused): await collect(engine, "a", [], SamplingParams())
        with pytest.raises(SamplingError): await collect(engine, "b", [1], SamplingParams(logit_bias={9999: 1}))
        first = asyncio.create_task(collect(engine, "same", [1], SamplingParams(max_tokens=60, ignore_eos=True)))
        await asyncio.sleep(0.05)
        with pytest.raises(RequestRefused, match="same"): await collect(engine, "same", [1], SamplingParams())
        return len((await first)[0])
    assert run_async(tiny_model, body) == 60


def test_a_dead_engine_says_so():
    def logits(token, position): raise RuntimeError("the GPU fell off")
    async def body(engine):
        both = await asyncio.gather(*(collect(engine, name, [1], SamplingParams()) for name in "ab"), return_exceptions=True)
        with pytest.raises(EngineError, match="fell off"): await collect(engine, "later", [1], SamplingParams())
        return both, engine.failure
    both, failure = run_async(Told(logits), body)
    assert all(isinstance(e, EngineError) and "fell off" in str(e) for e in both) and isinstance(failure.__cause__, RuntimeError)


def test_stopping_ends_the_streams(tiny_model):
    async def main():
        engine = AsyncEngine(tiny_model, tokenizer=TOKENIZER, num_pages=80)
        with pytest.raises(EngineError, match="start"): await collect(engine, "x", [1], SamplingParams())
        await engine.start()
        task = asyncio.create_task(collect(engine, "long", [1], SamplingParams(max_tokens=2000, ignore_eos=True)))
        await asyncio.sleep(0.1)
        await engine.stop()
        with pytest.raises(EngineError, match="stopped"): await task
        return engine.stats()["pages_free"]
    assert asyncio.run(main()) == 80


def test_generation_defaults(tmp_path):
    assert generation_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_p": 0.9, "do_sample": true, "eos_token_id": 3}')
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.9}
    file.write_text('{"do_sample": false}')
    assert generation_defaults(tmp_path) == {"temperature": 0.0}
    file.write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"): generation_defaults(tmp_path)


@pytest.mark.parametrize("drafts", [0, 3])
def test_overlapped_steps_give_the_same(tiny_model, drafts):
    "Text one step later; the same outputs in all, also where a stop string is found when the next step has run."
    rng = random.Random(3)
    asked = [([rng.randrange(256) for _ in range(rng.choice((3, 64, 90)))], SamplingParams(
        temperature=i % 2, seed=i, max_tokens=30, n=1 + i % 3, stop=(chr(97 + i), "ab") if i % 4 < 2 else (), logprobs=2 if i % 5 == 0 else None, ignore_eos=i % 2 == 0,
        frequency_penalty=float(i % 3 == 0), prompt_logprobs=1 if i == 4 else None, logit_bias={97 + i: 4.0} if i % 4 < 2 else None)) for i in range(12)]

    def run(step):
        engine = Engine(tiny_model, byte_tokenizer(), num_pages=9, max_model_len=192, max_num_seqs=6, max_num_batched_tokens=48, num_speculative_tokens=drafts)
        found = {}

        def hear(outputs):
            for out in outputs:
                ids, text, scores, *end = found.setdefault((out.request_id, out.index), ([], [], [], []))
                ids += out.token_ids; text.append(out.text_delta); scores += out.logprobs or []; end[0].append((out.finish_reason, out.stop_reason, out.prompt_logprobs is None))
        for i, (prompt, params) in enumerate(asked): engine.add(str(i), prompt, params)
        while engine.busy:
            step(engine, hear)
            if engine.totals["steps"] % 7 == 6: engine.scheduler.preempt_last()
            engine.check_integrity()
        assert not engine.requests and engine.scheduler.pages.free == 9 and engine.scheduler.preemptions > 0
        return {key: (ids, "".join(text), scores, [e for e in end if e[0]]) for key, (ids, text, scores, end) in found.items()}, engine.totals["generated_tokens"]

    def overlapped(engine, hear): assert not engine.step_overlapped(hear)
    plain = run(lambda engine, hear: hear(engine.step()[0]))
    assert run(overlapped) == plain and any(isinstance(end[0][1], str) for *_, end in plain[0].values())


def test_streams_of_an_overlapped_engine():
    "The texts of the plain loop through streams, some of which are left in the middle; names can be used again at once."
    async def everybody(overlap):
        engine = AsyncEngine(saying("one two three", 1), tokenizer=TOKENIZER, num_pages=20, overlap=overlap)
        await engine.start()

        async def read(name, stop, most):
            text = ""
            async for out in engine.generate(name, [63], SamplingParams(temperature=0, max_tokens=30, stop=stop)):
                text += out.text_delta
                if len(text) >= most: break
            return text
        first = await asyncio.gather(*(read(f"r{i}", [stop], most) for i, (stop, most) in enumerate((("tw", 99), ("zz", 99), ("zz", 4), ("ee", 99)))))
        again = await asyncio.gather(*(read(f"r{i}", ["th"], 99) for i in range(4)))
        await engine.stop()
        engine.engine.check_integrity()
        return first, again, engine.stats()["pages_free"], len(engine.streams), len(engine.engine.requests)
    assert asyncio.run(everybody(True)) == asyncio.run(everybody(False)) == (["one ", "one two three", "one ", "one two thr"], ["one two "] * 4, 20, 0, 0)


def test_an_abort_between_overlapped_steps(tiny_model):
    "What is late is handed out first; then the abort ends the request, and nothing is left."
    engine, heard = Engine(tiny_model, None, num_pages=20), []
    engine.add("a", [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(3): engine.step_overlapped(heard.extend)
    assert engine.late and sum(len(out.token_ids) for out in heard) == 2
    engine.hand_out(heard.extend)
    assert sum(len(out.token_ids) for out in heard) == 3 and not engine.late
    engine.abort("a")
    assert not engine.busy and engine.scheduler.pages.free == 20
    engine.check_integrity()
