"""The scheduler against a model that reads its own pages: nothing leaks, nobody starves, everybody gets the tokens of a solo run."""
import time

import pytest
from checksum_model import ChecksumModel
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm52.engine.prefix_cache import PrefixCache
from glm52.engine.scheduler import PagePool, QueueFull, RequestRefused, Scheduler, Sequence


def make(pages=16, size=4, context=None, seqs=4, budget=16, **more):
    return Scheduler(PagePool(pages, size), context or pages * size, seqs, budget, **more)


def run(scheduler, model, limit=10_000):
    "Until nothing is left; the number of steps."
    steps = 0
    while scheduler.busy:
        model.step(scheduler)
        scheduler.check_integrity()
        steps += 1
        assert steps < limit, "it does not end"
    return steps


class Machine(RuleBasedStateMachine):
    "Random requests, steps and aborts on a pool that is often too small."

    @initialize(pages=st.integers(4, 12), size=st.sampled_from([1, 3, 4]), seqs=st.integers(1, 5), extra=st.integers(0, 12), drafts=st.sampled_from([0, 0, 3]),
                seed=st.integers(0, 99), pool=st.sampled_from([PagePool, PrefixCache]))
    def start(self, pages, size, seqs, extra, drafts, seed, pool):
        self.scheduler = Scheduler(pool(pages, size), pages * size, seqs, seqs + extra, max_waiting=6)
        self.model, self.all, self.number = ChecksumModel(size, drafts=drafts, seed=seed), [], 0

    @rule(prompt=st.integers(1, 20), answer=st.one_of(st.none(), st.integers(0, 25)), priority=st.integers(0, 2), stop=st.frozensets(st.integers(0, 22), max_size=2))
    def add(self, prompt, answer, priority, stop):
        self.number += 1
        sequence = Sequence(str(self.number), [(self.number * 7 + i) % 23 for i in range(prompt)], answer, stop, priority)
        context = self.scheduler.max_model_len
        legal = prompt + (1 if answer is None else answer) <= context
        full = self.scheduler.waiting >= 6
        try: self.scheduler.add(sequence)
        except RequestRefused: assert not legal
        except QueueFull: assert legal and full
        else:
            assert legal and not full
            self.all.append(sequence)

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count): self.model.step(self.scheduler)

    @precondition(lambda self: self.all)
    @rule(which=st.integers(0, 10**6), again=st.booleans())
    def abort(self, which, again):
        sequence = self.all[which % len(self.all)]
        for _ in range(1 + again): self.scheduler.finish(sequence, "abort")

    @precondition(lambda self: self.all)
    @rule(which=st.integers(0, 10**6))
    def abort_within_a_step(self, which):
        step = self.scheduler.schedule()
        sampled = [self.model.rows(rows) for rows in step.rows]
        gone = self.all[which % len(self.all)]
        self.scheduler.finish(gone, "abort")
        assert gone not in [progress.sequence for progress in self.scheduler.update(step, sampled)]

    @invariant()
    def books_balance(self):
        if hasattr(self, "scheduler"): self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "scheduler"): return
        run(self.scheduler, self.model)
        assert self.scheduler.pages.free == self.scheduler.pages.num_pages
        for s in self.all:
            answer, reason = self.model.solo(s.tokens[:s.prompt_len], s.limit - s.prompt_len, s.stop_ids)
            if s.finish_reason == "abort": assert s.tokens[s.prompt_len:] == answer[:s.generated]
            else: assert (s.tokens[s.prompt_len:], s.finish_reason) == (answer, reason)


test_every_request_finishes_with_its_own_tokens = Machine.TestCase
test_every_request_finishes_with_its_own_tokens.settings = settings(max_examples=60, stateful_step_count=25, deadline=None,
                                                                    suppress_health_check=[HealthCheck.too_slow])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=12), st.integers(8, 20), st.integers(1, 4), st.sampled_from([0, 1, 5]))
def test_a_small_pool_only_costs_time(shapes, pages, seqs, drafts):
    answers = []
    for pool in (pages, 200):
        scheduler, model = Scheduler(PagePool(pool, 4), 60 if pool == 200 else min(60, pages * 4), seqs, 16), ChecksumModel(4, drafts=drafts)
        sequences = [Sequence(str(i), [(i + j) % 23 for j in range(prompt)], answer) for i, (prompt, answer) in enumerate(shapes)
                     if prompt + answer <= min(60, pages * 4)]
        for s in sequences: scheduler.add(s)
        run(scheduler, model)
        answers.append([s.tokens for s in sequences])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("prompt, wanted, room", [(48, 16, 16), (48, 17, None), (48, None, 16), (64, 1, None), (64, 0, 0), (64, None, None), (63, None, 1), (65, 0, None), (0, 1, None)])
def test_the_context_is_used_to_the_last_token(prompt, wanted, room):
    "Case OA06."
    scheduler, model = make(), ChecksumModel(4)
    sequence = Sequence("s", [1] * prompt, wanted)
    if room is None:
        with pytest.raises(RequestRefused, match=str(prompt) if prompt else "empty") as refusal: scheduler.add(sequence)
        if prompt: assert "64" in str(refusal.value)
        assert not scheduler.busy
        return
    scheduler.add(sequence)
    run(scheduler, model)
    assert sequence.generated == room and sequence.finish_reason == "length"


@pytest.mark.parametrize("prompt, wanted", [(26, 6), (31, 1), (26, None), (20, 5)])
def test_drafts_stop_at_the_limit(prompt, wanted):
    "Case MT05: the pool holds exactly the context."
    scheduler, model = make(pages=8, context=32), ChecksumModel(4, drafts=7)
    sequence = Sequence("s", [1] * prompt, wanted)
    scheduler.add(sequence)
    run(scheduler, model)
    assert sequence.tokens[prompt:] == model.solo([1] * prompt, wanted or 32 - prompt)[0]


def test_a_step_never_exceeds_its_budget_and_uses_it():
    scheduler, model = make(pages=100, seqs=8, budget=16), ChecksumModel(4)
    for i in range(8): scheduler.add(Sequence(str(i), [i] * 40, 5))
    step = scheduler.schedule()
    assert step.tokens == 16
    scheduler.update(step, [model.rows(rows) for rows in step.rows])
    run(scheduler, model)


@pytest.mark.parametrize("seqs, depth", [(3, 2), (3, 30), (9, 4), (15, 7)])
def test_a_long_prompt_takes_no_drafts_away(seqs, depth):
    "Decoding answers keep their drafts beside a prompt of many steps, which still gets half of what the answers' own rows leave."
    scheduler, model = make(pages=1000, context=2000, seqs=16, budget=16 if seqs == 15 else 24), ChecksumModel(4, drafts=depth)
    answers = [Sequence(str(i), [i + 1], 500) for i in range(seqs)]
    for s in answers: scheduler.add(s)
    model.step(scheduler)
    long = Sequence("long", [1] * 1000, 1)
    scheduler.add(long)
    for _ in range(20):
        before, room = long.computed, scheduler.max_num_batched_tokens - seqs
        for s in answers: s.depth = depth
        step = scheduler.schedule()
        assert step.tokens == scheduler.max_num_batched_tokens
        assert sum(r.drafts for r in step.rows) == min(seqs * depth, room // 2)
        scheduler.update(step, [model.rows(rows) for rows in step.rows])
        assert long.computed - before >= -(-room // 2)
    while long.state != "finished": model.step(scheduler)
    for s in answers: assert s.tokens[1:] == model.solo([s.tokens[0]], 500)[0][:s.generated]


def test_short_prompts_pass_a_long_one_and_it_never_stands_still():
    scheduler, model = make(pages=400, seqs=8, budget=32), ChecksumModel(4)
    long = Sequence("long", [1] * 1000, 1)
    scheduler.add(long)
    waits, number = [], 0
    while long.computed < 900:
        short = Sequence(f"short {number}", [2] * 10, 1)
        scheduler.add(short)
        before, steps = long.computed, 0
        while short.state != "finished":
            model.step(scheduler)
            steps += 1
        assert long.computed - before >= 16 * steps
        waits.append(steps)
        number += 1
    assert max(waits) == 1
    run(scheduler, model)


def test_the_shortest_remainder_goes_first_in_the_second_half():
    scheduler = make(pages=400, seqs=8, budget=32)
    for name, prompt in (("oldest", 500), ("medium", 100), ("short", 6), ("shorter", 5)): scheduler.add(Sequence(name, [1] * prompt, 1))
    assert {rows.sequence.id: rows.count for rows in scheduler.schedule().rows} == {"oldest": 16, "medium": 5, "short": 6, "shorter": 5}


def test_many_short_prompts_do_not_starve_a_long_one_that_waits_for_pages():
    scheduler, model = make(pages=20, seqs=4, budget=16), ChecksumModel(4)
    for i in range(3): scheduler.add(Sequence(f"first {i}", [i] * 10, 10))
    model.step(scheduler)
    long = Sequence("long", [1] * 70, 5)
    scheduler.add(long)
    for i in range(300):
        if long.state == "finished": break
        if scheduler.waiting < 5: scheduler.add(Sequence(f"later {i}", [i % 20] * 8, 8))
        model.step(scheduler)
    assert long.finish_reason == "length"


def test_priority_goes_first_and_is_preempted_last():
    scheduler, model = make(pages=16, seqs=1), ChecksumModel(4)
    late, early, urgent = (Sequence(name, [1] * 5, 3, priority=p) for name, p in (("late", 1), ("early", 0), ("urgent", -1)))
    ended = []
    for s in (late, early, urgent): scheduler.add(s)
    while scheduler.busy: ended += [p.sequence.id for p in model.step(scheduler) if p.ended]
    assert ended == ["urgent", "early", "late"]
    scheduler = make(pages=8, seqs=4, context=32)
    humble, important = Sequence("humble", [1] * 8, 20, priority=5), Sequence("important", [2] * 8, 20)
    for s in (humble, important): scheduler.add(s)
    run(scheduler, model)
    assert humble.preemptions and not important.preemptions


def test_the_queue_has_an_end():
    scheduler = make(max_waiting=2)
    for i in range(2): scheduler.add(Sequence(str(i), [1], 1))
    with pytest.raises(QueueFull, match="2"): scheduler.add(Sequence("x", [1], 1))
    scheduler.schedule()
    scheduler.add(Sequence("y", [1], 1))


def test_thousands_of_aborts():
    scheduler, model = make(pages=64, seqs=8, budget=32), ChecksumModel(4)
    sequences = [Sequence(str(i), [i % 20] * 9, 30) for i in range(5000)]
    for s in sequences: scheduler.add(s)
    for _ in range(3): model.step(scheduler)
    start = time.perf_counter()
    for s in sequences[:-2]: scheduler.finish(s, "abort")
    assert time.perf_counter() - start < 1
    scheduler.check_integrity()
    assert scheduler.waiting == 2 and not scheduler.running and scheduler.pages.free == 64 and len(scheduler.queue) < 100
    run(scheduler, model)
    assert [s.finish_reason for s in sequences[-3:]] == ["abort", "length", "length"]


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens is 3"): make(seqs=4, budget=3)
    with pytest.raises(ValueError, match="64.*65"): make(context=65)


def test_check_integrity_finds_what_is_wrong():
    scheduler, model = make(pages=16, seqs=4), ChecksumModel(4)
    for i in range(3): scheduler.add(Sequence(str(i), [1] * 9, 9))
    model.step(scheduler)
    first, second = scheduler.running[:2]
    for spoil in (lambda: first.pages.append(second.pages[0]), lambda: first.pages.pop(), lambda: scheduler.running.reverse(), lambda: setattr(scheduler, "waiting", 7),
                  lambda: setattr(first, "computed", 99), lambda: scheduler.pages.stack.pop()):
        saved = list(first.pages), list(scheduler.running), scheduler.waiting, first.computed, list(scheduler.pages.stack)
        spoil()
        with pytest.raises(AssertionError): scheduler.check_integrity()
        first.pages, scheduler.running, scheduler.waiting, first.computed, scheduler.pages.stack = saved
        scheduler.check_integrity()


def test_bookkeeping_is_cheap():
    "Far from a benchmark: a factor of five above what was measured, to notice a loop in a loop."
    scheduler = Scheduler(PagePool(20_000), 65_536, 256, 2048)
    for i in range(256): scheduler.add(Sequence(str(i), [1] * 60, 200))
    while any(len(s.tokens) == s.prompt_len for s in scheduler.running) or scheduler.waiting:
        step = scheduler.schedule()
        scheduler.update(step, [[5] if rows.sample else [] for rows in step.rows])
    start, steps = time.perf_counter(), 50
    for _ in range(steps):
        step = scheduler.schedule()
        scheduler.update(step, [[5]] * len(step.rows))
    per_request = (time.perf_counter() - start) / steps / 256
    assert per_request < 20e-6, f"{per_request * 1e6:.1f} us"


class Searches(PrefixCache):
    "Counts how often pages are looked for."
    count = 0

    def match(self, sequence):
        self.count += 1
        return super().match(sequence)


def test_the_head_of_the_queue_is_not_searched_at_every_step():
    "A prompt that does not fit is looked for again when something has changed for the better, not at each step."
    scheduler, model = Scheduler(Searches(8, 4), 32, 4, 64), ChecksumModel(4)
    scheduler.add(Sequence("first", list(range(8)), 20))
    model.step(scheduler)
    scheduler.add(Sequence("long", list(range(30, 58)), 4))
    steps = run(scheduler, model)
    assert steps > 20 and scheduler.pages.count <= 5


def test_choices_wait_for_the_prompt_of_the_first():
    "Three choices of one prompt: its full pages are computed once, whatever happens to the first one."
    prompt = list(range(21))
    for end in ("nothing", "abort while it waits", "abort in its prompt", "one token"):
        scheduler, model = Scheduler(PrefixCache(40, 4), 64, 8, 8), ChecksumModel(4)
        first = Sequence("0", list(prompt), 1 if end == "one token" else 6)
        followers = [Sequence(str(i), list(prompt), 6) for i in (1, 2)]
        scheduler.add(first)
        for follower in followers: scheduler.add(follower, after=first)
        assert scheduler.waiting == 3
        if end == "abort while it waits": scheduler.finish(first, "abort")
        model.step(scheduler)
        if end == "abort in its prompt": scheduler.finish(first, "abort")
        else: scheduler.finish(followers[1], "abort")
        scheduler.check_integrity()
        run(scheduler, model)
        assert followers[0].generated == 6 and not scheduler.waiting and scheduler.pages.free == 40
        if not end.startswith("abort"): assert followers[0].cached == 20


def test_preempting_at_every_step_stops_nobody():
    scheduler, model = Scheduler(PrefixCache(40, 4), 64, 4, 8), ChecksumModel(4)
    for i in range(3): scheduler.add(Sequence(str(i), list(range(i, i + 21)), 6))
    steps = 0
    while scheduler.busy:
        model.step(scheduler)
        scheduler.preempt_last()
        scheduler.check_integrity()
        steps += 1
        assert steps < 500, "it does not end"
    assert scheduler.preemptions > 3
