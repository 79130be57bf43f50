"""The whole service with the shipped model behind it, asked by the official client."""
import concurrent.futures
import json
import time

import httpx
import openai
import pytest

from glm52.cli import new_service
from glm52.engine.engine import AsyncEngine
from glm52.server.app import create_app
from glm52.server.protocol import live

MODEL = "glm52-nano"
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Get the weather for a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


def ask(text): return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def engine(): return AsyncEngine(MODEL, dtype="float32", device="cpu", max_model_len=2048, num_pages=256, max_num_seqs=16)


@pytest.fixture(scope="module")
def server(engine):
    service = new_service(engine, MODEL)
    service.max_body = 100_000
    with live(create_app(service)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client, url


@pytest.fixture(autouse=True)
def nothing_left_behind(engine):
    yield
    end = time.monotonic() + 10
    while (s := engine.stats())["running"] or s["waiting"] or s["pages_free"] < s["pages_total"]:
        assert time.monotonic() < end, f"requests or pages are still held: {s}"
        time.sleep(0.02)
    engine.engine.check_integrity()


def streamed(client, **body):
    "Message and finish reason of a stream, joined as a client does."
    message, calls, reason, usage = {"content": "", "reasoning_content": ""}, [], None, None
    for chunk in client.chat.completions.create(model=MODEL, stream=True, stream_options={"include_usage": True}, **body):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            for name in message: message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                if call["id"]: calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
            reason = choice.finish_reason or reason
    return message["reasoning_content"], message["content"], [tuple(c) for c in calls], reason, usage.completion_tokens


def whole(client, **body):
    answer = client.chat.completions.create(model=MODEL, **body)
    message = answer.choices[0].message
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    return message.reasoning_content or "", message.content or "", calls, answer.choices[0].finish_reason, answer.usage.completion_tokens


def test_sums_thinking_and_streams(server):
    client, _ = server
    for a, b in ((27, 58), (314, 159), (7, 5)):
        body = dict(messages=ask(f"What is {a} + {b}?"), temperature=0)
        thought, said, calls, reason, count = whole(client, **body)
        assert said == f"{a} + {b} = {a + b}" and "=" in thought and "think" not in thought and reason == "stop" and not calls
        assert streamed(client, **body) == (thought, said, calls, reason, count)
    thought, said, *_ = whole(client, messages=ask("What is 2 + 3?"), temperature=0, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert not thought and said == "2 + 3 = 5"


def test_a_tool_call_streamed_token_by_token_is_the_whole_one(server):
    client, _ = server
    body = dict(messages=ask("What is the weather in Paris?"), tools=[WEATHER], temperature=0)
    thought, said, calls, reason, count = whole(client, **body)
    assert calls == [("get_weather", '{"city": "Paris"}')] and reason == "tool_calls" and "Paris" in thought
    assert streamed(client, **body) == (thought, said, calls, reason, count)
    turn = [*body["messages"], {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": calls[0][1]}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 18, "condition": "sunny"}'}]
    assert "18" in whole(client, messages=turn, tools=[WEATHER], temperature=0)[1]


def test_completions_with_ids_echo_and_scores(server):
    client, _ = server
    engine_text = client.completions.create(model=MODEL, prompt=[2014, 2016, 40, 50], max_tokens=0, echo=True, logprobs=1).choices[0]
    assert len(engine_text.logprobs.tokens) == 4 and engine_text.logprobs.token_logprobs[0] is None and engine_text.finish_reason == "length"
    two = client.completions.create(model=MODEL, prompt=["27 + ", "5 + "], max_tokens=3, n=2, seed=1, temperature=1).choices
    assert [c.index for c in two] == [0, 1, 2, 3]


def test_a_seed_repeats_and_is_reported(server):
    client, _ = server
    body = dict(model=MODEL, messages=ask("Hello"), temperature=1.0, max_tokens=20)
    first = client.chat.completions.create(**body)
    again = client.chat.completions.create(**body, seed=first.model_extra["seed"])
    assert first.choices[0].message.model_dump() == again.choices[0].message.model_dump()


def test_health_models_and_metrics(server):
    client, url = server
    health = httpx.get(f"{url}/health").json()
    assert health["status"] == "ok" and {row["op"] for row in health["implementations"]} >= {"topk", "sparse_mla", "moe"}
    assert [m.id for m in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).model_extra["max_model_len"] == 2048
    text = httpx.get(f"{url}/metrics").text
    assert "glm52:generation_tokens_total" in text and "glm52:kv_cache_usage_perc 0.0" in text


BAD = [({"messages": []}, 400, "empty"), ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "role"), ({"max_tokens": -5}, 400, "max_tokens"),
       ({"temperature": "NaN"}, 400, "temperature"), ({"temperature": -1}, 400, "temperature"), ({"top_p": 0}, 400, "top_p"), ({"n": 0}, 400, "n is 0"),
       ({"model": "gpt-9"}, 404, "gpt-9"), ({"logit_bias": {"99999": 1}}, 400, "logit_bias"), ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "2048"),
       ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "image_url"), ({"stop": [""]}, 400, "stop"),
       ({"max_tokens": 5000}, 400, "context"), ({"seed": 2**70}, 400, "seed"), ({"tools": [{"type": "function"}]}, 400, "tools[0]")]


@pytest.mark.parametrize("change, status, said", BAD, ids=[s for *_, s in BAD])
def test_bad_input_is_refused_by_name_and_the_server_goes_on(server, change, status, said):
    client, url = server
    response = httpx.post(f"{url}/v1/chat/completions", json={"model": MODEL, "messages": ask("hi")} | change, timeout=30)
    error = response.json()["error"]
    assert response.status_code == status and said in error["message"] and set(error) == {"message", "type", "param", "code"}
    assert whole(client, messages=ask("2 + 2"), temperature=0)[3] == "stop"


def test_broken_bodies(server):
    _, url = server
    post = lambda body: httpx.post(f"{url}/v1/chat/completions", content=body)
    for body, said in ((b"{", "JSON"), (b'{"temperature": NaN}', "NaN"), (b"[1]", "object"), (b"\xff", "JSON"), (b'{"messages": 3}', "messages")):
        assert post(body).status_code == 400 and said in post(body).json()["error"]["message"]
    assert post(b" " * 200_000).status_code == 413
    assert httpx.get(f"{url}/v1/nothing").status_code == 404 and httpx.get(f"{url}/v1/chat/completions").status_code == 405


def test_a_client_that_hangs_up_frees_its_pages(server, engine):
    _, url = server
    body = {"model": MODEL, "prompt": "word " * 50, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    before = engine.stats()["aborted"]
    for _ in range(3):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response: next(response.iter_raw())
    end = time.monotonic() + 10
    while engine.stats()["aborted"] < before + 3: assert time.monotonic() < end; time.sleep(0.02)


def test_twenty_streams_at_once(server):
    client, _ = server
    sums = [(11 * i + 3, 7 * i + 12) for i in range(20)]
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        got = list(pool.map(lambda ab: streamed(client, messages=ask(f"What is {ab[0]} + {ab[1]}?"), temperature=0)[1], sums))
    right = sum(text == f"{a} + {b} = {a + b}" for text, (a, b) in zip(got, sums))
    alone = [whole(client, messages=ask(f"What is {a} + {b}?"), temperature=0)[1] for a, b in sums[:4]]
    assert got[:4] == alone and right >= 18


def test_keys_and_origins(engine):
    with live(create_app(new_service(engine, MODEL, ["house", "other name"]), api_key="secret", allowed_origins=["http://here"])) as url:
        get = lambda **headers: httpx.get(f"{url}/v1/models", headers=headers)
        assert get().status_code == get(authorization="Bearer wrong").status_code == 401 and "key" in get().json()["error"]["message"]
        assert [m["id"] for m in get(authorization="Bearer secret").json()["data"]] == ["house", "other name"]
        assert httpx.get(f"{url}/health").status_code == 200
        assert get(authorization="Bearer secret", origin="http://elsewhere").status_code == 403
        assert get(authorization="Bearer secret", origin="http://here").status_code == 200
