"""The sampling kernel in Triton's interpreter: the plain form's tokens, whatever way a row takes through it."""
import dataclasses
import math

import numpy as np
import pytest
import torch

from glm52.engine.sampling import SamplingParams, SamplingTable, choose as plain, gumbel_noise, sample, sampling_batch, weight_limit, whole_weight
from glm52.kernels import sampling
from glm52.kernels.sampling import Plan, choose

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only where there is no GPU")
SMALL = Plan(piece=16, pieces=16, aim=8, aim_more=12, aim_most=24, few=16, many=64, part=16, tile=512)
INF, NAN = math.inf, math.nan


def batch_of(wishes, positions=None, choices=None):
    table, n = SamplingTable(), len(wishes)
    for line, params in enumerate(wishes): table.put(line, params, params.seed or line, choices[line] if choices else line % 3)
    return sampling_batch(table, np.arange(n), np.arange(n) * 7 + 3 if positions is None else np.array(positions), np.zeros(n, np.int64))


def peaked(rows, vocab, slope=2.0, seed=0):
    "Some tokens far above the others, as a trained model has it."
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, vocab, generator=g) * 1.5
    many = min(40, vocab)
    where = torch.rand(rows, vocab, generator=g).topk(many, 1).indices
    return z.scatter(1, where, 12 - slope * torch.arange(1, many + 1).log() + 0.3 * torch.randn(rows, many, generator=g))


def agree(z, wishes, plan=SMALL, **places):
    "Tokens equal, log-probs close; says which way each row took."
    batch = batch_of(wishes, **places)
    want, want_logprob = plain(z, batch)
    token, logprob, way = sampling.launch(z, batch, plan)
    assert torch.equal(token, want)
    fine = want >= 0
    assert torch.allclose(logprob[fine], want_logprob[fine], atol=2e-5, rtol=0)
    return way.tolist()


@interpreted
def test_a_peaked_row_is_settled_by_its_candidates():
    wishes = [SamplingParams(temperature=t, top_p=p, seed=s) for t, p, s in ((1, 0.9, 1), (0.7, 0.95, 2), (1.2, 0.5, 2**64 - 1), (0, 1, 4), (0.3, 1e-6, 5))]
    wishes += [SamplingParams(top_k=5), SamplingParams(top_k=1), SamplingParams(min_p=0.1), SamplingParams(top_k=6, top_p=0.8, min_p=0.01)]
    assert agree(peaked(len(wishes), 1003), wishes) == [0] * len(wishes)


@interpreted
def test_a_hard_row_is_searched():
    flat = torch.randn(7, 400, generator=torch.Generator().manual_seed(1)) * 0.3
    wishes = [SamplingParams(top_p=0.9), SamplingParams(top_k=200), SamplingParams(top_k=150, top_p=0.7, temperature=1.5), SamplingParams(min_p=0.3),
              SamplingParams(min_p=0.2, top_p=0.5), SamplingParams(top_k=250, min_p=0.4, top_p=0.99), SamplingParams(top_k=10**6, top_p=0.3)]
    assert agree(flat, wishes) == [1] * 7


@interpreted
def test_a_row_without_filters_draws_noise_for_all():
    z = peaked(4, 1001)
    assert agree(z, [SamplingParams(), SamplingParams(temperature=0.1), SamplingParams(temperature=1e-38), SamplingParams(temperature=1e38)]) == [2] * 4


@interpreted
@pytest.mark.parametrize("vocab", [1, 3, 65, 255])
def test_any_vocabulary(vocab):
    wishes = [SamplingParams(temperature=t, top_p=p, top_k=k) for t in (0, 1) for p in (1.0, 0.8) for k in (0, 2)]
    agree(peaked(len(wishes), vocab, seed=vocab), wishes)


@interpreted
def test_ties_equal_rows_and_infinities():
    z = torch.zeros(9, 200)
    z[1] = (peaked(1, 200)[0] * 2).round()
    z[2, ::2] = -INF
    z[3, 5:] = -INF
    z[4, 17] = 300.0
    z[5] = torch.where(torch.arange(200) % 2 == 0, 0.0, -0.0)
    z[6, 100:] = -50.0
    z[7], z[8] = -3e38, torch.linspace(-3e38, 3e38, 200)
    for fields in ({"top_k": 120, "top_p": 0.9}, {"temperature": 1e-30, "top_p": 0.9}):
        agree(z, [SamplingParams(**fields)] * 9)


@interpreted
def test_logits_as_close_as_a_tiny_temperature():
    z = torch.zeros(2, 200)
    z[0], z[1, :150] = torch.arange(200) * -1e-37, -1e-36
    agree(z, [SamplingParams(temperature=2e-37, top_p=0.9), SamplingParams(temperature=1e-36, top_p=0.95)])


@interpreted
def test_a_dead_row_stays_alone():
    z = peaked(6, 500)
    healthy = choose(z, batch_of([SamplingParams(top_p=0.9)] * 6), SMALL)
    z[1], z[2, 7], z[4, 3] = -INF, NAN, INF
    for fields in ({"top_p": 0.9}, {"temperature": 0}, {}): agree(z, [SamplingParams(**fields)] * 6)
    token, logprob = choose(z, batch_of([SamplingParams(top_p=0.9)] * 6), SMALL)
    assert token[[1, 2, 4]].tolist() == [-1] * 3
    assert torch.equal(token[[0, 3, 5]], healthy[0][[0, 3, 5]]) and torch.equal(logprob[[0, 3, 5]], healthy[1][[0, 3, 5]])


@interpreted
def test_a_row_does_not_know_its_neighbours():
    wishes = [SamplingParams(temperature=t, top_p=p, top_k=k, seed=s) for s, (t, p, k) in
              enumerate([(1, 0.9, 0), (0, 1, 0), (0.8, 1, 9), (1, 1, 0), (1.3, 0.99, 0), (1, 0.2, 300)], 1)]
    z = peaked(6, 500)
    together = choose(z, batch_of(wishes, positions=[5] * 6, choices=[1] * 6), SMALL)
    for rows in ([0], [3, 2], [5, 4, 1, 0]):
        some = choose(z[rows], batch_of([wishes[r] for r in rows], positions=[5] * len(rows), choices=[1] * len(rows)), SMALL)
        assert torch.equal(some[0], together[0][rows]) and torch.equal(some[1], together[1][rows])


@interpreted
def test_the_plan_changes_nothing_but_the_way():
    z, wishes = peaked(3, 400, slope=1.2), [SamplingParams(top_p=p) for p in (0.3, 0.8, 0.97)]
    plans = [SMALL, dataclasses.replace(SMALL, aim=1, aim_more=1, aim_most=1, tile=128), dataclasses.replace(SMALL, aim=40, many=512, piece=64, pieces=4)]
    ways = [tuple(agree(z, wishes, plan)) for plan in plans]
    assert len(set(ways)) > 1


@interpreted
def test_rows_that_lie_apart_and_sample_with_the_kernel():
    wide = peaked(3, 400)
    z = wide[:, :301]
    wishes = [SamplingParams(top_p=0.9, logprobs=2), SamplingParams(presence_penalty=1.0), SamplingParams(logit_bias={5: 100.0}, temperature=0)]
    agree(z, wishes)
    batch = batch_of(wishes[:1] + wishes[2:] + wishes[:1])
    want, got = sample(z, batch), sample(z, batch, choose=lambda z, b: choose(z, b, SMALL))
    assert torch.equal(want.token, got.token) and torch.equal(want.rank, got.rank) and torch.equal(want.top_ids, got.top_ids)
    empty = choose(z[:0], batch_of([]), SMALL)
    assert empty[0].shape == empty[1].shape == (0,)


@pytest.mark.parametrize("z,words", [(torch.zeros(2, 8, dtype=torch.float64), "float32"), (torch.zeros(2, 16)[:, ::2], "side by side"), (torch.zeros(3, 8), "3 rows"),
                                     (torch.zeros(8), "N, V"), (torch.zeros(1, 1).expand(2, 300_000), "262,144"), (torch.zeros(2, 0), "262,144")])
def test_bad_input_is_refused_before_the_launch(z, words):
    with pytest.raises(ValueError, match=words): choose(z, batch_of([SamplingParams()] * 2))


@interpreted
def test_a_runner_takes_the_kernel_by_name():
    from glm52.engine.runner import Runner
    from glm52.model.decoder import random_model, tiny_config
    model = random_model(tiny_config())
    z, batch = peaked(2, 300), batch_of([SamplingParams(temperature=0), SamplingParams(top_k=3)])
    plain_runner, runner = Runner(model, 4), Runner(model, 4, sampler="triton")
    assert torch.equal(plain_runner.sample(z, batch).token, runner.sample(z, batch).token)
    assert plain_runner.sample.keywords["choose"].name == "torch" and runner.sample.keywords["choose"].name == "triton"
    with pytest.raises(ValueError, match="no implementation 'dice'"): Runner(model, 4, sampler="dice")
