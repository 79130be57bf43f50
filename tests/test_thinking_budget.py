"""Thinking that ends in time: by the engine with guesses and without, under grammars, and for official clients of a running server."""
import json
import random
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
import tokenizers
import torch
from test_bound_answers import FORMAT, fits
from test_engine import EOS, TOKENIZER, Told
from test_speculation import oracle, with_mtp
from transformers import PreTrainedTokenizerFast

from glm52.chat.parsers import parse
from glm52.chat.structured import Grammar, GrammarError, ThinkingBudget, allowed_ids, structure_of
from glm52.chat.template import TEMPLATE, render
from glm52.chat.tokenizer import Tokenizer, byte_characters, byte_tokenizer
from glm52.cli import new_service
from glm52.engine.engine import LLM, AsyncEngine
from glm52.engine.sampling import SamplingError, SamplingParams
from glm52.engine.scheduler import RequestRefused
from glm52.model.checkpoint import load_model
from glm52.server.app import create_app
from glm52.server.protocol import Service, live

CASES = {case["id"]: case for line in (Path(__file__).parent / "cases" / "public-reports.jsonl").read_text().splitlines() if (case := json.loads(line))}
(THINK,), (CLOSE,) = TOKENIZER.encode("<think>"), TOKENIZER.encode("</think>")
EVERY = list(range(TOKENIZER.vocab_size))
TALKS = [[{"role": "user", "content": text}] for text in ("hi", "What is 123 + 456?", "Who is Ana, aged 31?", "What is 98 + 765?")]


def thinker(after=(CLOSE, ord("f"), ord("i"), ord("n"), ord("e"), EOS)):
    "Thinks `h` for ever; behind what closes its thinking it says `fine` and ends."
    following = dict(zip(after, after[1:]))

    def logits(token, position):
        row = torch.zeros(292)
        row[following.get(token, ord("h"))] = 20.0
        return row
    return Told(logits)


def wanted(sequence, position):
    "What the thinker will say with a budget of 8."
    place = position - sequence.prompt_len
    return ord("h") if place < 8 else [CLOSE, *b"fine", EOS][min(place - 8, 5)]


RP08 = CASES["RP08"]["given"], CASES["RP08"]["expect"]
GUESSES = [(0, None, 1), *((drafts, truth, right) for drafts in (1, 3, 5, 7) for truth, right in ((wanted, 1.0), (wanted, 0.7), (lambda s, p: ord("h"), 1.0), (lambda s, p: CLOSE, 1.0)))]


@pytest.mark.parametrize("drafts, truth, right", GUESSES)
def test_public_case_rp08(monkeypatch, drafts, truth, right):
    "Guesses that know about the budget, that are sometimes wrong, that think on over its end, and that close the thinking everywhere."
    asked, expect = RP08
    if drafts: oracle(monkeypatch, truth, right)
    llm = LLM(with_mtp(thinker()) if drafts else thinker(), tokenizer=TOKENIZER, num_pages=20, num_speculative_tokens=drafts)
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], thinking_token_budget=asked["thinking_budget"], logprobs=0)
    out = llm.generate("<|user|>hi<|assistant|><think>", params, use_tqdm=False)[0].outputs[0]
    said = parse(out.text, None, "<|assistant|><think>", out.finish_reason)
    assert (said.message.content, said.finish_reason) == (expect["content"], expect["finish_reason"])
    assert out.token_ids == [ord("h")] * expect["reasoning_tokens_max"] + [CLOSE, *b"fine", EOS]
    assert out.logprobs[8][CLOSE].logprob < -19 and out.logprobs[9][ord("f")].logprob > -1e-3      # the model's own, not the mask's
    llm.engine.check_integrity()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("extra", [{"thinking_token_budget": 8}, {"thinking": {"type": "enabled", "budget_tokens": 8}}])
def test_public_case_rp08_over_http(monkeypatch, drafts, extra):
    "The count of thinking is right to the token, though steps give several."
    asked, expect = RP08
    if drafts: oracle(monkeypatch, wanted, 0.8)
    engine = AsyncEngine(with_mtp(thinker()) if drafts else thinker(), tokenizer=byte_tokenizer(TEMPLATE), num_pages=20, num_speculative_tokens=drafts, overlap=bool(drafts))
    with live(create_app(Service(engine, "toy"))) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": asked["max_tokens"], "temperature": 0}
        for choices in (1, 3):
            answer = client.chat.completions.create(**body, n=choices, extra_body=extra)
            for choice in answer.choices:
                assert (choice.message.content, choice.message.reasoning_content, choice.finish_reason) == (expect["content"], "h" * 8, expect["finish_reason"])
            assert answer.usage.completion_tokens_details.reasoning_tokens == choices * expect["reasoning_tokens_max"]
        without = client.chat.completions.create(**body)
        assert (without.choices[0].message.content, without.choices[0].finish_reason, without.usage.completion_tokens_details.reasoning_tokens) == ("", "length", 40)


def reply(budget, text, prompt="<|user|>hi<|assistant|><think>", grammar=None):
    "For each token of a reply: the ids that may come there (None: all), and whether a mask is needed for it."
    state, seen = ThinkingBudget(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.encode(prompt), budget, grammar), []
    for token in TOKENIZER.encode(text):
        allowed = allowed_ids(state.mask(), TOKENIZER.vocab_size)
        seen.append((None if allowed == EVERY else allowed, state.binds(1)))
        state.accept(token)
    return seen


def test_what_may_come_next():
    free, close = (None, False), ([CLOSE], True)
    shut = ([i for i in EVERY if i != THINK], True)
    assert reply(2, "hm</think>4") == [free, free, close, shut]
    assert reply(0, "</think>4") == [close, shut]
    assert reply(9, "hm</think>4") == [free] * 4
    assert reply(1, "</think> \n<think>a</think> ok<think>") == [free] * 5 + [close, shut, shut] + [free] * 2     # opened again: it goes on counting; behind a word it is prose
    assert reply(0, "ok", prompt="<|assistant|><think></think>") == [shut, free]
    assert reply(1, "<think>a</think>b", prompt="<|assistant|>") == [free, free, close, shut]
    assert reply(0, "go on<think>", prompt="<|assistant|><think></think>Please") == [free] * 6
    assert reply(1, "c</think>", prompt="<|assistant|><think>ab") == [free, close]                              # what the prompt thought is not counted
    assert reply(0, "a", prompt="<|assistant|><think>ab<|user|>") == [shut] and reply(0, "a", prompt="<think>") == [close]
    spelled = ThinkingBudget(TOKENIZER, 292, [THINK], 20)
    for byte in b"a</think>b": spelled.accept(byte)
    assert (spelled.thinking, spelled.answering, spelled.left) == (False, True, 20 - len("a</think"))


@pytest.mark.parametrize("seed", range(60))
def test_random_replies_never_think_too_much(seed):
    "The parser reads no more thinking than the budget; where `binds` is False, nothing was forbidden for so many tokens; a fork goes its own way."
    rng = random.Random(seed)
    budget, prompt = rng.randrange(6), rng.choice(["<|assistant|><think>", "<|assistant|><think></think>", "<|assistant|>", "x"])
    state, ids, free = ThinkingBudget(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.encode(prompt), budget), [], 0
    for _ in range(60):
        for token in rng.choice([[i] for i in (97, 32, THINK, CLOSE)] + [list(b"</think>"), list(b"<think>")]):
            allowed = allowed_ids(state.mask(), TOKENIZER.vocab_size)
            assert free <= 0 or allowed == EVERY
            free = max([free - 1] + [count - 1 for count in range(1, 9) if not state.binds(count)])
            if token not in allowed: token = CLOSE if CLOSE in allowed else 97
            other = state.fork()
            other.accept(rng.choice(allowed))
            state.accept(token)
            ids.append(token)
    assert len(TOKENIZER.encode(parse(TOKENIZER.decode(ids), None, prompt).message.reasoning_content or "")) <= budget


@pytest.mark.parametrize("seed", range(20))
def test_a_bound_thought_may_be_cut_anywhere(seed):
    "Inside a character, inside a tag that is being spelled: the grammar admits the close, and the answer is bound behind it."
    rng = random.Random(seed)
    request = Grammar.compile(structure_of(response_format={"type": "json_object"}), TOKENIZER, "<|assistant|><think>")
    thought = [token for _ in range(8) for token in rng.choice([list("🙂é<".encode()), list(b"</think"), list(b"<thi"), [32], [rng.randrange(256)]])]
    for length in range(len(thought)):
        state = ThinkingBudget(TOKENIZER, TOKENIZER.vocab_size, [THINK], length, request).fork()
        for token in thought[:length]:
            assert state.binds(1) and state.left and token in allowed_ids(state.mask(), 292)
            state.accept(token)
        assert state.thinking and CLOSE in allowed_ids(state.grammar.mask(), 292) and allowed_ids(state.mask(), 292) == [CLOSE]
        state.accept(CLOSE)
        assert ord("{") in allowed_ids(state.mask(), 292) and not {ord("a"), THINK, CLOSE, EOS} & {*allowed_ids(state.mask(), 292)}
    assert request.fork().matcher.accept_string("x</think>{")           # the request's own has not moved


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_thought_cut_inside_a_character_is_counted(monkeypatch, drafts):
    "Two bytes of four, and the reply goes on; the text has a mark where they were."
    smile = list("🙂".encode())
    decoder = thinker((THINK, *smile, THINK))
    tell = decoder.tell
    decoder.tell = lambda token, position: thinker().tell(token, position) if token in (CLOSE, *b"fine") else tell(token, position)
    if drafts: oracle(monkeypatch, lambda s, p: [*smile[:2], CLOSE, *b"fine", EOS][min(p - s.prompt_len, 7)], 0.8)
    engine = AsyncEngine(with_mtp(decoder) if drafts else decoder, tokenizer=byte_tokenizer(TEMPLATE), num_pages=20, num_speculative_tokens=drafts)
    with live(create_app(Service(engine, "toy"))) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "temperature": 0, "thinking_token_budget": 2}).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("\ufffd", "fine") and answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


@pytest.fixture(scope="module")
def nano(): return load_model("glm52-nano", "float32", "cpu", notice=lambda text: None)


@pytest.fixture(scope="module")
def tokenizer(): return AsyncEngine("glm52-nano", dtype="float32", device="cpu", max_model_len=64, num_pages=4, max_num_seqs=1).tokenizer


def tokens(nano, tokenizer, budgets, preempt=False, again=False, bound=False, **options):
    "Replies to all talks with each budget, all in one batch, greedy and drawn: [budget][talk] ids."
    llm = LLM(nano, tokenizer=tokenizer, max_model_len=512, num_pages=120, **options)
    if preempt:
        step, count = llm.engine.step, iter(range(10**6))
        def stepping():
            if next(count) % 4 == 3: llm.engine.scheduler.preempt_last()
            return step()
        llm.engine.step = stepping
    prompts, params = [], []
    for budget in budgets:
        for i, talk in enumerate(TALKS):
            text = render([{"role": "system", "content": "Be brief. " * 8}, *talk], tokenizer=tokenizer)
            prompts.append({"prompt": text, "grammar": Grammar.compile(structure_of(response_format=FORMAT), tokenizer, text, nano.config.vocab_size) if bound and i % 2 == 0 else None})
            params.append(SamplingParams(temperature=i // 2, max_tokens=45, seed=3, thinking_token_budget=budget))
    for _ in range(1 + again): got = llm.generate(prompts, params, use_tqdm=False)
    if preempt: assert llm.engine.scheduler.preemptions > 0
    if again: assert all(r.num_cached_tokens for r in got)
    llm.engine.check_integrity()
    ids = [r.outputs[0].token_ids for r in got]
    return [ids[at:at + len(TALKS)] for at in range(0, len(ids), len(TALKS))]


BUDGETS = [0, 1, 8, 10**6, None]


def test_one_reply_whatever_the_guesses(nano, tokenizer):
    "No draft, neighbour, preemption or cached page changes a token; a budget changes none before its end, and a large one none at all."
    close = tokenizer.encode("</think>")[0]
    plain = tokens(nano, tokenizer, BUDGETS, max_num_seqs=1)
    assert plain[3] == plain[4]
    cut = 0
    for budget, replies in zip(BUDGETS[:3], plain):
        for ids, free in zip(replies, plain[4]):
            assert ids[:budget] == free[:budget] and close in ids[:budget + 1]
            if close not in free[:budget + 1]:
                cut += 1
                assert ids.index(close) == budget
            else: assert ids == free
    assert cut >= 2 * len(TALKS)
    for options in ({"max_num_seqs": 20}, {"num_speculative_tokens": 1}, {"num_speculative_tokens": 3, "preempt": True}, {"num_speculative_tokens": 5, "again": True}, {"preempt": True}):
        assert tokens(nano, tokenizer, BUDGETS, **options) == plain, options


def test_a_bound_answer_behind_a_short_thought(nano, tokenizer):
    close, plain = tokenizer.encode("</think>")[0], tokens(nano, tokenizer, [0, 5, None], bound=True, max_num_seqs=1)
    complete = 0
    for budget, replies in zip((0, 5), plain):
        for ids in replies[::2]:
            assert close in ids[:budget + 1]
            if ids[-1] in tokenizer.eos_token_ids:
                complete += 1
                fits(tokenizer.decode(ids[ids.index(close) + 1:-1]))
    assert complete >= 2
    for options in ({"num_speculative_tokens": 4}, {"num_speculative_tokens": 2, "preempt": True}):
        assert tokens(nano, tokenizer, [0, 5, None], bound=True, **options) == plain, options


@pytest.mark.parametrize("drafts", [1, 5])
def test_rejection_holds_the_budget_too(nano, tokenizer, drafts):
    close = tokenizer.encode("</think>")[0]
    for budget, replies in zip((0, 1, 8), tokens(nano, tokenizer, [0, 1, 8], num_speculative_tokens=drafts, acceptance="rejection")):
        for ids in replies: assert close in ids[:budget + 1]


def bytes_only():
    "A tokenizer of 256 bytes, without markers."
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({character: byte for byte, character in enumerate(byte_characters())}, []))
    backend.pre_tokenizer, backend.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    return backend


def test_nonsense_is_refused_by_name(nano, tokenizer, tiny_model):
    for wrong in (-1, 1.5, True, "8", 2**31, 10**400):
        with pytest.raises(SamplingError, match="^thinking_token_budget is .*must be"): SamplingParams(thinking_token_budget=wrong)
    bare = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=bytes_only(), eos_token="a"))
    for decoder, other in ((tiny_model, None), (tiny_model, bare), (Told(None, vocab_size=THINK), TOKENIZER)):   # no tokenizer; no tags in it; tags beyond the model's ids
        llm = LLM(decoder, tokenizer=other, num_pages=20)
        with pytest.raises(RequestRefused, match="^thinking_token_budget needs"): llm.generate({"prompt_token_ids": [1]}, SamplingParams(thinking_token_budget=3), use_tqdm=False)
        assert not llm.engine.requests
    with live(create_app(Service(AsyncEngine(tiny_model, tokenizer=bare, num_pages=20), "bare"))) as url:
        for stream in (False, True):
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "thinking_token_budget": 3, "stream": stream})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"
    with pytest.raises(GrammarError, match="one token each"): ThinkingBudget(TOKENIZER, 200, [1], 3)
    chat = LLM(nano, tokenizer=tokenizer, max_model_len=512, num_pages=20).chat(TALKS[1], SamplingParams(temperature=0, max_tokens=60, thinking_token_budget=2), use_tqdm=False)
    assert chat[0].outputs[0].token_ids[2] == tokenizer.encode("</think>")[0]


@pytest.fixture(scope="module", params=[0, 3])
def served(request):
    engine = AsyncEngine("glm52-nano", dtype="float32", device="cpu", max_model_len=1024, max_num_seqs=8, num_pages=100, num_speculative_tokens=request.param)
    with live(create_app(new_service(engine, "glm52-nano"))) as url: yield url


def test_the_openai_client_gets_short_thoughts(served):
    plain = {"model": "glm52-nano", "max_tokens": 100, "temperature": 0, "messages": TALKS[1]}
    with openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0, timeout=60) as client:
        create = client.chat.completions.create
        free = create(**plain)
        assert free.usage.completion_tokens_details.reasoning_tokens > 4
        for extra in ({"thinking_token_budget": 4}, {"thinking": {"budget_tokens": 4}}, {"thinking": {"type": "enabled", "budget_tokens": 4}, "thinking_token_budget": 4}):
            whole = create(**plain, extra_body=extra)
            assert whole.usage.completion_tokens_details.reasoning_tokens == 4 and whole.choices[0].message.content
            assert free.choices[0].message.reasoning_content.startswith(whole.choices[0].message.reasoning_content)
            parts = list(create(**plain, stream=True, stream_options={"include_usage": True}, extra_body=extra))
            joined = lambda name: "".join(getattr(p.choices[0].delta, name, None) or "" for p in parts if p.choices)
            assert (joined("reasoning_content"), joined("content")) == (whole.choices[0].message.reasoning_content, whole.choices[0].message.content)
            assert parts[-1].usage == whole.usage
        none = create(**plain, extra_body={"thinking_token_budget": 0})
        assert not none.choices[0].message.reasoning_content and none.usage.completion_tokens_details.reasoning_tokens == 0 and none.choices[0].message.content
        bound = create(**plain | {"messages": TALKS[2]}, response_format=FORMAT, extra_body={"thinking_token_budget": 3})
        fits(bound.choices[0].message.content)
        response = client.responses.create(model="glm52-nano", input=TALKS[1], max_output_tokens=100, temperature=0, extra_body={"thinking_token_budget": 4})
        assert (response.output_text, response.usage.output_tokens_details.reasoning_tokens) == (whole.choices[0].message.content, 4)
        text = client.completions.create(model="glm52-nano", prompt="<|user|>hi<|assistant|><think>", max_tokens=30, temperature=0, extra_body={"thinking_token_budget": 1}).choices[0].text
        assert "</think>" in text


@pytest.mark.parametrize("extra, param, said", [
    ({"thinking_token_budget": -1}, "thinking_token_budget", "at least 0|between 0"), ({"thinking_token_budget": True}, "thinking_token_budget", "valid integer"),
    ({"thinking_token_budget": "8"}, "thinking_token_budget", "valid integer"), ({"thinking_token_budget": 1.5}, "thinking_token_budget", "valid integer"),
    ({"thinking_token_budget": 2**40}, "thinking_token_budget", "between 0"), ({"thinking": {"budget_tokens": -5}}, "thinking", r"^thinking\.budget_tokens is -5"),
    ({"thinking": {"budget_tokens": True}}, "thinking", r"^thinking\.budget_tokens is True"), ({"thinking": {"budget_tokens": "many"}}, "thinking", "whole number"),
    ({"thinking": {"budget_tokens": 10**40}}, "thinking", "more than 30 digits"), ({"thinking": {"budget_tokens": 5}, "thinking_token_budget": 6}, "thinking", "send one of them"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking", "turns off"), ({"thinking_token_budget": 5, "enable_thinking": False}, "thinking_token_budget", "turns off"),
    ({"thinking_token_budget": 5, "reasoning_effort": "none"}, "thinking_token_budget", "turns off"), ({"thinking_token_budget": 5, "chat_template_kwargs": {"enable_thinking": False}}, "thinking_token_budget", "turns off")])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_errors_name_the_field(served, extra, param, said, stream):
    with openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0, timeout=60) as client:
        with pytest.raises(openai.BadRequestError) as caught: client.chat.completions.create(model="glm52-nano", messages=TALKS[0], max_tokens=5, stream=stream, extra_body=extra)
        assert caught.value.param == param and pytest.raises(AssertionError, match=said).matches(AssertionError(caught.value.body["message"]))


def test_the_anthropic_client_gets_short_thoughts(served):
    plain = {"model": "glm52-nano", "max_tokens": 100, "messages": TALKS[1], "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=served, api_key="none", max_retries=0, timeout=60) as client:
        free = client.messages.create(**plain, thinking={"type": "enabled", "budget_tokens": 10**6}).content[0].thinking
        whole = client.messages.create(**plain, thinking={"type": "enabled", "budget_tokens": 4})
        assert [block.type for block in whole.content] == ["thinking", "text"] and free.startswith(whole.content[0].thinking) and len(whole.content[0].thinking) < len(free)
        with client.messages.stream(**plain, thinking={"type": "enabled", "budget_tokens": 4}) as stream: final = stream.get_final_message()
        assert [(block.type, getattr(block, "thinking", None) or block.text) for block in final.content] == [(block.type, getattr(block, "thinking", None) or block.text) for block in whole.content]
        assert final.usage == whole.usage
        assert [block.type for block in client.messages.create(**plain, thinking={"type": "enabled", "budget_tokens": 0}).content] == ["text"]
        for thinking, said in (({"type": "disabled", "budget_tokens": 4}, "turns off"), ({"budget_tokens": 4}, "turns off"), ({"type": "enabled", "budget_tokens": -4}, "thinking.budget_tokens is -4"),
                               ({"type": "enabled", "budget_tokens": True}, "whole number"), ({"type": "enabled", "budget_tokens": 4.5}, "whole number")):
            with pytest.raises(anthropic.BadRequestError, match=said): client.messages.create(**plain, thinking=thinking)
