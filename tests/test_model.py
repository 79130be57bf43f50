"""The decoder as a whole: rows that do not feel their neighbours, selection shared as configured, captures, refusals."""
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from glm52.config import ModelConfig
from glm52.model.decoder import (Backends, Caches, Capture, SelectionError, Step, fill, first_difference, per_head, random_model,
                                 random_tensors, tiny_config as make_config)
from glm52.model.parallel import World, shard
from glm52.ops.fp8 import cancelling, linear
from glm52.ops.rope import inv_freq
from glm52.model.plan import PlanError, RequestRows, StepPlan

DTYPES = (torch.float32, torch.bfloat16)


def text(length, seed=1):
    return torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(model, sequences, schedule, page_seed=0, latent="auto", index="auto", capture=None):
    """Hidden states of every sequence. `schedule` is a list of steps, a step a dict sequence -> rows to take;
    pages are handed out at random, so that each call has another layout."""
    need = [-(-len(s) // 64) for s in sequences]
    free = list(range(sum(need) + 4))
    random.Random(page_seed).shuffle(free)
    pages = [[free.pop() for _ in range(n)] for n in need]
    caches = Caches.new(model.config, sum(need) + 4, model.dtype, latent=latent, index=index)
    for tensor in (*caches.latent.values(), *caches.index.values()):     # whatever was there before must not matter
        if tensor.dtype != torch.uint8: tensor.fill_(7.0)
    done, out = [0] * len(sequences), [[] for _ in sequences]
    for step in schedule:
        rows = [RequestRows(sequences[i][done[i]:done[i] + n], done[i], pages[i], "none") for i, n in step.items()]
        hidden = model.forward(StepPlan.build(rows), caches, capture)
        for (i, n), part in zip(step.items(), hidden.split(list(step.values()))):
            out[i].append(part)
            done[i] += n
    assert done == [len(s) for s in sequences]
    return [torch.cat(parts) for parts in out]


def alone(model, sequence, chunk, **kw):
    steps = [{0: min(chunk, len(sequence) - start)} for start in range(0, len(sequence), chunk)]
    return run(model, [sequence], steps, **kw)[0]


def mixed_schedule(lengths, seed):
    "Random chunks of random sequences, in random company and order."
    rng, left, steps = random.Random(seed), list(lengths), []
    while any(left):
        open_ = [i for i, n in enumerate(left) if n]
        chosen = rng.sample(open_, rng.randint(1, len(open_)))
        steps.append({i: rng.randint(1, min(left[i], rng.choice((1, 1, 7, 64, 300)))) for i in chosen})
        for i, n in steps[-1].items(): left[i] -= n
    return steps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kinds", [("auto", "auto"), ("fp8", "fp8")], ids=["plain cache", "fp8 cache"])
def test_bits_do_not_depend_on_chunks_company_or_pages(dtype, kinds):
    model = random_model(make_config(), dtype=dtype)
    sequences = [text(n, seed) for seed, n in enumerate((3, 33, 90, 170))]
    wanted = [alone(model, s, len(s), latent=kinds[0], index=kinds[1]) for s in sequences]
    for chunk in (1, 7, 64):
        got = alone(model, sequences[2], chunk, page_seed=chunk, latent=kinds[0], index=kinds[1])
        assert torch.equal(got, wanted[2]), f"chunks of {chunk}"
    for seed in range(4):
        got = run(model, sequences, mixed_schedule(map(len, sequences), seed), seed, *kinds)
        for i, (a, b) in enumerate(zip(got, wanted)): assert torch.equal(a, b), f"sequence {i}, schedule {seed}"
    logits = model.logits(wanted[3])
    assert all(torch.equal(model.logits(wanted[3][t:t + n]), logits[t:t + n]) for t in (0, 19) for n in (1, 2, 7, 33))


def test_bits_with_threads():
    "Two threads give their own bits, but the same ones for every schedule."
    model, before = random_model(make_config()), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sequences = [text(n, seed) for seed, n in enumerate((33, 90))]
        wanted = [alone(model, s, len(s)) for s in sequences]
        got = run(model, sequences, mixed_schedule(map(len, sequences), 1), 1)
    finally: torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_rows_are_free_where_every_rounding_shows(dtype):
    "Sums that cancel: in BF16 too an order of sums that depends on the row count shows in every element."
    for k, n in ((256, 16), (2048, 256), (100, 37), (32, 32), (128, 1280), (33, 7)):
        x, w = cancelling(300, k, n, dtype, seed=5)
        whole = linear(x, w)
        assert all(torch.equal(linear(x[t:t + rows], w), whole[t:t + rows]) for rows in (1, 2, 3, 5, 7, 16, 33, 257) for t in (0, 1, 19, 43)), (k, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_per_head_rows_are_free(dtype):
    for heads, k, n in ((4, 24, 32), (8, 96, 512), (8, 512, 64), (3, 7, 5)):
        x, w = zip(*(cancelling(300, k, n, dtype, seed) for seed in range(heads)))
        x, w = torch.stack(x, 1), torch.stack(w).transpose(1, 2).contiguous()
        whole = per_head(x, w)
        assert all(torch.equal(per_head(x[t:t + rows], w), whole[t:t + rows]) for rows in (1, 2, 3, 7, 16, 33, 257) for t in (0, 19, 43))
        wanted = torch.einsum("thk,hkn->thn", x.float(), w.float())
        assert (whole.float() - wanted).abs().max() < (1e-3 if dtype == torch.float32 else 0.5)


def test_fp8_caches_stay_close():
    model = random_model(make_config())
    ids = text(60)
    exact, rough = alone(model, ids[:14], 14), alone(model, ids[:14], 14, latent="fp8", index="fp8")
    assert 1e-4 < (exact - rough).norm() / exact.norm() < 0.3


# ---------------------------------------------------------------- selection

def test_shared_layers_attend_to_what_the_nearest_full_layer_chose():
    "A public report (IX02): engines that build an indexer on shared layers select with random weights."
    types = ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]
    config = make_config(num_hidden_layers=8, index_topk_freq=None, index_skip_topk_offset=None, indexer_types=types)
    plan = StepPlan.build([RequestRows([5], 20, [0])])
    step = Step(config, plan, torch.ones(8))
    chosen, seen = {0: [1], 1: [2], 2: [3], 6: [9]}, []
    for layer in range(8):
        if layer in chosen: step.write(layer, torch.tensor([chosen[layer]], dtype=torch.int32))
        seen.append(step.read(layer)[0].tolist())
    assert seen == [[1], [2], [3], [3], [3], [3], [9], [9]]
    owners = {i for i, layer in enumerate(random_model(config).layers) if layer.attention.indexer is not None}
    assert owners == {0, 1, 2, 6} == set(Caches.new(config, 1).index) - {8}


def test_a_selection_that_was_not_made_is_an_error(tiny_config):
    step = Step(tiny_config, StepPlan.build([RequestRows([5], 20, [0])]), torch.ones(8))
    with pytest.raises(SelectionError, match="layer 4 reuses the selection of layer 2"): step.read(4)
    step.write(1, torch.zeros(1, 16, dtype=torch.int32))
    with pytest.raises(SelectionError): step.read(4)


def test_a_list_is_as_wide_as_top_k_where_kernels_cut_it():
    "They give each block of a row an equal share of the list's width: with a width of the batch's longest row, a row's sums would be cut elsewhere in company."
    config, widths = make_config(index_topk=256), {}
    for device in ("cpu", "meta"):
        for longest in (70, 200):
            step = Step(config, StepPlan.build([RequestRows([1], longest - 1, range(4))], device), inv_freq(config.qk_rope_head_dim, 1e4).to(device))
            step.write_all(0, lambda positions, *_: positions)
            widths[device, longest] = step.slots[0].shape[1]
    assert widths == {("cpu", 70): 128, ("cpu", 200): 256, ("meta", 70): 256, ("meta", 200): 256}


def test_index_keys_are_written_while_nothing_is_scored(tiny_model):
    "A prompt below top-k, then one far above: the early keys must be there."
    ids = text(60)
    assert torch.equal(run(tiny_model, [ids], [{0: 10}, {0: 50}])[0], alone(tiny_model, ids, 60))


def test_sparsity_bites_only_beyond_topk():
    ids = text(60)
    sparse, dense = random_model(make_config()), random_model(make_config(index_topk=64))
    a, b = alone(sparse, ids, 60), alone(dense, ids, 60)
    assert torch.equal(a[:16], b[:16]) and (a[17:] - b[17:]).abs().amax(-1).min() > 1e-3


def test_ties_in_the_scores_break_by_position_everywhere():
    "Two index heads: many scores are exactly 0. Still the same bits for every schedule."
    model = random_model(make_config(index_n_heads=2))
    ids = text(90)
    wanted = alone(model, ids, 90)
    assert all(torch.equal(alone(model, ids, chunk), wanted) for chunk in (1, 7))


# ---------------------------------------------------------------- captures

def test_capture_holds_what_was_used(tiny_model, tiny_config):
    ids, captures = text(40), []
    capture = Capture(hidden=[])
    whole = run(tiny_model, [ids], [{0: 40}], capture=capture)[0]
    assert capture.experts.shape == (40, 4, 2) and capture.experts.dtype == torch.uint8 and int(capture.experts.max()) < 8
    assert set(capture.positions) == {0, 1, 2, 6} and len(capture.hidden) == 8
    for table in capture.positions.values():
        assert table.shape == (40, 16) and table.dtype == torch.int32
        for t, row in enumerate(table.tolist()):
            real = [p for p in row if p >= 0]
            assert real == sorted(set(real)) and len(real) == min(16, t + 1) and row[len(real):] == [-1] * (16 - len(real))
            assert max(real) <= t
    for start in range(0, 40, 8):          # the same rows chunk by chunk
        captures.append(Capture())
        run(tiny_model, [ids[:start + 8]], [{0: start}, {0: 8}] if start else [{0: 8}], capture=captures[-1])
    assert torch.equal(torch.cat([c.experts for c in captures]), capture.experts)
    for layer in capture.positions: assert torch.equal(torch.cat([c.positions[layer] for c in captures]), capture.positions[layer])
    assert torch.equal(whole, alone(tiny_model, ids, 40))


def test_first_difference_names_layer_and_row():
    states = [torch.randn(5, 8) for _ in range(4)]
    spoiled = [s.clone() for s in states]
    assert first_difference(states, spoiled) is None
    spoiled[3][2] += 1
    assert first_difference(states, spoiled).startswith("layer 2 (first at row 2")
    spoiled[0][4, 0] = torch.nan
    assert first_difference(states, spoiled).startswith("the embedding (first at row 4")


# ---------------------------------------------------------------- plan

def test_plan_by_hand():
    plan = StepPlan.build([RequestRows([7, 8, 9], 63, [4, 2], [0, 2], capture=True), RequestRows([5], 0, [1]), RequestRows([3, 3], 5, [9], "none")])
    assert plan.token_ids.tolist() == [7, 8, 9, 5, 3, 3] and plan.positions.tolist() == [63, 64, 65, 0, 5, 6]
    assert plan.slot.tolist() == [4 * 64 + 63, 2 * 64, 2 * 64 + 1, 64, 9 * 64 + 5, 9 * 64 + 6]
    assert plan.limit.tolist() == [64, 65, 66, 1, 6, 7] and plan.query_start.tolist() == [0, 3, 4, 6]
    assert plan.context_len.tolist() == [66, 1, 7] and plan.row_request.tolist() == [0, 0, 0, 1, 2, 2]
    assert plan.page_table.tolist() == [[4, 2], [1, 0], [9, 0]] and plan.page_table.dtype == torch.int32
    assert plan.sample_rows.tolist() == [0, 2, 3] and plan.capture_rows.tolist() == [True] * 3 + [False] * 3
    assert plan.longest == 66 and len(plan) == 6
    assert StepPlan.build([RequestRows([5], 0, [1], "all")]).capture_rows is None


@pytest.mark.parametrize("rows, words", [
    (RequestRows([1] * 65, 0, [3]), "position 64; its 1 pages hold positions below 64"),
    (RequestRows([], 0, [3]), "no rows"), (RequestRows([1], -1, [3]), "-1"),
    (RequestRows([1], 0, [3], "first"), "first"), (RequestRows([1], 0, [3], [1]), r"rows \[1\]")])
def test_plans_that_cannot_be(rows, words):
    with pytest.raises(PlanError, match=words): StepPlan.build([rows])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 200)), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_plan_slots_are_the_page_table(shapes, rng):
    free = list(range(60))
    rng.shuffle(free)
    rows = [RequestRows([1] * n, start, [free.pop() for _ in range(-(-(start + n) // 64))], "all") for n, start in shapes]
    plan = StepPlan.build(rows)
    pages = plan.page_table[plan.row_request, plan.positions // 64].long()
    assert torch.equal(plan.slot, pages * 64 + plan.positions % 64) and len(set(plan.slot.tolist())) == len(plan)
    assert plan.sample_rows.tolist() == list(range(len(plan)))


# ---------------------------------------------------------------- backends, weights, ranks

def test_backends_are_chosen_once_and_wishes_are_kept_or_refused():
    table = Backends.choose("cpu").table()
    assert [op for op, _, _ in table] == ["rms_norm", "layer_norm", "rope", "linear", "index_scores", "topk", "prepare_queries", "prepare_key", "prepare_latent", "slots",
                                        "add_rms_norm", "sparse_mla", "route", "moe", "absorb_queries", "absorb_values", "lm_head", "mtp_input"]
    assert all(name == "torch" and why for _, name, why in table)
    with pytest.raises(ValueError, match="no op called attention"): Backends.choose("cpu", attention="torch")
    with pytest.raises(ValueError, match="no implementation 'mkl'"): Backends.choose("cpu", topk="mkl")


def test_every_tensor_has_a_place_and_every_place_reads_back(tiny_config):
    model = random_model(tiny_config, seed=9)
    assert set(model.weights.places) == set(model.weights.specs)
    for name, tensor in random_tensors(tiny_config, 9):
        place = model.weights.places[name]
        assert torch.equal(place.read() if hasattr(place, "read") else place, tensor), name


def test_bfloat16_model_keeps_the_router_bias_in_fp32():
    model = random_model(make_config(), dtype=torch.bfloat16)
    kinds = {name: place.dtype for name, place in model.weights.places.items() if not hasattr(place, "read")}
    assert all(dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16) for name, dtype in kinds.items())
    assert model.logits(torch.zeros(1, 128, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_model_without_mtp_or_experts_builds():
    model = random_model(make_config(num_nextn_predict_layers=0, num_hidden_layers=2))
    capture = Capture()
    assert model.mtp is None and run(model, [text(20)], [{0: 20}], capture=capture)[0].shape == (20, 128) and capture.experts is None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_cover_every_tensor_once(size):
    config = make_config(intermediate_size=1024, moe_intermediate_size=512)
    from glm52.config import checkpoint_tensors
    for spec in checkpoint_tensors(config).values():
        mine = [shard(spec, config, World(rank, size)) for rank in range(size)]
        count = torch.zeros(spec.shape)
        for part in mine:
            if part is not None: count[part] += 1
        assert (count == 1).all() or (count == size).all(), spec.name
        if size == 1: assert (count == 1).all()


def test_shares_respect_heads_and_blocks():
    config = make_config(intermediate_size=1024)
    from glm52.config import checkpoint_tensors
    specs = checkpoint_tensors(config)
    q_b = shard(specs["model.layers.0.self_attn.q_b_proj.weight"], config, World(1, 4))
    assert (q_b[0].start, q_b[0].stop) == (40, 80)
    down = shard(specs["model.layers.0.mlp.down_proj.weight"], config, World(3, 8))
    assert (down[1].start, down[1].stop) == (384, 512)
    with pytest.raises(ValueError, match="cannot be cut into 8"): shard(specs["model.layers.0.self_attn.q_b_proj.weight"], config, World(0, 8))
    with pytest.raises(ValueError, match="rank 4"): World(4, 4)
    with pytest.raises(NotImplementedError): World(0, 2).all_reduce(torch.ones(1))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(1, 17))
def test_shares_tile_any_range(n, size):
    parts = [World(rank, size).share(n) for rank in range(size)]
    assert parts[0].start == 0 and parts[-1].stop == n and all(a.stop == b.start for a, b in zip(parts, parts[1:]))


def test_forward_needs_no_gradient_and_changes_no_weight(tiny_model, tiny_config):
    out = alone(tiny_model, text(20), 20)
    assert not out.requires_grad
    assert isinstance(tiny_model.config, ModelConfig) and fill(tiny_model, []) == set()


def test_groups_of_128_rows_are_the_same_products():
    "What deterministic mode runs on a GPU, on the CPU: the plain forms' values, and a row's bits at any number of rows."
    from glm52.model.decoder import per_head, per_head_batch_invariant
    from glm52.ops.fp8 import linear, linear_batch_invariant
    from glm52.ops.moe import moe_batch_invariant, moe_torch
    g = torch.Generator().manual_seed(3)
    x, w, heads, per = (torch.randn(*shape, generator=g) for shape in ((300, 96), (40, 96), (300, 4, 24), (4, 24, 32)))
    for rows in (0, 1, 127, 128, 129, 300):
        for plain, grouped, a, b in ((linear, linear_batch_invariant, x, w), (per_head, per_head_batch_invariant, heads, per)):
            got = grouped(a[:rows], b)
            assert got.shape == plain(a[:rows], b).shape and torch.allclose(got, plain(a[:rows], b), atol=1e-5) and torch.equal(got, grouped(a, b)[:rows])
    ids, weights = torch.randint(8, (300, 2), generator=g), torch.rand(300, 2, generator=g)
    stacks = torch.randn(8, 64, 96, generator=g) / 10, torch.randn(8, 96, 32, generator=g) / 6
    whole = moe_batch_invariant(x, ids, weights, *stacks)
    assert torch.allclose(whole, moe_torch(x, ids, weights, *stacks), atol=1e-4)
    assert torch.equal(moe_batch_invariant(x[7:9], ids[7:9], weights[7:9], *stacks), whole[7:9])


def test_deterministic_mode_refuses_an_op_that_feels_its_neighbours():
    from glm52.device import Implementation
    from glm52.model.decoder import BATCH_INVARIANT, IMPLEMENTATIONS
    with pytest.raises(ValueError, match="deterministic mode: index_scores runs 'torch' here"): Backends._invariant(Implementation("index_scores", "torch", print, "no kernel"))
    kept, changed = Backends._invariant(Implementation("rms_norm", "triton", print, "own kernel")), Backends._invariant(Implementation("linear", "torch", print, "own kernel"))
    assert kept.function is print and (changed.name, changed.function) == ("batch_invariant", BATCH_INVARIANT["linear"])
    assert set(BATCH_INVARIANT) <= set(IMPLEMENTATIONS) and Backends.choose("cpu", deterministic=True).table() == Backends.choose("cpu").table()
