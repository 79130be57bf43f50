"""Sparse attention kernels in TileLang, run on the CPU as the CUDA they become: right numbers, registers that exist, no hang, no missing barrier."""
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
COUNTS = (10 ** 6, 0, 129)             # positions of a row, at most
PROGRAMS = {"fp8, two blocks a row": (True, 64, 2, lambda: sparse_prefill.pair_program(64, 2, True, sparse_mla_fp8.FP8)),
            "prefill, a block a row": (False, 64, 1, lambda: sparse_prefill.pair_program(64, 1, True, sparse_prefill.BF16)),
            "decode, two blocks a row": (False, 32, 2, lambda: sparse_mla.many_heads_program(32, 2, True))}


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


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_cuda_is_the_plain_form_and_no_barrier_is_missing(name, tmp_path):
    "Three rows of six tiles, of none, of three: three tiles for each of two blocks, or one block that takes row after row."
    rows, k, scale = 3, 384, 256 ** -0.5
    fp8, heads, parts, program = PROGRAMS[name]
    arrays, plain, slots = inputs(fp8, heads, rows, k)
    source = emulated_cuda.cuda_source(program(), sparse_mla.TARGET)
    asked = [int(n) for n in re.findall(r"warpgroup_reg_(?:de)?alloc<(\d+)>", source)]
    assert len(asked) == 3 and sum(asked) <= 504 and all(n % 8 == 0 for n in asked), f"{asked}: 384 threads start with 168 registers each"
    clusters = rows if parts > 1 else 1
    numbers = dict(clusters=clusters, pages=arrays["page_table"].shape[1], rows=rows, scale=scale, width=k)
    got = emulated_cuda.run(source, tmp_path, clusters, parts, arrays, numbers, races=True).float()
    assert (got[1] == 0).all()
    for row in (0, 2):
        kv = plain[slots[row][slots[row] >= 0]]
        want, _ = naive_sparse_mla(arrays["q"][row:row + 1].float(), kv, torch.arange(len(kv))[None], scale)
        assert relative_error(want[0], got[row]) < 4e-3, row
