"""The kernels' wrappers and, in Triton's interpreter, the Triton kernels; what bad input meets; stored figures belong to the stored kernels."""
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from glm52.bench_kernels import BENCHES, Row, source_sha
from glm52.cli import app
from glm52.config import ModelConfig
from glm52.device import missing_package, relative_error
from glm52.kernels import (absorb, cache, fp8, head, indexer, indexer_prepare, moe, mtp, norm, norm_quant, rope, sampling, sparse_mla, sparse_mla_fp8,
                           sparse_prefill, topk)
from glm52.model.checkpoint import resolve_model
from glm52.model.decoder import IMPLEMENTATIONS, Backends, Caches, Capture, Decoder, fill, random_tensors, tiny_config as make_config
from glm52.model.plan import RequestRows, StepPlan
from glm52.ops.fp8 import quantize_index
from glm52.ops.indexer import naive_index_scores, paged_index_scores, read_index_keys
from glm52.ops.norm import naive_layer_norm, naive_rms_norm
from glm52.ops.rope import cos_sin, inv_freq, rotate

RESULTS = Path(__file__).resolve().parent.parent / "nbs" / "results" / "kernels-h200.json"
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only where there is no GPU")


def case(counts, contexts, kind, heads=16, width=32, seed=0):
    "Requests with some query rows at the end of their contexts; pages in any order, two that belong to nobody."
    g = torch.Generator().manual_seed(seed)
    pages = [max(1, -(-c // 64)) for c in contexts]
    table, order = torch.zeros(len(counts), max(pages), dtype=torch.int32), torch.randperm(sum(pages) + 2, generator=g).int()
    for b, some in enumerate(order[2:].split(pages)): table[b, :len(some)] = some
    keys = torch.randn((sum(pages) + 2) * 64, width, generator=g)
    if kind == "fp8":
        values, scale = quantize_index(keys)
        cache = torch.cat([values.view(torch.uint8).view(-1, 64 * width), scale.view(-1, 64).contiguous().view(torch.uint8)], 1)
    else: cache = keys.to(torch.float16).view(-1, 64, width)
    q = torch.randn(sum(counts), heads, width, generator=g).to(torch.float32 if kind == "fp8" else torch.float16)
    gate = torch.randn(sum(counts), heads, generator=g)
    start = torch.tensor([0, *counts]).cumsum(0)
    limit = torch.cat([torch.arange(c - n, c) + 1 for n, c in zip(counts, contexts)])
    return q, gate, cache, table, start, limit


@interpreted
@pytest.mark.parametrize("kind", ["fp8", "float16"])
@pytest.mark.parametrize("counts,contexts", [((1, 1, 1), (64, 65, 130)), ((6, 6), (70, 129)), (tuple(range(1, 9)), (64, 30, 70, 5, 6, 128, 7, 100)),
                                             ((1, 0, 9, 3), (64, 10, 200, 3)), ((20,), (150,))],
                         ids=["decode", "six rows", "one to eight", "ragged", "prefill"])
def test_index_scores_in_the_interpreter(counts, contexts, kind):
    q, gate, cache, table, start, limit = case(counts, contexts, kind)
    got = indexer.index_scores(q, gate, cache, table, start, limit, debug=True)
    want = paged_index_scores(q, gate, cache, table, start, limit)
    assert torch.equal(got.isinf(), want.isinf()) and relative_error(want, got) < 1e-5
    for b, (first, last) in enumerate(zip(start.tolist(), start.tolist()[1:])):
        if kind == "fp8" or last == first: continue
        plain = naive_index_scores(q[first:last], read_index_keys(cache, table[b]), gate[first:last], limit[first:last])
        assert relative_error(plain, got[first:last]) < 1e-5


@interpreted
@pytest.mark.parametrize("kind", ["fp8", "float16"])
@pytest.mark.parametrize("heads", [1, 3, 8, 15, 24])
def test_index_scores_of_any_number_of_heads(heads, kind):
    "Heads that fill up to a power of two, at least 16, add nothing: the same bits as heads of zeros beside the real ones."
    q, gate, *rest = case((1, 6, 9, 2), (64, 70, 200, 65), kind, heads)
    got, missing = indexer.index_scores(q, gate, *rest), (16 if heads < 16 else 32) - heads
    want = paged_index_scores(q, gate, *rest)
    assert torch.equal(got.isinf(), want.isinf()) and relative_error(want, got) < 1e-5
    pad = torch.nn.functional.pad
    assert torch.equal(got, indexer.index_scores(pad(q, (0, 0, 0, missing)), pad(gate, (0, missing)), *rest))


@interpreted
@pytest.mark.parametrize("heads", [8, 16])
def test_a_row_of_scores_knows_neither_its_neighbours_nor_the_cut(heads):
    q, gate, cache, table, start, limit = case((6, 1, 3), (200, 65, 333), "float16", heads)
    together = indexer.index_scores(q, gate, cache, table, start, limit)
    for b, (first, last) in enumerate(zip(start.tolist(), start.tolist()[1:])):
        for t in range(first, last):
            alone = indexer.index_scores(q[t:t + 1], gate[t:t + 1], cache, table[b:b + 1], torch.tensor([0, 1]), limit[t:t + 1])
            assert torch.equal(together[t:t + 1], alone)
    seen = torch.arange(together.shape[1]) < limit[:, None]
    for chunk in (1, 2, 5, 64):
        cut = indexer.index_scores_fp8(q, gate, cache, table, start, limit, 6, fill=chunk % 2 == 1, chunk=chunk)
        assert torch.equal(together[seen], cut[seen])


@interpreted
@pytest.mark.parametrize("counts", [(2, 0), (0, 3, 0), (4, 0, 0, 0), (0, 0)])
def test_as_many_rows_as_requests_is_not_one_row_each(counts):
    arguments = case(counts, (100,) * len(counts), "fp8")
    got, want = indexer.index_scores(*arguments), paged_index_scores(*arguments)
    assert got.shape == want.shape and torch.equal(got.isinf(), want.isinf())
    if len(got): assert relative_error(want, got) < 1e-5


@interpreted
def test_index_scores_refuses_what_would_go_wrong_on_the_device():
    q, gate, cache, table, start, limit = case((2, 1), (100, 64), "fp8")
    good = dict(q=q, gate=gate, index_cache=cache, page_table=table, query_start=start, limit=limit)
    for change, words in ((dict(gate=gate.half()), "gate must be float32"), (dict(gate=gate[:, :8]), "got gate"),
                          (dict(q=q.repeat(1, 5, 1), gate=gate.repeat(1, 5)), "80 heads of 32"), (dict(q=q[:, :, :24].contiguous()), "16 heads of 24"), (dict(index_cache=cache[:, :64 * 32]), "FP8 pages must be"),
                          (dict(index_cache=torch.zeros(5, 64, 32)), "bf16 or fp16"), (dict(page_table=table.long()), "page table int32"),
                          (dict(limit=limit.int()), "limit int64"), (dict(limit=limit[:2]), "limit"), (dict(query_start=start[:2]), "query_start"),
                          (dict(page_table=table.t().contiguous().t()), "page table must be contiguous"),
                          (dict(index_cache=torch.cat([cache.flatten(), cache[0]])[8:8 + cache.numel()].view(cache.shape)), "16 bytes")):
        with pytest.raises(ValueError, match=words): indexer.index_scores(**good | change)
    for change, words in ((dict(page_table=table + 90), "request 0 names a page outside"), (dict(limit=limit + 500), "limits must be 0 to 128")):
        with pytest.raises(ValueError, match=words): indexer.index_scores(**good | change, debug=True)


@interpreted
@pytest.mark.parametrize("dtype,ratio", [(torch.float32, 1e-6), (torch.float16, 1e-3)], ids=["float32", "float16"])
@pytest.mark.parametrize("rows,width", [(1, 1), (3, 2), (7, 63), (2, 64), (5, 6144), (33, 129), (0, 16)])
def test_norms_in_the_interpreter(rows, width, dtype, ratio):
    g = torch.Generator().manual_seed(rows * width)
    x = (torch.randn(rows, width + 3, generator=g) * 5 - 2).to(dtype)[:, :width]          # rows lie apart
    weight, bias = torch.randn(width, generator=g), torch.randn(width, generator=g).half()
    for got, want in ((norm.rms_norm(x, weight, 1e-5), naive_rms_norm(x, weight, 1e-5)),
                      (norm.layer_norm(x, weight, bias, 1e-6), naive_layer_norm(x, weight, bias, 1e-6))):
        assert got.dtype == dtype and got.is_contiguous() and got.shape == want.shape
        if rows and width > 1: assert relative_error(want, got) < ratio
    if rows > 1: assert torch.equal(norm.layer_norm(x, weight, bias, 1e-6)[1:2], norm.layer_norm(x[1:2], weight, bias, 1e-6))
    if width == 64: assert torch.equal(norm.rms_norm(x.reshape(1, rows, width), weight, 1e-5)[0], norm.rms_norm(x, weight, 1e-5))


@interpreted
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("shape,width", [((1, 1), 2), ((5, 64), 64), ((3, 20), 64), ((4, 17), 16), ((6,), 64), ((0, 4), 8)])
def test_rope_in_the_interpreter(shape, width, interleave):
    g = torch.Generator().manual_seed(width)
    x = torch.randn(*shape, width + 5, generator=g)[..., 3:3 + width]                     # heads and rows lie apart
    cos, sin = cos_sin(torch.randint(0, 1 << 20, shape[:1], generator=g), inv_freq(width, 8e6))
    got = rope.rotate(x, cos, sin, interleave)
    assert got.is_contiguous() and got.shape == x.shape
    if shape[0]: assert relative_error(rotate(x, cos, sin, interleave), got) < 1e-6
    if shape[0] > 2: assert torch.equal(got[2:3], rope.rotate(x[2:3], cos[2:3].contiguous(), sin[2:3].contiguous(), interleave))


def test_norms_and_rope_refuse():
    x, w = torch.zeros(2, 8), torch.zeros(8)
    for arguments, words in (((x.double(), w), "float64"), ((x, w[:7]), "weight must be"), ((x.t().contiguous().t(), w), "side by side"),
                             ((torch.zeros(1, 40000), torch.zeros(40000)), "32,768"), ((x, torch.zeros(16)[::2]), "in one piece")):
        with pytest.raises(ValueError, match=words): norm.rms_norm(*arguments, 1e-5)
    with pytest.raises(ValueError, match="bias"): norm.layer_norm(x, w, w[:3], 1e-5)
    angle = torch.zeros(2, 4)
    for arguments, words in (((x.double(), angle, angle), "float64"), ((x[:, :6], angle, angle), "power of two"), ((x, angle[:1], angle), "cos must be"),
                             ((x, angle, angle.double()), "sin must be"), ((x.t().contiguous().t(), angle, angle), "side by side")):
        with pytest.raises(ValueError, match=words): rope.rotate(*arguments)


def test_topk_refuses_before_it_launches():
    scores, limit = torch.zeros(3, 100), torch.full((3,), 100)
    for arguments, words in (((scores.half(), limit, 5), "float32"), ((scores.t(), torch.full((100,), 3), 2), "contiguous"), ((scores, limit[:2], 5), r"\[3\] int64"),
                             ((scores, limit.int(), 5), "int64"), ((scores, limit, 0), "1 to 4096"), ((scores, limit, 4097), "1 to 4096"),
                             ((torch.empty(1, (1 << 20) + 64), torch.tensor([5]), 5), "20 bits"), ((torch.empty(70000, 1), torch.zeros(70000, dtype=torch.int64), 1), "65,535"),
                             ((scores, limit, 5), "runs on a GPU")):
        with pytest.raises(ValueError, match=words): topk.topk(*arguments)


def test_topk_splits_long_rows_while_clusters_fit():
    for rows in (1, 14, 15, 30, 31, 66, 67, 1000):
        for length in (1, 8192, 8193, 1 << 20):
            for k in (1, 2048, 2049, 4096):
                parts, capacity, threads, blocks, vector = topk.plan(rows, length, k)
                assert capacity >= 2 * k and threads % (32 * parts) == 0 and capacity % parts == 0
                assert parts == 1 or (length > capacity and rows * parts <= 132)
                assert vector == (4 if length % 4 == 0 else 1)


def test_sparse_mla_refuses_before_it_launches():
    q, cache = torch.zeros(2, 8, 576, dtype=torch.bfloat16), torch.zeros(3, 64, 576, dtype=torch.bfloat16)
    slots = torch.zeros(2, 64, dtype=torch.int64)
    for arguments, words in (((q.float(), cache, slots), "bfloat16"), ((q, cache.half(), slots), "bfloat16"), ((q[:, :5], cache, slots), "5 heads"), ((q[..., :512], cache, slots), "512"),
                             ((q, cache[:, :32], slots), "pages of 64"), ((q, cache, slots.int()), "int64"), ((q, cache, torch.zeros(2, 4097, dtype=torch.int64)), "at most 4096"),
                             ((q, cache, slots[:1]), "2 lists"), ((q.transpose(0, 1).contiguous().transpose(0, 1), cache, slots), "contiguous"), ((q, cache, slots), "runs on a GPU")):
        with pytest.raises(ValueError, match=words): sparse_mla.sparse_mla(*arguments, 0.1)
    with pytest.raises(ValueError, match="int32"): sparse_mla.sparse_mla_paged(q, cache, slots, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), 0.1)


def test_debug_mode_finds_slots_outside_the_cache_and_holes():
    cache, slots = torch.zeros(3, 64, 576), torch.full((2, 5), 191)
    sparse_mla._check_list(slots, cache)
    for place, value, words in (((1, 2), 192, "row 1 names a slot outside"), ((0, 0), -2, "row 0 names"), ((1, 2), -1, "row 1 has a -1 before")):
        bad = slots.clone()
        bad[place] = value
        with pytest.raises(ValueError, match=words): sparse_mla._check_list(bad, cache)


def test_sparse_mla_splits_rows_while_clusters_fit():
    fits = {16: 6, 8: 14, 4: 30, 2: 66}
    for heads in sparse_mla.HEADS:
        for rows in (1, 2, 3, 6, 7, 14, 15, 30, 31, 66, 67, 500):
            group, parts = sparse_mla.plan(rows, heads)
            assert heads % group == 0 and (parts == 1 or rows * (heads // group) <= fits[parts])
            for split in (1, 2, 4, 8): assert sparse_mla.plan(rows, heads, split)[1] == split
        with pytest.raises(ValueError, match="not 3"): sparse_mla.plan(1, heads, 3)
    with pytest.raises(ValueError, match="not 16"): sparse_mla.plan(1, 64, 16)


@interpreted
def test_a_model_bound_to_the_triton_kernels_says_and_selects_the_same(tiny_config):
    ids = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    steps = ([RequestRows(ids[:22], 0, [3]), RequestRows(ids[:9], 0, [5])], [RequestRows(ids[22:24], 22, [3]), RequestRows(ids[9:10], 9, [5])])
    said = []
    for backends in (Backends.choose("cpu"), Backends.choose("cpu", **dict.fromkeys(("rms_norm", "layer_norm", "rope", "index_scores"), "triton"))):
        model = Decoder(tiny_config, torch.float32, "cpu", backends)
        fill(model, random_tensors(tiny_config, 0))
        caches = Caches.new(tiny_config, 6, torch.float32, "cpu", index="fp8")
        for rows in steps:
            capture = Capture()
            said.append((model.logits(model.forward(StepPlan.build(rows, model.device), caches, capture)), capture.positions))
    for (want, plain), (got, chosen) in zip(said[:2], said[2:]):
        assert relative_error(want, got) < 1e-5
        assert plain.keys() == chosen.keys() and all(torch.equal(plain[layer], chosen[layer]) for layer in plain)


@pytest.mark.skipif(missing_package("tilelang") is not None, reason="TileLang is not installed")
def test_a_model_is_bound_to_kernels_only_where_they_suit(monkeypatch):
    glm, nano = make_config(num_attention_heads=64, kv_lora_rank=512, qk_rope_head_dim=64, index_n_heads=32, index_head_dim=128, index_topk=2048), make_config()
    ops = ("index_scores", "topk", "sparse_mla")
    bound = lambda *model, **wishes: {op: (name, why) for op, name, why in Backends.choose("cuda", *model, **wishes).table() if op in ops}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for model in ((), (glm, torch.bfloat16)):
        found = bound(*model)
        assert [found[op][0] for op in ops] == ["triton", "tilelang", "tilelang"]
        assert found["sparse_mla"][1] == "own kernel for BF16 pages; FP8 pages take the plain form"
    assert bound(glm, torch.float32)["sparse_mla"] == ("torch", "the kernel takes bfloat16 models, this one is float32")
    assert bound(glm, torch.float32)["index_scores"][0] == "torch" and bound(glm, torch.float32)["topk"][0] == "tilelang"
    assert bound(make_config(index_n_heads=8), torch.bfloat16)["index_scores"][0] == "triton"
    assert bound(make_config(index_n_heads=80), torch.bfloat16)["index_scores"] == ("torch", "the kernel takes 1 to 64 heads of 32, 64 or 128, not 80 of 32")
    assert bound(nano, torch.bfloat16)["sparse_mla"] == ("torch", "the kernel has 8, 16, 32 or 64 heads, not 4")
    assert bound(nano, torch.bfloat16, sparse_mla="tilelang")["sparse_mla"][0] == "tilelang"       # a wish is kept
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert set(bound(glm, torch.bfloat16).values()) == {("torch", "the kernel is for Hopper GPUs (9.0), this one is 10.0")}


@pytest.mark.skipif(missing_package("tilelang") is not None, reason="TileLang is not installed")
def test_what_runs_each_op_on_a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    whole = dict(hidden_size=6144, num_attention_heads=64, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, q_lora_rank=2048,
                 index_n_heads=32, index_head_dim=128, index_topk=2048, n_routed_experts=256, num_experts_per_tok=8)
    names = lambda *model, **wishes: {op: name for op, name, _ in Backends.choose("cuda", *model, **wishes).table()}
    kernels = dict.fromkeys(IMPLEMENTATIONS, "triton") | dict(topk="tilelang", sparse_mla="tilelang")
    assert names(make_config(**whole), torch.bfloat16) == names() == kernels
    single = names(make_config(**whole), torch.float32)
    assert {op for op in single if single[op] == "torch"} == {"index_scores", "sparse_mla", "absorb_queries", "absorb_values", "lm_head"}
    odd = names(make_config(**whole | dict(hidden_size=200, qk_nope_head_dim=48, v_head_dim=32, n_routed_experts=12)), torch.bfloat16)
    assert {op for op in odd if odd[op] == "torch"} == {"moe", "route", "absorb_queries", "absorb_values", "lm_head"}
    one_answer = Backends.choose("cuda", make_config(**whole), torch.bfloat16, deterministic=True)
    assert {op for op, name, _ in one_answer.table() if name == "batch_invariant"} == {"linear", "sparse_mla", "moe", "absorb_queries", "absorb_values", "lm_head"}
    nano = Backends.choose("cuda", ModelConfig.from_dir(resolve_model("glm52-nano")), torch.bfloat16, deterministic=True)     # eight index heads are not refused
    assert [getattr(nano, op).name for op in ("index_scores", "rms_norm", "layer_norm")] == ["triton"] * 3
    assert set(names(make_config(**whole), torch.bfloat16, **dict.fromkeys(IMPLEMENTATIONS, "torch")).values()) == {"torch"}
    assert {name for _, name, _ in Backends.choose("cpu").table()} == {"torch"}


# Figures of a source before this one, until the bench runs on a GPU again: barriers in split decode of many heads, any number of index heads.
OLDER = {"sparse_decode_bf16", "index_scores", "index_scores_prefill"}


def test_stored_figures_belong_to_the_stored_kernels():
    rows = json.loads(RESULTS.read_text())
    now = {"topk": topk, "sparse_decode_bf16": sparse_mla, "index_scores": indexer, "index_scores_prefill": indexer,
           "indexer_prepare": indexer_prepare, "cache_write": cache, "norm_quant": norm_quant, "rope": rope,
           "sparse_decode_fp8": sparse_mla_fp8, "sparse_prefill_bf16": sparse_prefill, "linear_fp8": fp8, "moe_fp8": moe,
           "lm_head": head, "sample": sampling, "absorb": absorb, "mtp_step": mtp}
    assert {r["kernel"] for r in rows} <= now.keys() and BENCHES.keys() <= now.keys()
    facts = {"gpu", "driver", "torch", "triton", "tilelang", "date"}
    for row in rows:
        assert row.keys() == Row.__dataclass_fields__.keys() | facts and all(row[f] for f in facts)
        assert row["us"] > 0 and 0 <= row["roofline_share"] <= 1.02, row
        if row["impl"].startswith("glm52"):
            assert row["source_sha"] == source_sha(now[row["kernel"]]) or row["kernel"] in OLDER, f"{row['kernel']}: measured with another source; run the bench again on the GPU"
            bound = 3e-2 if row["kernel"] == "moe_fp8" else 5e-3        # its SwiGLU is rounded to e4m3: a hair's difference becomes a step
            assert row["rel_err"] is None or row["rel_err"] < bound
        else: assert row["source_sha"] is None
    assert OLDER == {r["kernel"] for r in rows if r["impl"].startswith("glm52") and r["source_sha"] != source_sha(now[r["kernel"]])}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the bench would run")
def test_the_bench_says_what_it_lacks(tmp_path):
    done = CliRunner().invoke(app, ["bench-kernels", "--out", str(tmp_path / "k.json")])
    assert done.exit_code == 1 and "torch sees none" in done.output and not (tmp_path / "k.json").exists()
