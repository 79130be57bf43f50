"""The kernels of the model's end on a Hopper GPU: real shapes, BF16, the plain form's tokens, the same bits twice."""
import math

import numpy as np
import pytest
import torch

from glm52.bench_head import peaked_logits, wishes
from glm52.device import relative_error
from glm52.engine.sampling import SamplingParams, SamplingTable, choose as plain_choose, gumbel_noise, sampling_batch, whole_weight
from glm52.kernels import absorb, head, mtp, sampling
from glm52.ops.norm import naive_rms_norm
from glm52.ops.rope import cos_sin, inv_freq, rotate

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]
V = 154880


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


# sampling

def test_noise_and_weights_have_the_bits_of_the_cpu():
    rows = torch.arange(4)
    noise = gumbel_noise(rows * 10**15, rows, rows, V)
    assert torch.equal(noise, gumbel_noise(rows.cuda() * 10**15, rows.cuda(), rows.cuda(), V).cpu())
    z = torch.arange(400_001) / -10_000
    assert torch.equal(whole_weight(z), whole_weight(z.cuda()).cpu())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fields", [{"top_p": 0.95}, {"top_p": 0.5, "temperature": 0.6}, {}, {"temperature": 0}, {"top_k": 50, "top_p": 0.9}, {"top_k": 3000, "temperature": 1.5, "top_p": 0.9},
                                    {"min_p": 0.05}, {"min_p": 1e-4, "top_p": 0.8, "temperature": 1.2}, {"top_k": 1}, {"top_p": 0.9, "temperature": 2.0}])
def test_tokens_are_the_plain_forms(fields, overlap):
    plan = sampling.Plan(overlap=overlap)
    for name, z in (("peaked", peaked_logits(48, V)), ("flat", normal(48, V, dtype=torch.float32)), ("ties", (peaked_logits(48, V) * 2).round() / 2), ("equal", torch.zeros(16, V, device="cuda"))):
        batch = wishes(len(z), SamplingParams(**fields))
        want, want_logprob = plain_choose(z, batch)
        token, logprob = sampling.choose(z, batch, plan)
        assert torch.equal(want, token), name
        assert torch.allclose(want_logprob, logprob, atol=1e-4), name
        again = sampling.choose(z, batch, plan)
        assert torch.equal(token, again[0]) and torch.equal(logprob, again[1])


def test_rows_of_every_kind_in_one_batch_and_alone():
    kinds = [SamplingParams(temperature=t, top_p=p, top_k=k, min_p=m, seed=s) for s, (t, p, k, m) in
             enumerate([(1, 0.95, 0, 0.0), (0, 1, 0, 0.0), (1, 1, 0, 0.0), (0.7, 1, 40, 0.0), (1.5, 0.99, 0, 0.0), (1, 0.9, 0, 0.02), (1, 0.9, 100_000, 0.0), (2, 1, 0, 0.3)], 1)]
    def batch_of(rows):
        table = SamplingTable()
        for line, r in enumerate(rows): table.put(line, kinds[r % len(kinds)], kinds[r % len(kinds)].seed)
        return sampling_batch(table, np.arange(len(rows)), np.array(rows) + 3, np.zeros(len(rows), np.int64), "cuda")
    z = torch.cat([peaked_logits(24, V), normal(8, V, dtype=torch.float32)])
    z[3, 5], z[9], z[17, 100] = math.nan, -math.inf, math.inf
    together = sampling.choose(z, batch_of(range(32)))
    want, _ = plain_choose(z, batch_of(range(32)))
    assert torch.equal(together[0], want) and (want[[3, 9, 17]] == -1).all()
    for rows in ([0], [31], [4, 2, 26], list(range(31, 8, -2))):
        some = sampling.choose(z[rows], batch_of(rows))
        assert torch.equal(some[0], together[0][rows]) and torch.equal(some[1].nan_to_num(7), together[1][rows].nan_to_num(7))


def test_sampling_in_a_graph():
    z, batch = peaked_logits(8, V), wishes(8, SamplingParams(top_p=0.95))
    want = sampling.choose(z, batch)[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): token, _ = sampling.choose(z, batch)
    token.zero_()
    graph.replay()
    assert torch.equal(token, want)


# head

@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 65, 256, 300])
def test_lm_head(rows):
    hidden, weight = normal(rows, 6144), normal(20011, 6144, seed=1) * 0.02
    logits, (token, logprob) = head.lm_head(hidden, weight), head.best_token(hidden, weight)
    assert relative_error(hidden.float() @ weight.float().T, logits) < 1e-4
    assert torch.equal(token, logits.argmax(1)) and torch.allclose(logprob, logits.log_softmax(1).amax(1), atol=1e-4)
    assert torch.equal(logits, head.lm_head(hidden, weight)) and torch.equal(token, head.best_token(hidden, weight)[0])


def test_exact_logits_do_not_depend_on_the_batch():
    hidden, weight = normal(300, 6144), normal(5000, 6144, seed=1) * 0.02
    together = head.lm_head(hidden, weight, exact=True)
    for rows in (slice(7, 8), slice(0, 16), slice(100, 165), slice(20, 300)): assert torch.equal(head.lm_head(hidden[rows], weight, exact=True), together[rows])
    assert torch.equal(head.best_token(hidden[:3], weight, exact=True)[0], head.best_token(hidden, weight, exact=True)[0][:3])


# absorbed projections

@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 100, 256, 1000])
def test_absorb(rows):
    q, w_uk, w_uv, o = normal(rows, 64, 256), normal(64, 192, 512, seed=1) * 0.07, normal(64, 512, 256, seed=2) * 0.04, normal(rows, 64, 512, seed=3)
    cos, sin = cos_sin(torch.arange(rows, device="cuda") * 1000, inv_freq(64, 8e6).cuda())
    for interleave in (True, False):
        got = absorb.absorb_queries(q, w_uk, cos, sin, interleave)
        assert relative_error(torch.einsum("thk,hkn->thn", q[..., :192].float(), w_uk.float()), got[..., :512].float()) < 3e-3
        assert relative_error(rotate(q[..., 192:], cos, sin, interleave), got[..., 512:]) < 3e-3
    values = absorb.absorb_values(o, w_uv)
    assert relative_error(torch.einsum("thk,hkn->thn", o.float(), w_uv.float()), values.float()) < 3e-3
    assert torch.equal(values, absorb.absorb_values(o, w_uv)) and torch.equal(got, absorb.absorb_queries(q, w_uk, cos, sin, False))
    exact = absorb.absorb_values(o, w_uv, exact=True)
    assert torch.equal(exact[-1:], absorb.absorb_values(o[-1:], w_uv, exact=True))


# speculation

@pytest.mark.parametrize("rows", [1, 7, 256])
def test_mtp_input_and_verdict(rows):
    embed, hidden, enorm, hnorm = normal(5000, 6144), normal(rows, 6144, seed=1), normal(6144, seed=2), normal(6144, seed=3)
    tokens = torch.randint(5000, (rows,), device="cuda")
    want = torch.cat([naive_rms_norm(embed[tokens].float(), enorm.float(), 1e-5), naive_rms_norm(hidden.float(), hnorm.float(), 1e-5)], -1)
    assert relative_error(want, mtp.mtp_input(tokens, embed, hidden, enorm, hnorm, 1e-5).float()) < 3e-3
    at = torch.arange(rows * 6, device="cuda").view(rows, 6)
    samples, drafts = torch.randint(-1, 2, (rows * 6,), device="cuda"), torch.randint(-1, 2, (rows, 5), device="cuda")
    real = torch.rand(rows, 5, device="cuda") < 0.9
    accepted, count, own = mtp.accept(samples, drafts, at, real)
    holds = ((samples[at][:, :-1] == drafts) & real & (drafts >= 0)).long().cumprod(1).sum(1)
    assert torch.equal(accepted, holds) and torch.equal(own, samples[at])
    assert torch.equal(count, holds + (own.gather(1, holds[:, None])[:, 0] >= 0))
