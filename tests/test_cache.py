"""Chapter cache: layouts to the byte, addresses, and a cache that behaves like a dictionary."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52.device import relative_error
from glm52.ops.cache import (KINDS, PAGE_SIZE, check_positions, check_slots, gather_latent, latent_row_bytes,
                             latent_width, new_index_cache, new_latent_cache, positions_to_slots, read_index_keys,
                             unpack_latent, write_index_key, write_latent)

DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_bytes_per_token_of_the_reference_page():
    latent = {kind: new_latent_cache(3, kind).nbytes // (3 * PAGE_SIZE) for kind in KINDS}
    index = new_index_cache(3, "fp8").nbytes // (3 * PAGE_SIZE)
    assert (latent["auto"], latent["fp8"], index) == (1152, 656, 132)
    assert [78 * latent[k] + 21 * index for k in KINDS] == [92_628, 53_940]
    assert [79 * latent[k] + 22 * index for k in KINDS] == [93_912, 54_728]


def test_bf16_latent_row_is_latent_then_rope():
    cache = new_latent_cache(2)
    latent, k_pe = normal(1, 512), normal(1, 64, seed=1)
    write_latent(cache, torch.tensor([65]), latent, k_pe)
    assert torch.equal(cache[1, 1], torch.cat((latent, k_pe), -1)[0].bfloat16())
    assert cache[0].count_nonzero() == 0 and cache[1].count_nonzero() <= 576


def test_fp8_latent_row_byte_by_byte():
    "512 e4m3, then four fp32 scales amax / 448, then 64 bf16; the first byte of slot 67 is at 67 * 656."
    cache = new_latent_cache(2, "fp8")
    latent, k_pe = normal(1, 512) * torch.tensor([1e-3, 1.0, 30.0, 0.0]).repeat_interleave(128), normal(1, 64, seed=1)
    write_latent(cache, torch.tensor([67]), latent, k_pe)
    row = cache.flatten()[67 * 656:68 * 656]
    scales = row[512:528].view(torch.float32)
    for group in range(3):
        part = latent[0, group * 128:(group + 1) * 128]
        assert scales[group] == part.abs().max() / 448
        values = row[group * 128:(group + 1) * 128].view(torch.float8_e4m3fn)
        assert torch.equal(values.float(), (part / scales[group]).to(torch.float8_e4m3fn).float())
        assert values.float().abs().max() == 448
    assert row[384:512].view(torch.float8_e4m3fn).float().count_nonzero() == 0, "a group of zeros stays zero"
    assert torch.equal(row[528:].view(torch.bfloat16), k_pe[0].bfloat16())
    assert cache.flatten()[:67 * 656].count_nonzero() == cache.flatten()[68 * 656:].count_nonzero() == 0


def test_fp8_index_page_byte_by_byte():
    "All 64 keys of a page first, then its 64 scales."
    cache = new_index_cache(3, "fp8")
    keys = normal(PAGE_SIZE, 128) * torch.logspace(-6, 3, PAGE_SIZE)[:, None]
    order = torch.randperm(PAGE_SIZE, generator=torch.Generator().manual_seed(3))
    write_index_key(cache, PAGE_SIZE + order, keys[order])
    amax = keys.abs().amax(1).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    by_hand = torch.cat(((keys / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8).flatten(), scale.view(torch.uint8)))
    assert by_hand.shape == (64 * 128 + 64 * 4,)
    assert torch.equal(cache[1], by_hand)
    assert cache[0].count_nonzero() == cache[2].count_nonzero() == 0


@given(latent=st.integers(1, 700), rope=st.integers(1, 70))
def test_latent_width_undoes_row_bytes(latent, rope):
    assert latent_width(latent_row_bytes(latent, rope), rope) == latent


def test_latent_width_refuses_what_is_no_row():
    with pytest.raises(ValueError, match="657 bytes"): latent_width(657, 63)
    with pytest.raises(ValueError, match="rope part of 64 has 128"): latent_width(128, 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("latent_dim,rope_dim", [(512, 64), (48, 16), (130, 6)], ids=str)
def test_round_trip(kind, dtype, latent_dim, rope_dim):
    cache = new_latent_cache(4, kind, latent_dim + rope_dim, rope_dim, dtype)
    slot = torch.randperm(4 * PAGE_SIZE, generator=torch.Generator().manual_seed(0))[:100]
    latent, k_pe = normal(100, latent_dim).to(dtype), normal(100, rope_dim, seed=1).to(dtype)
    write_latent(cache, slot, latent, k_pe)
    back = gather_latent(cache, slot, rope_dim, dtype)
    assert back.dtype == dtype and back.shape == (100, latent_dim + rope_dim)
    if kind == "auto": assert torch.equal(back, torch.cat((latent, k_pe), -1))
    else:
        assert torch.equal(back[:, latent_dim:], k_pe.bfloat16().to(dtype))
        assert 0.005 < relative_error(latent, back[:, :latent_dim]) < 0.04
        worst = (back[:, :latent_dim].float() - latent.float()).abs() / latent.abs().float().amax(1, keepdim=True)
        assert worst.max() < 1 / 14, "half a step of e4m3 at the top of a group, and bf16's own rounding"


@pytest.mark.parametrize("kind", KINDS)
def test_index_keys_come_back_in_order_of_pages(kind):
    cache = new_index_cache(5, kind, dtype=torch.float32)
    keys = normal(130, 128)
    table = torch.tensor([[3, 0, 4]], dtype=torch.int32)
    write_index_key(cache, positions_to_slots(torch.arange(130)[:, None], table, torch.zeros(130, dtype=torch.int64))[:, 0], keys)
    back = read_index_keys(cache, table[0])
    assert back.shape == (192, 128) and back[130:].count_nonzero() == 0
    if kind == "auto": assert torch.equal(back[:130], keys)
    else: assert 0.005 < relative_error(keys, back[:130]) < 0.04


def test_every_finite_byte_survives_unpacking():
    "What is in the cache means what e4m3 says, subnormal values included."
    finite = [b for b in range(256) if b & 0x7F != 0x7F]
    rows = torch.zeros(1, 656, dtype=torch.uint8)
    rows[0, :len(finite)] = torch.tensor(finite, dtype=torch.uint8)
    rows[0, 512:528] = torch.tensor([0.5, 0.25, 1.0, 1.0]).view(torch.uint8)
    values = torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    want = values * torch.cat((torch.full((128,), 0.5), torch.full((len(finite) - 128,), 0.25)))
    assert torch.equal(unpack_latent(rows, 64, torch.float32)[0, :len(finite)], want)


@pytest.mark.parametrize("kind", KINDS)
def test_slot_minus_one_writes_nothing_and_reads_zeros(kind):
    cache, index_cache = new_latent_cache(2, kind), new_index_cache(2, kind)
    slot = torch.tensor([-1, 5, -1])
    write_latent(cache, slot, normal(3, 512), normal(3, 64))
    write_index_key(index_cache, slot, normal(3, 128))
    rows = cache.view(2 * PAGE_SIZE, -1)
    assert rows.any(1).nonzero().flatten().tolist() == [5]
    assert read_index_keys(index_cache, torch.tensor([0, 1])).any(1).nonzero().flatten().tolist() == [5]
    back = gather_latent(cache, torch.tensor([[5, -1], [-1, 5]]))
    assert back.shape == (2, 2, 576) and torch.equal(back[0, 0], back[1, 1])
    assert back[0, 0].any() and not back[0, 1].any() and not back[1, 0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_write(kind):
    cache, index_cache = new_latent_cache(1, kind), new_index_cache(1, kind)
    for slot in (torch.zeros(0, dtype=torch.int64), torch.full((3,), -1)):
        n = len(slot)
        write_latent(cache, slot, torch.ones(n, 512), torch.ones(n, 64))
        write_index_key(index_cache, slot, torch.ones(n, 128))
    assert not cache.any() and not index_cache.any()
    assert gather_latent(cache, torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 576)


def test_addresses_beyond_32_bits():
    "3.3 million FP8 rows end behind byte 2**31; pages that nobody touches take no memory."
    pages = 2**31 // (656 * PAGE_SIZE) + 2
    cache = torch.empty(pages, PAGE_SIZE, 656, dtype=torch.uint8)
    cache[0], cache[-1] = 0, 0
    last = torch.tensor([pages * PAGE_SIZE - 1])
    table = torch.tensor([[pages - 1]], dtype=torch.int32)
    assert torch.equal(positions_to_slots(torch.tensor([[63]]), table, torch.tensor([0]))[0], last)
    assert int(last) * 656 > 2**31
    write_latent(cache, last, torch.ones(1, 512), torch.ones(1, 64))
    assert torch.equal(gather_latent(cache, last)[0], torch.ones(576, dtype=torch.bfloat16))
    assert not cache[0].any() and not cache[-1, :-1].any()


def test_slots_are_int64_even_where_the_table_is_int32():
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    slots = positions_to_slots(torch.tensor([[1]], dtype=torch.int32), table, torch.tensor([0]))
    assert slots.dtype == torch.int64 and slots.item() == (2**31 - 1) * 64 + 1


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_cache_is_a_dictionary(data, kind):
    "Random writes, rewrites and skipped rows against a dict of slot -> what is stored."
    pages = 3
    cache, index_cache = new_latent_cache(pages, kind, 40, 8), new_index_cache(pages, kind, 16)
    model = {}
    for step in range(data.draw(st.integers(1, 5))):
        slots = data.draw(st.lists(st.integers(0, pages * PAGE_SIZE - 1), unique=True, max_size=12))
        slots = [s if data.draw(st.booleans()) else -1 for s in slots]
        latent, k_pe, key = normal(len(slots), 32, seed=step), normal(len(slots), 8, seed=step + 9), normal(len(slots), 16, seed=step + 99)
        write_latent(cache, torch.tensor(slots, dtype=torch.int64), latent, k_pe)
        write_index_key(index_cache, torch.tensor(slots, dtype=torch.int64), key)
        alone, index_alone = new_latent_cache(1, kind, 40, 8), new_index_cache(1, kind, 16)
        for row, slot in enumerate(slots):
            if slot < 0: continue
            one = torch.tensor([7])
            write_latent(alone, one, latent[row:row + 1], k_pe[row:row + 1])
            write_index_key(index_alone, one, key[row:row + 1])
            model[slot] = gather_latent(alone, one, 8)[0], read_index_keys(index_alone, torch.tensor([0]))[7]
    rows = gather_latent(cache, torch.arange(pages * PAGE_SIZE), 8)
    keys = read_index_keys(index_cache, torch.arange(pages))
    for slot in range(pages * PAGE_SIZE):
        want = model.get(slot, (torch.zeros(40), torch.zeros(16)))
        assert torch.equal(rows[slot].float(), want[0].float()) and torch.equal(keys[slot].float(), want[1].float()), slot


@given(data=st.data())
def test_positions_to_slots_is_the_formula(data):
    requests, pages = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    table = [data.draw(st.lists(st.integers(0, 99), min_size=pages, max_size=pages)) for _ in range(requests)]
    rows = data.draw(st.lists(st.tuples(st.integers(0, requests - 1),
                                        st.lists(st.integers(-1, pages * 64 - 1), min_size=3, max_size=3)), min_size=1, max_size=6))
    got = positions_to_slots(torch.tensor([p for _, p in rows], dtype=torch.int32), torch.tensor(table, dtype=torch.int32),
                             torch.tensor([r for r, _ in rows]))
    want = [[-1 if p < 0 else table[r][p // 64] * 64 + p % 64 for p in ps] for r, ps in rows]
    assert got.tolist() == want


TABLE = torch.tensor([[4, 1, 2], [3, -1, -1]], dtype=torch.int32)


@pytest.mark.parametrize("positions,requests,words", [
    ([[0, 5], [191, 192]], [0, 0], r"row 1 of request 0 asks for position 192; its 3 pages of 64 hold positions 0 to 191"),
    ([[0, 5], [1, 2]], [0, 2], r"row 1 belongs to request 2; the page table has 2 requests"),
    ([[0, -1], [64, 2]], [1, 1], r"row 1 asks for position 64 of request 1, whose page 1 was never handed out"),
    ([[0, -2]], [0], r"position -2"),
])
def test_position_errors_name_the_row(positions, requests, words):
    with pytest.raises(ValueError, match=words): check_positions(torch.tensor(positions), TABLE, torch.tensor(requests))


def test_positions_to_slots_explains_a_refused_index():
    with pytest.raises(ValueError, match="position 192"): positions_to_slots(torch.tensor([[192]]), TABLE, torch.tensor([0]))
    with pytest.raises(ValueError, match="request 2"): positions_to_slots(torch.tensor([[1]]), TABLE, torch.tensor([2]))


def test_slot_errors_name_row_and_slot():
    good = torch.tensor([[0, 127, -1]])
    check_slots(good, 2)
    for bad in (128, -2, 2**40):
        with pytest.raises(ValueError, match=rf"scores: row 1, entry 2 is slot {bad}; a cache of 2 pages has slots 0 to 127"):
            check_slots(torch.cat((good, torch.tensor([[1, 2, bad]]))), 2, "scores")


@pytest.mark.parametrize("kind", KINDS)
def test_bad_writes_are_refused_and_change_nothing(kind):
    cache, index_cache = new_latent_cache(2, kind), new_index_cache(2, kind)
    for bad in (128, -2):
        slot = torch.tensor([3, bad])
        with pytest.raises(ValueError, match=f"write_latent: row 1, entry 0 is slot {bad}"): write_latent(cache, slot, normal(2, 512), normal(2, 64))
        with pytest.raises(ValueError, match=f"write_index_key: row 1, entry 0 is slot {bad}"): write_index_key(index_cache, slot, normal(2, 128))
    slot = torch.tensor([3, 4])
    with pytest.raises(ValueError, match="2 slots need as many rows"): write_latent(cache, slot, normal(3, 512), normal(3, 64))
    with pytest.raises(ValueError, match="do not fit"): write_latent(cache, slot, normal(2, 500), normal(2, 64))
    with pytest.raises(ValueError, match="do not fit"): write_index_key(index_cache, slot, normal(2, 64))
    with pytest.raises(ValueError, match="int64"): write_latent(cache, slot.int(), normal(2, 512), normal(2, 64))
    assert not cache.any() and not index_cache.any()


def test_unknown_kind():
    with pytest.raises(ValueError, match="'int4' is not known; there are auto, fp8"): new_latent_cache(1, "int4")
    with pytest.raises(ValueError, match="'bf16'"): new_index_cache(1, "bf16")
