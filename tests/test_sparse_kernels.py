"""Sparse attention of prompts and over FP8 pages: what the wrappers refuse and choose without a GPU."""
import pytest
import torch

from glm52.device import resolve
from glm52.kernels import sparse_mla_fp8, sparse_prefill
from glm52.ops.sparse_mla import IMPLEMENTATIONS, sparse_mla

Q = torch.zeros(2, 8, 576, dtype=torch.bfloat16)
SLOTS = torch.zeros(2, 64, dtype=torch.int64)
KERNELS = {"prefill": (sparse_prefill.sparse_prefill, sparse_prefill.sparse_prefill_paged, torch.zeros(3, 64, 576, dtype=torch.bfloat16)),
           "fp8": (sparse_mla_fp8.sparse_mla_fp8, sparse_mla_fp8.sparse_mla_fp8_paged, torch.zeros(3, 64, 656, dtype=torch.uint8))}


@pytest.mark.parametrize("name", KERNELS)
def test_refusals_come_before_the_launch(name):
    slots_entry, paged_entry, cache = KERNELS[name]
    table, request = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    for arguments, words in (((Q.float(), cache, SLOTS), "bfloat16"), ((Q, cache.float(), SLOTS), "cache"), ((Q[:, :5], cache, SLOTS), "5 heads"),
                             ((Q[..., :512], cache, SLOTS), "512"), ((Q, cache[:, :32], SLOTS), "pages of 64"), ((Q, cache[..., :560], SLOTS), "560"),
                             ((Q, cache, SLOTS.int()), "int64"), ((Q, cache, torch.zeros(2, 4097, dtype=torch.int64)), "at most 4096"),
                             ((Q, cache, SLOTS[:1]), "2 lists"), ((Q.transpose(0, 1).contiguous().transpose(0, 1), cache, SLOTS), "contiguous"),
                             ((Q, cache, SLOTS), "runs on a GPU")):
        with pytest.raises(ValueError, match=words): slots_entry(*arguments, 0.1)
    with pytest.raises(ValueError, match="int32"): paged_entry(Q, cache, SLOTS, table, request, 0.1)
    odd = torch.zeros(2 * 8 * 576 + 1, dtype=torch.bfloat16)[1:].view(2, 8, 576)
    with pytest.raises(ValueError, match="multiple of 16 bytes"): slots_entry(odd, cache, SLOTS, 0.1)


def test_tables_are_checked():
    positions, table, request = torch.full((2, 5), 100, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32), torch.tensor([0, 2])
    cache = torch.zeros(3, 64, 576)
    check = lambda *change, debug=True: sparse_prefill.check_tables("sparse", 2, *change, cache, debug)
    check(positions, table, request)
    for arguments, words in (((positions, table.long(), request), "int32"), ((positions, table, request.int()), "int64"), ((positions, table[0], request), "page table"),
                             ((positions, table, request[:1]), "2 requests"), ((positions + 28, table, request), "beyond 2 pages"),
                             ((positions, table, request + 1), "outside the page table"), ((positions, table + 3, request), "outside the cache")):
        with pytest.raises(ValueError, match=words): check(*arguments)
    check(positions + 28, table, request, debug=False)


def test_rows_are_split_while_clusters_fit():
    fits = {16: 6, 8: 14, 4: 30, 2: 66}
    for rows in (1, 2, 6, 7, 14, 15, 30, 31, 66, 67, 500):
        parts = sparse_mla_fp8.plan(rows)
        assert parts == 1 or rows <= fits[parts]
        for split in sparse_prefill.SPLITS: assert sparse_mla_fp8.plan(rows, split) == split
    for split in (0, 3, 32):
        with pytest.raises(ValueError, match=f"not {split}"): sparse_mla_fp8.plan(1, split)
        with pytest.raises(ValueError, match=f"not {split}"): sparse_prefill.check_split("sparse_prefill", split)


def test_the_pair_is_there_by_name_and_reaches_each_kernel():
    assert resolve("sparse_mla", IMPLEMENTATIONS, None, "cuda").name != "tilelang_pair"        # until its figures are stored
    scores = torch.zeros(70, 64, dtype=torch.int64)
    for rows, cache, words in ((2, KERNELS["fp8"][2], "sparse_mla_fp8: this"), (70, KERNELS["prefill"][2], "sparse_prefill: this"), (2, KERNELS["prefill"][2], "sparse_mla: this")):
        with pytest.raises(ValueError, match=words + " kernel runs on a GPU"): sparse_mla(Q[:1].expand(rows, -1, -1).contiguous(), cache, scores[:rows], 0.1, impl="tilelang_pair")
