"""Sparse attention of prompts and over FP8 pages against the plain form; the same bits twice."""
import pytest
import torch

from glm52.device import missing_package, relative_error
from glm52.ops.cache import pack_latent, positions_to_slots, unpack_latent
from glm52.ops.sparse_mla import naive_sparse_mla

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU"),
              pytest.mark.skipif(missing_package("tilelang") is not None, reason="TileLang is not installed")]
KINDS = ("bf16", "fp8")
SHAPES = [(1, 2048, 16), (7, 2048, 8), (7, 100, 4), (20, 130, 2), (64, 2048, 2), (150, 64, 1), (150, 2048, 1)]     # rows, k, blocks a row
CASES = [*((heads, *shape) for heads in (8, 64) for shape in SHAPES), *((heads, *shape) for heads in (16, 32) for shape in SHAPES[4:6])]


def kernels():
    "What these tests launch, to be compiled before them; the other tests have 64 heads and splits that are among these."
    return [(module, heads, split, mapped) for module in ("sparse_prefill", "sparse_mla_fp8")
            for heads, split in sorted({(heads, split) for heads, _, _, split in CASES}) for mapped in (True, False)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def entries(kind):
    "The kernel by slots, by positions."
    if kind == "bf16":
        from glm52.kernels.sparse_prefill import sparse_prefill, sparse_prefill_paged
        return sparse_prefill, sparse_prefill_paged
    from glm52.kernels.sparse_mla_fp8 import sparse_mla_fp8, sparse_mla_fp8_paged
    return sparse_mla_fp8, sparse_mla_fp8_paged


def paged(kind, requests, context, seed=0, size=1.0):
    "The cache, the same in fp32, a page table in random order."
    pages = -(-context // 64)
    rows = normal((requests * pages + 3) * 64, 576, seed=seed)
    rows[:, :512] *= size
    table = (torch.randperm(requests * pages, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") + 3).int().view(requests, pages)
    if kind == "bf16": return rows.view(-1, 64, 576), rows.float(), table
    packed = pack_latent(rows[:, :512], rows[:, 512:])
    return packed.view(-1, 64, 656), unpack_latent(packed, 64, torch.float32), table


def choose(rows, context, k, seed=0):
    "Ascending positions; row r holds k, 0, 1, 63, 64, 65, ... of them."
    counts = [k, 0, 1, min(63, k), min(64, k), min(65, k), k - 1]
    keys = torch.rand(rows, context, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    out = torch.full((rows, k), -1, dtype=torch.int32, device="cuda")
    for r in range(rows):
        n = min(counts[r % len(counts)], context)
        if n: out[r, :n] = keys[r].topk(n).indices.sort().values.int()
    return out


def by_the_plain_form(q, plain, table, request, positions, scale):
    slots = positions_to_slots(positions, table, request)
    return torch.cat([naive_sparse_mla(q[t:t + 1].float(), plain[slots[t].clamp_min(0)], torch.where(slots[t] < 0, -1, torch.arange(slots.shape[1], device="cuda"))[None], scale)[0]
                      for t in range(len(q))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads,rows,k,split", CASES)
def test_it_is_the_plain_form(kind, heads, rows, k, split):
    by_slots, by_positions = entries(kind)
    context, requests, scale = max(k, 200), max(1, rows // 3), 192 ** -0.5
    cache, plain, table = paged(kind, requests, context, rows)
    request = torch.arange(rows, device="cuda") % requests
    positions, q = choose(rows, context, k, rows), normal(rows, heads, 576, seed=1)
    got = by_positions(q, cache, positions, table, request, scale, split, debug=True)
    some = slice(0, 20)
    assert relative_error(by_the_plain_form(q[some], plain, table, request[some], positions[some], scale), got[some].float()) < 5e-3
    assert (got[(positions < 0).all(1)] == 0).all()
    for _ in range(5): assert torch.equal(got, by_positions(q, cache, positions, table, request, scale, split))
    assert torch.equal(got, by_slots(q, cache, positions_to_slots(positions, table, request), scale, split=split, debug=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [1, 2, 8])
def test_a_row_does_not_feel_the_batch(kind, split):
    _, kernel = entries(kind)
    cache, _, table = paged(kind, 150, 300)
    request, positions, q = torch.arange(150, device="cuda"), choose(150, 300, 256), normal(150, 64, 576, seed=1)
    whole = kernel(q, cache, positions, table, request, 0.1, split)
    for some in (slice(3, 4), slice(40, 57), slice(100, 150)):
        assert torch.equal(whole[some], kernel(q[some], cache, positions[some], table, request[some], 0.1, split))


@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_grow_move_the_reference_point(kind):
    "Every tile's scores pass the tile's before by far more than 2^8, so that the sums are scaled each time."
    _, kernel = entries(kind)
    k, q = 1024, normal(2, 64, 576, seed=3)
    rows = normal(k, 576, seed=4) * 0.1 + torch.linspace(-2, 2, k, device="cuda")[:, None] * q.float().mean((0, 1)).sign()
    rows = rows.bfloat16()
    q = (q.float() + 3 * q.float().mean((0, 1)).sign()).bfloat16()
    table, request = torch.arange(k // 64, device="cuda", dtype=torch.int32)[None], torch.zeros(2, dtype=torch.int64, device="cuda")
    positions = torch.arange(k, device="cuda", dtype=torch.int32).repeat(2, 1)
    if kind == "bf16": cache, plain = rows.view(-1, 64, 576), rows.float()
    else:
        packed = pack_latent(rows[:, :512], rows[:, 512:])
        cache, plain = packed.view(-1, 64, 656), unpack_latent(packed, 64, torch.float32)
    for split in (1, 4):
        got = kernel(q, cache, positions, table, request, 0.2, split)
        assert relative_error(by_the_plain_form(q, plain, table, request, positions, 0.2), got.float()) < 5e-3


@pytest.mark.parametrize("size", [1e-4, 1e-2, 30.0, 300.0])
def test_fp8_latents_of_every_size(size):
    _, kernel = entries("fp8")
    cache, plain, table = paged("fp8", 3, 300, 1, size)
    request, positions = torch.arange(3, device="cuda"), choose(3, 300, 256)[[0, 0, 6]]
    q = (normal(3, 64, 576, seed=1).float() / max(size, 1.0)).bfloat16()
    got = kernel(q, cache, positions, table, request, 0.1)
    assert relative_error(by_the_plain_form(q, plain, table, request, positions, 0.1), got.float()) < 1e-2
