"""What a step costs beside the model: the engine around a decoder that costs nothing. `python tests/overhead.py --out nbs/results/overhead.json`."""
import argparse
import asyncio
import dataclasses
import gc
import json
import time
from pathlib import Path

import torch

from glm52.chat.tokenizer import byte_tokenizer
from glm52.engine import runner as runner_module
from glm52.engine.engine import AsyncEngine, Engine
from glm52.engine.sampling import SamplingParams
from glm52.model.checkpoint import load_model, resolve_model
from glm52.model.decoder import Backends, tiny_config

SIZES = 64, 256, 1024
TOKENIZER = byte_tokenizer()


class Free:
    "A decoder that costs nothing: it always wants to say the same letter."

    def __init__(self):
        self.config, self.dtype, self.device, self.backends, self.mtp = dataclasses.replace(tiny_config(), vocab_size=292), torch.float32, torch.device("cpu"), Backends.choose("cpu"), None
        self.row = torch.zeros(292)
        self.row[ord("x")] = 9.0
        self.hidden = torch.zeros(16384, 1)

    def forward(self, plan, caches): return self.hidden[:len(plan.token_ids)]

    def logits(self, hidden): return self.row.expand(len(hidden), -1)


def wishes(number: int, tokens: int) -> SamplingParams:
    "Every fourth request has stop strings; the others only text."
    stop = ("zzz", "\n\nUser:", "xy") if number % 4 == 0 else ()
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, stop=stop, seed=number)


class Clock:
    "Processor seconds by part (others may use the machine too); parts are whole functions of a step, so that the clock itself costs next to nothing."

    def __init__(self): self.seconds = {}

    def around(self, owner, name, part):
        "Replace a function by one that is timed; returns how to undo it."
        inner = getattr(owner, name)

        def timed(*args, **kwargs):
            begun = time.thread_time()
            try: return inner(*args, **kwargs)
            finally: self.seconds[part] = self.seconds.get(part, 0.0) + time.thread_time() - begun
        own = name in vars(owner)
        setattr(owner, name, timed)
        return lambda: setattr(owner, name, inner) if own else delattr(owner, name)


def new_engine(requests: int, steps: int) -> dict:
    return dict(max_num_seqs=requests, max_num_batched_tokens=max(2 * requests, 2048), num_pages=requests * 4 + 8, max_model_len=256)


def measure(requests: int, steps: int = 60, repeats: int = 3, decoder=None) -> dict[str, float]:
    "Microseconds a request and step, by part: the best of some repeats. Without a decoder the model is free, and left out."
    best = None
    for _ in range(repeats):
        engine = Engine(decoder or Free(), TOKENIZER, **new_engine(requests, steps))
        for i in range(requests): engine.add(f"r{i}", [10 + i % 200] * 20, wishes(i, steps + 20))
        while engine.scheduler.waiting or any(len(s.tokens) - s.computed > 1 for s in engine.scheduler.running): engine.step()
        for _ in range(3): engine.step()
        clock, engine_runner = Clock(), engine.runner
        undo = [clock.around(engine.scheduler, "schedule", "schedule"), clock.around(engine.scheduler, "update", "update"),
                clock.around(engine_runner, "run", "run"), clock.around(engine.decoder, "forward", "model"), clock.around(engine.decoder, "logits", "model"),
                clock.around(runner_module, "flatten_rows", "rows"), clock.around(runner_module, "to_plan", "rows"),
                clock.around(runner_module, "sampling_batch", "wishes"), clock.around(engine_runner, "sample", "sampler")]
        gc.collect()
        gc.freeze()      # as the server does when it starts
        begun = time.thread_time()
        for _ in range(steps // 2):
            outputs, _ = engine.step()
            assert len(outputs) == requests
        whole = time.thread_time() - begun
        gc.unfreeze()
        for each in undo: each()
        part = clock.seconds
        found = {"schedule": part["schedule"], "rows": part["rows"], "wishes": part["wishes"], "sampler": part["sampler"],
                 "results": part["run"] - part["rows"] - part["wishes"] - part["sampler"] - part["model"],
                 "update": part["update"], "text": whole - part["schedule"] - part["run"] - part["update"]}
        if decoder is not None: found["model"] = part["model"]
        found = {name: seconds * 1e6 / (requests * (steps // 2)) for name, seconds in found.items()}
        if best is None or sum(found.values()) < sum(best.values()): best = found
    return best


async def _streams(requests: int, steps: int) -> float:
    "Processor seconds of streams that all run at once, in both threads."
    gc.collect()
    gc.freeze()
    engine = AsyncEngine(Free(), tokenizer=TOKENIZER, **new_engine(requests, steps))

    async def read(i):
        async for _ in engine.generate(f"r{i}", [10 + i % 200] * 20, wishes(i, steps)): pass
    await engine.start()
    begun = time.process_time()
    await asyncio.gather(*(read(i) for i in range(requests)))
    spent = time.process_time() - begun
    await engine.stop()
    gc.unfreeze()
    return spent


def measure_streams(requests: int) -> float:
    "Processor microseconds a request and step with one stream for each: the slope, so that beginnings and ends do not count."
    short, long = (min(asyncio.run(_streams(requests, steps)) for _ in range(2)) for steps in (20, 80))
    return (long - short) * 1e6 / (requests * 60)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {requests: measure(requests) | {"streams": measure_streams(requests)} for requests in SIZES}
    nano = measure(32, 20, 1, load_model(resolve_model("glm52-nano"), dtype="float32", device="cpu"))
    for requests, parts in found.items():
        print(f"{requests:5d} requests  " + "  ".join(f"{name} {us:5.2f}" for name, us in parts.items()) + f"  engine {sum(us for name, us in parts.items() if name != 'streams'):6.2f} us")
    print(f"nano model, 32 requests: model {nano['model']:.0f} us a request and step, engine {sum(nano.values()) - nano['model']:.1f}")
    if args.out: args.out.write_text(json.dumps({"nano_32_requests": {k: round(v, 3) for k, v in nano.items()}, "us_per_request_step": {str(r): {k: round(v, 3) for k, v in p.items()} for r, p in found.items()}}, indent=1) + "\n")


if __name__ == "__main__": main()
