"""Chapter sparse attention: the right answer, the same bits for a row in any company and on any page."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glm52.ops.sparse_mla as module
from glm52.device import assert_close
from glm52.ops.cache import (PAGE_SIZE, gather_latent, new_latent_cache, positions_to_slots, write_latent)
from glm52.ops.sparse_mla import naive_sparse_mla, sparse_mla

FORMS = [("auto", torch.float32), ("auto", torch.bfloat16), ("fp8", torch.float32), ("fp8", torch.bfloat16)]
NAMES = ["fp32", "bf16", "fp8-fp32", "fp8-bf16"]
SCALE = 1 / 16


def seeded(seed): return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0): return torch.randn(*shape, generator=seeded(seed))


def filled_cache(kind, dtype, pages=8, rope_dim=64, latent=512):
    "A cache without an empty row, and the slots of its rows."
    cache = new_latent_cache(pages, kind, latent + rope_dim, rope_dim, dtype)
    slots = torch.arange(pages * PAGE_SIZE)
    write_latent(cache, slots, normal(len(slots), latent, seed=1), normal(len(slots), rope_dim, seed=2))
    return cache


def some_slots(counts, width, total, seed=3):
    "One list of distinct slots for each count, -1 after it."
    rows = [torch.randperm(total, generator=seeded(seed + i))[:n].sort().values for i, n in enumerate(counts)]
    return torch.stack([torch.nn.functional.pad(r, (0, width - len(r)), value=-1) for r in rows])


def reference(q, cache, slots, dtype, rope_dim=64, scale=SCALE):
    kv = gather_latent(cache, torch.arange(len(cache) * PAGE_SIZE), rope_dim, dtype)
    return naive_sparse_mla(q, kv, slots, scale, rope_dim)[0]


@pytest.mark.parametrize("kind,dtype", FORMS, ids=NAMES)
@pytest.mark.parametrize("heads,latent,rope_dim", [(8, 512, 64), (3, 48, 16), (1, 130, 6)], ids=str)
def test_sparse_mla_matches_naive(kind, dtype, heads, latent, rope_dim):
    cache = filled_cache(kind, dtype, 8, rope_dim, latent)
    counts = (1, 2, 63, 64, 65, 0, 127, 128, 200, 256)
    slots = some_slots(counts, 256, 512)
    q = normal(len(counts), heads, latent + rope_dim, seed=5).to(dtype)
    got = sparse_mla(q, cache, slots, SCALE, rope_dim)
    assert got.dtype == dtype and got.shape == (len(counts), heads, latent)
    assert_close("sparse_mla", reference(q, cache, slots, dtype, rope_dim), got, 1e-6 if dtype == torch.float32 else 3e-3)
    assert not got[5].any(), "a row without positions is zero"


def test_absorbed_is_expanded():
    "GLM-5.2's head: 192 + 64 wide keys, 256 wide values, scale 256^-0.5."
    T, H, S, K = 4, 3, 70, 33
    q_nope, q_pe, c, k_pe = normal(T, H, 192), normal(T, H, 64, seed=1), normal(S, 512, seed=2), normal(S, 64, seed=3)
    w_uk, w_uv = normal(H, 192, 512, seed=4) / 23, normal(H, 256, 512, seed=5) / 23
    positions = some_slots([K] * T, K, S)
    want = torch.empty(T, H, 256)
    for t in range(T):
        for h in range(H):
            rows = positions[t]
            keys = torch.cat((c[rows] @ w_uk[h].T, k_pe[rows]), 1)
            p = (keys @ torch.cat((q_nope[t, h], q_pe[t, h])) / 256 ** 0.5).softmax(0)
            want[t, h] = p @ (c[rows] @ w_uv[h].T)
    q = torch.cat((torch.einsum("thn,hnr->thr", q_nope, w_uk), q_pe), -1)
    cache = new_latent_cache(2, dtype=torch.float32)
    write_latent(cache, torch.arange(S), c, k_pe)
    got = torch.einsum("thr,hvr->thv", sparse_mla(q, cache, positions, 256 ** -0.5), w_uv)
    assert_close("absorbed", want, got, 2e-6)
    wrong = torch.einsum("thr,hvr->thv", sparse_mla(q, cache, positions, 576 ** -0.5), w_uv)
    with pytest.raises(AssertionError): assert_close("a wrong scale must not pass", want, wrong, 1e-2)


@pytest.mark.parametrize("cut", [1, 5, 31])
def test_log_sum_exp_merges_parts(cut):
    q, kv, positions = normal(6, 4, 576), normal(80, 576, seed=1), some_slots([32] * 6, 32, 80)
    whole, lse = naive_sparse_mla(q, kv, positions, SCALE)
    (a, la), (b, lb) = (naive_sparse_mla(q, kv, p, SCALE) for p in (positions[:, :cut], positions[:, cut:]))
    assert_close("lse", lse, torch.logaddexp(la, lb), 1e-6)
    assert_close("merged", whole, torch.exp(la - lse)[..., None] * a + torch.exp(lb - lse)[..., None] * b, 1e-6)


def test_no_positions_at_all():
    q, kv = normal(2, 3, 576), normal(5, 576)
    out, lse = naive_sparse_mla(q, kv, torch.full((2, 4), -1), SCALE)
    assert not out.any() and torch.equal(lse, torch.full((2, 3), -torch.inf))
    cache = filled_cache("auto", torch.float32)
    assert not sparse_mla(q, cache, torch.full((2, 4), -1), SCALE).any()
    assert sparse_mla(q, cache, torch.zeros(2, 0, dtype=torch.int64), SCALE).shape == (2, 3, 512)
    assert sparse_mla(q[:0], cache, torch.zeros(0, 4, dtype=torch.int64), SCALE).shape == (0, 3, 512)


@pytest.mark.parametrize("kind,dtype", FORMS, ids=NAMES)
def test_rows_do_not_feel_their_neighbours(kind, dtype, monkeypatch):
    "Alone, in pairs, shuffled, in groups of many sizes, with other lists' widths around, in chunks of any size: the same bits."
    cache = filled_cache(kind, dtype)
    counts = [1, 40, 64, 65, 130, 192, 200, 256] * 5 + [7] * 8
    slots, q = some_slots(counts, 256, 512), normal(len(counts), 8, 576, seed=5).to(dtype)
    whole = sparse_mla(q, cache, slots, SCALE)
    for rows in (1, 2, 7, 16, 33):
        for start in (0, 3, len(q) - rows):
            part = slice(start, start + rows)
            assert torch.equal(sparse_mla(q[part], cache, slots[part], SCALE), whole[part]), (rows, start)
    order = torch.randperm(len(q), generator=seeded(11))
    assert torch.equal(sparse_mla(q[order], cache, slots[order], SCALE), whole[order])
    uniform = [i for i, n in enumerate(counts) if n > 192]
    assert torch.equal(sparse_mla(q[uniform], cache, slots[uniform], SCALE), whole[uniform])
    for scratch in (1, 3 << 20, 1 << 30):
        monkeypatch.setitem(module.SCRATCH, "cpu", scratch)
        assert torch.equal(sparse_mla(q, cache, slots, SCALE), whole), f"chunks of {scratch} bytes"


def test_many_rows_of_one_width():
    "300 rows in one group, against one at a time."
    cache = filled_cache("auto", torch.float32, 4)
    slots, q = some_slots([60] * 300, 64, 256), normal(300, 8, 576, seed=5)
    whole = sparse_mla(q, cache, slots, SCALE)
    for t in (0, 1, 150, 299): assert torch.equal(sparse_mla(q[t:t + 1], cache, slots[t:t + 1], SCALE), whole[t:t + 1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_show(threads):
    "Whatever one thread count computes, it computes for a row in any company."
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cache = filled_cache("auto", torch.float32)
        slots, q = some_slots([256, 100, 64] * 7, 256, 512), normal(21, 8, 576, seed=5)
        whole = sparse_mla(q, cache, slots, SCALE)
        for t in range(0, 21, 4): assert torch.equal(sparse_mla(q[t:t + 1], cache, slots[t:t + 1], SCALE), whole[t:t + 1])
    finally: torch.set_num_threads(before)


@pytest.mark.parametrize("columns", [200, 201, 256, 320, 2048])
def test_empty_columns_do_not_show(columns):
    "A list of 200 in a table of any width is the same list."
    cache, q = filled_cache("auto", torch.float32), normal(3, 8, 576)
    slots = some_slots([200, 129, 64], 200, 512)
    wide = torch.nn.functional.pad(slots, (0, columns - 200), value=-1)
    assert torch.equal(sparse_mla(q, cache, wide, SCALE), sparse_mla(q, cache, slots, SCALE))


def test_holes_within_a_list():
    "-1 between valid slots is allowed and means nothing."
    cache, q = filled_cache("auto", torch.float32), normal(2, 8, 576)
    slots = some_slots([90, 150], 192, 512)
    slots[0, 3:40] = slots[1, 0] = slots[1, 149] = -1       # 53 left of 90: the list still ends at 90
    assert_close("holes", reference(q, cache, slots, torch.float32), sparse_mla(q, cache, slots, SCALE), 1e-6)


def place(tables, lengths, kind, dtype, pages, seed):
    "A cache in which request b's rows lie on tables[b]; every other page is full of somebody else's values."
    cache = new_latent_cache(pages, kind, dtype=dtype)
    everywhere = torch.arange(pages * PAGE_SIZE)
    write_latent(cache, everywhere, 50 * normal(len(everywhere), 512, seed=seed), 50 * normal(len(everywhere), 64, seed=seed + 1))
    for b, (table, n) in enumerate(zip(tables, lengths)):
        slots = positions_to_slots(torch.arange(n)[:, None], torch.tensor([table]), torch.zeros(n, dtype=torch.int64))[:, 0]
        write_latent(cache, slots, normal(n, 512, seed=100 + b), normal(n, 64, seed=200 + b))
    return cache


@settings(max_examples=20, deadline=None)
@given(data=st.data(), form=st.sampled_from(FORMS))
def test_page_placement_does_not_show(data, form):
    "Three requests, two random placements of their pages in caches of different sizes and content: bit-equal results."
    kind, dtype = form
    lengths = [data.draw(st.integers(1, 300)) for _ in range(3)]
    needed = [-(-n // PAGE_SIZE) for n in lengths]
    request = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
    positions = torch.stack([some_slots([min(lengths[b], data.draw(st.integers(1, 256)))], 256, lengths[b], seed=i)[0]
                             for i, b in enumerate(request.tolist())])
    q, results = normal(len(request), 4, 576, seed=9).to(dtype), []
    for seed in (1000, 2000):
        pages = sum(needed) + data.draw(st.integers(0, 6))
        free = data.draw(st.permutations(range(pages)))
        tables = [[free.pop() for _ in range(n)] for n in needed]
        cache = place(tables, lengths, kind, dtype, pages, seed)
        table = torch.tensor([t + [-1] * (max(needed) - len(t)) for t in tables], dtype=torch.int32)
        results.append(sparse_mla(q, cache, positions_to_slots(positions, table, request), SCALE))
    assert torch.equal(*results)
    assert results[0].any()


@pytest.mark.parametrize("kind,dtype", FORMS[:2], ids=NAMES[:2])
def test_a_nan_elsewhere_does_not_come_in(kind, dtype):
    "Padding must not read a row that the query did not choose."
    cache, q = filled_cache(kind, dtype), normal(3, 8, 576).to(dtype)
    slots = some_slots([5, 64, 100], 256, 512)
    clean = sparse_mla(q, cache, slots, SCALE)
    rows = cache.view(-1, 576)
    unused = torch.ones(len(rows), dtype=torch.bool)
    unused[slots[slots >= 0]] = False
    rows[unused] = torch.nan
    assert torch.equal(sparse_mla(q, cache, slots, SCALE), clean)


def test_large_scores_do_not_overflow():
    cache, q = filled_cache("auto", torch.float32), 1e3 * normal(4, 8, 576)
    slots = some_slots([1, 10, 64, 200], 256, 512)
    got = sparse_mla(q, cache, slots, SCALE)
    assert got.isfinite().all()
    assert_close("one-hot softmax", reference(q, cache, slots, torch.float32), got, 1e-5)


def test_a_slot_outside_the_cache_is_named():
    cache, q = filled_cache("auto", torch.float32, 2), normal(3, 8, 576)
    slots = some_slots([5, 64, 100], 128, 128)
    slots[1, 7] = 128
    with pytest.raises(ValueError, match=r"sparse_mla: row 1, entry 7 is slot 128; a cache of 2 pages has slots 0 to 127"): sparse_mla(q, cache, slots, SCALE)


@pytest.mark.parametrize("change,words", [
    (dict(q=torch.zeros(3, 576)), r"q \[T, H, R \+ P\] and slots"),
    (dict(slots=torch.zeros(2, 4, dtype=torch.int64)), "must agree"),
    (dict(slots=torch.zeros(3, 4, dtype=torch.int32)), "int64, got torch.int32"),
    (dict(q=torch.zeros(3, 8, 512)), "queries of 512 cannot meet cache rows of 576"),
    (dict(rope_dim=576), "rope part of 576 in queries of 576"),
    (dict(impl="magic"), "no implementation 'magic'"),
])
def test_bad_input_is_explained(change, words):
    call = dict(q=torch.zeros(3, 8, 576), latent_cache=new_latent_cache(1, dtype=torch.float32),
                slots=torch.zeros(3, 4, dtype=torch.int64), scale=SCALE) | change
    with pytest.raises(ValueError, match=words): sparse_mla(**call)


def test_an_fp8_cache_of_another_width_is_refused():
    cache = new_latent_cache(1, "fp8", 576, 64)
    with pytest.raises(ValueError, match="queries of 500 cannot meet cache rows of 656 bytes"):
        sparse_mla(torch.zeros(1, 2, 500), cache, torch.zeros(1, 4, dtype=torch.int64), SCALE)
