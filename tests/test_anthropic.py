"""Anthropic's Messages API, asked by the official client on a live socket; the engine says what it is told."""
import json
from contextlib import contextmanager

import anthropic
import httpx
import pytest
from scripted import ScriptedEngine

from glm52.chat.template import render
from glm52.server.anthropic import Blocks
from glm52.server.app import create_app
from glm52.server.protocol import Service, live

PICK = {"name": "pick", "description": "pick", "input_schema": {"type": "object", "properties": {"k": {"type": "integer"}, "why": {"type": "string"}}}}
CALL = "<tool_call>pick<arg_key>k</arg_key><arg_value>{}</arg_value></tool_call>"
HI = [{"role": "user", "content": "hi"}]
THINK = {"type": "enabled", "budget_tokens": 1024}


@contextmanager
def serving(script="ok", **options):
    engine = ScriptedEngine(script, **options)
    with live(create_app(Service(engine, "glm52-test"))) as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client: yield client, engine, url


def ask(**more): return {"model": "glm52-test", "max_tokens": 500, "messages": HI} | more


def shape(message) -> list[tuple]:
    "The blocks of a message without the ids of calls, which are drawn."
    return [(b.type, getattr(b, {"thinking": "thinking", "text": "text", "tool_use": "input"}[b.type])) for b in message.content]


ANSWERS = {"hm</think>Hi": ([("thinking", "hm"), ("text", "Hi")], "end_turn"), "hm</think>" + CALL.format(1): ([("thinking", "hm"), ("tool_use", {"k": 1})], "tool_use"),
           "a</think>see " + CALL.format(1) + "\n" + CALL.format(-7): ([("thinking", "a"), ("text", "see "), ("tool_use", {"k": 1}), ("tool_use", {"k": -7})], "tool_use"),
           "never closed": ([("thinking", "never closed")], "end_turn"), "</think>straße 🙂": ([("text", "straße 🙂")], "end_turn")}


@pytest.mark.parametrize("chunk", [1, 5, 80])
@pytest.mark.parametrize("said", ANSWERS)
def test_stream_equals_complete(said, chunk):
    with serving(said, chunk=chunk) as (client, _, _):
        body = ask(tools=[PICK], thinking=THINK)
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream: final = stream.get_final_message()
        assert (shape(whole), whole.stop_reason) == (shape(final), final.stop_reason) == ANSWERS[said]
        assert whole.usage == final.usage and whole.usage.output_tokens == len(said.encode()) - (len("</think>") - 1) * said.count("</think>") + 1 - sum(
            (len(tag) - 1) * said.count(tag) for tag in ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))


def events_of(url, **more) -> list[dict]:
    lines = httpx.post(f"{url}/v1/messages", json=ask(stream=True, **more)).text.split("\n\n")
    pairs = [line.split("\n") for line in lines if line and not line.startswith(":")]
    assert all(name == f"event: {json.loads(data[6:])['type']}" for name, data in pairs)
    return [json.loads(data[6:]) for _, data in pairs]


def test_blocks_open_and_close_in_turn():
    "AN01, whole and on the wire."
    with serving("hm</think>Hi" + CALL.format(1) + "\n" + CALL.format(2)) as (_, _, url):
        events = events_of(url, tools=[PICK], thinking=THINK)
    assert events[0]["type"] == "message_start" and [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    check_blocks(events[1:-2], ["thinking", "text", "tool_use", "tool_use"])


def check_blocks(events, kinds):
    own, opened, seen = {"thinking": {"thinking_delta", "signature_delta"}, "text": {"text_delta"}, "tool_use": {"input_json_delta"}}, None, []
    for event in events:
        if event["type"] == "content_block_start":
            assert opened is None and event["index"] == len(seen)
            opened = event["content_block"]["type"]
            seen.append(opened)
        elif event["type"] == "content_block_delta": assert event["index"] == len(seen) - 1 and event["delta"]["type"] in own[opened]
        else:
            assert event == {"type": "content_block_stop", "index": len(seen) - 1}
            opened = None
    assert opened is None and seen == kinds


def test_deltas_of_the_public_case():
    blocks, call = Blocks(), lambda i, name, arguments: {"tool_calls": [{"index": i, "id": f"c{i}", "function": {"name": name, "arguments": arguments}}]}
    deltas = [{"reasoning_content": "hm"}, {"content": "Hi"}, call(0, "f", "{}"), {"content": "\n"}, call(1, "g", '{"a": 1}')]
    check_blocks([event for delta in deltas for event in blocks.take(delta)] + blocks.close(), ["thinking", "text", "tool_use", "tool_use"])


def test_usage_is_a_partition():
    "AN03."
    with serving("ok", cached_tokens=4) as (client, engine, url):
        usage = client.messages.create(**ask()).usage
        assert usage.cache_read_input_tokens == 4 and usage.cache_creation_input_tokens == 0 and usage.output_tokens == 3
        assert usage.input_tokens + 4 == len(engine.seen[0][0]) == client.messages.count_tokens(model="glm52-test", messages=HI).input_tokens
        assert events_of(url)[0]["message"]["usage"]["cache_read_input_tokens"] == 4


def test_the_billing_line_is_no_part_of_the_prompt():
    "AN04."
    system = lambda mark: [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=9.9; cch={mark};"}, {"type": "text", "text": "You are a helper."}]
    with serving() as (client, engine, _):
        said = [{"role": "user", "content": "x-anthropic-billing-header: is what I asked about"}]
        for mark in ("aaaaa", "bbbbb"): client.messages.create(**ask(system=system(mark), messages=said))
        first, second = [engine.tokenizer.decode(ids) for ids, _ in engine.seen]
        assert first == second and "You are a helper." in first and said[0]["content"] in first and "cch=" not in first


def test_overflow_in_words_that_agents_know():
    "AN07."
    with serving(max_model_len=64) as (client, engine, _):
        with pytest.raises(anthropic.BadRequestError) as caught: client.messages.create(**ask(messages=[{"role": "user", "content": "x" * 70}], max_tokens=5))
        error = caught.value.body
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert "prompt is too long: " in error["error"]["message"] and "> 64 maximum" in error["error"]["message"] and not engine.seen
        with pytest.raises(anthropic.BadRequestError, match="exceed context limit"): client.messages.create(**ask(max_tokens=64))
        assert client.messages.create(**ask(max_tokens=10)).content[0].text == "ok"


def test_stop_reasons_and_prefill():
    with serving("one two three") as (client, engine, _):
        stopped = client.messages.create(**ask(stop_sequences=[" two"]))
        assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("one", "stop_sequence", " two")
        assert client.messages.create(**ask(max_tokens=3)).stop_reason == "max_tokens"
        client.messages.create(**ask(messages=HI + [{"role": "assistant", "content": "It is"}]))
        assert engine.tokenizer.decode(engine.seen[-1][0]).endswith("It is")


def test_thinking_and_tool_results_reach_the_template():
    turn = HI + [{"role": "assistant", "content": [{"type": "thinking", "thinking": "look", "signature": "any"}, {"type": "tool_use", "id": "t1", "name": "pick", "input": {"k": 1}}]},
                 {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "nine"}]}]
    with serving() as (client, engine, _):
        client.messages.create(**ask(messages=turn, tools=[PICK], thinking=THINK, system="Be brief."))
        assert engine.tokenizer.decode(engine.seen[0][0]) == render(turn, [PICK], tokenizer=engine.tokenizer, style="anthropic", system="Be brief.")
        client.messages.create(**ask())
        assert engine.tokenizer.decode(engine.seen[1][0]).endswith("</think>")


@pytest.mark.parametrize("change,status,says", [({"max_tokens": None}, 400, "max_tokens"), ({"max_tokens": 0}, 400, "max_tokens"), ({"messages": []}, 400, "messages"), ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "boss", "content": "x"}]}, 400, "boss"), ({"tool_choice": {"type": "any"}}, 400, "declares none"), ({"tool_choice": {"type": "tool", "name": "drop"}, "tools": [PICK]}, 400, "drop"), ({"thinking": {"type": "maybe"}}, 400, "thinking"),
    ({"temperature": -1}, 400, "temperature"), ({"model": "other"}, 404, "other"), ({"stop_sequences": [7]}, 400, "stop_sequences")])
def test_bad_input(change, status, says):
    with serving() as (client, _, url):
        response = httpx.post(f"{url}/v1/messages", json=ask(**change))
        error = response.json()
        assert response.status_code == status and error["type"] == "error" and set(error["error"]) == {"type", "message"} and says in error["error"]["message"]
        assert client.messages.create(**ask()).content[0].text == "ok"


def test_errors_of_the_door_and_of_the_engine():
    def broken(prompt, params, choice): raise RuntimeError("secret")
    with serving(broken) as (client, _, url):
        assert httpx.get(f"{url}/v1/messages").json()["type"] == "error"
        assert httpx.post(f"{url}/v1/messages", content=b"{").json()["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.InternalServerError): client.messages.create(**ask())
        events = events_of(url)
        assert events[-1]["type"] == "error" and "secret" not in json.dumps(events)
