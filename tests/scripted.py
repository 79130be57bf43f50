"""An engine that says what it is told: tests of the server need no model."""
import asyncio
from collections.abc import Callable

from glm52.chat.template import TEMPLATE
from glm52.chat.tokenizer import Detokenizer, Tokenizer, byte_tokenizer
from glm52.engine.engine import Logprob, StepOutput, StopStrings


class ScriptedEngine:
    "Answers every prompt from a script, some tokens a step, all choices in turn."

    def __init__(
        self,
        script: str | list[int] | Callable,   # the answer: text, ids, or (prompt_ids, params, choice) -> either
        tokenizer: Tokenizer | None = None,   # default: one token a byte
        max_model_len: int = 8192,
        chunk: int = 1,                       # tokens in one step
        delay: float = 0.0,                   # seconds before each step
        cached_tokens: int = 0,               # reported with the first step
    ):
        self.script, self.tokenizer = script, tokenizer or byte_tokenizer(TEMPLATE)
        self.max_model_len, self.chunk, self.delay, self.cached_tokens = max_model_len, chunk, delay, cached_tokens
        self.vocab_size, self.weights_version = self.tokenizer.vocab_size, 1
        self.running, self.aborted, self.seen = set(), [], []

    async def start(self): self.alive = True

    async def stop(self): self.alive = False

    def implementations(self) -> list[dict]: return [{"op": "everything", "implementation": "script", "why": "a test"}]

    def stats(self) -> dict: return {"running": len(self.running), "waiting": 0}

    def abort(self, request_id: str):
        if request_id in self.running: self.aborted.append(request_id)
        self.running.discard(request_id)

    def _answer(self, prompt_ids, params, choice) -> list[int]:
        said = self.script(prompt_ids, params, choice) if callable(self.script) else self.script
        return (self.tokenizer.encode(said) + [self.tokenizer.eos_token_ids[0]]) if isinstance(said, str) else list(said)

    def _entry(self, token_id: int, top: int) -> dict:
        ids = [token_id] + [i for i in range(top) if i != token_id][:max(top - 1, 0)]
        return {i: Logprob(-0.1 * (place + 1), place + 1, self.tokenizer.token_text(i)) for place, i in enumerate(ids)}

    async def generate(self, request_id, prompt_token_ids, params):
        self.seen.append((prompt_token_ids, params))
        self.running.add(request_id)
        scored = None
        if params.prompt_logprobs is not None:
            scored = [None] + [self._entry(i, params.prompt_logprobs) for i in prompt_token_ids[1:]]
        states = [_Choice(self, prompt_token_ids, params, number) for number in range(params.n)]
        try:
            while pending := [state for state in states if not state.finished]:
                await asyncio.sleep(self.delay)
                for state in pending:
                    if request_id not in self.running: return
                    step = state.step(request_id)
                    step.prompt_logprobs, scored = scored, None
                    step.cached_tokens = self.cached_tokens if state.number == 0 and state.steps == 1 else 0
                    yield step
        finally:
            if any(not state.finished for state in states): self.abort(request_id)
            self.running.discard(request_id)


class _Choice:
    def __init__(self, engine, prompt_ids, params, number):
        self.engine, self.params, self.number, self.finished, self.steps = engine, params, number, False, 0
        self.ids = engine._answer(prompt_ids, params, number)
        self.detokenizer, self.sent = Detokenizer(engine.tokenizer, params.skip_special_tokens), 0
        self.stops = StopStrings(params.stop) if params.stop else None

    def step(self, request_id: str) -> StepOutput:
        "The next tokens."
        self.steps += 1
        limit = min(len(self.ids), self.params.max_tokens)
        ids = self.ids[self.sent:min(self.sent + self.engine.chunk, limit)]
        self.sent += len(ids)
        delta, reason, stopped = self.detokenizer.push(ids), None, None
        if self.sent >= limit: reason = "length"
        if ids and ids[-1] in self.engine.tokenizer.eos_token_ids and not self.params.ignore_eos: reason = "stop"
        if reason: delta += self.detokenizer.flush()
        if self.stops: delta, stopped = self.stops.push(delta)
        if stopped: reason = "stop"
        elif self.stops and reason: delta += self.stops.flush()
        self.finished = reason is not None
        logprobs = None if self.params.logprobs is None else [self.engine._entry(i, self.params.logprobs) for i in ids]
        return StepOutput(request_id, self.number, delta, ids, logprobs, finish_reason=reason, stop_reason=stopped)
