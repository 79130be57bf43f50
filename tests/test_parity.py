"""Our decoder against transformers' GlmMoeDsaForCausalLM on tiny random models, in float32 and bfloat16.

transformers norms the two low-rank latents with eps 1e-6 whatever the config says, so these models are compared with `lora_norm_eps` 1e-6.
"""
import dataclasses
import functools
import itertools
import random
import tempfile
from pathlib import Path

import pytest
import torch

from conftest import write_checkpoint
from glm52.device import Implementation, relative_error
from glm52.model.checkpoint import load_model
from glm52.model.decoder import Backends, Caches, Capture, first_difference, tiny_config
from glm52.model.plan import RequestRows, StepPlan
from glm52.ops.topk import topk_torch

transformers = pytest.importorskip("transformers")

MODELS = {
    "glm-5.2": {},                                                                     # dense and sparse, full and shared
    "glm-5.1": dict(num_hidden_layers=4, index_topk_freq=1, index_skip_topk_offset=2, first_k_dense_replace=1, n_routed_experts=12,
                    num_experts_per_tok=3, n_group=3, topk_group=2),                   # every layer full, expert groups
    "dense": dict(num_hidden_layers=3, index_topk_freq=None, index_skip_topk_offset=None, index_topk_pattern="FSF", q_lora_rank=48,
                  v_head_dim=24, qk_nope_head_dim=16, num_attention_heads=6),          # no experts
    "sparse": dict(num_hidden_layers=4, first_k_dense_replace=0, index_topk_freq=None, index_skip_topk_offset=None,
                   indexer_types=["full", "shared", "full", "shared"], index_topk=33, index_head_dim=48, n_shared_experts=2,
                   norm_topk_prob=False, routed_scaling_factor=1.0, num_nextn_predict_layers=1),
}
LENGTHS = (9, 40, 260)       # below top-k, a little above, far above
CHUNKS = (1, 7, 64, None)
CLOSE = 2e-6                 # of the largest score in the row: what fp32 sums of 16 heads cannot tell apart


def pair(name, dtype=torch.float32):
    "Our model and theirs, from the same files."
    return load_pair(name, dtype)


@functools.cache
def load_pair(name, dtype):
    config = tiny_config(**{"num_nextn_predict_layers": 0, "lora_norm_eps": 1e-6} | MODELS[name])
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), config, seed=len(name))
        theirs = transformers.GlmMoeDsaForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        return load_model(path, dtype=dtype, device="cpu"), theirs


def text(length, seed=1):
    return torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed + length)).tolist()


@torch.no_grad()
def their_logits(name, ids, dtype=torch.float32):
    return pair(name, dtype)[1](torch.tensor([ids]), use_cache=False).logits[0].float()


def pages_for(requests, tokens, seed=0):
    "Disjoint pages in no order, for so many requests of so many tokens."
    each = -(-tokens // 64)
    free = list(range(requests * each + 3))
    random.Random(seed).shuffle(free)
    return [free[i * each:(i + 1) * each] for i in range(requests)], len(free)


def our_logits(model, ids, chunk, capture=None):
    "One sequence, `chunk` tokens a step (None: all), through the paged cache."
    (pages,), count = pages_for(1, len(ids))
    caches, out = Caches.new(model.config, count, model.dtype), []
    for start in range(0, len(ids), chunk or len(ids)):
        part = ids[start:start + (chunk or len(ids))]
        out.append(model.forward(StepPlan.build([RequestRows(part, start, pages)]), caches, capture))
    return model.logits(torch.cat(out))


def close_rows(name, ids):
    "Positions at which some full layer's k-th and next index score cannot be told apart."
    found = set()

    def probe(scores, limit, k):
        best = scores.topk(k + 1, -1).values
        scale = scores.masked_fill(scores == -torch.inf, 0).abs().amax(-1)
        found.update((limit[best[:, k - 1] - best[:, k] <= CLOSE * scale] - 1).tolist())
        return topk_torch(scores, limit, k)

    model, _ = pair(name)
    probing = dataclasses.replace(Backends.choose("cpu"), topk=Implementation("topk", "torch", probe, "to see the scores"))
    watched = load_model_with(model, probing)
    our_logits(watched, ids, None)
    return found


def load_model_with(model, backends):
    "The same weights behind other implementations."
    twin = type(model)(model.config, model.dtype, model.device, backends)
    for name, place in model.weights.places.items():
        source = place.read() if hasattr(place, "read") else place
        target = twin.weights.places[name]
        target.write(source) if hasattr(target, "write") else target.copy_(source)
    return twin


def where_it_starts(name, ids):
    "The first layer whose output differs, for the message of a failure."
    model, theirs = pair(name)
    states, capture = [], Capture(hidden=[])
    hooks = [theirs.model.embed_tokens.register_forward_hook(lambda m, i, o: states.append(o[0]))]
    hooks += [layer.register_forward_hook(lambda m, i, o: states.append((o[0] if isinstance(o, tuple) else o)[0])) for layer in theirs.model.layers]
    their_logits(name, ids)
    for hook in hooks: hook.remove()
    our_logits(model, ids, None, capture)
    return first_difference(states, capture.hidden)


@pytest.mark.parametrize("name, length", [*itertools.product(MODELS, LENGTHS)])
def test_logits_in_float32(name, length, record_property):
    ids = text(length)
    model, _ = pair(name)
    wanted, close = their_logits(name, ids), close_rows(name, ids)
    for chunk in CHUNKS:
        error = (our_logits(model, ids, chunk) - wanted).abs().amax(-1)
        wrong = (error > 1e-4).nonzero().flatten().tolist()
        unexplained = [row for row in wrong if not any(c <= row for c in close)]
        assert not unexplained, f"rows {unexplained[:5]} differ by up to {error.max():.2g}; it starts at {where_it_starts(name, ids)}"
        assert len(wrong) <= 0.05 * length, f"{len(wrong)} rows after a close call differ"
    record_property("close rows", len(close))
    record_property("rows that differ after one", len(wrong))
    print(f"{name} {length}: {len(close)} rows too close to call, {len(wrong)} rows differ for it, largest difference {error.max():.2g}")


@pytest.mark.parametrize("name", MODELS)
def test_mixed_batch_through_one_cache(name):
    "Requests of 5 to 200 tokens, each in chunks of its own size, together in every step."
    model, _ = pair(name)
    prompts = [text(n, seed) for seed, n in enumerate((5, 17, 70, 200))]
    chunks, done = [5, 3, 11, 64], [0, 0, 0, 0]
    pages, count = pages_for(4, 200, seed=3)
    caches, got = Caches.new(model.config, count, model.dtype), [[] for _ in prompts]
    while any(d < len(p) for d, p in zip(done, prompts)):
        active = [i for i in range(4) if done[i] < len(prompts[i])]
        rows = [RequestRows(prompts[i][done[i]:done[i] + chunks[i]], done[i], pages[i], "none") for i in active]
        plan = StepPlan.build(rows)
        hidden = model.forward(plan, caches)
        for i, part in zip(active, hidden.split([len(r.token_ids) for r in rows])): got[i].append(part)
        for i, r in zip(active, rows): done[i] += len(r.token_ids)
    for ids, parts in zip(prompts, got):
        error = (model.logits(torch.cat(parts)) - their_logits(name, ids)).abs().amax(-1)
        close = close_rows(name, ids)
        assert not [row for row in (error > 1e-4).nonzero().flatten().tolist() if not any(c <= row for c in close)], error.max()


@pytest.mark.parametrize("name, length", [("glm-5.2", 9), ("glm-5.2", 40), ("glm-5.1", 40), ("sparse", 100), ("dense", 40)])
def test_greedy_continuations_of_64_tokens(name, length):
    model, theirs = pair(name)
    ids = text(length, seed=5)
    with torch.no_grad():
        prompt = torch.tensor([ids])      # without a mask, generate would take every pad id in the prompt for padding
        wanted = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False,
                                 eos_token_id=None, pad_token_id=0)[0, length:].tolist()
    (pages,), count = pages_for(1, length + 64)
    caches, got, new = Caches.new(model.config, count, model.dtype), [], ids
    start = 0
    for _ in range(64):
        hidden = model.forward(StepPlan.build([RequestRows(new, start, pages)]), caches)
        start += len(new)
        new = [int(model.logits(hidden[-1:]).argmax())]
        got += new
    assert got == wanted


def first_flip(name, ids):
    "The first row at which BF16 takes another expert or another position than fp32 does: from there on the two compute different things."
    seen = []
    for dtype in (torch.float32, torch.bfloat16):
        capture = Capture()
        our_logits(pair(name, dtype)[0], ids, None, capture)
        seen.append(capture)
    same = torch.ones(len(ids), dtype=torch.bool)
    if seen[0].experts is not None: same &= (seen[0].experts.sort(-1).values == seen[1].experts.sort(-1).values).flatten(1).all(1)
    for layer in seen[0].positions: same &= (seen[0].positions[layer] == seen[1].positions[layer]).all(1)
    return len(ids) if same.all() else int((~same).nonzero()[0])


BF16_BOUND = 0.03     # relative RMS error of the logits, against fp32, while both choose the same experts and positions


def test_bfloat16_within_its_bound():
    "Up to the first flip under the bound; over everything no worse than transformers' own BF16."
    clean, ours, theirs = 0, [], []
    for name, seed in itertools.product(MODELS, (2, 3, 4)):
        ids = text(60, seed)
        exact, got = their_logits(name, ids), our_logits(pair(name, torch.bfloat16)[0], ids, 7)
        flip = first_flip(name, ids)
        clean += flip
        if flip: assert relative_error(exact[:flip], got[:flip]) < BF16_BOUND, (name, seed, flip)
        ours.append(relative_error(exact, got))
        theirs.append(relative_error(exact, their_logits(name, ids, torch.bfloat16)))
    print(f"BF16: {clean} of {12 * 60} rows before a flip; mean error of all rows ours {sum(ours) / 12:.3f}, transformers {sum(theirs) / 12:.3f}")
    assert clean >= 100
    assert sum(ours) < 1.1 * sum(theirs)


def test_ties_are_seen_and_counted():
    "With two index heads many scores are exactly 0: those rows are close calls, and only rows at or after one may differ."
    MODELS["two heads"] = dict(num_hidden_layers=3, index_topk_freq=None, index_skip_topk_offset=None, index_n_heads=2)
    ids = text(120)
    wanted, close = their_logits("two heads", ids), close_rows("two heads", ids)
    error = (our_logits(pair("two heads")[0], ids, 7) - wanted).abs().amax(-1)
    del MODELS["two heads"]
    assert len(close) >= 10 and min(close) >= 16
    assert error[:min(close)].max() <= 1e-4
    print(f"two index heads: {len(close)} of 120 rows are ties, {(error > 1e-4).sum()} rows differ")


def test_the_first_differing_layer_is_named():
    "Spoil one weight of layer 4, and layer 4 is named."
    model, theirs = pair("glm-5.2")
    ids = text(40)
    assert where_it_starts("glm-5.2", ids) is None
    weight = theirs.model.layers[4].self_attn.o_proj.weight
    with torch.no_grad(): weight[0, 0] += 1.0
    try: assert where_it_starts("glm-5.2", ids).startswith("layer 4 (first at row 0")
    finally:
        with torch.no_grad(): weight[0, 0] -= 1.0
