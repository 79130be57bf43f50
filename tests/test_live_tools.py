"""Tool calls of a real model through a live server and the official client: one token a step, streamed equals complete,
and both are what the parser makes of the raw text."""

import json

import openai
import pytest
from test_openai import complete, joined, without_ids

from glm52.chat.parsers import parse
from glm52.cli import new_service
from glm52.engine.engine import AsyncEngine
from glm52.nano.tasks import held_out_items
from glm52.server.app import create_app
from glm52.server.protocol import live


@pytest.fixture(scope="module")
def client():
    engine = AsyncEngine("glm52-nano", dtype="float32", device="cpu", max_model_len=2048, max_num_seqs=8, num_pages=200)
    with live(create_app(new_service(engine, "glm52-nano"))) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        client.tokenizer = engine.tokenizer
        yield client


ITEMS = [item for item in held_out_items("tools", 8, seed=4) if item.tools][:4]


def question(item):
    "The messages before the model's last turn."
    last = max(i for i, message in enumerate(item.messages) if message["role"] == "assistant")
    return item.messages[:last]


@pytest.mark.parametrize("number", range(len(ITEMS)))
def test_streamed_equals_complete(client, number):
    item = ITEMS[number]
    body = {"model": "glm52-nano", "messages": question(item), "tools": item.tools, "temperature": 1.0, "seed": number, "n": 2, "max_tokens": 160,
            "extra_body": {"return_token_ids": True}}
    whole, streamed = complete(client.chat.completions.create(**body)), joined(client.chat.completions.create(**body, stream=True))
    assert without_ids(whole) == without_ids(streamed)
    for choice in whole.values():
        raw = client.tokenizer.decode(choice["ids"], skip_special=True)
        message = parse(raw, item.tools, "<|assistant|><think>", "stop" if choice["finish_reason"] == "tool_calls" else choice["finish_reason"]).message
        assert (choice["reasoning_content"], choice["content"]) == (message.reasoning_content or "", message.content or "")
        assert [call[1:] for call in choice["calls"]] == [[call.name, call.arguments] for call in message.tool_calls]


def test_the_model_calls_tools(client):
    "Otherwise the test above would prove little."
    answers = [client.chat.completions.create(model="glm52-nano", messages=question(item), tools=item.tools, temperature=0, max_tokens=160)
               for item in ITEMS]
    calls = [call for answer in answers for call in answer.choices[0].message.tool_calls or ()]
    for call in calls: assert isinstance(json.loads(call.function.arguments), dict)
    assert len(calls) >= 2 and any(answer.choices[0].finish_reason == "tool_calls" for answer in answers)
