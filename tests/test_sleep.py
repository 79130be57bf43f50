"""An engine that is paused or asleep computes nothing and holds nothing; awake again it gives the same answers."""
import asyncio

import httpx
import openai
import pytest
import torch
from conftest import write_checkpoint

from glm52.cli import new_service
from glm52.engine.engine import AsyncEngine, Engine, EngineClosed, EngineError, LLM
from glm52.engine.memory import Memory, storages
from glm52.engine.sampling import SamplingParams
from glm52.engine.scheduler import QueueFull
from glm52.model.decoder import random_model, tiny_config
from glm52.server.app import create_app
from glm52.server.protocol import live

PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True, detokenize=False)
PROMPTS = [[7, 8, 9] * 30, list(range(20, 150)), [3] * 70]


@pytest.fixture(scope="module")
def model(): return random_model(tiny_config())


def finish(engine):
    "All answers by request."
    found = {}
    while engine.busy:
        outputs, failed = engine.step()
        assert not failed
        for out in outputs: found.setdefault(out.request_id, []).extend(out.token_ids)
    return found


def start(engine):
    for n, ids in enumerate(PROMPTS): engine.add(str(n), ids, PARAMS)


@pytest.mark.parametrize("drafts", [0, 3])
def test_requests_sleep_too(model, drafts):
    "Asleep in the middle of an answer, awake again: the same tokens, and no page lost."
    engine = Engine(model, None, num_pages=40, max_model_len=256, num_speculative_tokens=drafts)
    start(engine)
    want = finish(engine)
    start(engine)
    got = {}
    for _ in range(4):
        for out in engine.step()[0]: got.setdefault(out.request_id, []).extend(out.token_ids)
    assert got and engine.busy
    weights = model.lm_head.clone()
    assert engine.sleep(1) == []
    assert not engine.busy and engine.step() == ([], {})
    assert engine.memory.bytes()["caches"] == 0 and engine.scheduler.pages.free == 40
    engine.add("late", PROMPTS[0], PARAMS)                       # waits
    engine.wake_up()
    assert torch.equal(weights, model.lm_head)
    for key, tokens in finish(engine).items(): got.setdefault(key, []).extend(tokens)
    assert got == want | {"late": want["0"]}
    engine.check_integrity()


def test_sleep_gives_everything_back():
    "Level 2 forgets the weights and reads them again; nothing that a checkpoint or a page fills keeps memory."
    llm = LLM("glm52-nano", dtype="float32", device="cpu", num_pages=64, max_model_len=1024)
    prompt = {"prompt_token_ids": list(range(300, 420))}
    params = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    want = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    decoder, runner = llm.engine.decoder, llm.engine.runner
    llm.sleep(2)
    assert llm.engine.memory.bytes() == {"weights": 0, "caches": 0}
    assert decoder.lm_head.untyped_storage().nbytes() == 0 and decoder.layers[3].feed_forward.gate_up.untyped_storage().nbytes() == 0
    assert all(t.untyped_storage().nbytes() == 0 for t in runner.page_tensors())
    with pytest.raises(EngineError, match="wake_up"): llm.generate(prompt, params, use_tqdm=False)
    with pytest.raises(EngineError, match="already"): llm.sleep(1)
    llm.wake_up()
    llm.wake_up()                                                # harmless
    again = llm.generate(prompt, params, use_tqdm=False)[0]
    assert again.outputs[0].token_ids == want and again.num_cached_tokens == 0


def test_refusals(model):
    engine = Engine(model, None, num_pages=40, max_model_len=256)
    with pytest.raises(EngineError, match="level"): engine.sleep(3)
    with pytest.raises(EngineError, match="checkpoint"): engine.sleep(2)
    with pytest.raises(EngineError, match="keep"): engine.pause("perhaps")
    assert not engine.paused and not engine.asleep


def test_pause_keeps_or_ends(model):
    engine = Engine(model, None, num_pages=40, max_model_len=256)
    start(engine)
    want = finish(engine)
    start(engine)
    engine.step()
    assert engine.pause() == [] and engine.step() == ([], {})
    engine.resume()
    assert finish(engine).keys() == want.keys()
    start(engine)
    engine.step()
    ends = engine.pause("abort")
    assert sorted(out.request_id for out in ends) == ["0", "1", "2"] and {out.finish_reason for out in ends} == {"abort"}
    engine.resume()
    assert not engine.busy and engine.scheduler.pages.free == 40
    engine.check_integrity()


def test_the_prefix_cache_forgets(model):
    engine = Engine(model, None, num_pages=40, max_model_len=256)
    start(engine)
    finish(engine)
    before = engine.totals["cached_tokens"]
    engine.reset_prefix_cache()
    start(engine)
    finish(engine)
    assert engine.totals["cached_tokens"] == before
    start(engine)
    finish(engine)
    assert engine.totals["cached_tokens"] > before
    engine.check_integrity()


def test_a_storage_is_counted_once():
    a = torch.zeros(8, 4)
    assert len(storages([a, a[2:], a.T, torch.zeros(3)])) == 2


def test_streams_wait_for_the_sleeper(model):
    async def run():
        engine = AsyncEngine(model, num_pages=40, max_model_len=256)
        await engine.start()

        async def collect(name): return [t async for out in engine.generate(name, PROMPTS[1], PARAMS) for t in out.token_ids]

        try:
            want = await collect("a")
            await engine.sleep(1)
            waiting = asyncio.create_task(collect("b"))
            await asyncio.sleep(0.2)
            assert not waiting.done() and engine.stats()["asleep"] == 1
            with pytest.raises(EngineError, match="already"): await engine.sleep(1)
            await engine.wake_up()
            assert await waiting == want
            await engine.pause()
            ended = asyncio.create_task(collect("c"))
            await asyncio.sleep(0.05)
            await engine.pause("abort")
            assert await ended == []
            await engine.resume()
            assert await collect("d") == want
        finally: await engine.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_over_http():
    engine = AsyncEngine("glm52-nano", dtype="float32", device="cpu", max_model_len=1024, num_pages=64)
    with live(create_app(new_service(engine, "glm52-nano"), api_key="secret", control=True)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=60)
        ask = lambda: client.chat.completions.create(model="glm52-nano", messages=[{"role": "user", "content": "What is 12 + 30?"}], temperature=0).choices[0].message.content
        want, key = ask(), {"authorization": "Bearer secret"}
        assert httpx.post(f"{url}/sleep").status_code == 401
        for bad in ("level=9", "level=x", "running=maybe"):
            answer = httpx.post(f"{url}/sleep?{bad}", headers=key)
            assert answer.status_code == 400 and answer.json()["error"]["message"], bad
        for level in (1, 2):
            assert httpx.post(f"{url}/sleep?level={level}", headers=key, timeout=30).json() == {"paused": False, "asleep": level}
            assert httpx.get(f"{url}/is_sleeping", headers=key).json() == {"is_sleeping": True}
            assert httpx.post(f"{url}/wake_up", headers=key, timeout=30).json() == {"paused": False, "asleep": 0}
            assert ask() == want
        assert httpx.post(f"{url}/pause?arriving=refuse", headers=key).json()["paused"] is True
        refused = httpx.post(f"{url}/v1/completions", headers=key, json={"prompt": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_closed" and refused.headers["retry-after"]
        assert httpx.post(f"{url}/resume", headers=key).json()["paused"] is False
        assert httpx.post(f"{url}/reset_prefix_cache", headers=key).status_code == 200
    with live(create_app(new_service(AsyncEngine("glm52-nano", dtype="float32", device="cpu", max_model_len=512, num_pages=16), "glm52-nano"))) as url:
        assert httpx.post(f"{url}/sleep").status_code == 404      # only where the operator wants it


def test_those_who_come_meanwhile_wait_or_are_refused(model):
    engine = Engine(model, None, num_pages=40, max_model_len=256, max_waiting=2)
    for close, open_ in ((engine.pause, engine.resume), (engine.sleep, engine.wake_up)):
        close(arriving="refuse")
        with pytest.raises(EngineClosed, match="takes no requests"): engine.add("a", PROMPTS[0], PARAMS)
        open_()
        engine.add("a", PROMPTS[0], PARAMS)
        close()
        engine.add("b", PROMPTS[1], PARAMS)
        with pytest.raises(QueueFull): [engine.add(f"c{i}", PROMPTS[2], PARAMS) for i in range(3)]     # the queue has an end
        open_()
        assert {"a", "b"} <= finish(engine).keys() and engine.scheduler.pages.free == 40
        engine.check_integrity()
    with pytest.raises(EngineError, match="refuse"): engine.pause(arriving="perhaps")


def test_sleep_after_a_preemption_without_progress(model):
    engine = Engine(model, None, num_pages=40, max_model_len=256)
    start(engine)
    engine.step()
    engine.scheduler.preempt_last()
    while not engine.scheduler.waiting == 0: engine.step()
    engine.scheduler.preempt_last()
    engine.step()
    engine.sleep(1)
    engine.wake_up()
    assert finish(engine) and engine.scheduler.pages.free == 40


def test_a_changed_checkpoint_is_a_new_version(tmp_path):
    "Level 2 reads what is there. If that is something else, nobody's tokens come from two versions, and no old page is found."
    config = tiny_config()
    write_checkpoint(tmp_path / "m", config, seed=0)
    llm = LLM(tmp_path / "m", dtype="float32", device="cpu", num_pages=40, max_model_len=256)
    engine = llm.engine
    engine.add("begun", PROMPTS[1], PARAMS)
    while not engine.step()[0]: continue
    engine.add("new", PROMPTS[1], PARAMS)
    engine.sleep(2)
    assert engine.wake_up() == [] and engine.weights_version == 1 and len(engine.requests) == 2    # the same weights: all go on
    engine.sleep(2)
    write_checkpoint(tmp_path / "m", config, seed=1)
    ends = engine.wake_up()
    assert [(out.request_id, out.finish_reason) for out in ends] == [("begun", "abort")] and engine.weights_version == 2
    want = LLM(random_model(config, seed=1), num_pages=40, max_model_len=256).generate({"prompt_token_ids": PROMPTS[1]}, PARAMS, use_tqdm=False)
    assert finish(engine)["new"] == want[0].outputs[0].token_ids
    engine.check_integrity()
    assert engine.scheduler.pages.free == 40
