"""What cannot be served is refused by name, nothing is left behind, and nobody else notices."""
import asyncio
import math
import random

import httpx
import pytest

from glm52.engine.engine import AsyncEngine, Engine, LLM
from glm52.engine.sampling import SamplingError, SamplingParams
from glm52.engine.scheduler import RequestRefused
from glm52.server.app import create_app
from glm52.server.protocol import Service, live

LIMITS = dict(num_pages=16, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64)
VICTIM = list(range(40, 75)), SamplingParams(temperature=1, seed=3, max_tokens=60, ignore_eos=True)
FIELDS = [  # a wish, and the word that the error begins with
    *[({name: value}, name) for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty") for value in (math.nan, math.inf, -math.inf)],
    ({"seed": 2**64}, "seed"), ({"seed": -2**63 - 1}, "seed"), ({"seed": 10**400}, "seed"), ({"stop": [str(i) for i in range(65)]}, "stop"), ({"stop": ["x" * 1025]}, "stop"),
    ({"stop": [""]}, "stop"), ({"stop_token_ids": list(range(65))}, "stop_token_ids"), ({"stop_token_ids": [10**6]}, "stop_token_ids"), ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
    ({"logit_bias": {5: math.nan}}, "logit_bias"), ({"logit_bias": {i: 1.0 for i in range(1025)}}, "logit_bias"), ({"n": 129}, "n"), ({"logprobs": 10**6}, "logprobs"),
    ({"max_tokens": -1}, "max_tokens"), ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"top_k": 10**30}, "top_k"), ({"top_k": 10**400}, "top_k"), ({"min_tokens": 10**30, "max_tokens": None}, "min_tokens"),
    ({"temperature": 1e300}, "temperature"), ({"repetition_penalty": 1e300}, "repetition_penalty"), ({"repetition_penalty": 1e-300}, "repetition_penalty"), ({"repetition_penalty": 0}, "repetition_penalty")]
PROMPTS = [([], "empty"), ([-1], "-1"), ([10**6], "1000000"), ([1.5], "float"), (["a"], "str"), ([None], "NoneType"), ([5] * 129, "129"), ([5] * 128, "128")]


def books(engine: Engine) -> dict:
    "Everything that a request may hold."
    engine.check_integrity()
    return {"pages": engine.scheduler.pages.free, "waiting": engine.scheduler.waiting, "running": len(engine.scheduler.running), "requests": len(engine.requests), "choices": len(engine.choices),
            "lines": engine.runner.lines - len(engine.runner.free_lines), "counts": len(engine.runner.counts.of), "scored": len(engine.runner.score_prompt)}


def test_refused_in_the_middle_of_an_answer(tiny_model):
    "Between the steps of another request; its tokens are what they are alone."
    alone = LLM(tiny_model, **LIMITS).generate({"prompt_token_ids": VICTIM[0]}, VICTIM[1], use_tqdm=False)[0].outputs[0].token_ids
    engine, got = Engine(tiny_model, None, **LIMITS), []
    empty = books(engine)
    engine.add("victim", *VICTIM)
    step = lambda: got.extend(token for out in engine.step()[0] for token in out.token_ids)
    for number, (wish, name) in enumerate(FIELDS):
        if number % 4 == 0: step()
        before = books(engine)
        with pytest.raises(SamplingError, match=f"^{name}"): engine.add("bad", [1, 2], SamplingParams(**wish))
        assert books(engine) == before
    for prompt, said in PROMPTS:
        step()
        before = books(engine)
        with pytest.raises(RequestRefused, match=said): engine.add("bad", prompt, SamplingParams(max_tokens=1))
        assert books(engine) == before
    for more, said in (({"priority": "high"}, "priority"), ({"priority": 1.5}, "priority"), ({"cache_salt": 3}, "cache_salt"), ({"cache_salt": "\ud800"}, "cache_salt")):
        before = books(engine)
        with pytest.raises(RequestRefused, match=said): engine.add("bad", [1], SamplingParams(), **more)
        assert books(engine) == before
    with pytest.raises(RequestRefused, match="under way"): engine.add("victim", *VICTIM)
    with pytest.raises(RequestRefused, match="tokenizer"): engine.add("bad", [1], SamplingParams(stop=["x"]))
    while engine.busy: step()
    assert got == alone and books(engine) == empty


def test_a_prompt_that_fits_only_without_its_answer(tiny_model):
    engine = Engine(tiny_model, None, **LIMITS)
    for count, wanted, room in ((128, 0, 0), (127, 1, 1), (127, None, 1), (64, None, 64)):
        engine.add("a", [5] * count, SamplingParams(max_tokens=wanted, temperature=0, ignore_eos=True))
        tokens = []
        while engine.busy: tokens += [token for out in engine.step()[0] for token in out.token_ids]
        assert len(tokens) == room
    for count, wanted in ((128, 1), (128, None), (127, 2)):
        with pytest.raises(RequestRefused, match=f"{count}.*128"): engine.add("a", [5] * count, SamplingParams(max_tokens=wanted))
    assert books(engine)["pages"] == 16


@pytest.mark.parametrize("drafts", [0, 3])
def test_thousands_of_aborts_in_flight(tiny_model, drafts):
    "3,000 requests of all kinds, ended in every state they can be in, beside one that stays."
    engine, got, rng = Engine(tiny_model, None, **LIMITS, num_speculative_tokens=drafts), [], random.Random(0)
    alone = LLM(tiny_model, **LIMITS).generate({"prompt_token_ids": VICTIM[0]}, VICTIM[1], use_tqdm=False)[0].outputs[0].token_ids
    empty = books(engine)
    engine.add("victim", *VICTIM)
    for turn in range(60):
        names = [f"{turn}-{i}" for i in range(50)]
        for name in names:
            engine.add(name, [rng.randrange(500) for _ in range(rng.choice((3, 64, 100)))],
                       SamplingParams(n=rng.choice((1, 3)), seed=turn, max_tokens=20, frequency_penalty=rng.choice((0, 1)), prompt_logprobs=rng.choice((None, 1)), ignore_eos=True), rng.choice((0, 1)))
        rng.shuffle(names)
        for name in names[:40]: engine.abort(name)
        if turn % 2: got += [token for out in engine.step()[0] if out.request_id == "victim" for token in out.token_ids]
        for name in names: engine.abort(name)
        engine.check_integrity()
    while engine.busy: got += [token for out in engine.step()[0] for token in out.token_ids]
    assert got == alone and books(engine) == empty and not engine.scheduler.queue


def test_the_largest_values_that_are_allowed(tiny_model):
    "They may be silly; they may not hurt."
    engine = Engine(tiny_model, None, **LIMITS)
    wishes = [dict(top_k=2**31 - 1), dict(temperature=1e38), dict(temperature=1e-300), dict(repetition_penalty=1e30), dict(repetition_penalty=1e-30, temperature=0), dict(seed=2**64 - 1), dict(seed=-2**63),
              dict(min_p=1.0), dict(top_p=1e-300), dict(min_tokens=40), dict(logit_bias={i: 100.0 if i % 2 else -100.0 for i in range(500)}), dict(stop_token_ids=list(range(64))), dict(logprobs=1024)]
    for number, wish in enumerate(wishes): engine.add(str(number), [1, 2, 3], SamplingParams(**{"seed": 1, "max_tokens": 50} | wish))
    ended = set()
    while engine.busy:
        outputs, failed = engine.step()
        assert not failed
        ended |= {out.request_id for out in outputs if out.finish_reason in ("stop", "length")}
    assert len(ended) == len(wishes) and books(engine)["pages"] == 16


def test_over_http_with_raw_json(tiny_model):
    "The same over the wire: 400 in the API's form, beside a stream that does not notice."
    engine = AsyncEngine(tiny_model, **LIMITS)
    raw = ['{"temperature": NaN}', '{"top_p": Infinity}', '{"min_p": -Infinity}', '{"temperature": 1e999}', '{"logit_bias": {"5": NaN}}', '{"logit_bias": {"1000000": 1}}', '{"logit_bias": {"x": 1}}',
           '{"seed": 18446744073709551616}', '{"seed": 1e400}', '{"seed": 1.5}', '{"seed": "x"}', '{"stop_token_ids": %s}' % list(range(65)), '{"stop_token_ids": [1000000]}', '{"stop": %s}' % str(["a"] * 65).replace("'", '"'),
           '{"n": 129}', '{"n": 0}', '{"max_tokens": 999}', '{"max_tokens": -1}', '{"prompt": []}', '{"prompt": [1.5]}', '{"prompt": [-1]}', '{"prompt": [1000000]}', '{"prompt": %s}' % ([5] * 129), '{"prompt": "text"}',
           '{"temperature": "hot"}', '{"top_k": %s}' % ("9" * 5000), '{"top_k": %d}' % 10**30, '{"temperature": 1e300}', '{"min_tokens": 9, "max_tokens": 8}', '{', '[]', '\xff']

    async def run(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            body = {"prompt": VICTIM[0], "temperature": 1, "seed": 3, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
            want = (await http.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"]
            victim = asyncio.create_task(http.post("/v1/completions", json=body))
            for text in raw:
                if text.startswith('{"') and '"prompt"' not in text: text = '{"prompt": [1, 2, 3], ' + text[1:]
                answer = await http.post("/v1/completions", content=text.encode("latin-1"), headers={"content-type": "application/json"})
                assert answer.status_code == 400 and answer.json()["error"]["message"] and answer.json()["error"]["type"] == "invalid_request_error", (text[:80], answer.text[:200])
            assert (await victim).json()["choices"][0]["token_ids"] == want

    with live(create_app(Service(engine, "tiny"))) as url: asyncio.run(run(url))
    assert books(engine.engine)["pages"] == 16 and not engine.streams
