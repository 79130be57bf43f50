"""The prefix cache against a dictionary of whole prefixes, under collisions, new weights, and in the engine."""
import dataclasses
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm52.engine.engine import LLM, Engine
from glm52.engine.prefix_cache import NaivePrefixCache, PrefixCache, chain_digest
from glm52.engine.sampling import SamplingParams


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    salt: str = ""
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    pages_sent: int = 0
    digests: list[bytes] = field(default_factory=list)
    settled: int = 0


def begin(pool, s, content):
    "Find what is there, take the rest. `content`: page -> the whole prefix written there. False if it does not fit."
    s.pages, size = pool.match(s), pool.page_size
    for i, page in enumerate(s.pages): assert content[page] == (pool.version, s.salt, tuple(s.tokens[:(i + 1) * size]))
    needed = -(-len(s.tokens) // size) - len(s.pages)
    if needed > pool.free: pool.release(s); return False
    s.computed = len(s.pages) * size
    s.pages += pool.take(needed)
    return True


def advance(pool, s, count, content):
    "Compute up to `count` more tokens; more pages than there are tokens for are never needed."
    size = pool.page_size
    s.computed = min(s.computed + count, len(s.tokens))
    for i in range(s.computed // size): content[s.pages[i]] = pool.version, s.salt, tuple(s.tokens[:(i + 1) * size])
    pool.filled(s)
    for i in range(s.computed // size): assert content[s.pages[i]] == (pool.version, s.salt, tuple(s.tokens[:(i + 1) * size]))


class Both(RuleBasedStateMachine):
    "The same calls on both forms: the same pages are found, the same number is free, and a page always holds what it is found for."

    @initialize(pages=st.integers(2, 12), size=st.sampled_from([1, 2, 4]))
    def start(self, pages, size):
        self.pools = NaivePrefixCache(pages, size), PrefixCache(pages, size)
        self.contents, self.alive = ({}, {}), []

    @rule(prefix=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from(["", "", "b"]))
    def add(self, prefix, salt):
        pair = Sequence(list(prefix), salt), Sequence(list(prefix), salt)
        fits = [begin(pool, s, content) for pool, s, content in zip(self.pools, pair, self.contents)]
        assert fits[0] == fits[1] and pair[0].computed == pair[1].computed
        if fits[0]: self.alive.append(pair)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 10**6), count=st.integers(1, 9))
    def compute(self, which, count):
        for pool, s, content in zip(self.pools, self.alive[which % len(self.alive)], self.contents): advance(pool, s, count, content)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 10**6), token=st.integers(0, 1))
    def say(self, which, token):
        pair = self.alive[which % len(self.alive)]
        if pair[0].computed < len(pair[0].tokens): return
        full = [len(s.tokens) >= len(s.pages) * pool.page_size for pool, s in zip(self.pools, pair)]
        if full[0] and self.pools[0].free == 0: return
        for pool, s, content in zip(self.pools, pair, self.contents):
            s.tokens.append(token)
            if full[0]: s.pages += pool.take(1)
            advance(pool, s, 1, content)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 10**6))
    def end(self, which):
        for pool, s in zip(self.pools, self.alive.pop(which % len(self.alive))): pool.release(s)

    @invariant()
    def agree(self):
        if not hasattr(self, "pools"): return
        naive, real = self.pools
        real.check_integrity([s for _, s in self.alive])
        assert naive.free == real.free and len(naive.kept) == len(real.kept)
        for a, b in self.alive: assert a.pages == b.pages


test_both_forms_do_the_same = Both.TestCase
test_both_forms_do_the_same.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class Colliding(Both):
    "A digest that knows nothing but the place: sharing is lost, correctness is not."

    @initialize(pages=st.integers(2, 12), size=st.sampled_from([1, 2, 4]))
    def start(self, pages, size):
        self.pools = (PrefixCache(pages, size, digest=lambda before, tokens: bytes(15) + bytes([before[-1] + 1 if before[:15] == bytes(15) else 0])),) * 1
        self.contents, self.alive = ({},), []

    @rule(prefix=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from(["", "", "b"]))
    def add(self, prefix, salt):
        s = Sequence(list(prefix), salt)
        if begin(self.pools[0], s, self.contents[0]): self.alive.append((s,))

    @invariant()
    def agree(self):
        if hasattr(self, "pools"): self.pools[0].check_integrity([s for s, in self.alive])


test_collisions_cost_sharing_never_correctness = Colliding.TestCase
test_collisions_cost_sharing_never_correctness.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("length, found", [(63, 0), (64, 0), (65, 1), (128, 1), (129, 2), (200, 3)])
def test_the_last_token_is_always_computed(length, found):
    pool, content = PrefixCache(20), {}
    first, second = (Sequence(list(range(length))) for _ in range(2))
    begin(pool, first, content)
    advance(pool, first, length, content)
    pool.release(first)
    assert begin(pool, second, content) and second.computed == 64 * found


def test_new_weights_find_nothing_old():
    pool, content = PrefixCache(12, 4), {}
    old, between = Sequence(list(range(16))), Sequence(list(range(8)))
    for s in (old, between): begin(pool, s, content)
    advance(pool, old, 16, content)
    advance(pool, between, 2, content)     # not one page full yet
    pool.release(old)
    pool.reset(2)
    pool.check_integrity([between])
    between.computed = 8
    pool.filled(between)                   # half of its page is of the old weights
    assert not pool.entries
    new = Sequence(list(range(16)))
    assert begin(pool, new, content) and new.computed == 0
    pool.check_integrity([between, new])


def test_digests_differ_by_all_that_matters():
    base = chain_digest(bytes(16), [1, 2])
    assert len({base, chain_digest(bytes(16), [2, 1]), chain_digest(b"1" * 16, [1, 2]), chain_digest(bytes(16), [1, 2, 0])}) == 4


def ids(results): return [[c.token_ids for c in r.outputs] for r in results]


def conversations(vocab, seed, count=10, most=70):
    "Prompts that begin alike in groups, answered at both temperatures."
    rng = random.Random(seed)
    begin = [[rng.randrange(vocab) for _ in range(n)] for n in (64, 130, 200)]
    prompts = [begin[i % 3] + [rng.randrange(vocab) for _ in range(rng.choice((0, 1, 30, 64)))] for i in range(count)]
    params = [SamplingParams(temperature=rng.choice((0, 1)), seed=rng.randrange(2**40), ignore_eos=True, max_tokens=rng.randrange(1, most)) for _ in range(count)]
    return [{"prompt_token_ids": p} for p in prompts], params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limits", [dict(num_pages=120), dict(num_pages=7, max_model_len=448, max_num_batched_tokens=100, max_num_seqs=6)], ids=["roomy", "preempting"])
def test_cold_and_warm_answers_are_those_without_a_cache(tiny_model, dtype, limits):
    from glm52.model.decoder import random_model
    model = tiny_model if dtype == torch.float32 else random_model(tiny_model.config, dtype=dtype)
    prompts, params = conversations(512, seed=3, count=8, most=150 if limits["num_pages"] < 10 else 30)
    plain = ids(LLM(model, num_pages=120, enable_prefix_caching=False).generate(prompts, params, use_tqdm=False))
    cached = LLM(model, **limits)
    for run in ("cold", "warm"):
        results = cached.generate(prompts, params, use_tqdm=False)
        cached.engine.check_integrity()
        assert ids(results) == plain, run
        assert cached.engine.stats()["pages_free"] == limits["num_pages"]
    if limits["num_pages"] > 100: assert [r.num_cached_tokens for r in results] == [(len(p["prompt_token_ids"]) - 1) // 64 * 64 for p in prompts]
    else: assert cached.engine.scheduler.preemptions > 0 and cached.engine.scheduler.pages.evictions > 0


def test_the_nano_model_is_the_same_warm():
    prompts, params = conversations(2000, seed=5, count=6)
    params = [dataclasses.replace(p, max_tokens=12) for p in params]
    plain, cached = (LLM("glm52-nano", dtype="float32", device="cpu", num_pages=80, max_model_len=600, enable_prefix_caching=on) for on in (False, True))
    want = ids(plain.generate(prompts, params, use_tqdm=False))
    assert want == ids(cached.generate(prompts, params, use_tqdm=False)) == ids(cached.generate(prompts, params, use_tqdm=False))


def test_salts_and_scored_prompts_share_nothing(tiny_model):
    engine, prompt, params = Engine(tiny_model, num_pages=40), list(range(200)), SamplingParams(max_tokens=1, temperature=0)

    def cached(name, **more):
        engine.add(name, prompt, dataclasses.replace(params, **{k: v for k, v in more.items() if k != "cache_salt"}), cache_salt=more.get("cache_salt", ""))
        return sum(out.cached_tokens for _ in range(30) if engine.busy for out in engine.step()[0])

    assert cached("first") == 0 and cached("again") == 192
    assert cached("other", cache_salt="b") == 0 and cached("other again", cache_salt="b") == 192
    assert cached("scored", prompt_logprobs=0) == 0


def test_requests_that_come_together_end_up_on_one_copy(tiny_model):
    engine = Engine(tiny_model, num_pages=100)
    for i in range(8): engine.add(str(i), list(range(300)), SamplingParams(max_tokens=30, temperature=1, seed=i, ignore_eos=True))
    for _ in range(10): engine.step(); engine.check_integrity()
    assert engine.scheduler.pages.folded == 6 * 4 and engine.scheduler.pages.num_pages - engine.scheduler.pages.free == 4 + 8
