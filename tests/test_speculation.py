"""Speculation changes no token: with good guesses, bad ones and the MTP layer's own, near every edge there is."""
import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import EOS, TOKENIZER, Told, ids, requests, saying

from glm52.engine.engine import Engine, LLM
from glm52.engine.runner import Guesses
from glm52.engine.sampling import SamplingParams
from glm52.engine.scheduler import QueueFull
from glm52.engine.speculation import Chains, best_depth, leading, next_trust
from glm52.model.decoder import random_model, tiny_config

CASES = {case["id"]: case for line in (Path(__file__).parent / "cases" / "public-reports.jsonl").read_text().splitlines() if (case := json.loads(line))}


@pytest.fixture(scope="module")
def small_model():
    "Four layers: the third chooses for the fourth."
    return random_model(tiny_config(num_hidden_layers=4))


class ToldWithMtp(Told):
    "A told decoder with an MTP layer: its guesses come from an oracle that is asked by position, and is sometimes wrong."
    mtp = True


def oracle(monkeypatch, truth, right=0.8, seed=0):
    "Guesses that are `truth(sequence, position)` with a probability, whatever the MTP layer would say."
    from glm52.engine import runner
    rng = random.Random(seed)

    def guess(self, step, sampled, chains, arrays, plan, before, masks):
        tokens = torch.full(chains.real.shape, -1)
        for s, i in enumerate(sampled.tolist()):
            rows = step.rows[i]
            for k in range(rows.drafts): tokens[s, k] = truth(rows.sequence, rows.start + 1 + k) if rng.random() < right else rng.randrange(self.vocab_size)
        for k in range(tokens.shape[1] if masks is not None else 0): masks.follow(list(range(len(tokens))), tokens[:, k])
        shown = torch.cat([plan.token_ids[plan.sample_rows[chains.at[:, :1]]], tokens.clamp_min(0)], 1)
        plan.token_ids[plan.sample_rows] = chains.of_rows(shown)
        return Guesses(tokens)

    monkeypatch.setattr(runner, "_guess", guess)
    monkeypatch.setattr(runner, "_follow", lambda *args: None)


def with_mtp(decoder):
    decoder.__class__, decoder.config = ToldWithMtp, dataclasses.replace(decoder.config, hidden_size=2)
    return decoder


def told(decoder, **limits):
    "An engine of a told decoder that speculates."
    return LLM(with_mtp(decoder), tokenizer=TOKENIZER, **{"num_pages": 20, "num_speculative_tokens": 5} | limits)


def say(monkeypatch, text, prompt="??", right=1.0, **fields):
    "The answer of a model that wants to say `text` and guesses it."
    wanted = TOKENIZER.encode(text) + [EOS]
    oracle(monkeypatch, lambda s, position: wanted[min(position - len(prompt), len(wanted) - 1)], right)
    llm = told(saying(text, len(prompt)))
    out = llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 50} | fields), use_tqdm=False)[0].outputs[0]
    llm.engine.check_integrity()
    assert not llm.engine.requests and llm.engine.stats()["pages_free"] == 20
    return out, llm.engine


def test_ends_inside_an_accepted_run(monkeypatch):
    "The model's own end, a stop id, a stop string, a limit: what was accepted after it is not in the answer."
    out, engine = say(monkeypatch, "Hello")
    assert (out.text, out.finish_reason, out.token_ids[-1], len(out.token_ids)) == ("Hello", "stop", EOS, 6)
    assert engine.totals["steps"] == 2 and engine.stats()["drafts_accepted"] == [1] * 5      # a prompt, then all at once
    out, _ = say(monkeypatch, "one two three", stop=["tw"], logprobs=0)
    assert (out.text, out.stop_reason, len(out.token_ids), len(out.logprobs)) == ("one ", "tw", 6, 6)
    out, _ = say(monkeypatch, "a.b", stop_token_ids=[ord(".")])
    assert (out.text, out.stop_reason, len(out.token_ids)) == ("a", ord("."), 2)
    out, engine = say(monkeypatch, "Hello you", max_tokens=4)
    assert (out.text, out.finish_reason) == ("Hell", "length") and engine.totals["steps"] == 2


def test_min_tokens_inside_a_run(monkeypatch):
    plain = LLM(saying("Hi", 2), tokenizer=TOKENIZER, num_pages=20).generate("??", SamplingParams(temperature=0, min_tokens=5, max_tokens=9), use_tqdm=False)[0].outputs[0]
    out, _ = say(monkeypatch, "Hi", min_tokens=5, max_tokens=9)
    assert out.token_ids == plain.token_ids and EOS not in out.token_ids[:5]
    out, _ = say(monkeypatch, "a.b.c", stop=["."], min_tokens=3)
    assert out.text == "a.b"


def test_a_row_without_finite_logits_matters_only_inside_the_chain(monkeypatch):
    "A wrong guess may lead anywhere; a right one that leads to a dead row ends the request where it would have ended."
    def logits(token, position):
        return torch.full((292,), torch.nan) if token == 13 else torch.zeros(292).index_fill(0, torch.tensor([13 if position == 5 else 65]), 5.0)
    oracle(monkeypatch, lambda s, position: 13, right=1.0)      # always guesses the deadly token, right at position 6 only
    errors, answers = [], []
    for k in (0, 4):
        engine = Engine(with_mtp(Told(logits)), TOKENIZER, num_pages=10, num_speculative_tokens=k)
        engine.add("r", [1, 2], SamplingParams(temperature=0, max_tokens=9))
        found = []
        while engine.busy:
            outputs, failed = engine.step()
            found += [t for out in outputs for t in out.token_ids]
            errors += [str(e) for e in failed.values()]
        answers.append(found)
        engine.check_integrity()
    assert answers[0] == answers[1] == [65] * 4 + [13] and len(errors) == 2 and errors[0] == errors[1]


WISHES = dict(frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2, logit_bias={3: 4.0, 9: -5.0}, min_p=0.02, top_k=40, top_p=0.95, logprobs=2, prompt_logprobs=1, n=2)


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_wish_is_what_it_is_without_guesses(tiny_model, k, temperature):
    "Ids, log-probs and prompt log-probs, with the random model's own guesses, which are hardly ever right."
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=30, stop_token_ids=[7], min_tokens=12, **WISHES)
    prompts = [{"prompt_token_ids": [3 + i, 9, 40 + i]} for i in range(3)] + [{"prompt_token_ids": list(range(100, 190))}]
    plain, guessed = (LLM(tiny_model, num_pages=60, num_speculative_tokens=n).generate(prompts, params, use_tqdm=False) for n in (0, k))
    for a, b in zip(plain, guessed):
        assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs] and [c.logprobs for c in a.outputs] == [c.logprobs for c in b.outputs]
        assert a.prompt_logprobs == b.prompt_logprobs


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
def test_penalties_count_the_guesses_before_a_row(tiny_model, monkeypatch, right):
    "With guesses that are right, several tokens are counted in one step; a wrong one is forgotten."
    params = [SamplingParams(temperature=t, seed=i, max_tokens=40, ignore_eos=True, **{**WISHES, "n": 1, "logprobs": 1}) for i, t in enumerate((0, 0, 1, 1))]
    prompts = [{"prompt_token_ids": [3 + i, 9, 40 + i]} for i in range(4)]
    plain = LLM(tiny_model, num_pages=60).generate(prompts, params, use_tqdm=False)
    answers = {tuple(p["prompt_token_ids"]): r.outputs[0].token_ids for p, r in zip(prompts, plain)}
    oracle(monkeypatch, lambda s, position: answers[tuple(s.tokens[:3])][position - 3], right)
    llm = LLM(tiny_model, num_pages=60, num_speculative_tokens=4)
    got = llm.generate(prompts, params, use_tqdm=False)
    assert [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in got] == [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in plain]
    share = sum(llm.engine.drafts.accepted) / sum(llm.engine.drafts.proposed)
    assert share == 1 if right == 1 else share < right + 0.1


def disturbed(engine):
    "Its step, before every fourth of which a decoding sequence goes back to the queue."
    step, scheduler = engine.step, engine.scheduler

    def after_preemption():
        if scheduler.steps % 4 == 3 and scheduler.running and len((last := scheduler.running[-1]).tokens) - last.computed == 1: scheduler.preempt_last()
        return step()
    return after_preemption


@pytest.mark.parametrize("k, limits", [(1, dict(num_pages=200)), (5, dict(num_pages=4, max_model_len=192)), (3, dict(num_pages=4, max_model_len=192, max_num_batched_tokens=20, max_num_seqs=5))],
                         ids=["all together", "few pages", "few pages, small chunks"])
def test_mixed_requests_are_what_each_is_without_guesses(small_model, k, limits):
    few = limits["num_pages"] < 10
    prompts, params = requests(8, seed=1, most=110 if few else 40)
    if few: prompts = [{"prompt_token_ids": p["prompt_token_ids"][:60]} for p in prompts]
    llm = LLM(small_model, num_speculative_tokens=k, **limits)
    if few: llm.engine.step = disturbed(llm.engine)
    got = ids(llm.generate(prompts, params, use_tqdm=False))
    llm.engine.check_integrity()
    if few: assert llm.engine.scheduler.preemptions > 0
    assert sum(llm.engine.drafts.proposed) > 100 and got == ids(LLM(small_model, num_pages=200).generate(prompts, params, use_tqdm=False))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_random_requests_keep_the_books(small_model, seed):
    "Adds, steps, aborts and forced preemptions in any order on the tiny model's own guesses; what ends is what it is alone."
    rng = random.Random(seed)
    engine = Engine(small_model, None, num_pages=rng.choice((4, 6)), max_model_len=200, max_num_seqs=rng.choice((2, 5)), max_num_batched_tokens=rng.choice((6, 40)),
                    max_waiting=6, num_speculative_tokens=rng.choice((1, 3, 7)), enable_prefix_caching=rng.random() < 0.7)
    asked, got, ended = {}, {}, set()

    def take(outputs):
        for out in outputs:
            got[out.request_id] += out.token_ids
            if out.finish_reason not in (None, "abort"): ended.add(out.request_id)

    for turn in range(30):
        action, name = rng.random(), f"r{turn}"
        if action < 0.25:
            prompt = [rng.randrange(3) for _ in range(rng.choice((1, 5, 63, 64, 65, 130)))]
            params = SamplingParams(temperature=rng.choice((0, 1)), seed=turn, max_tokens=rng.randrange(0, 40), frequency_penalty=rng.choice((0, 1)), ignore_eos=True)
            try: engine.add(name, prompt, params)
            except QueueFull: continue
            asked[name], got[name] = (prompt, params), []
        elif action < 0.32 and engine.requests: engine.abort(rng.choice(sorted(engine.requests)))
        elif action < 0.4 and engine.scheduler.running and len((last := engine.scheduler.running[-1]).tokens) - last.computed == 1: engine.scheduler.preempt_last()
        else: take(engine.step()[0])
        engine.check_integrity()
    while engine.busy: take(engine.step()[0])
    engine.check_integrity()
    assert engine.scheduler.pages.free == engine.scheduler.pages.num_pages
    alone = LLM(small_model, num_pages=20, max_model_len=200)
    for name in sorted(ended)[::4]:
        prompt, params = asked[name]
        assert ids(alone.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)) == [[got[name]]], name


def guesses_of(llm, monkeypatch=None):
    "Records what an engine guesses: (sequence's tokens so far) -> guesses."
    from glm52.engine import runner
    original, seen = runner._guess, {}

    def watched(self, step, sampled, chains, *rest):
        found = original(self, step, sampled, chains, *rest)
        for s, i in enumerate(sampled.tolist()):
            rows = step.rows[i]
            if rows.drafts: seen.setdefault(tuple(rows.sequence.tokens), found.tokens[s, :rows.drafts].tolist())
        return found
    return watched, seen


@pytest.mark.parametrize("prompt_len", [64, 65, 70, 128, 129, 150])
def test_guesses_after_a_warm_hit_are_those_after_a_cold_start(small_model, monkeypatch, prompt_len):
    "The MTP layer's rows come with the pages, and the hidden state at their end with the last of them; folded twins too."
    from glm52.engine import runner
    prompt = torch.randint(0, 512, (prompt_len,), generator=torch.Generator().manual_seed(prompt_len)).tolist()
    params = SamplingParams(temperature=1, seed=3, max_tokens=70, ignore_eos=True)
    found = []
    for warm in (False, True):
        llm = LLM(small_model, num_pages=60, num_speculative_tokens=3)
        if warm:    # two twins at once fold their pages; a third request has only the beginning in common
            llm.generate([{"prompt_token_ids": p} for p in (prompt, prompt, prompt[:64] + [1, 2, 3])], params, use_tqdm=False)
            assert llm.engine.scheduler.pages.folded > 0
        watched, seen = guesses_of(llm)
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_guess", watched)
            result = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
        assert (result.num_cached_tokens > 0) == (warm and prompt_len > 64)
        found.append((result.outputs[0].token_ids, seen))
    (cold_ids, cold), (warm_ids, warm) = found    # a prompt of 65 tokens has its first guesses one step earlier when 64 are cached
    assert cold_ids == warm_ids and len(cold.keys() & warm.keys()) > 15 and all(cold[text] == guess for text, guess in warm.items() if text in cold)


def test_guesses_after_preemption_are_those_without(tiny_model, monkeypatch):
    from glm52.engine import runner
    prompt, params = list(range(50, 110)), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    found = []
    for preempt in (False, True):
        engine = Engine(tiny_model, None, num_pages=60, num_speculative_tokens=3)
        watched, seen = guesses_of(engine)
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_guess", watched)
            engine.add("r", prompt, params)
            while engine.busy:
                if preempt and engine.totals["steps"] % 5 == 4 and engine.scheduler.running: engine.scheduler.preempt_last()
                engine.step()
        assert (engine.scheduler.preemptions > 0) == preempt
        found.append(seen)
    assert len(found[1]) > 20 and all(found[0][text] == guess for text, guess in found[1].items() if text in found[0])
    assert len(found[0].keys() & found[1].keys()) > 20


def test_guesses_are_those_of_the_plain_loop(tiny_model, monkeypatch):
    "At temperature 0 the engine guesses what `naive_draft` guesses from the same text."
    from glm52.engine import runner
    from glm52.model.mtp import naive_draft
    llm = LLM(tiny_model, num_pages=60, num_speculative_tokens=4)
    watched, seen = guesses_of(llm)
    monkeypatch.setattr(runner, "_guess", watched)
    llm.generate([{"prompt_token_ids": list(range(s, s + n))} for s, n in ((7, 3), (90, 61))], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert len(seen) >= 16
    for text, guess in seen.items(): assert naive_draft(tiny_model, text, len(guess))[0] == guess


def test_public_case_mt05_no_room_means_no_drafts(tiny_model):
    "Within a few tokens of the context's end; log-probs too."
    given_, expect = CASES["MT05"]["given"], CASES["MT05"]["expect"]
    prompt = [(11 * i + 5) % 512 for i in range(given_["prompt_tokens"])]
    results = []
    for k in (0, given_["mtp_steps"], 7):
        llm = LLM(tiny_model, num_pages=1, max_model_len=given_["max_model_len"], num_speculative_tokens=k)
        out = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=None, logprobs=1, ignore_eos=True), use_tqdm=False)[0].outputs[0]
        results.append((out.token_ids, out.logprobs, out.finish_reason))
    assert results[0] == results[1] == results[2] and len(results[0][0]) == expect["generated"]


@pytest.mark.parametrize("prompt, room", [(31, 1), (30, 2), (26, 6), (1, 31), (25, 3)])
@pytest.mark.parametrize("right", [0.5, 1.0])
def test_the_limit_is_reached_and_never_passed(tiny_model, monkeypatch, prompt, room, right):
    "One page of 64 tokens less what is used; guesses that are right may not overshoot."
    text = [(11 * i + 5) % 512 for i in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
    plain = LLM(tiny_model, num_pages=1, max_model_len=32).generate({"prompt_token_ids": text}, params, use_tqdm=False)[0].outputs[0].token_ids
    oracle(monkeypatch, lambda s, position: plain[position - prompt], right)
    llm = LLM(tiny_model, num_pages=1, max_model_len=32, num_speculative_tokens=7)
    out = llm.generate({"prompt_token_ids": text}, params, use_tqdm=False)[0].outputs[0]
    assert out.token_ids == plain and len(plain) == room and out.finish_reason == "length"
    if right == 1 and room > 1: assert llm.engine.totals["steps"] == 1 + -(-(room - 1) // 8)


def test_public_case_oa17_prompt_scores_do_not_depend_on_guesses(tiny_model):
    given_ = CASES["OA17"]["given"]
    prompt = [(7 * i + 3) % 512 for i in range(given_["prompt_tokens"])]
    scored, other = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, ignore_eos=True), SamplingParams(max_tokens=12, temperature=1, seed=5, ignore_eos=True)
    seen = []
    for chunk in given_["chunk_sizes"]:
        for k in given_["mtp_steps"]:
            llm = LLM(tiny_model, num_pages=16, max_num_seqs=4, max_num_batched_tokens=chunk, num_speculative_tokens=k)
            prompts = [{"prompt_token_ids": [9 + i, 4, 8]} for i in range(3)] + [{"prompt_token_ids": prompt}]
            seen.append(llm.generate(prompts, [other] * 3 + [scored], use_tqdm=False)[-1].prompt_logprobs)
    assert len(seen[0]) == len(prompt) and all(other == seen[0] for other in seen[1:])


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="0 to 7"): Engine(random_model(tiny_config()), num_pages=70, num_speculative_tokens=8)
    with pytest.raises(ValueError, match="no MTP layer"): Engine(random_model(tiny_config(num_nextn_predict_layers=0)), num_pages=70, num_speculative_tokens=1)
    with pytest.raises(ValueError, match="coupled or rejection"): Engine(random_model(tiny_config()), num_pages=70, num_speculative_tokens=1, acceptance="hope")


def test_without_speculation_there_is_no_mtp_cache(tiny_model, tiny_config):
    number = tiny_config.num_hidden_layers
    assert number not in Engine(tiny_model, num_pages=70).runner.caches.latent and number in Engine(tiny_model, num_pages=70, num_speculative_tokens=1).runner.caches.latent


def test_chains():
    chains = Chains.new(np.array([2, 0, 1]))
    assert chains.at.tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 5]] and chains.real.tolist() == [[True, True], [False, False], [True, False]]
    assert chains.of_rows(torch.arange(9).view(3, 3)).tolist() == [0, 1, 2, 3, 6, 7]
    assert leading(torch.tensor([[True, True], [True, False], [False, True]])).tolist() == [2, 1, 0]
    assert Chains.new(np.zeros(0, np.int64)).at.shape == (0, 1)


def test_depth_follows_trust(tiny_model, monkeypatch):
    "Right guesses get as many as there may be, wrong ones one; the text is the same."
    prompt, params = {"prompt_token_ids": [5, 9, 40]}, SamplingParams(temperature=1, seed=2, max_tokens=80, ignore_eos=True)
    plain = LLM(tiny_model, num_pages=60).generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    for right, last in ((1.0, 7), (0.0, 1)):
        with monkeypatch.context() as patch:
            oracle(patch, lambda s, position: plain[position - 3], right)
            engine = Engine(tiny_model, num_pages=60, num_speculative_tokens=7, adaptive_depth=True)
            engine.add("r", prompt["prompt_token_ids"], params)
            sequence, found = engine.requests["r"].choices[0].sequence, []
            while engine.busy: found += [t for out in engine.step()[0] for t in out.token_ids]
        assert found == plain and sequence.depth == last and (sequence.trust > 0.9) == (right == 1)
    assert [best_depth(trust, 7) for trust in (0.0, 0.5, 0.99)] == [1, 2, 7] and best_depth(0.99, 3) == 3
    assert next_trust(0.5, 3, 3) > 0.6 and next_trust(0.5, 3, 0) == pytest.approx(0.45)


def test_accepted_lengths_are_those_of_the_plain_loop():
    "The shipped model on its own tasks: step for step, `naive_draft` from the text so far and a count of what comes true."
    from glm52.cli import task_prompts
    from glm52.engine.engine import load_tokenizer
    from glm52.model.checkpoint import load_model, resolve_model
    from glm52.model.mtp import naive_draft
    model, k = load_model("glm52-nano", dtype="float32"), 4
    texts = [t for t in task_prompts(load_tokenizer(resolve_model("glm52-nano")), 44) if len(t) < 60][:4]
    llm = LLM(model, num_pages=60, num_speculative_tokens=k)
    answers = [r.outputs[0].token_ids for r in llm.generate([{"prompt_token_ids": t} for t in texts], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)]
    proposed, accepted = [0] * k, [0] * k
    for text, answer in zip(texts, answers):
        at = 1
        while at < len(answer):
            guesses = naive_draft(model, text + answer[:at], min(k, 16 - at - 1))[0] if at < 15 else []
            right = next((j for j, (a, b) in enumerate(zip(guesses, answer[at:])) if a != b), min(len(guesses), len(answer) - at))
            for j in range(len(guesses)): proposed[j] += 1
            for j in range(right): accepted[j] += 1
            at += right + 1
    assert llm.engine.drafts.proposed == proposed and proposed[0] > 8
    beyond = sum(llm.engine.drafts.accepted) - sum(accepted)     # the engine also counts guesses that are right after an answer's end
    assert 0 <= beyond <= len(texts) * k and all(a >= b for a, b in zip(llm.engine.drafts.accepted, accepted))


def test_each_answer_says_what_its_guesses_were_worth(tiny_model):
    "And the two together are the engine's totals; the server's usage has them where the OpenAI client looks."
    from types import SimpleNamespace
    from glm52.server.protocol import Generation
    llm = LLM(tiny_model, num_pages=60, num_speculative_tokens=3)
    results = llm.generate([{"prompt_token_ids": [3, 9]}, {"prompt_token_ids": [7] * 70}], SamplingParams(temperature=0, n=2, seed=1, max_tokens=20, ignore_eos=True), use_tqdm=False)
    choices = [c for r in results for c in r.outputs]
    assert sum(c.proposed_drafts for c in choices) == sum(llm.engine.drafts.proposed) and all(c.proposed_drafts >= c.accepted_drafts > -1 for c in choices)
    assert sum(c.accepted_drafts for c in choices) == sum(llm.engine.drafts.accepted) and all(c.proposed_drafts for c in choices)
    generation = Generation(SimpleNamespace(active=(), max_active=9), "r", [[1]], [SamplingParams()])
    assert "completion_tokens_details" not in generation.usage
    generation.proposed_drafts, generation.accepted_drafts = 9, 6
    assert generation.usage["completion_tokens_details"] == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 3}


def test_streams_with_guesses_are_what_the_llm_says(tiny_model):
    "The overlapped loop of the engine's thread, aborts and a stop id between accepted tokens included."
    import asyncio
    from test_engine import collect, run_async
    prompts, params = requests(8, seed=4)
    params[3] = dataclasses.replace(params[3], ignore_eos=False, stop_token_ids=tuple(range(0, 512, 9))[:60])

    async def body(engine):
        async def leave_early():
            async for _ in engine.generate("gone", [5, 6, 7], SamplingParams(max_tokens=500, ignore_eos=True)): return
        answers = await asyncio.gather(*(collect(engine, str(i), p["prompt_token_ids"], q) for i, (p, q) in enumerate(zip(prompts, params))), leave_early())
        return answers[:-1], engine.stats()["drafts_proposed"]

    streamed, proposed = run_async(tiny_model, body, num_speculative_tokens=3)
    assert streamed == ids(LLM(tiny_model, num_pages=80).generate(prompts, params, use_tqdm=False)) and proposed[0] > 30
