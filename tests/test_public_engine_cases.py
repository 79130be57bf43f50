"""Public bug reports of the engine: which stop string ends a text, and scores that do not depend on scheduling."""
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import Told
from test_speculation import oracle, told

from glm52.engine.engine import LLM, StopStrings
from glm52.engine.sampling import SamplingParams, SamplingTable, sample, sampling_batch
from glm52.engine.speculation import Chains, accept_coupled
from glm52.model.decoder import random_model, tiny_config

CASES = {case["id"]: case for line in (Path(__file__).parent / "cases" / "public-reports.jsonl").read_text().splitlines()
         if (case := json.loads(line))["area"] in ("openai-api", "rl-replay")}


def cut_by(stops, pieces, include=False):
    "The text before the stop string, and which one it was."
    finder, out = StopStrings(stops, include), ""
    for piece in pieces:
        certain, found = finder.push(piece)
        out += certain
        if found is not None: return out, found
    return out + finder.flush(), None


def regroup(pieces):
    "The same text in other steps: token by token, as one piece, letter by letter, two by two."
    text = "".join(pieces)
    return pieces, [text], list(text), [text[i:i + 2] for i in range(0, len(text), 2)], [text[:3], text[3:]]


@pytest.mark.parametrize("case", ["OA10", "OA12"])
def test_the_stop_string_that_is_complete_first(case):
    given_, expect = CASES[case]["given"], CASES[case]["expect"]
    for pieces in regroup(given_["steps"][0]):
        text, found = cut_by(given_["stop"], pieces)
        assert text == expect["text"] and found == expect.get("stop_reason", given_["stop"][0]), pieces


def test_a_long_stop_string_does_not_wait_for_its_end():
    "`bc` is complete before `abcd`, also when both arrive in one piece; of two complete together the longer one counts."
    for pieces in regroup(["xa", "bcd", "y"]):
        assert cut_by(["abcd", "bc"], pieces) == ("xa", "bc")
        assert cut_by(["c", "abc", "bc"], pieces) == ("x", "abc")
        assert cut_by(["abcd", "bc"], pieces, include=True) == ("xabc", "bc")


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_steps_of_any_size_stop_at_the_same_place(text, stops, data):
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5))), len(text)]
    assert cut_by(stops, [text[a:b] for a, b in zip(cuts, cuts[1:])]) == cut_by(stops, list(text))


def test_public_case_oa17_prompt_scores_do_not_depend_on_chunks(tiny_model):
    "Alone, and beside requests that decode; every chunk size gives the same numbers, bit for bit."
    given_ = CASES["OA17"]["given"]
    prompt = [(7 * i + 3) % tiny_model.config.vocab_size for i in range(given_["prompt_tokens"])]
    scored = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, ignore_eos=True)
    other = SamplingParams(max_tokens=12, temperature=1, seed=5, ignore_eos=True)
    seen = []
    for chunk in given_["chunk_sizes"]:
        for company in (0, 3):
            llm = LLM(tiny_model, num_pages=16, max_num_seqs=4, max_num_batched_tokens=chunk)
            prompts = [{"prompt_token_ids": [9 + i, 4, 8]} for i in range(company)] + [{"prompt_token_ids": prompt}]
            result = llm.generate(prompts, [other] * company + [scored], use_tqdm=False)[-1]
            seen.append([None if entry is None else {token: lp.logprob for token, lp in entry.items()} for entry in result.prompt_logprobs])
    assert len(seen[0]) == len(prompt) and seen[0][0] is None and all(token in entry for token, entry in zip(prompt[1:], seen[0][1:]))
    assert all(other == seen[0] for other in seen[1:])


def test_public_case_oa14_log_probs_of_accepted_guesses_are_the_models_own():
    "Not 0.0, which is what a one-hot of the choice would give; the guess was right, so the step gives both tokens."
    given_, expect = CASES["OA14"]["given"], CASES["OA14"]["expect"]
    table, chains = SamplingTable(), Chains.new(np.array([1]))
    table.put(0, SamplingParams(temperature=given_["temperature"], logprobs=0), seed=0)
    found = sample(torch.tensor(given_["target_logits"]), sampling_batch(table, np.array([0, 0]), np.array([5, 6]), np.array([0, 1])))
    verdict = accept_coupled(found.token, torch.tensor([given_["accepted_tokens"][:1]]), chains)
    assert verdict.count.tolist() == [2] and verdict.tokens[0, :2].tolist() == given_["accepted_tokens"]
    assert found.logprob.tolist() == pytest.approx(expect["logprobs"], abs=1e-5)


@pytest.mark.parametrize("right", [1.0, 0.0])
def test_public_case_oa14_through_the_engine(monkeypatch, right):
    "Accepted or not, a token's log-prob is the log-softmax of the model's own row."
    given_, want = CASES["OA14"]["given"], CASES["OA14"]["expect"]["logprobs"]
    rows, tokens = given_["target_logits"], given_["accepted_tokens"]

    def logits(token, position):
        row = torch.full((292,), -1e9)                     # a vocabulary of three, for what a softmax sees
        row[:3] = torch.tensor(rows[min(max(position - 1, 0), len(rows) - 1)])
        return row

    oracle(monkeypatch, lambda s, position: tokens[min(position - 2, len(tokens) - 1)], right)
    llm = told(Told(logits))
    params = SamplingParams(temperature=given_["temperature"], max_tokens=6, logprobs=0, ignore_eos=True)
    out = llm.generate({"prompt_token_ids": [9, 9]}, params, use_tqdm=False)[0].outputs[0]
    scores = [entry[token].logprob for token, entry in zip(out.token_ids, out.logprobs)]
    assert out.token_ids == tokens + tokens[-1:] * 4 and scores == pytest.approx(want + want[-1:] * 4, abs=1e-6)
    assert (sum(llm.engine.drafts.accepted) > 0) == (right == 1.0) and sum(llm.engine.drafts.proposed) > 0


def test_public_cases_rr07_and_rr10_weights_read_again(tmp_path):
    "The same weights twice are a no-op, bit for bit; new weights find no page of the old ones and answer like a fresh engine."
    config, prompt = tiny_config(), {"prompt_token_ids": list(range(20, 150))}
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)

    def ask(llm):
        result = llm.generate(prompt, params, use_tqdm=False)[0]
        return result.num_cached_tokens, result.outputs[0].token_ids, result.outputs[0].logprobs

    write_checkpoint(tmp_path / "m", config, seed=0)
    llm = LLM(tmp_path / "m", dtype="float32", device="cpu", num_pages=16, max_model_len=256)
    first = ask(llm)
    assert ask(llm)[0] > 0                                                # there are pages to find
    for _ in CASES["RR07"]["given"]["updates"]:
        llm.sleep(2)
        llm.wake_up()
        assert ask(llm) == first and llm.engine.weights_version == 1
    llm.sleep(2)
    write_checkpoint(tmp_path / "m", config, seed=1)
    llm.wake_up()
    cached, *answer = ask(llm)
    fresh = LLM(random_model(config, seed=1), num_pages=16, max_model_len=256)
    assert cached == CASES["RR10"]["expect"]["second_request_cached_tokens"] and answer == list(ask(fresh)[1:]) and answer[0] != first[1]
    assert llm.engine.weights_version == 2
