"""Chapter indexer: scores over pages are scores over rows, for every row alone."""
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glm52.ops.indexer as module
from glm52.config import ModelConfig
from glm52.device import assert_close
from glm52.ops.cache import new_index_cache, positions_to_slots, write_index_key
from glm52.ops.fp8 import cancelling, hadamard, quantize_index
from glm52.ops.indexer import PAGE_SIZE, TILE, index_scores, naive_index_scores, read_index_keys

CASES = {case["id"]: case for line in (Path(__file__).parent / "cases" / "public-reports.jsonl").read_text().splitlines()
         if (case := json.loads(line))["area"] == "dsa-indexer"}
FORMS = {"fp32": ("auto", torch.float32), "bf16": ("auto", torch.bfloat16), "fp8": ("fp8", torch.float32), "fp8-bf16": ("fp8", torch.bfloat16)}


def seeded(seed): return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0): return torch.randn(*shape, generator=seeded(seed))


class Batch:
    "Requests of given lengths, their keys in scattered pages, and the last `rows` queries of each."

    def __init__(self, lengths, rows, form="fp32", heads=4, dim=128, seed=0, pages=None, keys=None):
        kind, self.dtype = FORMS[form]
        counts = [-(-n // PAGE_SIZE) for n in lengths]
        order = torch.randperm(sum(counts) + 3, generator=seeded(seed)) if pages is None else pages
        self.table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
        self.cache = new_index_cache(sum(counts) + 3, kind, dim, self.dtype)
        self.lengths, taken, self.keys = lengths, 0, []
        for b, (n, count) in enumerate(zip(lengths, counts)):
            self.table[b, :count] = order[taken:taken + count].int()
            taken += count
            self.keys.append(normal(n, dim, seed=100 + b).to(self.dtype) if keys is None else keys[b].to(self.dtype))
            slots = positions_to_slots(torch.arange(n)[:, None], self.table, torch.full((n,), b))[:, 0]
            write_index_key(self.cache, slots, self.keys[b])
        self.start = torch.tensor([0, *rows]).cumsum(0)
        self.limit = torch.cat([torch.arange(n - r, n) + 1 for n, r in zip(lengths, rows)])
        total = sum(rows)
        self.q, self.gate = normal(total, heads, dim, seed=7).to(self.dtype), normal(total, heads, seed=8)

    def scores(self): return index_scores(self.q, self.gate, self.cache, self.table, self.start, self.limit)

    def reference(self, b):
        "naive over what the cache keeps: FP8 keys meet FP8 queries."
        rows = slice(int(self.start[b]), int(self.start[b + 1]))
        q, keys = self.q[rows].float(), self.keys[b].float()
        if self.cache.dtype == torch.uint8:
            q, keys = (v.float() * s[..., None] for v, s in (quantize_index(q), quantize_index(keys)))
        return naive_index_scores(q, keys, self.gate[rows], self.limit[rows])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths,rows,heads,dim", [
    ([5], [5], 4, 128), ([64], [1], 32, 128), ([65, 1, 512], [3, 1, 2], 4, 128), ([513, 70], [1, 0], 8, 64),
    ([1200, 511, 640], [70, 1, 9], 4, 128), ([130], [130], 1, 32)], ids=str)
def test_paged_matches_naive(lengths, rows, heads, dim, form):
    batch = Batch(lengths, rows, form, heads, dim)
    got = batch.scores()
    assert got.dtype == torch.float32 and got.shape == (sum(rows), batch.table.shape[1] * PAGE_SIZE)
    for b, n in enumerate(lengths):
        part, ref = got[batch.start[b]:batch.start[b + 1]], batch.reference(b)
        assert torch.isneginf(part[:, n:]).all() and torch.equal(part[:, :n].isneginf(), ref.isneginf())
        if rows[b]: assert_close("index_scores", ref, part[:, :n], 2e-6)


def test_naive_by_hand():
    "Two heads, one of them with a negative gate; the relu acts on each product, before the sum."
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    keys = torch.tensor([[2.0, 3.0], [-2.0, 3.0], [2.0, -3.0], [9.0, 9.0]])
    got = naive_index_scores(q, keys, torch.tensor([[1.0, -0.5]]), torch.tensor([3]))
    assert got[0].tolist() == [2 - 1.5, -1.5, 2.0, -torch.inf]


def test_relu_first_is_not_relu_last():
    batch = Batch([200], [20])
    dots = torch.einsum("thd,sd->ths", batch.q, batch.keys[0])
    last = (dots * batch.gate[:, :, None]).sum(1)
    got = batch.scores()[:, :200]
    seen = ~got.isneginf()
    for wrong in (last, last.relu()): assert (got[seen] - wrong[seen]).norm() > 0.3 * got[seen].norm()


def test_a_row_sees_positions_below_its_limit_only():
    batch = Batch([150], [150])
    got = batch.scores()
    assert torch.equal(~got.isneginf(), torch.arange(got.shape[1]) < batch.limit[:, None])
    keys = batch.keys[0].clone()
    keys[100:] = torch.nan                                     # the future must not leak, not even as nan
    later = Batch([150], [150], keys=[keys]).scores()
    assert torch.equal(later[:100], got[:100])


def test_no_rows_and_requests_without_rows():
    assert Batch([70, 10], [0, 0]).scores().shape == (0, 128)
    both, alone = Batch([70, 90, 10], [2, 0, 1]), Batch([70], [2])
    assert torch.equal(both.scores()[:2], alone.scores())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 300])
def test_a_row_keeps_its_bits_however_the_prompt_was_cut(rows, form):
    "300 rows in one step, and the last `rows` of them in their own; keys cancel, so that another order of sums would show."
    x, keys = cancelling(300 * 3, 128, 700, torch.bfloat16)
    whole = Batch([700], [300], form, heads=3, keys=[keys])
    whole.q = x.view(300, 3, 128).to(whole.dtype)
    full = whole.scores()
    part = Batch([700], [rows], form, heads=3, keys=[keys])
    part.q, part.gate = whole.q[-rows:], whole.gate[-rows:]
    assert torch.equal(part.scores(), full[-rows:])
    first = [whole.q[:rows], whole.gate[:rows], whole.cache, whole.table, torch.tensor([0, rows]), whole.limit[:rows]]
    assert torch.equal(index_scores(*first), full[:rows])


@pytest.mark.parametrize("heads,dim", [(1, 128), (8, 32), (3, 576)])
def test_a_row_keeps_its_bits_when_later_rows_see_more(heads, dim):
    "Alone, row 0 meets one page of keys; in the whole prompt it meets a full tile."
    x, keys = cancelling(500 * heads, dim, 500, torch.float32)
    whole = Batch([500], [500], heads=heads, dim=dim, keys=[keys])
    whole.q = x.view(500, heads, dim)
    full = whole.scores()
    for rows in (1, 2, 5, 20, 63, 64, 65, 130):
        part = index_scores(whole.q[:rows], whole.gate[:rows], whole.cache, whole.table, torch.tensor([0, rows]), whole.limit[:rows])
        assert torch.equal(part, full[:rows]), rows


@pytest.mark.parametrize("form", FORMS)
def test_a_row_keeps_its_bits_beside_others_and_on_other_pages(form):
    lengths, rows = [600, 90, 64, 333], [3, 1, 20, 40]
    together = Batch(lengths, rows, form)
    moved = Batch(lengths, rows, form, seed=9)
    assert not torch.equal(together.table, moved.table) and torch.equal(together.scores(), moved.scores())
    table = together.scores()
    for b, n in enumerate(lengths):
        mine = slice(int(together.start[b]), int(together.start[b + 1]))
        alone = index_scores(together.q[mine], together.gate[mine], together.cache, together.table[b:b + 1, :-(-n // PAGE_SIZE)],
                             torch.tensor([0, rows[b]]), together.limit[mine])
        assert torch.equal(alone, table[mine, :alone.shape[1]])
        assert torch.isneginf(table[mine, alone.shape[1]:]).all()


def test_what_lies_beyond_the_context_does_not_matter():
    "Unused pages, the tail of the last page, page numbers of pages that were never handed out."
    batch = Batch([100], [4])
    clean = batch.scores()
    batch.cache[batch.table[0, 1].item(), 100 - PAGE_SIZE:] = torch.nan
    used = set(batch.table.flatten().tolist())
    for page in range(len(batch.cache)):
        if page not in used: batch.cache[page] = torch.nan
    wide = torch.nn.functional.pad(batch.table, (0, 5), value=-1)
    got = index_scores(batch.q, batch.gate, batch.cache, wide, batch.start, batch.limit)
    assert torch.equal(got[:, :128], clean) and torch.isneginf(got[:, 128:]).all()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_ragged_batches(data):
    lengths = data.draw(st.lists(st.integers(1, 2 * TILE + 70), min_size=1, max_size=4))
    rows = [data.draw(st.integers(0, min(n, 70))) for n in lengths]
    batch = Batch(lengths, rows, data.draw(st.sampled_from(list(FORMS))), heads=2, dim=32)
    got = batch.scores()
    for b, n in enumerate(lengths):
        if rows[b]: assert_close("index_scores", batch.reference(b), got[batch.start[b]:batch.start[b + 1], :n], 2e-6)


def test_scores_are_made_tile_by_tile(monkeypatch):
    "No product is larger than 64 rows of heads against 512 keys, at any length."
    shapes, plain = [], module.linear
    monkeypatch.setattr(module, "linear", lambda x, w: shapes.append((len(x), len(w))) or plain(x, w))
    Batch([1400], [150]).scores()
    assert max(rows for rows, _ in shapes) == 64 * 4 and {keys for _, keys in shapes} == {TILE}


@pytest.mark.parametrize("form", FORMS)
def test_read_index_keys_returns_pages_in_the_order_asked(form):
    batch = Batch([192], [1], form)
    keys = batch.keys[0].float()
    if FORMS[form][0] == "fp8":
        values, scale = quantize_index(keys)
        keys = values.float() * scale[:, None]
    got = read_index_keys(batch.cache, batch.table[0].flip(0)).float()
    assert torch.equal(got, keys.view(3, 64, 128).flip(0).flatten(0, 1))


def test_fp8_keeps_most_of_the_selection():
    "What FP8 keys cost: a top 64 of 1,000 keeps more than nine positions in ten; a Hadamard turn changes no exact score."
    exact, rough = Batch([1000], [30], "fp32", heads=32), Batch([1000], [30], "fp8", heads=32)
    chosen = [{*row.topk(64).indices.tolist()} for row in exact.scores()]
    kept = [len(mine & {*row.topk(64).indices.tolist()}) / 64 for mine, row in zip(chosen, rough.scores())]
    assert sum(kept) / len(kept) > 0.9
    turned = Batch([1000], [30], "fp32", heads=32, keys=[hadamard(exact.keys[0])])
    turned.q = hadamard(exact.q)
    seen = ~exact.scores().isneginf()
    assert_close("hadamard", exact.scores()[seen], turned.scores()[seen], 1e-5)


def test_transformers_scores_the_same_positions():
    "Their indexer from hidden states to positions, ours from the same projections to scores; the chosen sets are equal."
    from transformers import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer
    from glm52.ops.norm import layer_norm
    from glm52.ops.rope import cos_sin, inv_freq, rotate
    config = GlmMoeDsaConfig(hidden_size=96, q_lora_rank=48, index_n_heads=8, index_head_dim=128, index_topk=12, qk_rope_head_dim=64,
                             num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    theirs = GlmMoeDsaIndexer(config, 0).float()
    theirs.k_norm.weight.data.normal_(); theirs.k_norm.bias.data.normal_()
    h, qa, T = normal(1, 90, 96), normal(1, 90, 48, seed=1), 90
    cos, sin = cos_sin(torch.arange(T), inv_freq(64, 8e6))
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None]
    chosen = theirs(h, qa, (torch.cat([cos] * 2, -1)[None], torch.cat([sin] * 2, -1)[None]), mask, torch.arange(T)[None])[0]

    def turn(x): return torch.cat((rotate(x[..., :64], cos, sin), x[..., 64:]), -1)

    key = turn(layer_norm(h[0] @ theirs.wk.weight.T, theirs.k_norm.weight, theirs.k_norm.bias, 1e-6)).detach()
    batch = Batch([T], [T], heads=8, keys=[key])
    batch.q = turn((qa[0] @ theirs.wq_b.weight.T).view(T, 8, 128)).detach()
    batch.gate = (h[0] @ theirs.weights_proj.weight.float().T).detach() * (8 * 128) ** -0.5
    scores = batch.scores()
    for t in range(12, T): assert set(chosen[t].tolist()) == set(scores[t].topk(12).indices.tolist()), t


def test_public_case_ix07_gates_are_not_rounded():
    given_, expect = CASES["IX07"]["given"], CASES["IX07"]["expect"]
    gate = torch.tensor([given_["head_weights"]])
    products = given_["relu_scores"]
    q, keys = torch.eye(2)[None], torch.tensor([products["A"], products["B"]])
    cache = new_index_cache(1, "auto", 2, torch.float32)
    write_index_key(cache, torch.tensor([0, 1]), keys)

    def winner(gate): return "AB"[index_scores(q, gate, cache, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([2]))[0].argmax()]

    assert winner(gate) == expect["winner_fp32"] and winner(gate.bfloat16().float()) == expect["winner_if_bf16_weights"]
    with pytest.raises(ValueError, match="flips near ties"): winner(gate.bfloat16())


def test_public_case_ix02_shared_layers_read_the_nearest_full_layer():
    case = CASES["IX02"]
    kinds, chosen = tuple(case["given"]["indexer_types"]), case["given"]["topk_by_full_layer"]
    small = dict(num_hidden_layers=len(kinds), first_k_dense_replace=1, mlp_layer_types=None, indexer_types=kinds)
    config = tiny(**small)
    assert [chosen[str(config.index_source(layer))] for layer in range(len(kinds))] == case["expect"]["topk_per_layer"]
    with pytest.raises(ValueError, match="shared"): tiny(**small | {"indexer_types": ("shared", *kinds[1:])})


def tiny(**changes):
    from glm52.model.decoder import tiny_config
    entries = tiny_config().to_dict() | changes
    return ModelConfig.from_dict({k: v for k, v in entries.items() if v is not None})


def test_public_case_ix09_only_owners_have_index_pages():
    from glm52.model.decoder import Caches
    given_ = CASES["IX09"]["given"]
    kinds = ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(given_["num_layers"])]
    config = tiny(num_hidden_layers=given_["num_layers"], mlp_layer_types=None, first_k_dense_replace=3, indexer_types=kinds,
                  index_head_dim=given_["index_head_dim"])
    caches = Caches.new(config, 1, torch.float32, "cpu")
    assert len(config.full_layers) == given_["full_layers"]
    assert len(caches.index) == CASES["IX09"]["expect"]["index_cache_layers"] + config.num_nextn_predict_layers
    assert len(caches.latent) == given_["num_layers"] + config.num_nextn_predict_layers


@pytest.mark.parametrize("change,words", [
    (dict(gate=torch.zeros(2, 3)), "must agree"), (dict(gate=torch.zeros(2, 4).bfloat16()), "gate must be float32"),
    (dict(limit=torch.ones(3, dtype=torch.int64)), "as many limits"), (dict(query_start=torch.tensor([0, 1])), "does not divide 2 rows"),
    (dict(query_start=torch.tensor([0, 1, 2])), "among 1 requests"), (dict(impl="cuda"), "no implementation 'cuda'"),
], ids=["heads", "gate dtype", "limits", "too few rows", "requests", "implementation"])
def test_errors_for_people(change, words):
    batch = Batch([5], [2])
    call = dict(q=batch.q, gate=batch.gate, index_cache=batch.cache, page_table=batch.table, query_start=batch.start, limit=batch.limit)
    with pytest.raises(ValueError, match=words): index_scores(**call | change)
