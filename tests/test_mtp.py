"""The MTP layer: the cached path against the plain one, what each step selects, and which row comes next."""
import dataclasses

import pytest
import torch

from glm52.device import Implementation, relative_error
from glm52.model.decoder import Backends, Caches, Capture, Decoder, fill, random_model, random_tensors, tiny_config as make_config
from glm52.model.mtp import accepted_rows, draft, mtp_forward, mtp_keep, naive_draft, naive_mtp, plain_hidden
from glm52.model.plan import RequestRows, StepPlan
from glm52.ops.topk import topk_torch


def text(length, seed=1):
    return torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefill(model, sequences, chunk, pages, latent="auto", index="auto"):
    """Main and MTP steps over chunks of all sequences together; the last token of each counts as just sampled.
    Returns what a drafter needs: the last MTP rows, each sequence's newest row, the caches."""
    caches = Caches.new(model.config, 1 + max(max(p) for p in pages), model.dtype, latent=latent, index=index)
    longest = max(map(len, sequences)) - 1
    starts = [longest - (len(s) - 1) for s in sequences]     # so that all end with the same step
    for low in range(0, longest, chunk):
        high = min(low + chunk, longest)
        active = [(i, max(0, low - starts[i]), high - starts[i]) for i in range(len(sequences)) if high > starts[i]]
        hidden = model.forward(StepPlan.build([RequestRows(sequences[i][a:b], a, pages[i], "none") for i, a, b in active]), caches)
        plan = StepPlan.build([RequestRows(sequences[i][a + 1:b + 1], a + 1, pages[i], "none") for i, a, b in active])
        rows = mtp_forward(model, plan, hidden, caches)
    return rows, plan.query_start[1:] - 1, caches


@pytest.mark.parametrize("length", [2, 9, 17, 18, 70, 150])
@pytest.mark.parametrize("chunk", [1, 16, 1000])
def test_cached_drafts_are_the_plain_ones(tiny_model, length, chunk):
    ids = text(length, seed=length)
    wanted, scores = naive_draft(tiny_model, ids, 5)
    rows, last, caches = prefill(tiny_model, [ids], chunk, [[4, 0, 2]])
    tokens, logits = draft(tiny_model, rows, last, caches, 5)
    assert tokens[0].tolist() == wanted
    assert relative_error(scores, logits[0]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_do_not_depend_on_company_chunks_or_pages(dtype):
    model = random_model(make_config(), dtype=dtype)
    sequences = [text(n, seed=n) for n in (3, 40, 90, 130)]
    pages = [[8], [2], [7, 1], [5, 3, 0]]
    rows, last, caches = prefill(model, sequences, 32, pages)
    together = draft(model, rows, last, caches, 4)
    for i, ids in enumerate(sequences):
        for chunk in (1, 50):
            rows, last, caches = prefill(model, [ids], chunk, [[9, 4, 6]])
            alone = draft(model, rows, last, caches, 4)
            assert torch.equal(alone[1][0], together[1][i]) and torch.equal(alone[0][0], together[0][i]), (i, chunk)


def test_bfloat16_and_fp8_caches_stay_close(tiny_model):
    "In a random model a flipped expert changes a lot, so of seven texts the best is asked for rounding only, the middle one for closeness."
    half = random_model(tiny_model.config, dtype=torch.bfloat16)
    for model, kinds, bound in ((half, ("auto", "auto"), 0.03), (tiny_model, ("fp8", "fp8"), 0.15)):
        errors = []
        for seed in range(7):
            _, exact = naive_draft(tiny_model, text(12, seed), 1)
            rows, last, caches = prefill(model, [text(12, seed)], 5, [[0]], *kinds)
            errors.append(relative_error(exact, draft(model, rows, last, caches, 1)[1][0]))
        assert 1e-4 < min(errors) < bound and sorted(errors)[3] < 0.3, errors


def probe(model):
    "The same model, whose selections are counted: rows scored, and by how many calls."
    calls = []

    def watched(scores, limit, k):
        calls.append((len(scores), k))
        return topk_torch(scores, limit, k)

    backends = dataclasses.replace(Backends.choose("cpu"), topk=Implementation("topk", "torch", watched, "counted"))
    twin = Decoder(model.config, model.dtype, "cpu", backends)
    fill(twin, random_tensors(model.config))
    return twin, calls


def test_step_0_runs_the_layers_own_indexer_and_later_steps_reuse_its_choice(tiny_model, tiny_config):
    "A public report (MT01): read as 'use the target's top-k', acceptance collapses."
    model, calls = probe(tiny_model)
    ids = text(60)
    rows, last, caches = prefill(model, [ids], 1000, [[0]])
    assert [n for n, _ in calls] == [43] * 4 + [43]     # four full layers, then the MTP layer: rows that see more than 16
    assert calls[-1][1] == tiny_config.index_topk + 1   # position 0 is struck out afterwards
    calls.clear()
    draft(model, rows, last, caches, 3)
    assert calls == []
    capture, number = Capture(), tiny_config.num_hidden_layers
    model.forward(StepPlan.build([RequestRows(ids[:-1], 0, [1], "none")]), Caches.new(tiny_config, 2, model.dtype), capture)
    mine = rows.step.positions[number][-1]
    assert all(set((capture.positions[layer][-1] + 1).tolist()) != set(mine.tolist()) for layer in tiny_config.full_layers)
    assert set((naive_mtp(model, plain_hidden(model, ids[:-1]), torch.tensor(ids[1:])).chosen[-1] + 1).tolist()) == set(mine.tolist())


def test_drafting_writes_nothing(tiny_model):
    ids = text(50)
    rows, last, caches = prefill(tiny_model, [ids], 1000, [[1]])
    before = [t.clone() for t in (*caches.latent.values(), *caches.index.values())]
    draft(tiny_model, rows, last, caches, 5)
    assert all(torch.equal(a, b) for a, b in zip(before, (*caches.latent.values(), *caches.index.values())))


def test_rows_lie_one_slot_later_and_slot_0_stays_empty(tiny_model, tiny_config):
    ids, number = text(40), tiny_config.num_hidden_layers
    rows, last, caches = prefill(tiny_model, [ids], 7, [[0]])
    assert not caches.latent[number][0, 0].any() and not caches.index[number][0, 0].any()
    assert caches.latent[number][0, 1:40].any(-1).all() and not caches.latent[number][0, 40:].any()
    caches.latent[number][0, 0], caches.index[number][0, 0] = 100.0, 100.0         # and whatever lies there is never read
    plan = StepPlan.build([RequestRows(ids[39:40], 39, [0])])
    again = mtp_forward(tiny_model, plan, plain_hidden(tiny_model, ids[:39])[-1:], caches)
    assert torch.equal(again.hidden[0], rows.hidden[-1]) and (again.step.positions[number] != 0).all()


def test_a_page_depends_on_nothing_after_it(tiny_model, tiny_config):
    "Two texts that share their first 64 tokens share the page's MTP rows, bit for bit."
    first, number = text(100), tiny_config.num_hidden_layers
    second = first[:64] + text(36, seed=9)
    pages = [prefill(tiny_model, [ids], 1000, [[0, 1]])[2] for ids in (first, second)]
    for kind in ("latent", "index"):
        a, b = (getattr(caches, kind)[number] for caches in pages)
        assert torch.equal(a[0], b[0]) and not torch.equal(a[1], b[1])


def test_draft_distribution_can_be_sampled_from(tiny_model):
    rows, last, caches = prefill(tiny_model, [text(30)], 1000, [[0]])
    seen = []

    def second_best(logits, k):
        seen.append((k, logits.shape, logits.dtype))
        return logits.topk(2).indices[:, 1]

    tokens, logits = draft(tiny_model, rows, last, caches, 3, second_best)
    assert seen == [(k, (1, 512), torch.float32) for k in range(3)] and torch.equal(tokens, logits.topk(2).indices[..., 1])
    assert not torch.equal(tokens[:, 1:], draft(tiny_model, rows, last, caches, 3)[0][:, 1:])


@pytest.mark.parametrize("spoil", ["swapped", "no norm", "norm twice"])
def test_the_classic_mistakes_are_visible(tiny_model, spoil):
    "Inputs swapped, feedback before the norm, feedback normed twice: none of them survives the comparison."
    ids = text(40)
    rows, last, caches = prefill(tiny_model, [ids], 1000, [[0]])
    _, right = draft(tiny_model, rows, last, caches, 2)
    twin = random_model(tiny_model.config)
    if spoil == "swapped": twin.mtp.eh_proj.copy_(twin.mtp.eh_proj.roll(twin.config.hidden_size, 1))
    else:
        apply, norm = twin.backends.rms_norm, twin.mtp.norm
        twin_rows, _, _ = prefill(twin, [ids], 1000, [[0]])
        rows = dataclasses.replace(twin_rows, hidden=apply(twin_rows.hidden, norm, 1e-5) if spoil == "norm twice" else twin_rows.hidden / norm)
    if spoil == "swapped": rows, last, caches = prefill(twin, [ids], 1000, [[0]])
    _, wrong = draft(twin, rows, last, caches, 2)
    assert relative_error(right, wrong) > 1e-2


def test_the_row_of_the_last_accepted_token():
    "A public report (MT03): the last padded row lies on the rejected branch."
    assert accepted_rows(torch.arange(0, 24, 6), torch.tensor([2, 5, 0])).tolist() == [2, 11, 12]
    assert accepted_rows(torch.tensor([0, 1, 4]), torch.tensor([0, 2])).tolist() == [0, 3]
    with pytest.raises(ValueError, match="accepted"): accepted_rows(torch.tensor([0, 6, 12]), torch.tensor([2, 6]))


def test_hidden_states_must_fit_the_rows(tiny_model, tiny_config):
    plan = StepPlan.build([RequestRows([1, 2], 1, [0])])
    with pytest.raises(ValueError, match=r"2 rows need hidden states \[2, 128\]"):
        mtp_forward(tiny_model, plan, torch.zeros(3, 128), Caches.new(tiny_config, 1, torch.float32))


@pytest.mark.parametrize("length", [1, 9, 70])
def test_rows_that_nobody_drafts_from_are_written_with_the_same_bits(tiny_model, tiny_config, length):
    "`mtp_keep` stops before attention and experts; what it leaves in the caches is what `mtp_forward` leaves."
    plan = StepPlan.build([RequestRows(text(length), 3, [1, 0], "none")])
    hidden, number = torch.randn(length, tiny_config.hidden_size), tiny_config.num_hidden_layers
    whole, kept = (Caches.new(tiny_config, 2, torch.float32) for _ in range(2))
    mtp_forward(tiny_model, plan, hidden, whole)
    mtp_keep(tiny_model, plan, hidden, kept)
    assert kept.latent[number].any() and torch.equal(whole.latent[number], kept.latent[number]) and torch.equal(whole.index[number], kept.index[number])
    assert not any(cache.any() for layer, cache in kept.latent.items() if layer != number)
