"""Hours of an engine's life in minutes: `python tests/soak.py --minutes 20`.

Clients ask random questions of engines that are too small for them, hang up, and ask what cannot be served; an operator pauses, preempts, empties caches and
sends the engine to sleep. At the end nothing is lost: every request has one end, every answer is what it is alone, pages and memory are back where they began.
"""
import argparse
import asyncio
import ctypes
import gc
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from glm52.cli import task_prompts
from glm52.engine.engine import AsyncEngine, EngineClosed, LLM, RequestOutput, CompletionOutput, load_tokenizer
from glm52.engine.sampling import SamplingParams
from glm52.engine.scheduler import QueueFull, RequestRefused
from glm52.model.checkpoint import resolve_model

MODEL, CONTEXT, CLIENTS, EPISODE = "glm52-nano", 512, 10, 12.0   # seconds that requests come in one episode
HOUSES = {  # the engines; all too small for their clients
    "plain": dict(num_pages=24, max_num_seqs=8, max_num_batched_tokens=96, max_waiting=14),
    "3 drafts": dict(num_pages=16, max_num_seqs=6, max_num_batched_tokens=256, max_waiting=14, num_speculative_tokens=3, overlap=True),
    "5 drafts, tiny chunks": dict(num_pages=12, max_num_seqs=4, max_num_batched_tokens=24, max_waiting=20, num_speculative_tokens=5),
    "1 draft, no prefix cache": dict(num_pages=16, max_num_seqs=8, max_num_batched_tokens=512, max_waiting=14, num_speculative_tokens=1, enable_prefix_caching=False),
    "overlapped": dict(num_pages=16, max_num_seqs=8, max_num_batched_tokens=96, max_waiting=14, overlap=True),
}


@dataclass
class Asked:
    "One request and what came of it."
    prompt: list[int]
    params: SamplingParams
    result: RequestOutput
    end: str = ""          # "finished", "aborted", "left", "refused"


@dataclass
class Diary:
    "What happened."
    asked: list[Asked] = field(default_factory=list)
    acts: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Questions:
    "Random requests: the nano model's own tasks, and noise in families with the same beginning."

    def __init__(self, seed: int, tokenizer, vocab_size: int):
        self.rng, self.vocab_size = random.Random(seed), vocab_size
        self.tasks = [t for t in task_prompts(tokenizer, 120) if len(t) < CONTEXT - 60]
        self.families = [[self.rng.randrange(300, vocab_size - 100) for _ in range(n)] for n in (0, 63, 64, 65, 130)]

    def draw(self) -> tuple[list[int], SamplingParams]:
        rng = self.rng
        noise = rng.choice(self.families) + [rng.randrange(300, self.vocab_size - 100) for _ in range(rng.choice((1, 5, 40, 64, 130)))]
        prompt = list(rng.choice(self.tasks)) if rng.random() < 0.5 else noise
        asked = dict(temperature=rng.choice((0, 0, 0.7, 1.0)), seed=rng.randrange(1000), max_tokens=rng.choice((0, 1, 8, 20, 48)), n=rng.choice((1, 1, 1, 2, 3)), ignore_eos=rng.random() < 0.4)
        for chance, wish in ((0.2, dict(stop=rng.choice((["e"], ["\n"], [" the", "an"], ["12", "3"])))), (0.1, dict(top_p=0.9)), (0.1, dict(top_k=20)), (0.1, dict(min_p=0.05)),
                             (0.1, dict(presence_penalty=0.5)), (0.1, dict(repetition_penalty=1.2)), (0.1, dict(logprobs=rng.choice((0, 2)))), (0.05, dict(prompt_logprobs=1)),
                             (0.1, dict(logit_bias={rng.randrange(self.vocab_size): 3.0})), (0.1, dict(stop_token_ids=[rng.randrange(300, 400)]))):
            if rng.random() < chance: asked |= wish
        if asked["max_tokens"] >= 8 and rng.random() < 0.2: asked["min_tokens"] = 5
        return prompt, SamplingParams(**asked)


async def client(engine: AsyncEngine, questions: Questions, diary: Diary, name: str, until: float):
    "Asks one thing after the other; sometimes leaves in the middle, sometimes asks for what cannot be."
    rng, number = questions.rng, 0
    while time.monotonic() < until:
        number += 1
        prompt, params = questions.draw()
        if rng.random() < 0.05: prompt = rng.choice(([], [10**9], [5] * (CONTEXT + 1)))
        patience = rng.randrange(1, 12) if rng.random() < 0.15 else None
        asked = Asked(prompt, params, RequestOutput(f"{name}-{number}", None, prompt, [CompletionOutput(i, "", []) for i in range(params.n)]))
        diary.asked.append(asked)
        stream = engine.generate(asked.result.request_id, prompt, params, priority=rng.choice((0, 0, 1)), cache_salt=rng.choice(("", "", "salt")))
        try:
            async for out in stream:
                asked.result.take(out)
                if patience is not None and sum(len(c.token_ids) for c in asked.result.outputs) >= patience: asked.end = "left"; break
            else: asked.end = "aborted" if any(c.finish_reason == "abort" for c in asked.result.outputs) else "finished"
        except (QueueFull, RequestRefused, EngineClosed) as refusal:
            asked.end = "refused"
            diary.acts[f"refused: {type(refusal).__name__}"] += 1
            await asyncio.sleep(0.3)
        finally: await stream.aclose()


async def operator(engine: AsyncEngine, rng: random.Random, diary: Diary, until: float):
    "Disturbs the engine in every way that is allowed."
    while time.monotonic() < until:
        await asyncio.sleep(rng.uniform(0.05, 0.8))
        act = rng.choice(("preempt", "preempt", "preempt", "sleep 1", "sleep 2", "pause", "abort all", "reset"))
        diary.acts[act] += 1
        arriving = rng.choice(("wait", "refuse"))
        if act == "preempt":
            for _ in range(rng.randrange(1, 6)): engine.inbox.put(engine.engine.scheduler.preempt_last)
        elif act == "reset": await engine.reset_prefix_cache()
        elif act.startswith("sleep"):
            await engine.sleep(int(act[-1]), rng.choice(("keep", "keep", "abort")), arriving)
            await asyncio.sleep(rng.uniform(0, 0.2))
            await engine.wake_up()
        else:
            await engine.pause("abort" if act == "abort all" else "keep", arriving)
            await asyncio.sleep(rng.uniform(0, 0.2))
            await engine.resume()


async def episode(engine: AsyncEngine, questions: Questions, diary: Diary, name: str, seconds: float, clients: int):
    "Some seconds of requests, then until the last has its end."
    await engine.start()
    until = time.monotonic() + seconds
    people = [client(engine, questions, diary, f"{name}-{i}", until) for i in range(clients)] + [operator(engine, questions.rng, diary, until)]
    try: await asyncio.wait_for(asyncio.gather(*people), seconds + 180)
    finally: await engine.stop()
    inner = engine.engine
    inner.check_integrity()
    held = {"requests": len(inner.requests), "streams": len(engine.streams), "running": len(inner.scheduler.running), "waiting": inner.scheduler.waiting,
            "pages": inner.scheduler.pages.num_pages - inner.scheduler.pages.free, "lines": inner.runner.lines - len(inner.runner.free_lines), "counts": len(inner.runner.counts.of)}
    diary.wrong += [f"{name}: {count} {what} still held" for what, count in held.items() if count]


def compare(diary: Diary, plain: LLM, begin: int) -> None:
    "Every answer against the same request alone: no company, no cache, no guesses. Of one that was cut off, what there is."
    for asked in diary.asked[begin:]:
        name = asked.result.request_id
        if not asked.end: diary.wrong.append(f"{name}: lost")
        if asked.end not in ("finished", "aborted", "left"): continue
        alone = plain.generate({"prompt_token_ids": asked.prompt}, asked.params, use_tqdm=False)[0]
        for got, want in zip(asked.result.outputs, alone.outputs):
            if asked.end == "finished" or got.finish_reason not in (None, "abort"): same = replace(got, proposed_drafts=0, accepted_drafts=0) == want
            else: same = got.token_ids == want.token_ids[:len(got.token_ids)] and want.text.startswith(got.text)
            if not same: diary.wrong.append(f"{name}, choice {got.index}: {got} but alone {want}; asked {asked.params} of {asked.prompt}")
        if asked.end == "finished" and asked.result.prompt_logprobs != alone.prompt_logprobs: diary.wrong.append(f"{name}: other scores of the prompt")
        asked.prompt, asked.result = [], RequestOutput(name, None, [], [])      # a diary that keeps everything would look like a leak


def memory() -> tuple[int, int]:
    "MB of this process, and MB of live tensors. What the allocator only keeps for later does not count."
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}
    with open("/proc/self/statm") as file: pages = int(file.read().split()[1])
    return pages * 4096 >> 20, sum(tensors.values()) >> 20


def soak(minutes: float, seed: int = 0, say=print, clients: int = CLIENTS, houses=tuple(HOUSES)) -> Diary:
    "Episodes on all engines in turn until the time is over; each engine has one at least."
    tokenizer = load_tokenizer(resolve_model(MODEL))
    options = dict(dtype="float32", device="cpu", max_model_len=CONTEXT)
    plain = LLM(MODEL, **options, num_pages=8, max_num_seqs=1, enable_prefix_caching=False)
    engines = {name: AsyncEngine(MODEL, **options, **limits) for name, limits in HOUSES.items() if name in houses}
    questions, diary, end, number, before = Questions(seed, tokenizer, plain.engine.vocab_size), Diary(), time.monotonic() + 60 * minutes, 0, None
    seconds = min(EPISODE, max(60 * minutes / 12, 0.5))
    while number < len(engines) or time.monotonic() < end:
        name = list(engines)[number % len(engines)]
        begin = len(diary.asked)
        asyncio.run(episode(engines[name], questions, diary, f"{name} {number}", seconds, clients))
        compare(diary, plain, begin)
        number += 1
        if number == len(engines): before = memory()      # the first round makes what is made once
        if number % len(engines) == 0 or seconds == EPISODE: say(f"{number} episodes, {len(diary.asked)} requests, {len(diary.wrong)} wrong, {memory()} MB")
        if diary.wrong: break
    after = memory()
    if after[0] - before[0] > 100 or after[1] - before[1] > 8: diary.wrong.append(f"memory grew: (process, tensors) {before} MB at the beginning, {after} MB at the end")
    preempted = {name: engine.engine.scheduler.preemptions for name, engine in engines.items()}
    drafts = {name: f"{sum(engine.engine.drafts.accepted)} of {sum(engine.engine.drafts.proposed)}" for name, engine in engines.items()}
    cached = {name: engine.engine.totals["cached_tokens"] for name, engine in engines.items()}
    say(f"{len(diary.asked)} requests in {number} episodes: {dict(Counter(asked.end or 'lost' for asked in diary.asked))}\noperator: {dict(diary.acts)}\n"
        f"preemptions {preempted}\nprompt tokens from the cache {cached}\ndrafts right {drafts}\nmemory (process, tensors) {before} MB after the first round, {after} MB at the end\n{len(diary.wrong)} wrong")
    return diary


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    diary = soak(args.minutes, args.seed, lambda text: print(time.strftime("%H:%M:%S"), text, flush=True))
    for what in diary.wrong[:20]: print("WRONG", what[:3000])
    sys.exit(bool(diary.wrong))


if __name__ == "__main__": main()
