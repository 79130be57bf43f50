"""Sampling: validation, the noise, the stages, and rows that do not know their neighbours."""
import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from glm52.engine.sampling import (MAX_STOP, SamplingError, SamplingParams, SamplingTable, TokenCounts, fixed_log, gumbel_noise,
                                   naive_philox, naive_process, order_key, philox, random_words, sample, sampling_batch, unpack_mask,
                                   weight_limit, whole_weight)

LOW = 0xFFFFFFFF


def run(logits, wishes, position=0, said=None, ends=(), generated=None, mask=None, choice=None):
    "Sample rows with these wishes together; `said` is (prompt, output) for each."
    table, n = SamplingTable(2), len(wishes)
    counts = TokenCounts(logits.shape[1])
    for line, params in enumerate(wishes):
        table.put(line, params, params.seed or 0, 0 if choice is None else choice[line], ends)
        counts.start(line, *(said[line] if said else ([], [])))
    if generated is None: generated = [len(said[i][1]) if said else 0 for i in range(n)]
    batch = sampling_batch(table, np.arange(n), np.zeros(n, np.int64) + position, np.array(generated))
    return sample(logits, batch, None if batch.penalised is None else counts.rows(batch.penalised.tolist()), mask)


# validation

@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", None, True, 1j, np.float32("nan")])
def test_every_float_must_be_a_finite_number(field, value):
    with pytest.raises(SamplingError, match=f"^{field} "): SamplingParams(**{field: value})


@pytest.mark.parametrize("fields", [
    {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.01}, {"min_p": -0.1}, {"min_p": 1.1}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1},
    {"repetition_penalty": 0.0}, {"repetition_penalty": -1.0}, {"top_k": -2}, {"top_k": 1.5}, {"n": 0}, {"n": 1000}, {"n": True}, {"seed": 2**64},
    {"seed": -2**63 - 1}, {"seed": 0.5}, {"seed": 10**6000}, {"temperature": 10**400}, {"temperature": "x" * 10**6}, {"max_tokens": -1}, {"max_tokens": "3"}, {"min_tokens": -1}, {"min_tokens": 17}, {"stop": ["x"] * (MAX_STOP + 1)},
    {"stop": [""]}, {"stop": [3]}, {"stop": "x" * 5000}, {"stop_token_ids": [-1]}, {"stop_token_ids": list(range(MAX_STOP + 1))}, {"stop_token_ids": "7"},
    {"stop_token_ids": [1.5]}, {"logprobs": -1}, {"logprobs": 10**6}, {"prompt_logprobs": -2}, {"logit_bias": {1: math.nan}}, {"logit_bias": {1: 101}},
    {"logit_bias": {-1: 1}}, {"logit_bias": {"a": 1}}, {"logit_bias": [1]}, {"logit_bias": {i: 1 for i in range(2000)}}, {"ignore_eos": 1},
    {"detokenize": "no"}])
def test_a_bad_field_is_named(fields):
    (name,) = fields
    with pytest.raises(SamplingError) as error: SamplingParams(**fields)
    assert str(error.value).startswith(name) and len(str(error.value)) < 200


def test_bounds_are_legal():
    SamplingParams(temperature=0, top_p=1, min_p=1.0, seed=2**64 - 1, max_tokens=0, top_k=-1, logprobs=0)
    SamplingParams(seed=-2**63, max_tokens=None, min_tokens=5, stop=None, stop_token_ids=None, logit_bias=None, n=np.int64(2))
    assert SamplingParams(stop="a").stop == ("a",) and SamplingParams(top_k=-1).top_k == 0
    with pytest.raises(SamplingError, match="detokenize"): SamplingParams(stop="a", detokenize=False)


def test_ids_beyond_the_vocabulary_are_refused():
    SamplingParams(logit_bias={9: 1}, stop_token_ids=[9]).check_vocabulary(10)
    for fields in ({"logit_bias": {10: 1}}, {"stop_token_ids": [10]}):
        with pytest.raises(SamplingError, match="10"): SamplingParams(**fields).check_vocabulary(10)


# noise

KNOWN = [((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), ((LOW,) * 4, (LOW,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
         ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1")]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_gives_the_published_vectors(counter, key, words):
    expected = tuple(int(word, 16) for word in words.split())
    assert naive_philox(counter, key) == expected
    assert tuple(word.item() for word in philox([torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key])) == expected


word = st.integers(0, LOW)
@settings(deadline=None, max_examples=60)
@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_philox_on_tensors_equals_philox_on_integers(counter, key):
    got = philox([torch.tensor([[c]]) for c in counter], [torch.tensor([k]) for k in key])
    assert tuple(w.item() for w in got) == naive_philox(counter, key)


def test_every_part_of_the_address_counts():
    base = dict(seed=5, position=9, choice=1, purpose=0)
    words = lambda **changed: random_words(*(torch.tensor([(base | changed)[name]]) for name in ("seed", "position", "choice")), 64, (base | changed)["purpose"])[0]
    assert len(set(words().tolist())) == 64
    for changed in (dict(seed=6), dict(seed=5 + 2**40), dict(seed=-5), dict(position=10), dict(choice=0), dict(purpose=1)):
        assert not (words() == words(**changed)).any()


def test_noise_is_finite_at_both_ends():
    for w in (0, 1, LOW - 1, LOW):
        uniform = torch.tensor([w]).float().add_(0.5).mul_(2.0 ** -32).clamp_(max=1 - 2.0 ** -24)
        assert torch.isfinite(-torch.log(-torch.log1p(-uniform))).all()
    noise = gumbel_noise(torch.arange(50), torch.arange(50), torch.zeros(50, dtype=torch.int64), 3001)
    assert noise.isfinite().all() and -3 < noise.min() and noise.max() < 23
    assert abs(noise.mean().item() - 0.5772) < 0.01 and abs(noise.std().item() - math.pi / 6 ** 0.5) < 0.01


def test_noise_and_weights_are_these_bits():
    "On every device: the kernel's tests compare it with these forms, and this one pins them."
    digest = lambda x: hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16]
    noise = gumbel_noise(torch.arange(6) * 10**15, torch.arange(6) + 3, torch.zeros(6, dtype=torch.int64), 50_000)
    assert digest(noise) == "e210278dd0e3b393"
    assert digest(whole_weight(torch.arange(400_001) / -10_000)) == "5507b07071edb924"


def test_the_written_logarithm_and_exponential_are_right():
    x = torch.cat([torch.logspace(-37, 38, 100_000), torch.linspace(0.5, 2, 100_000)])
    exact = x.double().log()
    assert ((fixed_log(x, x - 1) - exact).abs() / exact.abs().clamp_min(1e-3)).max() < 2e-7
    near = torch.logspace(-38, -1, 10_000)
    assert ((fixed_log(1 - near, -near) + near.double().neg().log1p().neg()) / near).abs().max() < 2e-7
    z = torch.linspace(-30, 0, 300_001)
    weights = whole_weight(z)
    assert (weights * 2.0 ** -44 - z.double().exp()).abs().max() < 2e-7 and (weights.diff() >= 0).all()
    assert whole_weight(torch.tensor([0.0, -31.0, -math.inf])).tolist() == [2**44, 0, 0]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 2**62), st.floats(2.0 ** -30, 1, width=32, exclude_max=True))
def test_the_limit_of_top_p_is_exact(total, top_p):
    want = max(total * math.ceil(top_p * 2**24) >> 24, 1)
    assert weight_limit(torch.tensor([total]), torch.tensor([top_p])).item() == want


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.3}, {"temperature": 1.7}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}])
def test_samples_follow_the_distribution(fields):
    "Chi-square over 20,000 samples: 5 to 11 degrees of freedom, p = 1e-5 lies near 40."
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    params, n = SamplingParams(seed=11, **fields), 20_000
    expected = naive_process(logits, params).exp() * n
    table = SamplingTable()
    table.put(0, params, params.seed)
    batch = sampling_batch(table, np.zeros(n, np.int64), np.arange(n), np.zeros(n, np.int64))
    found = sample(logits.expand(n, -1), batch).token.bincount(minlength=12)
    assert not found[expected == 0].any()
    kept = expected > 0
    assert ((found - expected)[kept] ** 2 / expected[kept]).sum() < 45


def test_choices_and_seeds_differ_and_repeat():
    logits = torch.zeros(6, 500)
    wishes = [SamplingParams(seed=s) for s in (1, 1, 2, 1, 2**64 - 1, -1)]
    first = run(logits, wishes, choice=[0, 1, 0, 0, 0, 0]).token.tolist()
    assert first[0] == first[3] and len({first[0], first[1], first[2]}) == 3
    assert first[4] == first[5], "a seed and its two's complement are the same 64 bits"


# stages

reals = st.sampled_from([0.0, 0.3, 1.0, 1.7])
@settings(deadline=None, max_examples=80)
@given(st.data())
def test_a_batch_does_what_the_specification_says(data):
    draw, n, V = data.draw, data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    token = st.integers(0, V - 1)
    wishes = [SamplingParams(temperature=draw(reals), top_p=draw(st.sampled_from([1.0, 0.9, 0.3])), top_k=draw(st.sampled_from([0, 1, 3, 39, 1000])),
                             min_p=draw(st.sampled_from([0.0, 0.05, 1.0])), repetition_penalty=draw(st.sampled_from([1.0, 1.5, 0.7])),
                             presence_penalty=draw(st.sampled_from([0.0, 1.5])), frequency_penalty=draw(st.sampled_from([0.0, -0.7])),
                             logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, 2.5]), max_size=3)), min_tokens=draw(st.sampled_from([0, 3])),
                             seed=draw(st.integers(0, 2**64 - 1))) for _ in range(n)]
    said = [(draw(st.lists(token, max_size=5)), draw(st.lists(token, max_size=5))) for _ in range(n)]
    logits = torch.randn(n, V, generator=torch.Generator().manual_seed(draw(st.integers(0, 999)))) * 2
    allowed = torch.rand(n, -(-V // 32) * 32, generator=torch.Generator().manual_seed(1)) < 0.8
    allowed[:, V // 2] = True
    packed = (allowed.view(n, -1, 32).long() << torch.arange(32)).sum(-1).to(torch.int32)
    assert torch.equal(unpack_mask(packed, V), allowed[:, :V])
    ends, bound = [0] if V > 2 else [], [row for row in range(n) if draw(st.booleans())]
    allowed[[row for row in range(n) if row not in bound]] = True          # a grammar binds some rows, not all
    got = run(logits, wishes, position=7, said=said, ends=ends, mask=(torch.tensor(bound), packed[bound]) if bound else None)
    for row, params in enumerate(wishes):
        log_p = naive_process(logits[row], params, *said[row], allowed=allowed[row, :V], end_ids=ends)
        noise = gumbel_noise(torch.tensor([row * 0 + (params.seed + 2**63) % 2**64 - 2**63]), torch.tensor([7]), torch.tensor([0]), V)[0]
        expected = (log_p + noise if params.temperature else log_p).argmax().item()
        assert got.token[row].item() == expected
        if params.temperature: assert abs(got.chosen_logprob[row].item() - log_p[expected].item()) < 1e-4


def test_greedy_rows_are_not_divided():
    "Case SA03: a masked logit beside a greedy row."
    inf = float("inf")
    logits = torch.tensor([[1.0, -inf, 0.5], [0.0, -inf, 2.0]])
    wishes = [SamplingParams(temperature=0, logprobs=3), SamplingParams(temperature=1, seed=1, logprobs=3)]
    for position in range(300):
        got = run(logits, wishes, position)
        assert got.token[0] == 0 and got.token[1] != 1
        assert not got.chosen_logprob.isnan().any() and not got.top_logprobs.isnan().any()


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform():
    logits = torch.tensor([[90.0, 89.9, -90.0]]).repeat(2, 1)
    found = [run(logits, [SamplingParams(temperature=1e-38, seed=1), SamplingParams(temperature=1e38, seed=1)], t) for t in range(100)]
    assert {got.token[0].item() for got in found} == {0} and {got.token[1].item() for got in found} == {0, 1, 2}
    assert all(got.chosen_logprob.isfinite().all() for got in found)


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(3, 300)
    logits[1, 7], logits[1, 5] = -0.0, 0.0
    got = run(logits, [SamplingParams(temperature=0, logprobs=4), SamplingParams(seed=0, top_k=1, logprobs=4), SamplingParams(seed=4, top_k=3, logprobs=4)])
    assert got.token[:2].tolist() == [0, 0] and got.token[2] < 3
    assert got.top_ids.tolist() == [[0, 1, 2, 3]] * 3 and got.rank[:2].tolist() == [1, 1]
    assert all(run(logits, [SamplingParams(seed=s, top_p=1e-6)] * 3).token.tolist() == [0] * 3 for s in range(20))


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30))
def test_order_key_orders_as_the_floats_do(values):
    x = torch.tensor([values])
    order = order_key(x)[0].argsort(descending=True).tolist()
    assert order == sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert order_key(x).unique().numel() == len(values)


def test_penalties_count_as_vllm_does():
    "Repetition sees prompt and output, presence and frequency the output only."
    logits = torch.tensor([[1.0, 1.0, 1.0, -1.0]])
    log_p = lambda **fields: naive_process(logits[0], SamplingParams(temperature=0, **fields), prompt=[0, 3], output=[1, 1])
    difference = lambda x: (x - x[2] + logits[0, 2]).tolist()
    assert difference(log_p(repetition_penalty=2.0)) == pytest.approx([0.5, 0.5, 1.0, -2.0])
    assert difference(log_p(presence_penalty=0.5)) == pytest.approx([1.0, 0.5, 1.0, -1.0])
    assert difference(log_p(frequency_penalty=0.5)) == pytest.approx([1.0, 0.0, 1.0, -1.0])


def test_counts_grow_are_reused_and_forget():
    counts = TokenCounts(10)
    for line in range(9): counts.start(line, [line], [1, 1])
    counts.add([3, 3, 4], [5, 5, 6])
    in_prompt, in_output = counts.rows([3, 4])
    assert in_prompt.nonzero().tolist() == [[0, 3], [1, 4]]
    assert in_output[0].tolist() == [0, 2, 0, 0, 0, 2, 0, 0, 0, 0] and in_output[1, 6] == 1
    counts.stop(3), counts.stop(77)
    counts.start(12, [], [])
    assert not counts.rows([12])[0].any() and not counts.rows([12])[1].any()


def test_min_tokens_holds_the_end_back():
    logits = torch.tensor([[9.0, 1.0, 8.0, 0.0]]).repeat(3, 1)
    wishes = [SamplingParams(temperature=0, min_tokens=2), SamplingParams(temperature=0, min_tokens=2), SamplingParams(temperature=0)]
    assert run(logits, wishes, ends=[0, 2], generated=[1, 2, 0]).token.tolist() == [1, 0, 0]


def test_a_dead_row_stays_alone():
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    wishes = [SamplingParams(temperature=t, seed=3, logprobs=2) for t in (0, 1, 1, 0, 1)]
    healthy = run(logits, wishes)
    broken = logits.clone()
    broken[1], broken[3, 4] = -torch.inf, torch.nan
    got = run(broken, wishes)
    assert got.token.tolist() == [healthy.token[0], -1, healthy.token[2], -1, healthy.token[4]]
    assert torch.equal(got.top_logprobs[[0, 2, 4]], healthy.top_logprobs[[0, 2, 4]])


# neighbours

@pytest.mark.parametrize("V", [1, 3, 127, 2048, 5003])
def test_row_bits_do_not_depend_on_the_batch(V):
    rng = np.random.default_rng(V)
    pick = lambda *values: values[rng.integers(len(values))]
    wishes = [SamplingParams(temperature=pick(0, 0.7, 1.0), top_p=pick(1.0, 0.9), top_k=pick(0, 20), min_p=pick(0, 0.01), logprobs=pick(None, 3),
                             presence_penalty=pick(0.0, 0.3), seed=int(rng.integers(2**63))) for _ in range(33)]
    said = [(rng.integers(V, size=4).tolist(), rng.integers(V, size=6).tolist()) for _ in wishes]
    logits = torch.randn(33, V, generator=torch.Generator().manual_seed(V)) * 3
    whole = run(logits, wishes, position=5, said=said)
    asked = [row for row in range(33) if wishes[row].logprobs is not None]
    for rows in ([0], [5, 4], list(rng.permutation(33)[:7]), list(range(32, 15, -1))):
        part = run(logits[rows], [wishes[r] for r in rows], position=5, said=[said[r] for r in rows])
        assert torch.equal(part.token, whole.token[rows]) and torch.equal(part.chosen_logprob, whole.chosen_logprob[rows])
        reporting = [asked.index(r) for r in rows if r in asked]
        if reporting:
            for name in ("logprob", "rank", "top_ids", "top_logprobs"): assert torch.equal(getattr(part, name), getattr(whole, name)[reporting])


def test_threads_do_not_change_bits():
    logits, wishes = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)), [SamplingParams(seed=1, top_p=0.9, logprobs=2)] * 2
    before, threads = run(logits, wishes), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        after, alone = run(logits, wishes), run(logits[:1], wishes[:1])
    finally: torch.set_num_threads(threads)
    for name in ("token", "chosen_logprob", "logprob", "top_logprobs"):
        assert torch.equal(getattr(before, name), getattr(after, name)) and torch.equal(getattr(before, name)[:1], getattr(alone, name))
