"""Sparse attention kernels written in TileLang, run on the CPU as the CUDA they become: right numbers, registers that exist, no hang, no missing barrier."""
import importlib.util
import re
import shutil

import pytest
import torch

import emulated_cuda
from glm52.device import relative_error
from glm52.kernels import sparse_mla, sparse_mla_fp8, sparse_prefill
from glm52.ops.cache import pack_latent, positions_to_slots, unpack_latent
from glm52.ops.sparse_mla import naive_sparse_mla

pytestmark = [pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="TileLang is not installed"),
              pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not there")]
COUNTS = (10 ** 6, 0, 129, 64, 1)      # positions of a row, at most: several tiles, none, an odd tile, a full one, one
PROGRAMS = {"fp8, a block a row": (True, 64, 1, lambda: sparse_prefill.pair_program(64, 1, True, sparse_mla_fp8.FP8)),
            "fp8, two blocks a row": (True, 64, 2, lambda: sparse_prefill.pair_program(64, 2, True, sparse_mla_fp8.FP8)),
            "prefill, a block a row": (False, 64, 1, lambda: sparse_prefill.pair_program(64, 1, True, sparse_prefill.BF16)),
            "prefill, 8 heads, two blocks a row": (False, 8, 2, lambda: sparse_prefill.pair_program(8, 2, True, sparse_prefill.BF16)),
            "decode, 64 heads, two blocks a row": (False, 64, 2, lambda: sparse_mla.many_heads_program(64, 2, True))}


def inputs(fp8: bool, heads: int, rows: int, k: int, context: int = 600, requests: int = 2):
    "The kernel's arrays, cache rows in fp32, slots."
    g = torch.Generator().manual_seed(0)
    pages = -(-context // 64)
    bf = torch.randn(requests * pages * 64, 576, generator=g).bfloat16()
    cache = pack_latent(bf[:, :512], bf[:, 512:]) if fp8 else bf
    table, request = torch.randperm(requests * pages, generator=g).int().view(requests, pages), torch.arange(rows) % requests
    positions = torch.full((rows, k), -1, dtype=torch.int32)
    for row in range(rows):
        n = min(COUNTS[row % len(COUNTS)], k)
        positions[row, :n] = torch.rand(context, generator=g).topk(n).indices.sort().values.int()
    q = torch.randn(rows, heads, 576, generator=g).bfloat16()
    arrays = dict(cache=cache, index=positions, page_table=table, row_request=request, q=q, out=torch.full((rows, heads, 512), torch.nan).bfloat16())
    return arrays, unpack_latent(cache, 64, torch.float32) if fp8 else bf.float(), positions_to_slots(positions, table, request)


def emulate(name, folder, rows, k, persistent=None, races=False):
    "Output and the plain form's."
    fp8, heads, parts, program = PROGRAMS[name]
    arrays, plain, slots = inputs(fp8, heads, rows, k)
    clusters, scale = persistent or rows, 256 ** -0.5
    numbers = dict(clusters=clusters, pages=arrays["page_table"].shape[1], rows=rows, scale=scale, width=k)
    source = emulated_cuda.cuda_source(program(), sparse_mla.TARGET)
    asked = [int(n) for n in re.findall(r"warpgroup_reg_(?:de)?alloc<(\d+)>", source)]
    assert len(asked) == 3 and sum(asked) <= 504 and all(n % 8 == 0 for n in asked), f"{asked}: 384 threads start with 168 registers each; more would be waited for, for ever"
    got = emulated_cuda.run(source, folder, clusters, parts, arrays, numbers, races)
    want = [naive_sparse_mla(arrays["q"][t:t + 1].float(), plain[slots[t][slots[t] >= 0]], torch.arange(int((slots[t] >= 0).sum()))[None], scale)[0]
            for t in range(rows)]
    return got.float(), torch.cat(want)


@pytest.mark.parametrize("name,persistent", [("fp8, two blocks a row", None), ("prefill, a block a row", 1)])
def test_the_cuda_is_the_plain_form(name, persistent, tmp_path):
    got, want = emulate(name, tmp_path, 3, 384, persistent)       # six tiles: three for each of two blocks
    assert (got[1] == 0).all()
    for row in (0, 2): assert relative_error(want[row], got[row]) < 4e-3, row


KNOWN = pytest.mark.xfail(strict=True, reason="two barriers are missing before partial outputs are staged: chapter sparse_mla_kernel; "
                          "they come with the next measurement, because a stored figure belongs to the source that was measured")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=KNOWN) if name.startswith("decode") else name for name in PROGRAMS])
def test_no_barrier_is_missing(name, tmp_path):
    got, want = emulate(name, tmp_path, 2, 384, None if PROGRAMS[name][2] > 1 else 1, races=True)
    assert relative_error(want[0], got[0]) < 4e-3
