"""Rejection keeps the distribution: counted over 200,000 chains, against the exact product of the model's own distributions."""
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from test_speculation import with_mtp
from test_engine import Told

from glm52.engine.engine import LLM
from glm52.engine.sampling import SamplingParams, SamplingTable, naive_process, process, sample, sampling_batch
from glm52.engine.speculation import Chains, accept_coupled, accept_rejection, log_distribution, naive_rejection

CASES = {case["id"]: case for line in (Path(__file__).parent / "cases" / "public-reports.jsonl").read_text().splitlines() if (case := json.loads(line))}
V = 6


def chi_square(seen, want):
    "The probability of a deviation at least this large, over cells that expect 8 or more; the others count together."
    small = want < 8
    a, b = (torch.cat([x[~small], x[small].sum()[None]]) for x in (seen, want))
    a, b = a[b > 0], b[b > 0]
    return float(torch.special.gammaincc(torch.tensor((len(a) - 1) / 2).double(), ((a - b) ** 2 / b).sum() / 2))


def tables(seed, nearness=1.0):
    "Logits of the next token by the last one: the model's, and a draft's that is near it."
    g = torch.Generator().manual_seed(seed)
    model = torch.randn(V, V, generator=g)
    return model, model + nearness * torch.randn(V, V, generator=g)


def wishes(params, count, seed=0):
    "A table in which every line is another request's."
    table = SamplingTable(count)
    table.put(0, params, 0)
    table.reals[:count], table.wholes[:count] = table.reals[0], table.wholes[0]
    table.wholes[:count, 1] = np.random.default_rng(seed).integers(-2**62, 2**62, count)      # the seeds
    return table


def verify(model, draft, table, last, position, k, rule):
    "One step for S chains, as the engine does it: guess, compute, accept."
    count = len(last)
    lines, token, drawn, log_q = np.arange(count), last, [], []
    for j in range(k):
        batch = sampling_batch(table, lines, np.asarray(position) + j, np.zeros(count, np.int64))
        drawn.append(sample(draft[token], batch).token)
        log_q.append(log_distribution(process(draft[token], batch), batch))
        token = drawn[-1]
    chains = Chains.new(np.full(count, k))
    drafts = torch.stack(drawn, 1)
    rows = chains.of_rows(torch.cat([last[:, None], drafts], 1))
    batch = sampling_batch(table, chains.owner, np.asarray(position)[chains.owner] + chains.place, np.zeros(len(rows), np.int64))
    logits = model[rows]
    if rule == "coupled": return accept_coupled(sample(logits, batch).token, drafts, chains)
    z = process(logits, batch)
    return accept_rejection(log_distribution(z, batch), batch, torch.ones(len(rows), dtype=torch.bool), drafts, torch.stack(log_q, 1), torch.arange(count), chains)


def texts(model, draft, params, count, k, length, rule="rejection"):
    "Texts [count, length] after token 0, in as many steps as they take, and the shares of guesses right by place."
    table, have = wishes(params, count), torch.zeros(count, dtype=torch.int64)
    text = torch.zeros(count, length + k + 2, dtype=torch.int64)
    right, judged = torch.zeros(k), torch.zeros(k)
    while (alive := torch.nonzero(have < length)[:, 0]).numel():
        some = SamplingTable(len(alive))
        some.reals, some.wholes = table.reals[alive.numpy()], table.wholes[alive.numpy()]
        at = have[alive]
        verdict = verify(model, draft, some, text[alive, at], (at + 1).numpy(), k, rule)
        for j in range(k):
            right[j] += (verdict.accepted > j).sum()
            judged[j] += (verdict.accepted >= j).sum()
        for j in range(k + 1):
            real = j < verdict.count
            place = torch.where(real, at + 1 + j, text.shape[1] - 1)
            text[alive, place.clamp_max(text.shape[1] - 1)] = verdict.tokens[:, j]
        have[alive] += verdict.count
    return text[:, 1:length + 1], right / judged


def expected(model, params, length):
    "The probability of every text [V ** length]."
    p = torch.stack([naive_process(row, params).exp() for row in model]).double()
    all_ = p[0]
    for _ in range(length - 1): all_ = (all_.view(-1, V)[:, :, None] * p).view(-1)
    return all_


SETTINGS = {"temperature 0.3": dict(temperature=0.3), "temperature 1": dict(temperature=1.0), "top-p 0.9": dict(temperature=1.0, top_p=0.9)}


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("setting", SETTINGS)
def test_200_000_texts_are_distributed_as_the_models(setting, k):
    "Texts of three tokens, all 216 of them; a text that cannot be has never been seen."
    model, draft = tables(seed=k)
    params, count = SamplingParams(**SETTINGS[setting]), 200_000
    text, _ = texts(model, draft, params, count, k, 3)
    seen = torch.bincount((text * torch.tensor([V * V, V, 1])).sum(1), minlength=V ** 3).double()
    want = expected(model, params, 3) * count
    assert seen[want == 0].sum() == 0
    assert chi_square(seen, want) > 1e-3


def test_the_test_can_fail():
    "Accepting without the residual, or with a coin that is the noise's own, is found."
    from glm52.engine import speculation
    model, draft = tables(seed=3)
    params, want = SamplingParams(temperature=1.0), expected(tables(seed=3)[0], SamplingParams(temperature=1.0), 1) * 50_000
    for spoil in ("COIN", "RESIDUAL"):
        before = getattr(speculation, spoil)
        setattr(speculation, spoil, 0)
        try: text, _ = texts(model, draft, params, 50_000, 1, 1)
        finally: setattr(speculation, spoil, before)
        seen = torch.bincount(text[:, 0], minlength=V).double()
        assert chi_square(seen, want) < 1e-6, spoil


@pytest.mark.parametrize("nearness", [0.3, 1.0, 3.0])
def test_acceptance_is_what_the_formulas_say(nearness):
    "1 - TV for rejection, the sum over coupled arguments for coupled, and less for a one-hot guess."
    model, draft = tables(seed=9, nearness=nearness)
    p, q = model[0].softmax(0), draft[0].softmax(0)
    params, shares = SamplingParams(temperature=1.0), {}
    for rule in ("coupled", "rejection"): shares[rule] = float(texts(model, draft, params, 40_000, 1, 1, rule)[1][0])
    coupled = float((1 / torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum())
    tv = float((p - q).abs().sum() / 2)
    assert abs(shares["rejection"] - (1 - tv)) < 0.012 and abs(shares["coupled"] - coupled) < 0.012
    assert (1 - tv) / (1 + tv) - 1e-6 <= coupled <= 1 - tv + 1e-6


def test_public_case_sa04_the_draft_distribution_counts():
    given_, expect = CASES["SA04"]["given"], CASES["SA04"]["expect"]
    pad = torch.full((V - 3,), -30.0)
    model, draft = (torch.cat([torch.tensor(given_[name]).log(), pad]).repeat(V, 1) for name in "pq")
    text, right = texts(model, draft, SamplingParams(temperature=1.0), 100_000, 1, 1)
    assert abs(float(right[0]) - expect["accept_rate"]) < 0.01 and abs(float(right[0]) - expect["not"]) > 0.2
    assert torch.allclose(torch.bincount(text[:, 0], minlength=V)[:3] / 100_000, torch.tensor(expect["output_distribution"]), atol=0.01)


def test_the_plain_form_and_the_fast_one_agree():
    "The same coins and the same noise: the same chains, for mixed depths, filters and temperature 0."
    from glm52.engine.sampling import gumbel_noise, random_words
    from glm52.engine.speculation import COIN, RESIDUAL
    rng = random.Random(5)
    model, draft = tables(seed=11)
    for trial in range(60):
        params = SamplingParams(temperature=rng.choice((0, 0.5, 1.0)), top_p=rng.choice((1, 0.8)), top_k=rng.choice((0, 3)), seed=rng.randrange(2**60))
        k, position, last = rng.choice((1, 2, 4)), rng.randrange(1, 900), rng.randrange(V)
        table = SamplingTable(1)
        table.put(0, params, params.seed)
        got = verify(model, draft, table, torch.tensor([last]), [position], k, "rejection")
        seed, zero = torch.tensor([params.seed]), torch.zeros(1, dtype=torch.int64)
        noise = lambda at, purpose: gumbel_noise(seed, torch.tensor([at]), zero, V, purpose)[0]
        one = lambda row: naive_process(row, params).exp() if params.temperature else torch.nn.functional.one_hot(row.argmax(), V).float()
        token, p, q, drafts = last, [], [], []
        for j in range(k):
            p.append(one(model[token])); q.append(one(draft[token]))
            token = int((q[-1].log() + noise(position + j, 0)).argmax())
            drafts.append(token)
        p.append(one(model[token]))
        coins = [float((random_words(seed, torch.tensor([position + j]), zero, 1, COIN)[0, 0].double() + 0.5) * 2.0 ** -32) for j in range(k)]
        want = naive_rejection(p, q, drafts, coins, [noise(position + j, RESIDUAL) for j in range(k)] + [noise(position + k, 0)])
        assert got.tokens[0, :int(got.count[0])].tolist() == want, trial


def test_the_engine_keeps_the_distribution_too(monkeypatch):
    "Through scheduler, runner and pages: 2,000 requests, a told decoder, guesses from another told decoder."
    from glm52.engine import runner
    from glm52.engine.runner import Guesses
    g = torch.Generator().manual_seed(2)
    model = torch.randn(V, V, generator=g)
    draft = model + torch.randn(V, V, generator=g)

    def guess(self, step, sampled, chains, arrays, plan, before, masks):
        "The runner's own, with logits that are told."
        some = np.flatnonzero(chains.granted)
        drawn, log_q = [], []
        choose = runner._chooser(self, [step.rows[i] for i in sampled[some].tolist()], drawn, log_q, masks, some.tolist())
        token = plan.token_ids[plan.query_start[torch.from_numpy(sampled[some])]]
        for j in range(int(chains.granted.max())): token = choose(draft[token], j)
        tokens = torch.full(chains.real.shape, -1)
        tokens[torch.from_numpy(some)] = torch.stack(drawn, 1)
        drafter = torch.zeros(len(chains.granted), dtype=torch.int64)
        drafter[torch.from_numpy(some)] = torch.arange(len(some))
        plan.token_ids[plan.sample_rows] = chains.of_rows(torch.cat([plan.token_ids[plan.sample_rows[chains.at[:, :1]]], tokens.clamp_min(0)], 1))
        return Guesses(tokens, torch.stack(log_q, 1), drafter)

    monkeypatch.setattr(runner, "_guess", guess)
    monkeypatch.setattr(runner, "_follow", lambda *args: None)

    llm = LLM(with_mtp(Told(lambda token, position: model[token], V)), num_pages=256, max_model_len=64, max_num_seqs=256, num_speculative_tokens=3, acceptance="rejection", enable_prefix_caching=False)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=1 + 2, ignore_eos=True) for i in range(2000)]
    out = llm.generate([{"prompt_token_ids": [0]}] * 2000, params, use_tqdm=False)
    seen = torch.bincount(torch.tensor([r.outputs[0].token_ids for r in out]) @ torch.tensor([V * V, V, 1]), minlength=V ** 3).double()
    want = expected(model, SamplingParams(temperature=1.0), 3) * 2000
    assert chi_square(seen, want) > 1e-3
    assert 0.3 < sum(llm.engine.drafts.accepted) / sum(llm.engine.drafts.proposed) < 0.95


def test_temperature_0_is_the_same_under_both_rules(tiny_model):
    "One-hot distributions: accept while equal."
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": [3 + i, 9, 40 + i]} for i in range(4)]
    got = [LLM(tiny_model, num_pages=60, num_speculative_tokens=k, acceptance=rule).generate(prompts, params, use_tqdm=False) for k, rule in ((0, "coupled"), (3, "rejection"))]
    assert [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in got[0]] == [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in got[1]]


def test_a_rejection_text_repeats_with_its_seed(tiny_model):
    params = SamplingParams(temperature=1, max_tokens=40, ignore_eos=True, seed=4, n=2, frequency_penalty=0.5, top_p=0.9)
    a, b = (LLM(tiny_model, num_pages=60, num_speculative_tokens=3, acceptance="rejection").generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)[0] for _ in range(2))
    assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs] and a.outputs[0].token_ids != a.outputs[1].token_ids
