"""lm_head, the absorbed projections and the kernels around speculation, in Triton's interpreter."""
import math

import pytest
import torch

from glm52.device import relative_error
from glm52.kernels import absorb, head, mtp
from glm52.ops.norm import naive_rms_norm
from glm52.ops.rope import cos_sin, inv_freq, rotate

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only where there is no GPU")
TILE = (64, 16, 32, 4, 2)


def half(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


# lm_head

@interpreted
@pytest.mark.parametrize("rows,vocab", [(1, 1), (3, 64), (16, 65), (17, 200)])
def test_lm_head(rows, vocab):
    hidden, weight = half(rows, 64), half(vocab, 64, seed=1)
    want = hidden.float() @ weight.float().T
    got = head.lm_head(hidden, weight, shape=TILE)
    assert got.dtype == torch.float32 and relative_error(want, got) < 3e-6
    token, logprob = head.best_token(hidden, weight, shape=TILE)
    assert torch.equal(token, got.argmax(1)) and torch.allclose(logprob, got.log_softmax(1).amax(1), atol=1e-5)
    for r in (0, rows - 1): assert torch.equal(head.lm_head(hidden[r:r + 1], weight, shape=TILE)[0], got[r])


@interpreted
def test_equal_scores_go_to_the_lowest_token():
    hidden, weight = half(2, 64), half(300, 64)
    weight[[70, 75, 200]] = (hidden[0] * 4).half()
    weight[[250, 9]] = (hidden[1] * 4).half()
    assert head.best_token(hidden, weight, shape=TILE)[0].tolist() == [70, 9]
    assert head.best_token(hidden * 0, weight, shape=TILE)[0].tolist() == [0, 0]


@interpreted
def test_a_row_without_a_token():
    hidden, weight = half(4, 64), half(130, 64)
    hidden[1, 3], hidden[2, 5] = math.nan, math.inf
    token, _ = head.best_token(hidden, weight, shape=TILE)
    alone = head.best_token(hidden[[0, 3]], weight, shape=TILE)[0]
    assert token.tolist() == [alone[0], -1, -1, alone[1]]


@interpreted
def test_rows_beyond_the_last():
    store, weight = half(20, 64), half(100, 64)
    store[5:] = math.nan
    got = head.lm_head(store[:5], weight, shape=TILE)
    assert torch.equal(got, head.lm_head(store[:5].clone(), weight, shape=TILE)) and got.isfinite().all()
    assert head.lm_head(store[:0], weight, shape=TILE).shape == (0, 100) and head.best_token(store[:0], weight, shape=TILE)[0].shape == (0,)


@pytest.mark.parametrize("hidden,weight,words", [(half(2, 64), half(9, 32), "do not fit"), (half(2, 64).float(), half(9, 64), "bfloat16 or float16"),
                                                 (half(2, 100), half(9, 100), "multiples of"), (half(128, 2).T, half(9, 128), "16 bytes"),
                                                 (half(64), half(9, 64), "do not fit")])
def test_lm_head_refuses(hidden, weight, words):
    with pytest.raises(ValueError, match=words): head.lm_head(hidden, weight)


# absorbed projections

@interpreted
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_queries(rows, interleave):
    q, w, (cos, sin) = half(rows, 3, 48 + 16), half(3, 48, 64, seed=2) * 0.2, cos_sin(torch.arange(rows) * 1000, inv_freq(16, 1e4))
    got = absorb.absorb_queries(q, w, cos, sin, interleave, shape=(16, 32, 16, 4, 2))
    want = torch.einsum("thk,hkn->thn", q[..., :48].float(), w.float())
    assert got.shape == (rows, 3, 80) and relative_error(want, got[..., :64].float()) < 1e-3
    assert torch.equal(got[..., 64:], rotate(q[..., 48:], cos, sin, interleave))
    assert torch.equal(got[-1:], absorb.absorb_queries(q[-1:], w, cos[-1:], sin[-1:], interleave, shape=(16, 32, 16, 4, 2)))


@interpreted
def test_values_of_rows_that_lie_apart():
    wide, w = half(9, 4, 80), half(4, 64, 32, seed=3) * 0.2
    got = absorb.absorb_values(wide[..., :64], w, shape=(16, 16, 16, 4, 2))
    assert relative_error(torch.einsum("thk,hkn->thn", wide[..., :64].float(), w.float()), got.float()) < 1e-3
    assert torch.equal(got, absorb.absorb_values(wide[..., :64].contiguous(), w, shape=(16, 16, 16, 4, 2)))
    assert absorb.absorb_values(wide[:0, :, :64], w, shape=(16, 16, 16, 4, 2)).shape == (0, 4, 32)


def test_absorb_refuses():
    q, w, (cos, sin) = half(2, 4, 256), half(4, 192, 512), cos_sin(torch.arange(2), inv_freq(64, 1e4))
    for arguments, words in (((q[:, :3], w, cos, sin), "3 heads"), ((q[..., :200], w, cos, sin), "200"), ((q, w.float(), cos, sin), "float32"),
                             ((q, w, cos[:1], sin[:1]), "cos"), ((q, w.transpose(1, 2).contiguous().transpose(1, 2), cos, sin), "one piece")):
        with pytest.raises(ValueError, match=words): absorb.absorb_queries(*arguments)
    with pytest.raises(ValueError, match="multiples"): absorb.absorb_values(half(2, 4, 104), half(4, 104, 256))


# speculation

@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mtp_input(dtype):
    embed, hidden, tokens = half(20, 100).to(dtype), half(5, 130, seed=1).to(dtype)[:, :100], torch.tensor([3, 19, 0, 3, 7])
    enorm, hnorm = half(100, seed=2).to(dtype), half(100, seed=3).to(dtype)
    got = mtp.mtp_input(tokens, embed, hidden, enorm, hnorm, 1e-5)
    want = torch.cat([naive_rms_norm(embed[tokens], enorm, 1e-5), naive_rms_norm(hidden, hnorm, 1e-5)], -1)
    assert relative_error(want, got) < (1e-6 if dtype == torch.float32 else 1e-3)
    assert torch.equal(got[2:3], mtp.mtp_input(tokens[2:3], embed, hidden[2:3], enorm, hnorm, 1e-5))
    assert mtp.mtp_input(tokens[:0], embed, hidden[:0], enorm, hnorm, 1e-5).shape == (0, 200)


def plain_accept(token, drafts, at, real):
    "In Python: accepted, given, and the samples at the places of each chain."
    own, accepted, count = token[at], [], []
    for chain in range(len(drafts)):
        n = 0
        while n < drafts.shape[1] and real[chain, n] and drafts[chain, n] >= 0 and drafts[chain, n] == own[chain, n]: n += 1
        accepted.append(n)
        count.append(n + int(own[chain, n] >= 0))
    return torch.tensor(accepted), torch.tensor(count), own


@interpreted
@pytest.mark.parametrize("chains,longest", [(1, 1), (5, 3), (33, 7), (4, 0)])
def test_accept(chains, longest):
    g = torch.Generator().manual_seed(chains)
    granted = torch.randint(0, longest + 1, (chains,), generator=g)
    start = (granted + 1).cumsum(0) - granted - 1
    at = start[:, None] + torch.arange(longest + 1).minimum(granted[:, None])
    real = torch.arange(longest) < granted[:, None]
    token = torch.randint(-1, 2, (int((granted + 1).sum()),), generator=g)
    drafts = torch.randint(-1, 2, (chains, longest), generator=g)
    got = mtp.accept(token, drafts, at, real)
    for a, b in zip(plain_accept(token, drafts, at, real), got, strict=True): assert torch.equal(a, b)
    row = at.gather(1, got[0][:, None])[:, 0]
    assert torch.equal(mtp.accepted_rows(at, got[0]), row)


def test_mtp_kernels_refuse():
    embed, hidden, tokens, norm = half(20, 100), half(5, 100), torch.zeros(5, dtype=torch.int64), half(100)
    for arguments, words in (((tokens[:4], embed, hidden, norm, norm), "4 tokens"), ((tokens.int(), embed, hidden, norm, norm), "int64"),
                             ((tokens, embed[:, :50], hidden, norm, norm), "50"), ((tokens, embed.float(), hidden, norm, norm), "float32"),
                             ((tokens, embed, hidden, norm[:9], norm), "enorm")):
        with pytest.raises(ValueError, match=words): mtp.mtp_input(*arguments, 1e-5)
    whole, flags = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.bool)
    for arguments, words in (((tokens, whole[:, :2], whole[:1], flags), "at"), ((tokens, whole[:, :2].int(), whole, flags), "int64"), ((tokens, whole[:, :2], whole, flags.int()), "bool"),
                             ((tokens, torch.zeros(5000, 2, dtype=torch.int64), torch.zeros(5000, 3, dtype=torch.int64), torch.zeros(5000, 2, dtype=torch.bool)), "4,096")):
        with pytest.raises(ValueError, match=words): mtp.accept(*arguments)


@interpreted
def test_a_model_bound_to_these_kernels_says_what_the_plain_one_does():
    from glm52.model.decoder import Backends, Caches, Decoder, fill, random_tensors, tiny_config
    from glm52.model.plan import RequestRows, StepPlan
    config = tiny_config(num_attention_heads=2, qk_nope_head_dim=64, kv_lora_rank=128, v_head_dim=64, vocab_size=300)
    plan, hidden = StepPlan.build([RequestRows([5, 9, 2], 0, [0])]), []
    for name in ("torch", "triton"):
        wishes = dict.fromkeys(("absorb_queries", "absorb_values", "lm_head", "mtp_input"), name)
        model = Decoder(config, torch.float16, "cpu", Backends.choose("cpu", config, torch.float16, **wishes))
        fill(model, random_tensors(config))
        state = model.forward(plan, Caches.new(config, 1, torch.float16))
        hidden.append((state, model.logits(state), model.mtp.merge(state, type("Step", (), {"plan": plan}))))
    for want, got in zip(*hidden): assert relative_error(want, got) < 5e-3
