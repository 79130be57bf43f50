"""Chapter topk: one rule, also where scores are equal, negative zero, nan or fewer than k; every row decided alone."""
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import glm52.ops.topk as module
from glm52.ops.cache import new_index_cache, positions_to_slots, write_index_key
from glm52.ops.indexer import PAGE_SIZE, index_scores, paged_index_scores
from glm52.ops.topk import naive_topk, select, topk

CASES = {case["id"]: case for line in (Path(__file__).parent / "cases" / "public-reports.jsonl").read_text().splitlines()
         if (case := json.loads(line))["area"] == "dsa-indexer"}
INF, NAN = math.inf, math.nan
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-45, -1e-45, 3.4e38])
SCORES = st.one_of(FEW, st.floats(width=32))


def normal(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_insertion(row, limit, k):
    "The rule once more, without sorting: take the best remaining candidate k times, earlier ones win."
    left, chosen = [s for s in range(min(limit, len(row))) if not math.isnan(row[s])], []
    while left and len(chosen) < k:
        best = left[0]
        for s in left[1:]:
            if row[s] > row[best]: best = s
        left.remove(best)
        chosen.append(best)
    return sorted(chosen) + [-1] * (k - len(chosen))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(SCORES, min_size=9, max_size=9), min_size=1, max_size=5), st.data())
@example([[0.0] * 9], None)
@example([[NAN] * 9, [-INF] * 9, [-0.0, 0.0] * 4 + [1.0]], None)
def test_topk_is_the_rule(rows, data):
    k = data.draw(st.integers(0, 14)) if data else 4
    limits = [data.draw(st.integers(0, 12)) if data else 9 for _ in rows]
    scores, limit = torch.tensor(rows, dtype=torch.float32), torch.tensor(limits)
    expect = [by_insertion(row, n, k) for row, n in zip(scores.tolist(), limits)]
    for op in (naive_topk, topk):
        got = op(scores, limit, k)
        assert got.dtype == torch.int32 and got.shape == (len(rows), k)
        assert got.tolist() == expect, op.__name__


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(1, 300), st.integers(1, 6), st.integers(0, 2**31))
def test_topk_is_the_rule_for_long_rows_with_many_ties(length, k, levels, seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (4, length), generator=g).float()
    limit = torch.randint(0, length + 1, (4,), generator=g)
    assert torch.equal(topk(scores, limit, k), naive_topk(scores, limit, k))


@pytest.mark.parametrize("scores,limit,k,expect", [
    ([1.0, 3.0, 2.0], 3, 2, [1, 2]),
    ([5.0, 5.0, 5.0, 5.0], 4, 2, [0, 1]),
    ([-0.0, 0.0, -0.0], 3, 2, [0, 1]),
    ([0.0, -0.0, 1.0], 3, 2, [0, 2]),
    ([NAN, 1.0, NAN, 0.0], 4, 3, [1, 3, -1]),
    ([-INF, 1.0, -INF], 3, 2, [0, 1]),
    ([NAN, -INF, -INF], 3, 1, [1]), ([NAN, -INF, 1.0, -INF, -INF], 4, 2, [1, 2]),
    ([1.0, 2.0], 2, 4, [0, 1, -1, -1]),
    ([1.0, 2.0, 9.0], 2, 2, [0, 1]),
    ([9.0, 1.0, 2.0], 3, 3, [0, 1, 2]),
    ([7.0], 1, 1, [0]), ([7.0], 0, 1, [-1]), ([NAN], 1, 1, [-1]),
    ([1.0, 2.0], 2, 0, []), ([], 0, 2, [-1, -1]), ([1.0, 2.0], 9, 1, [1]),
], ids=str)
def test_by_hand(scores, limit, k, expect):
    row = torch.tensor([scores], dtype=torch.float32)
    for op in (naive_topk, topk): assert op(row, torch.tensor([limit]), k)[0].tolist() == expect


def test_minus_infinity_below_the_limit_is_a_candidate():
    "A visible position counts even when its score overflowed downwards; a hidden one never, though its score looks the same."
    scores = torch.tensor([[-INF, -INF, -INF, -INF]])
    assert topk(scores, torch.tensor([2]), 3)[0].tolist() == [0, 1, -1]


def test_no_rows(): assert topk(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 3).shape == (0, 3)


def test_the_scores_are_left_alone():
    scores = torch.tensor([[-0.0, NAN, 1.0]])
    before = scores.clone()
    topk(scores, torch.tensor([2]), 2)
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 300])
def test_a_row_is_decided_alone(rows):
    scores, limit = (normal(300, 200) * 3).round(), torch.arange(300).remainder(201)
    full = topk(scores, limit, 48)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:rows]
    assert torch.equal(topk(scores[:rows], limit[:rows], 48), full[:rows])
    assert torch.equal(topk(scores[order], limit[order], 48), full[order])
    assert torch.equal(topk(scores, limit, 48), full), "and the same twice"


def test_columns_behind_the_limit_do_not_matter():
    scores, limit = (normal(40, 100) * 3).round(), torch.full((40,), 70)
    longer = torch.cat((scores[:, :70], torch.full((40, 500), INF)), 1)
    assert torch.equal(topk(scores, limit, 32), topk(longer, limit, 32))


def cache_of(lengths, dim=32, heads=2, rows=None, keys=None):
    "Requests with keys in scattered pages and their last rows as queries."
    counts = [-(-n // PAGE_SIZE) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)).int()
    table, cache, taken = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32), new_index_cache(sum(counts), "auto", dim, torch.float32), 0
    for b, (n, count) in enumerate(zip(lengths, counts)):
        table[b, :count] = order[taken:taken + count]
        taken += count
        write_index_key(cache, positions_to_slots(torch.arange(n)[:, None], table, torch.full((n,), b))[:, 0],
                        normal(n, dim, seed=b) if keys is None else keys[b])
    rows = rows or [min(n, 9) for n in lengths]
    limit = torch.cat([torch.arange(n - r, n) + 1 for n, r in zip(lengths, rows)])
    q, gate = normal(sum(rows), heads, dim, seed=50), normal(sum(rows), heads, seed=51)
    return [q, gate, cache, table, torch.tensor([0, *rows]).cumsum(0), limit]


@pytest.mark.parametrize("lengths,rows", [([200], [200]), ([16, 17, 300], [3, 2, 70]), ([10, 500, 16], [10, 1, 1]), ([400], [1]), ([70, 80], [0, 5])], ids=str)
def test_select_is_naive_topk_of_the_scores(lengths, rows):
    args, k = cache_of(lengths, rows=rows), 16
    assert torch.equal(select(*args, k), naive_topk(index_scores(*args), args[-1], k))


def test_a_context_up_to_k_takes_everything_unscored():
    "Nothing is scored, so keys that are nan do no harm; one position more and the row is scored."
    def refuse(*_): raise AssertionError("scored")
    args = cache_of([16], rows=[16])
    args[2] = torch.full_like(args[2], NAN)
    got = select(*args, 16, scores=refuse, topk=refuse)
    for t in range(16): assert got[t].tolist() == [*range(t + 1)] + [-1] * (15 - t)
    with pytest.raises(AssertionError, match="scored"): select(*cache_of([17], rows=[1]), 16, scores=refuse)


def test_long_and_short_rows_of_one_step_are_decided_one_by_one():
    "A prompt crosses k within one step: only the rows behind it are scored, and get what they would get alone."
    args, scored = cache_of([40, 10, 25], rows=[40, 10, 25]), []

    def scores(q, gate, cache, table, start, limit):
        scored.extend(limit.tolist())
        return paged_index_scores(q, gate, cache, table, start, limit)

    full = select(*args, 16, scores=scores)
    assert scored == [*range(17, 41), *range(17, 26)]
    q, gate, cache, table, start, limit = args
    for t in range(len(limit)):
        b = int((start[1:] <= t).sum())
        alone = select(q[t:t + 1], gate[t:t + 1], cache, table[b:b + 1], torch.tensor([0, 1]), limit[t:t + 1], 16)
        assert torch.equal(alone[0], full[t]), t


@pytest.mark.parametrize("cuts", [[1], [7], [64], [3, 50, 20]], ids=str)
def test_the_selection_does_not_depend_on_the_chunks(cuts):
    q, gate, cache, table, start, limit = cache_of([150], rows=[150])
    full, got, low = select(q, gate, cache, table, start, limit, 32), [], 0
    while low < 150:
        high = min(150, low + cuts[len(got) % len(cuts)])
        got.append(select(q[low:high], gate[low:high], cache, table, torch.tensor([0, high - low]), limit[low:high], 32))
        low = high
    assert torch.equal(torch.cat(got), full)


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 64])
def test_scratch_is_bounded_and_shows_in_nothing(monkeypatch, rows_at_a_time):
    args = cache_of([300, 90, 200], rows=[50, 90, 1])
    full, seen = select(*args, 16), []
    monkeypatch.setattr(module, "SCRATCH", rows_at_a_time * 4 * PAGE_SIZE * args[3].shape[1])

    def scores(*a):
        table = paged_index_scores(*a)
        seen.append(table.nbytes)
        return table

    assert torch.equal(select(*args, 16, scores=scores), full)
    assert max(seen) <= module.SCRATCH and len(seen) == -(-(50 + 74 + 1) // rows_at_a_time)


def test_scores_may_be_all_equal():
    "Keys of zeros: every score is 0 and the selection is the first k positions, in prefill and in decode."
    args = cache_of([100], rows=[100], keys=[torch.zeros(100, 32)])
    got = select(*args, 16)
    assert (got[16:] == torch.arange(16)).all()


def test_public_case_ix04_ties_take_the_lower_position():
    case = CASES["IX04"]
    scores, k = torch.tensor([case["given"]["scores"]]), case["given"]["k"]
    for row in (scores, torch.cat((scores, scores.flip(1)))):
        for op in (naive_topk, topk): assert op(row, torch.full((len(row),), 5), k)[0].tolist() == case["expect"]["set"]


def test_public_case_ix01_needs_a_context_longer_than_k():
    "Half-split index keys choose the same positions while all are chosen, and others as soon as some are not."
    from glm52.ops.rope import inv_freq, rope
    length, k, speeds = 120, 64, inv_freq(64, 8e6)
    keys, q, positions = normal(length, 64, seed=3), normal(length, 2, 64, seed=4), torch.arange(length)
    chosen = {}
    for interleave in (True, False):
        args = cache_of([length], 64, 2, [length], [rope(keys, positions, speeds, interleave)])
        args[0] = rope(q, positions, speeds, interleave)
        chosen[interleave] = select(*args, k)
    same = (chosen[True] == chosen[False]).all(-1)
    assert same[:k].all() and not same[k + 5:].any()


@pytest.mark.parametrize("call,words", [
    (lambda: topk(torch.zeros(5), torch.zeros(5), 2), "must be \\[T, S\\] float32"),
    (lambda: topk(torch.zeros(2, 5).bfloat16(), torch.zeros(2), 2), "bfloat16"),
    (lambda: topk(torch.zeros(2, 5), torch.zeros(3), 2), "as many limits"),
    (lambda: topk(torch.zeros(2, 5), torch.zeros(2), -1), "must not be negative"),
    (lambda: topk(torch.zeros(2, 5), torch.zeros(2), 1, impl="radix"), "no implementation 'radix'"),
], ids=["axes", "dtype", "limits", "k", "implementation"])
def test_errors_for_people(call, words):
    with pytest.raises(ValueError, match=words): call()
