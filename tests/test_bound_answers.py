"""Answers bound by a grammar: by the engine, with guesses and without, and by official clients of a running server."""
import json
import re

import anthropic
import openai
import pytest

from glm52.chat.structured import Grammar, structure_of
from glm52.chat.template import render
from glm52.cli import new_service
from glm52.engine.engine import LLM, AsyncEngine
from glm52.engine.sampling import SamplingParams
from glm52.engine.scheduler import RequestRefused
from glm52.model.checkpoint import load_model
from glm52.server.app import create_app
from glm52.server.protocol import live

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
          "required": ["name", "age", "kind"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
TALKS = [[{"role": "user", "content": text}] for text in ("Who is Ana, aged 31?", "hi", "What is 3 + 4?", "Sort 5, 2, 9.", "Tell me about Bo's dog, 7 years old.", "Thanks, bye!")]
WEATHER = {"name": "get_weather", "description": "The weather in a city", "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}}
TIME = {"name": "get_time", "description": "The time in a city", "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}}


def fits(text: str):
    pet = json.loads(text)
    assert list(pet) == ["name", "age", "kind"] and type(pet["age"]) is int and 0 <= pet["age"] <= 99 and pet["kind"] in ("cat", "dog") and len(pet["name"]) <= 12


@pytest.fixture(scope="module")
def nano(): return load_model("glm52-nano", "float32", "cpu", notice=lambda text: None)


@pytest.fixture(scope="module")
def tokenizer(): return AsyncEngine("glm52-nano", dtype="float32", device="cpu", max_model_len=64, num_pages=4, max_num_seqs=1).tokenizer


def answers(nano, tokenizer, temperature, thinking=False, preempt=False, **options):
    "Every other request is bound; the text of all."
    llm = LLM(nano, tokenizer=tokenizer, max_model_len=512, num_pages=60, **options)
    if preempt:
        step, count = llm.engine.step, iter(range(10**6))
        def stepping():
            if next(count) % 4 == 3: llm.engine.scheduler.preempt_last()
            return step()
        llm.engine.step = stepping
    prompts = []
    for i, talk in enumerate(TALKS):
        text = render(talk, tokenizer=tokenizer, enable_thinking=thinking)
        prompts.append({"prompt": text, "grammar": Grammar.compile(structure_of(response_format=FORMAT), tokenizer, text, nano.config.vocab_size) if i % 2 == 0 else None})
    out = [r.outputs[0] for r in llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=120, seed=3), use_tqdm=False)]
    if preempt: assert llm.engine.scheduler.preemptions > 0
    assert sum(o.finish_reason == "stop" for o in out[::2]) >= 2      # white space between values is free, and a model may like it
    return [o.text if o.finish_reason == "stop" else None for o in out]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_answer_whatever_the_guesses(nano, tokenizer, temperature):
    "Coupled guesses, preemption and neighbours change no token; requests that nothing binds answer as ever."
    plain = answers(nano, tokenizer, temperature, max_num_seqs=1)
    for text in filter(None, plain[::2]): fits(text)
    for options in ({"max_num_seqs": 6}, {"num_speculative_tokens": 1}, {"num_speculative_tokens": 4}, {"num_speculative_tokens": 3, "preempt": True}, {"preempt": True}):
        assert answers(nano, tokenizer, temperature, **options) == plain, options


@pytest.mark.parametrize("drafts", [1, 5])
def test_rejection_keeps_to_the_grammar_too(nano, tokenizer, drafts):
    for text in answers(nano, tokenizer, 1.0, num_speculative_tokens=drafts, acceptance="rejection")[::2]:
        if text: fits(text)


@pytest.mark.parametrize("drafts", [0, 4])
def test_thinking_is_free_and_the_answer_bound(nano, tokenizer, drafts):
    "Case SO01: the grammar begins behind the tag that closes the thinking, also where one step takes tokens of both."
    plain = answers(nano, tokenizer, 0.0, thinking=True, num_speculative_tokens=drafts)
    for text in filter(None, plain[::2]):
        thought, said = text.split("</think>")
        assert "{" not in thought
        fits(said)


def test_a_grammar_of_another_width_is_refused(nano, tokenizer):
    llm = LLM(nano, tokenizer=tokenizer, max_model_len=512, num_pages=60)
    text = render(TALKS[0], tokenizer=tokenizer, enable_thinking=False)
    grammar = Grammar.compile(structure_of(response_format=FORMAT), tokenizer, text, nano.config.vocab_size + 32)
    with pytest.raises(RequestRefused, match=f"compiled for {nano.config.vocab_size + 32} tokens, the model has {nano.config.vocab_size}"):
        llm.generate({"prompt": text, "grammar": grammar}, SamplingParams(max_tokens=5), use_tqdm=False)


@pytest.fixture(scope="module", params=[0, 3])
def served(request):
    engine = AsyncEngine("glm52-nano", dtype="float32", device="cpu", max_model_len=1024, max_num_seqs=8, num_pages=100, num_speculative_tokens=request.param)
    with live(create_app(new_service(engine, "glm52-nano"))) as url: yield url


def test_the_openai_client_gets_what_it_asked_for(served):
    plain = {"model": "glm52-nano", "max_tokens": 150, "extra_body": {"enable_thinking": False}}
    tools = [{"type": "function", "function": f} for f in (WEATHER, TIME)]
    with openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for temperature in (0, 1):
            for choice in client.chat.completions.create(messages=TALKS[2], response_format=FORMAT, temperature=temperature, n=3, seed=1, **plain).choices:
                fits(choice.message.content)
                assert choice.finish_reason == "stop"
        pieces = client.chat.completions.create(messages=TALKS[1], response_format=FORMAT, stream=True, temperature=1, **plain)
        fits("".join(p.choices[0].delta.content or "" for p in pieces if p.choices))
        thought = client.chat.completions.create(messages=TALKS[0], response_format=FORMAT, temperature=0, model="glm52-nano", max_tokens=150).choices[0].message
        fits(thought.content)
        assert isinstance(json.loads(client.chat.completions.create(messages=TALKS[1], response_format={"type": "json_object"}, temperature=0, **plain).choices[0].message.content), dict)
        for choice, names in (("required", {"get_weather", "get_time"}), ({"type": "function", "function": {"name": "get_time"}}, {"get_time"})):
            calls = client.chat.completions.create(messages=TALKS[1], tools=tools, tool_choice=choice, parallel_tool_calls=False, temperature=0, **plain).choices[0].message.tool_calls
            assert len(calls) == 1 and calls[0].function.name in names and isinstance(json.loads(calls[0].function.arguments)["city"], str)
        with pytest.raises(openai.BadRequestError, match="cannot be enforced") as caught:
            client.chat.completions.create(messages=TALKS[1], response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "array", "uniqueItems": True}}}, **plain)
        assert caught.value.param == "response_format"


FREE = [("regex", r"(red|blue)-[0-9]{3}", r"(red|blue)-\d{3}"), ("choice", ["yes", "no", "yes, but"], "yes|no|yes, but"),
        ("grammar", 'root ::= "go " place\nplace ::= "home" | "east " [1-9]', "go (home|east [1-9])"), ("json", SCHEMA, None), ("json", json.dumps(SCHEMA), None)]


@pytest.mark.parametrize("kind, said, whole", FREE, ids=lambda x: x if isinstance(x, str) and x in dict.fromkeys(k for k, *_ in FREE) else "")
def test_names_of_other_servers_bind_too(served, kind, said, whole):
    "vLLM's `structured_outputs`, its older `guided_…`, and both behind thinking; the three spellings are one answer."
    with openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0, timeout=60) as client:
        forms = [{"structured_outputs": {kind: said}}, {f"guided_{kind}": said}] + ([{"response_format": {"type": kind, kind: said}}] if kind != "json" else [])
        for thinking in (False, True):
            texts = [client.chat.completions.create(model="glm52-nano", messages=TALKS[1], max_tokens=200, temperature=1, seed=2, extra_body=form | {"enable_thinking": thinking}).choices[0].message.content for form in forms]
            assert len(set(texts)) == 1
            fits(texts[0]) if whole is None else re.fullmatch(whole, texts[0]) or pytest.fail(texts[0])


@pytest.mark.parametrize("fields, param, said", [
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "parenthesis"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "each bind the answer"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "each bind the answer"),
    ({"guided_choice": []}, "guided_choice", "guided_choice must be a list of texts"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "structured_outputs.choice must be a list"),
    ({"structured_outputs": {"choice": "yes"}}, "structured_outputs", "structured_outputs.choice must be a list"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "use json, json_object, regex"),
    ({"guided_json": "{"}, "guided_json", "is not JSON"), ({"guided_grammar": "root ::= x"}, "guided_grammar", "not defined"),
    ({"response_format": {"type": "regex"}}, "response_format", "response_format.regex must be a text"),
    ({"ebnf": "root ::= \"a\""}, "ebnf", "send structured_outputs")])
def test_what_cannot_bind_is_said(served, fields, param, said):
    with openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0, timeout=60) as client:
        with pytest.raises(openai.BadRequestError, match=said) as caught: client.chat.completions.create(model="glm52-nano", messages=TALKS[1], max_tokens=8, extra_body=fields)
        assert caught.value.param == param
        if "response_format" in fields: return
        with pytest.raises(openai.BadRequestError, match="not supported by this server") as caught:
            client.completions.create(model="glm52-nano", prompt="hi", max_tokens=8, extra_body={name: said or ["a"] for name, said in fields.items()})


def test_the_anthropic_client_gets_its_call(served):
    tools = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in (WEATHER, TIME)]
    with anthropic.Anthropic(base_url=served, api_key="none", max_retries=0, timeout=60) as client:
        for choice, names in (({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "get_time"}), ({"type": "tool", "name": "get_time", "disable_parallel_tool_use": True}, {"get_time"})):
            message = client.messages.create(model="glm52-nano", max_tokens=150, messages=TALKS[1], tools=tools, tool_choice=choice, extra_body={"temperature": 0})
            calls = [b for b in message.content if b.type == "tool_use"]
            assert message.stop_reason == "tool_use" and len(calls) == 1 and calls[0].name in names and isinstance(calls[0].input["city"], str)
