"""OpenAI's Responses API, asked by the official client on a live socket: the shipped model where it must answer, a scripted engine where it must say an exact thing."""
import json
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import responses as official
from pydantic import BaseModel, TypeAdapter
from scripted import ScriptedEngine, StepOutput

from glm52.chat.parsers import OutputParser
from glm52.chat.template import render
from glm52.cli import new_service
from glm52.engine.engine import AsyncEngine
from glm52.server.app import create_app
from glm52.server.protocol import ApiError, Service, live
from glm52.server.responses import Items, ResponsesRequest, check_fields, read_input, seal

CASES = {case["id"]: case for line in (Path(__file__).parent / "cases" / "public-reports.jsonl").read_text().splitlines() if (case := json.loads(line))}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "Get the weather for a city", "parameters": CITY}
TIME = {"type": "function", "name": "get_time", "description": "The time in a city", "parameters": CITY}
PICK = {"type": "function", "name": "pick", "description": "pick", "parameters": {"type": "object", "properties": {"k": {"type": "integer"}, "why": {"type": "string"}}}}
CALL = "<tool_call>pick<arg_key>k</arg_key><arg_value>{}</arg_value></tool_call>"
EVENT, RESPONSE = TypeAdapter(official.ResponseStreamEvent), TypeAdapter(official.Response)
QUIET = {"model": "glm52-nano", "temperature": 0, "reasoning": {"effort": "none"}}


@pytest.fixture(scope="module")
def served():
    "(client, address) of the shipped model behind a key."
    engine = AsyncEngine("glm52-nano", dtype="float32", device="cpu", max_model_len=1024, max_num_seqs=8, num_pages=100)
    with live(create_app(new_service(engine, "glm52-nano"), api_key="correct horse")) as url, \
         openai.OpenAI(base_url=f"{url}/v1", api_key="correct horse", max_retries=0, timeout=60) as client: yield client, url


@contextmanager
def serving(script="</think>ok", service=None, **options):
    engine = ScriptedEngine(script, **options)
    with live(create_app(Service(engine, "glm52-test", **(service or {})))) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client: yield client, engine, url


@pytest.fixture(scope="module")
def plain():
    with serving() as served: yield served


def ask(**more): return {"model": "glm52-test", "input": "hi"} | more


def bare(output) -> list[dict]:
    "Items without what is drawn for each answer."
    return [{name: value for name, value in (item if isinstance(item, dict) else item.model_dump(exclude_none=True)).items() if name not in ("id", "call_id", "parsed_arguments")} for item in output]


def texts(output) -> list[tuple]:
    return [(item.type, json.loads(item.arguments) if item.type == "function_call" else item.content[0].text) for item in output]


def raw_events(url, body, key="none") -> list[dict]:
    "Events as they came, each checked against the official type."
    text = httpx.post(f"{url}/v1/responses", json=body | {"stream": True}, headers={"authorization": f"Bearer {key}"}, timeout=60).text
    events = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"): continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=False)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def built(events) -> list[dict]:
    "The items that a client builds from deltas alone, with every rule of the order checked."
    items, opened = [], None
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert opened is None and event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            opened, part = json.loads(json.dumps(event["item"])), None
            continue
        assert opened is not None and event["output_index"] == len(items)
        if kind == "output_item.done":
            assert event["item"] == opened | {name: event["item"][name] for name in ("status", "encrypted_content") if name in event["item"]} and event["item"]["status"] in ("completed", "incomplete")
            items.append(event["item"])
            opened = None
            continue
        assert event["item_id"] == opened["id"]
        if opened["type"] == "function_call":
            assert "content_index" not in event and kind in ("function_call_arguments.delta", "function_call_arguments.done")
            if kind.endswith("delta"): opened["arguments"] += event["delta"]
            else: assert event["arguments"] == opened["arguments"]
            continue
        name = {"reasoning": "reasoning_text", "message": "output_text"}[opened["type"]]
        assert event["content_index"] == 0 and kind in ("content_part.added", f"{name}.delta", f"{name}.done", "content_part.done")
        if kind == "content_part.added":
            assert not opened["content"] and event["part"]["type"] == name and event["part"]["text"] == ""
            part = dict(event["part"])
            opened["content"] = [part]
        elif kind.endswith("_text.delta"):
            part["text"] += event["delta"]
            if name == "output_text": part["logprobs"] = part["logprobs"] + event["logprobs"]
        elif kind.endswith("_text.done"): assert event["text"] == part["text"] and event.get("logprobs", []) == part.get("logprobs", [])
        else: assert event["part"] == part
    assert opened is None
    return items


def check_stream(events, end="response.completed") -> dict:
    "The response at the end of a stream, which is what its events built."
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"] and events[-1]["type"] == end
    assert all(event["response"]["status"] == "in_progress" and event["response"]["output"] == [] for event in events[:2])
    final = events[-1]["response"]
    assert built(events[2:-1]) == final["output"] and len({event["response"]["id"] for event in (events[0], events[1], events[-1])}) == 1
    return final


# ------------------------------------------------------------------------------------------------ the shipped model

def test_a_thought_and_an_answer_streamed_and_whole(served):
    client, url = served
    body = {"model": "glm52-nano", "input": "What is 27 + 58?", "temperature": 0, "metadata": {"trace": "7"}, "seed": 5}
    whole = client.responses.create(**{k: v for k, v in body.items() if k != "seed"}, extra_body={"seed": 5})
    RESPONSE.validate_python(whole.model_dump())
    assert texts(whole.output)[1] == ("message", "27 + 58 = 85") == ("message", whole.output_text) and "carry" in texts(whole.output)[0][1]
    assert [item.type for item in whole.output] == ["reasoning", "message"] and whole.status == "completed" and whole.error is None and whole.incomplete_details is None
    assert whole.metadata == {"trace": "7"} and whole.model_extra["seed"] == 5 and whole.model_extra["store"] is False and whole.temperature == 0 and whole.top_p == 1
    used = whole.usage
    assert used.total_tokens == used.input_tokens + used.output_tokens and 0 < used.output_tokens_details.reasoning_tokens < used.output_tokens
    final = check_stream(raw_events(url, body, "correct horse"))
    assert bare(final["output"]) == bare(whole.output) and final["usage"]["output_tokens"] == used.output_tokens
    with client.responses.stream(model="glm52-nano", input=body["input"], temperature=0) as stream:
        seen = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert seen == stream.get_final_response().output_text == whole.output_text


def test_thinking_turns_off(served):
    client, _ = served
    for effort in ("none", "minimal"):
        answer = client.responses.create(model="glm52-nano", input="What is 2 + 3?", temperature=0, reasoning={"effort": effort})
        assert texts(answer.output) == [("message", "2 + 3 = 5")] and answer.usage.output_tokens_details.reasoning_tokens == 0 and answer.reasoning.effort == effort


@pytest.mark.parametrize("replay", ["content", "encrypted_content"])
def test_a_tool_loop(served, replay):
    "Function call, its result, answer; the items go back as they came, or the thought sealed, as stateless agents send it."
    client, _ = served
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(model="glm52-nano", input=asked, tools=[WEATHER], temperature=0, include=["reasoning.encrypted_content"])
    assert texts(first.output)[1] == ("function_call", {"city": "Paris"}) and first.status == "completed"
    call, items = first.output[1], [item.model_dump() for item in first.output]
    assert call.name == "get_weather" and call.call_id.startswith("call_") and call.status == "completed"
    items[0] = {k: v for k, v in items[0].items() if k in ("id", "type", "summary", replay)}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 18, "condition": "sunny"}'}
    with client.responses.stream(model="glm52-nano", input=asked + items + [result], tools=[WEATHER], temperature=0) as stream: last = stream.get_final_response()
    assert last.output[-1].type == "message" and "18" in last.output_text and "sunny" in last.output_text


@pytest.mark.parametrize("effort", ["high", "none"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_binds_the_message_and_leaves_the_thought_free(served, effort, stream):
    "Case SO03."
    client, url = served
    given, expect = CASES["SO03"]["given"], CASES["SO03"]["expect"]
    assert given["endpoint"] == "/v1/responses" and expect == {"message_item_json_valid": True, "reasoning_item_separate": True}
    body = {"model": "glm52-nano", "input": "What is 3 + 4?", "text": given["text"], "temperature": 0, "max_output_tokens": 150, "reasoning": {"effort": effort}}
    if stream: answer = official.Response.model_validate(check_stream(raw_events(url, body, "correct horse")))
    else: answer = client.responses.create(**body)
    said = [text for kind, text in texts(answer.output) if kind == "message"]
    assert answer.status == "completed" and len(said) == 1 and isinstance(json.loads(said[0])["ok"], bool)
    thoughts = [text for kind, text in texts(answer.output) if kind == "reasoning"]
    assert thoughts == ([] if effort == "none" else thoughts) and len(thoughts) == (effort != "none") and not any("{" in text for text in thoughts)
    assert answer.text.format.type == "json_schema"


def test_the_official_client_parses_what_it_asked_for(served):
    class Pet(BaseModel):
        age: int
        kind: bool
    client, _ = served
    pet = client.responses.parse(input="Tell me about Bo's dog.", text_format=Pet, max_output_tokens=150, **QUIET).output_parsed
    assert isinstance(pet, Pet)
    assert isinstance(json.loads(client.responses.create(input="hi", text={"format": {"type": "json_object"}}, max_output_tokens=200, **QUIET).output_text), dict)


@pytest.mark.parametrize("choice, names", [("required", {"get_weather", "get_time"}), ({"type": "function", "name": "get_time"}, {"get_time"}),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}, {"get_time"})])
def test_a_call_that_must_come(served, choice, names):
    client, _ = served
    answer = client.responses.create(input="hi", tools=[WEATHER, TIME], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=150, **QUIET)
    assert [item.type for item in answer.output] == ["function_call"] and answer.output[0].name in names and isinstance(json.loads(answer.output[0].arguments)["city"], str)


def test_the_limit_cuts(served):
    client, url = served
    body = {"model": "glm52-nano", "input": "What is 27 + 58?", "temperature": 0, "max_output_tokens": 5}
    whole, final = client.responses.create(**body), check_stream(raw_events(url, body, "correct horse"), "response.incomplete")
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens" and whole.usage.output_tokens == 5 and whole.completed_at is None
    assert [item.status for item in whole.output] == ["incomplete"] and bare(whole.output) == bare(final["output"])


def test_the_key(served):
    _, url = served
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client, pytest.raises(openai.AuthenticationError) as caught: client.responses.create(model="glm52-nano", input="hi")
    assert caught.value.body["code"] == "invalid_api_key"


# ------------------------------------------------------------------------------------------------ exact replies

ANSWERS = {"hm</think>Hi": [("reasoning", "hm"), ("message", "Hi")], "hm</think>" + CALL.format(1): [("reasoning", "hm"), ("function_call", {"k": 1})],
           "a</think>see " + CALL.format(1) + "\n" + CALL.format(-7) + "\nafter": [("reasoning", "a"), ("message", "see "), ("function_call", {"k": 1}), ("function_call", {"k": -7}), ("message", "\nafter")],
           "never closed": [("reasoning", "never closed")], "</think>straße 🙂": [("message", "straße 🙂")], "</think>": [], "": [], "x</think>a < b and <tool_call is no tag": [("reasoning", "x"), ("message", "a < b and <tool_call is no tag")]}


@pytest.mark.parametrize("chunk", [1, 5, 80])
def test_stream_equals_complete(chunk):
    "Texts, calls, log-probs, states and usage."
    said = iter([answer for answer in ANSWERS for _ in range(2)])
    with serving(lambda *_: next(said), chunk=chunk) as (client, _, url):
        for answer, items in ANSWERS.items():
            body = ask(tools=[PICK], include=["message.output_text.logprobs", "reasoning.encrypted_content"], top_logprobs=2)
            whole = client.responses.create(**body)
            final = check_stream(raw_events(url, body))
            RESPONSE.validate_python(final)
            assert [item.encrypted_content for item in whole.output if item.type == "reasoning"] == [seal(text) for kind, text in items if kind == "reasoning"]
            assert texts(whole.output) == items and bare(whole.output) == bare(final["output"]) and whole.usage.model_dump(exclude_none=True) == final["usage"]
            assert whole.status == "completed" and all(item.status == "completed" for item in whole.output)
            scored = [entry for item in whole.output if item.type == "message" for entry in item.content[0].logprobs]
            assert b"".join(bytes(entry.bytes) for entry in scored).decode() == "".join(text for kind, text in items if kind == "message") and all(len(entry.top_logprobs) == 2 for entry in scored)


WORDS = st.lists(st.sampled_from(["hm ", "Hi", " ", "\n", "</think>", "<think>", CALL.format(3), CALL.format("x"), "<tool_call>pick<arg_key>why", "</arg_key><arg_value>é🙂 \"", "</arg_value>", "</tool_call>", "<tool_call>other</tool_call>"]), max_size=9).map("".join)


def laid_out(text: str, cuts, tail: str, reason: str) -> list[dict]:
    "The items of a reply that comes in these pieces."
    parser, items, events = OutputParser([PICK], tail, call_id=lambda index: f"call_{index}"), Items(), []
    for delta in [delta for a, b in zip([0, *cuts], [*cuts, len(text)]) for delta in parser.feed(text[a:b])] + parser.finish(reason): events += items.take(delta.to_openai(), [])
    events += items.close(reason == "length")
    made = built(json.loads(json.dumps(events)))
    assert made == items.done
    thought, said = ("".join(item["content"][0]["text"] for item in made if item["type"] == kind) for kind in ("reasoning", "message"))
    message = parser.message
    assert thought == (message.reasoning_content or "") and said.split() == (message.content or "").split()
    assert [(item["call_id"], item["name"], item["arguments"], item["status"]) for item in made if item["type"] == "function_call"] == [(c.id, c.name, c.arguments, "incomplete" if c.incomplete else "completed") for c in message.tool_calls]
    return bare(made)


@settings(max_examples=150, deadline=None)
@given(WORDS, st.data(), st.sampled_from(["<|assistant|><think>", "<|assistant|><think></think>"]), st.sampled_from(["stop", "length"]))
def test_any_cut_of_the_reply_gives_the_same_items(text, data, tail, reason):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert laid_out(text, cuts, tail, reason) == laid_out(text, [], tail, reason)


def test_a_call_that_the_limit_cuts_is_incomplete_and_valid_json():
    with serving("</think>" + CALL.format(1) + "<tool_call>pick<arg_key>why</arg_key><arg_value>because it", chunk=3) as (client, _, url):
        body = ask(tools=[PICK], max_output_tokens=30)
        whole, final = client.responses.create(**body), check_stream(raw_events(url, body), "response.incomplete")
        assert bare(whole.output) == bare(final["output"]) and [item.status for item in whole.output] == ["completed", "incomplete"] == [item["status"] for item in final["output"]]
        assert json.loads(whole.output[1].arguments)["why"] == "becaus"


def test_one_call_where_more_are_not_wanted():
    with serving("</think>" + CALL.format(1) + CALL.format(2)) as (client, engine, _):
        answer = client.responses.create(**ask(tools=[PICK], parallel_tool_calls=False))
        assert texts(answer.output) == [("function_call", {"k": 1})] and answer.status == "completed" and not answer.parallel_tool_calls and not engine.running


def test_reports_stand_beside_the_output():
    with serving("</think><tool_call>other</tool_call>") as (client, _, _):
        assert [report["kind"] for report in client.responses.create(**ask(tools=[PICK])).model_extra["reports"]] == ["unknown_tool"]
    with serving() as (client, _, _): assert "reports" not in client.responses.create(**ask()).model_extra


def test_log_probs_belong_to_the_message(plain):
    client, engine, _ = plain
    assert client.responses.create(**ask()).output[0].content[0].logprobs == [] and engine.seen[-1][1].logprobs is None
    client.responses.create(**ask(include=["message.output_text.logprobs"]))
    assert engine.seen[-1][1].logprobs == 0


# ------------------------------------------------------------------------------------------------ the conversation

def prompt_of(plain, **more) -> str:
    client, engine, _ = plain
    client.responses.create(**ask(**more))
    return engine.tokenizer.decode(engine.seen[-1][0])


def message(role, text): return {"role": role, "content": text}


def thought(text): return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def called(number, call_id=None): return {"type": "function_call", "call_id": call_id or f"c{number}", "name": "pick", "arguments": json.dumps({"k": number})}


def output(number, text, call_id=None): return {"type": "function_call_output", "call_id": call_id or f"c{number}", "output": text}


def chat_call(*numbers): return [{"id": f"c{k}", "type": "function", "function": {"name": "pick", "arguments": {"k": k}}} for k in numbers]


def acts(*numbers, **more): return {"role": "assistant", "content": "", "tool_calls": chat_call(*numbers)} | more


def tool(number, text): return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


PARTS = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
SAID = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}]}
TALKS = {
    "text": ("hi", [message("user", "hi")]),
    "parts": ([message("developer", "brief"), PARTS], [message("system", "brief"), message("user", "ab")]),
    "an answer and a question": ([message("user", "a"), thought("hm"), SAID, message("user", "b")], [message("user", "a"), {"role": "assistant", "content": "yes", "reasoning_content": "hm"}, message("user", "b")]),
    "a tool loop": ([message("user", "a"), thought("hm"), SAID, called(1), output(1, "one")],
                    [message("user", "a"), acts(1, content="yes", reasoning_content="hm"), tool(1, "one")]),
    "two loops": ([message("user", "a"), thought("x"), called(1), output(1, "one"), thought("y"), called(2), output(2, [{"type": "input_text", "text": "two"}])],
                  [message("user", "a"), acts(1, reasoning_content="x"), tool(1, "one"), acts(2, reasoning_content="y"), tool(2, "two")]),
    "parallel calls, results reversed": ([message("user", "a"), called(1), called(2), output(2, "two"), output(1, "one")], [message("user", "a"), acts(1, 2), tool(1, "one"), tool(2, "two")]),
    "ids used again": ([message("user", "a"), called(1), output(1, "one"), called(2, "c1"), called(3, "c0"), output(3, "three", "c0"), output(2, "two", "c1")],
                       [message("user", "a"), acts(1), tool(1, "one"), acts(2, 3), tool(2, "two"), tool(3, "three")]),
    "two texts in a row": ([message("user", "a"), message("assistant", "x"), message("assistant", "y")], [message("user", "a"), message("assistant", "x"), message("assistant", "y")]),
    "text behind a call": ([message("user", "a"), message("assistant", "x"), called(1), message("assistant", "y"), output(1, "one")], [message("user", "a"), acts(1, content="xy"), tool(1, "one")]),
    "a summary": ([message("user", "a"), {"type": "reasoning", "summary": [{"type": "summary_text", "text": "p"}, {"type": "summary_text", "text": "q"}]}, called(1), output(1, "")],
                  [message("user", "a"), acts(1, reasoning_content="p\nq"), tool(1, "")]),
    "a sealed thought": ([message("user", "a"), {"type": "reasoning", "summary": [], "encrypted_content": seal("straße")}, called(1), output(1, "one")], [message("user", "a"), acts(1, reasoning_content="straße"), tool(1, "one")]),
    "an empty thought": ([message("user", "a"), {"type": "reasoning", "summary": []}, SAID, message("user", "b")], [message("user", "a"), message("assistant", "yes"), message("user", "b")])}


@pytest.mark.parametrize("talk", TALKS)
def test_items_become_the_prompt_that_chat_would_make(plain, talk):
    items, messages = TALKS[talk]
    tools, instructions = [{"type": "function", "function": {k: v for k, v in PICK.items() if k != "type"}}], {"role": "system", "content": "Be kind."}
    assert prompt_of(plain, input=items, tools=[PICK], instructions="Be kind.") == render([instructions, *messages], tools, tokenizer=plain[1].tokenizer)


def test_results_follow_the_order_of_their_calls():
    messages, places = read_input(ResponsesRequest(input=TALKS["parallel calls, results reversed"][0]))
    assert [m["content"] for m in messages[2:]] == ["one", "two"] and [p["content"] for p in places[2:]] == ["input[4].output", "input[3].output"]


def test_reasoning_options_reach_the_template(plain):
    old = [message("user", "a"), thought("old thought"), SAID, message("user", "b")]
    assert prompt_of(plain, reasoning={"effort": "none"}).endswith("</think>") and "Effort: High" in prompt_of(plain, reasoning={"effort": "high"})
    assert "old thought" in prompt_of(plain, input=old, reasoning={"context": "all_turns"})
    assert all("old thought" not in prompt_of(plain, input=old, reasoning=reasoning) for reasoning in ({"context": "current_turn"}, {"context": "auto", "summary": "auto"}, {}))
    assert prompt_of(plain, extra_body={"enable_thinking": False}) == prompt_of(plain, extra_body={"chat_template_kwargs": {"enable_thinking": False}}) == prompt_of(plain, reasoning={"effort": "none"})


def test_tools_in_the_prompt(plain):
    null = PICK | {"strict": None, "output_schema": None}
    assert prompt_of(plain, tools=[null]) == prompt_of(plain, tools=[PICK]) and "# Tools" not in prompt_of(plain, tools=[PICK], tool_choice="none")
    narrowed = prompt_of(plain, tools=[PICK, WEATHER], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "pick"}]})
    assert narrowed == prompt_of(plain, tools=[PICK])


def test_sampling_fields_are_chats(plain):
    client, engine, _ = plain
    extra = {"top_k": 3, "min_p": 0.1, "seed": 9, "stop": ["x"], "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "min_tokens": 1, "stop_token_ids": [7], "ignore_eos": False, "logit_bias": {"5": 1.0}}
    client.responses.create(**ask(temperature=0.7, top_p=0.5, max_output_tokens=17), extra_body=extra)
    params = engine.seen[-1][1]
    assert (params.top_k, params.min_p, params.seed, params.temperature, params.top_p, params.max_tokens, params.presence_penalty, params.min_tokens) == (3, 0.1, 9, 0.7, 0.5, 17, 0.5, 1)
    assert tuple(params.stop) == ("x",) and params.frequency_penalty == 0.25 and params.repetition_penalty == 1.5 and tuple(params.stop_token_ids) == (7,) and params.logit_bias == {5: 1.0}


def test_what_was_asked_comes_back(plain):
    answer = plain[0].responses.create(**ask(instructions="Be kind.", tools=[PICK], tool_choice="auto", max_output_tokens=50, max_tool_calls=3, user="u", store=False, truncation="disabled", reasoning={"effort": "high", "summary": "auto"}))
    assert (answer.instructions, answer.max_output_tokens, answer.max_tool_calls, answer.user, answer.truncation, answer.tool_choice) == ("Be kind.", 50, 3, "u", "disabled", "auto")
    assert answer.tools[0].name == "pick" and answer.reasoning.effort == "high" and answer.text.format.type == "text" and answer.model_extra["store"] is False


# ------------------------------------------------------------------------------------------------ refusals

REFUSED = [({"store": True}, "store", "store: false"), ({"previous_response_id": "resp_1"}, "previous_response_id", "earlier items"), ({"conversation": "conv_1"}, "conversation", "as input"), ({"conversation": {"id": "c"}}, "conversation", "as input"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions and input"), ({"background": True}, "background", "stream: true"), ({"truncation": "auto"}, "truncation", "shorten"), ({"context_management": [{"type": "compaction"}]}, "context_management", "shorten"),
    ({"moderation": {"model": "m"}}, "moderation", "leave it out"), ({"n": 2}, "n", "more requests"), ({"n": 0}, "n", "more requests"), ({"max_tokens": 5}, "max_tokens", "max_output_tokens"), ({"max_completion_tokens": 5}, "max_completion_tokens", "max_output_tokens"),
    ({"messages": [message("user", "x")]}, "messages", "send input"), ({"response_format": {"type": "json_object"}}, "response_format", "text.format"), ({"reasoning_effort": "high"}, "reasoning_effort", "reasoning.effort"),
    ({"logprobs": True}, "logprobs", "include"), ({"prompt_logprobs": 0}, "prompt_logprobs", "/v1/chat/completions"), ({"return_token_ids": True}, "return_token_ids", "/v1/chat/completions"),
    ({"text": {"verbosity": "low"}}, "text", "instructions"), ({"reasoning": {"summary": "detailed"}}, "reasoning", "reasoning_text"), ({"reasoning": {"generate_summary": "concise"}}, "reasoning", "reasoning_text"), ({"reasoning": {"mode": "pro"}}, "reasoning", "leave it out"),
    ({"reasoning": {"context": "some"}}, "reasoning", "all_turns"), ({"include": ["web_search_call.action.sources"]}, "include", "logprobs"), ({"stream_options": {"include_obfuscation": True}}, "stream_options", "leave it out"),
    *[({"tools": [{"type": kind}]}, "tools", "declare a function") for kind in ("web_search", "file_search", "code_interpreter", "mcp", "custom", "computer", "image_generation", "local_shell", None)],
    ({"tools": [PICK | {"async": True}]}, "tools", "leave it out"), ({"tools": [PICK | {"allowed_callers": ["programmatic"]}]}, "tools", "leave it out")]


@pytest.mark.parametrize("change, param, says", REFUSED, ids=[json.dumps(change)[:40] for change, *_ in REFUSED])
def test_what_is_not_supported_is_refused_by_name(plain, change, param, says):
    client, _, url = plain
    response = httpx.post(f"{url}/v1/responses", json=ask(**change))
    error = response.json()["error"]
    assert response.status_code == 400 and set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["message"].startswith(param) and "not supported" in error["message"] and says in error["message"] and (error["param"], error["code"]) == (param, "unsupported_parameter")


def test_what_asks_for_nothing_is_no_wish():
    nothing = {"store": False, "previous_response_id": None, "background": False, "truncation": "disabled", "n": 1, "max_tokens": None, "context_management": [], "text": {"verbosity": "medium"},
               "reasoning": {"summary": "auto", "mode": "standard", "context": "auto"}, "include": [], "top_logprobs": 0, "stream_options": {"include_obfuscation": False}, "return_token_ids": False, "logprobs": False}
    check_fields(ResponsesRequest(input="hi", **nothing))
    check_fields(ResponsesRequest(input="hi"))
    with pytest.raises(ApiError, match="^store: True is not supported"): check_fields(ResponsesRequest(input="hi", store=True))


IMAGE = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}]}]
BAD = [({"input": None}, 400, "input", "empty"), ({"input": ""}, 400, "input", "empty"), ({"input": []}, 400, "input", "empty"), ({"input": 7}, 400, "input", "a text or a list"), ({"input": {"role": "user", "content": "x"}}, 400, "input", "a text or a list"),
    ({"input": ["x"]}, 400, "input", "input[0] must be an item"), ({"input": [{}]}, 400, "input", "input[0].type is None"), ({"input": [{"type": "wish"}]}, 400, "input", "'wish'"), ({"input": [{"type": ["message"], "role": "user"}]}, 400, "input", "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 400, "input", "send the item itself"), ({"input": [message("wizard", "x")]}, 400, "input", "input[0].role is 'wizard'"), ({"input": [{"role": "user"}]}, 400, "input", "input[0].content is missing"),
    ({"input": [message("user", 7)]}, 400, "input", "input[0].content"), ({"input": IMAGE}, 400, "input", "input[0].content[1] has type 'input_image'"), ({"input": [message("user", [{"type": "input_text"}])]}, 400, "input", "input[0].content[0].text"),
    ({"input": [called(1) | {"arguments": "{"}]}, 400, "input", "input[0].arguments is not valid JSON"), ({"input": [called(1) | {"arguments": {"k": 1}}]}, 400, "input", "input[0].arguments must be text"), ({"input": [called(1) | {"arguments": "[1]"}]}, 400, "input", "input[0].arguments"),
    ({"input": [called(1) | {"name": None}]}, 400, "input", "input[0].name must be text"), ({"input": [message("user", "x"), called(1), called(2) | {"name": "a b"}]}, 400, "input", "input[2].name is 'a b'"),
    ({"input": [output(1, "x")]}, 400, "input", "belongs to no function_call"), ({"input": [called(1), output(1, None)]}, 400, "input", "input[1].output is missing"), ({"input": [called(1), output(1, 7)]}, 400, "input", "input[1].output"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, 400, "input", "input[0].content must be a list"), ({"input": [{"type": "reasoning", "content": [{"type": "text", "text": "x"}]}]}, 400, "input", "input[0].content[0] must be"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]}, 400, "input", "not written by this server"), ({"input": [{"type": "reasoning", "encrypted_content": "plain:%%"}]}, 400, "input", "not written by this server"),
    ({"instructions": 7}, 400, "instructions", "instructions"), ({"instructions": "\ud800"}, 400, "instructions", "instructions has a lone surrogate"), ({"input": [message("user", "x"), message("assistant", "\ud800")]}, 400, "input", "input[1].content has a lone surrogate"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens", "max_output_tokens is 0"), ({"max_output_tokens": 10**6}, 400, "max_output_tokens", "maximum context length"), ({"input": "word " * 3000}, 400, "input", "maximum context length"), ({"max_output_tokens": "x"}, 400, "max_output_tokens", "max_output_tokens"),
    ({"temperature": -1}, 400, "temperature", "temperature"), ({"top_p": 2}, 400, "top_p", "top_p"), ({"top_logprobs": 3}, 400, "top_logprobs", "include"), ({"top_logprobs": 30, "include": ["message.output_text.logprobs"]}, 400, "top_logprobs", "30"),
    ({"model": "gpt-9"}, 404, "model", "gpt-9"), ({"metadata": {"a": 1}}, 400, "metadata", "metadata"), ({"reasoning": {"effort": "huge"}}, 400, "reasoning", "reasoning.effort is 'huge'"), ({"reasoning": {"max_tokens": 5}}, 400, "reasoning", "reasoning.max_tokens"), ({"reasoning": "high"}, 400, "reasoning", "reasoning"),
    ({"text": {"format": {"type": "xml"}}}, 400, "text", "text.format.type is 'xml'"), ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text", "text.format has no schema"), ({"text": {"form": 1}}, 400, "text", "text.form"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "array", "uniqueItems": True}}}}, 400, "text", "text.format.schema/uniqueItems cannot be enforced"),
    ({"tools": [{"type": "function"}]}, 400, "tools", "tools[0].name"), ({"tools": [PICK, PICK]}, 400, "tools", "twice"), ({"tools": "x"}, 400, "tools", "tools"), ({"tool_choice": "required"}, 400, "tool_choice", "declares none"), ({"tools": [PICK], "tool_choice": {"type": "function", "name": "drop"}}, 400, "tool_choice", "'drop'"),
    ({"tools": [PICK], "tool_choice": {"type": "web_search"}}, 400, "tool_choice", "web_search"), ({"tools": [PICK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "drop"}]}}, 400, "tool_choice", "'drop'"), ({"seed": 2**70}, 400, "seed", "seed"), ({"stop": [""]}, 400, "stop", "stop")]


@pytest.mark.parametrize("change, status, param, says", BAD, ids=[f"{param}-{i}" for i, (_, _, param, _) in enumerate(BAD)])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input(plain, change, status, param, says, stream):
    _, engine, url = plain
    before = len(engine.seen)
    response = httpx.post(f"{url}/v1/responses", content=json.dumps(ask(stream=stream, **change)), headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == status and set(error) == {"message", "type", "param", "code"} and says in error["message"] and error["param"] == param, error
    assert len(engine.seen) == before


ITEMS = st.recursive(st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "x", "{}", "c1", "message", "reasoning", "function_call", "function_call_output", "user", "assistant", "plain:", "reasoning_text"]),
                     lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "call_id", "name", "arguments", "output", "summary", "encrypted_content"]), x, max_size=4), max_leaves=12)


@settings(max_examples=300, deadline=None)
@given(st.lists(ITEMS, max_size=4) | ITEMS)
def test_any_json_is_a_conversation_or_an_api_error(value):
    try: messages, places = read_input(ResponsesRequest(input=value))
    except ApiError as error: assert error.status == 400 and error.param == "input"
    else: assert len(messages) == len(places)


# ------------------------------------------------------------------------------------------------ the machine

def wait_until(condition, seconds: float = 5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_a_client_that_leaves_frees_the_engine_and_a_full_house_says_so():
    with serving("a" * 8000, delay=0.005, service={"max_active": 1}) as (client, engine, url):
        with httpx.stream("POST", f"{url}/v1/responses", json=ask(stream=True)) as response:
            begun = response.iter_raw()
            for _ in range(4): next(begun)
            with pytest.raises(openai.RateLimitError) as caught: client.responses.create(**ask())
            assert caught.value.code == "rate_limit_exceeded"
        wait_until(lambda: not engine.running)
        with pytest.raises(httpx.ReadTimeout): httpx.post(f"{url}/v1/responses", json=ask(), timeout=0.2)
        wait_until(lambda: not engine.running)
        assert len(engine.aborted) == 2 and client.responses.create(**ask(max_output_tokens=1)).status == "incomplete"


def test_an_engine_that_fails():
    "Whole: a 500 without internals. Streamed: `response.failed`, which the official client hands on."
    def script(prompt, params, choice): raise RuntimeError("secret prompt")
    with serving(script) as (client, _, url):
        with pytest.raises(openai.InternalServerError): client.responses.create(**ask())
        events = raw_events(url, ask())
        assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"] and "secret" not in json.dumps(events)
        failed = events[-1]["response"]
        assert failed["status"] == "failed" and failed["error"]["code"] == "server_error" and "internal error" in failed["error"]["message"]
        assert [event.type for event in client.responses.create(**ask(stream=True))][-1] == "response.failed"


def test_patience_ends_in_the_middle():
    with serving("thinking for long " * 500, delay=0.01, service={"timeout": 0.3}) as (client, engine, url):
        with pytest.raises(openai.InternalServerError) as caught: client.responses.create(**ask())
        assert caught.value.status_code == 504
        failed = check_stream(raw_events(url, ask()), "response.failed")
        assert "not ready" in failed["error"]["message"] and [(item["type"], item["status"]) for item in failed["output"]] == [("reasoning", "incomplete")] and failed["usage"] is None
        wait_until(lambda: not engine.running)


def test_a_call_in_which_the_engine_fails_is_incomplete():
    with serving("</think><tool_call>pick<arg_key>why</arg_key><arg_value>because " + "it is " * 500, delay=0.005, service={"timeout": 0.5}) as (_, _, url):
        failed = check_stream(raw_events(url, ask(tools=[PICK])), "response.failed")
        assert [(item["type"], item["status"]) for item in failed["output"]] == [("function_call", "incomplete")] and failed["output"][0]["arguments"].startswith('{"why": "because ')


def test_a_request_that_the_engine_ends():
    "An operator's pause may abort what runs: no answer is called complete that is not."
    async def generate(request_id, prompt, params):
        yield StepOutput(request_id, 0, "hm", [1])
        yield StepOutput(request_id, 0, "", [], finish_reason="abort")
    with serving() as (client, engine, url):
        engine.generate = generate
        with pytest.raises(openai.InternalServerError, match="send it again") as caught: client.responses.create(**ask())
        assert caught.value.status_code == 503
        failed = check_stream(raw_events(url, ask()), "response.failed")
        assert failed["error"]["code"] == "server_error" and texts(official.Response.model_validate(failed).output) == [("reasoning", "hm")]


def test_log_probs_end_where_a_stop_string_begins():
    for chunk in (1, 4):
        with serving("hm</think>one two three", chunk=chunk) as (client, _, _):
            answer = client.responses.create(**ask(include=["message.output_text.logprobs"]), extra_body={"stop": [" two"]})
            part = answer.output[1].content[0]
            assert part.text == "one" == "".join(entry.token for entry in part.logprobs) and answer.status == "completed"


def test_nothing_is_kept(plain):
    client, _, url = plain
    answer = client.responses.create(**ask())
    with pytest.raises(openai.NotFoundError): client.responses.retrieve(answer.id)
    assert httpx.get(f"{url}/v1/responses").status_code == 405


def test_usage_is_chats():
    "`cached_tokens` and the counts of usage are chat's."
    with serving("hm</think>ok", cached_tokens=4) as (client, engine, _):
        used = client.responses.create(**ask()).usage
        chat = client.chat.completions.create(model="glm52-test", messages=[message("user", "hi")]).usage
        assert (used.input_tokens, used.output_tokens, used.input_tokens_details.cached_tokens) == (chat.prompt_tokens, chat.completion_tokens, 4)
        assert used.output_tokens_details.reasoning_tokens == chat.completion_tokens_details.reasoning_tokens == 2
