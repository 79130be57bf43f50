"""OpenAI's endpoints, asked by the official client on a live socket; the engine says what it is told."""
import asyncio
import json
import time
from contextlib import contextmanager

import httpx
import openai
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine

from glm52.chat.tokenizer import byte_tokenizer
from glm52.server.openai import openai_routes, read_prompts
from glm52.server.protocol import ApiError, Service, live, merge, read_json

PICK = {"type": "function", "function": {"name": "pick", "description": "pick", "parameters": {
    "type": "object", "properties": {"k": {"type": "integer"}, "why": {"type": "string"}}}}}
CALL = "<tool_call>pick<arg_key>k</arg_key><arg_value>{}</arg_value></tool_call>"
HI = [{"role": "user", "content": "hi"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@contextmanager
def serving(script, **options):
    "(official client, engine, address) of a live server that answers with `script`."
    engine = ScriptedEngine(script, **{name: options.pop(name) for name in ("chunk", "delay", "max_model_len", "cached_tokens") if name in options})
    app = FastAPI()
    app.include_router(openai_routes(Service(engine, "glm52-test", **options)))
    with live(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client, engine, url


def raw_stream(url: str, path: str, body: dict) -> list[str]:
    "The `data:` lines of a stream, as they came."
    with httpx.stream("POST", url + path, json=body | {"stream": True}, timeout=20) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def joined(chunks) -> dict[int, dict]:
    "Chunks of a chat put together as a client does, by choice."
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"content": "", "reasoning_content": "", "calls": [], "finish_reason": None, "logprobs": [], "ids": []})
            delta = part.delta.model_dump()
            choice["content"] += delta.get("content") or ""
            choice["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call["id"] is not None:
                    assert call["index"] == len(choice["calls"]) and call["type"] == "function"
                    choice["calls"].append([call["id"], call["function"]["name"], ""])
                choice["calls"][call["index"]][2] += call["function"]["arguments"]
            choice["finish_reason"] = part.finish_reason or choice["finish_reason"]
            choice["logprobs"] += [entry.model_dump() for entry in part.logprobs.content] if part.logprobs else []
            choice["ids"] += part.model_extra.get("token_ids") or []
    return choices


def complete(response) -> dict[int, dict]:
    "The same view of a complete answer."
    out = {}
    for choice in response.choices:
        message = choice.message
        out[choice.index] = {"content": message.content or "", "reasoning_content": message.reasoning_content or "",
                             "calls": [[c.id, c.function.name, c.function.arguments] for c in message.tool_calls or ()],
                             "finish_reason": choice.finish_reason,
                             "logprobs": [entry.model_dump() for entry in choice.logprobs.content] if choice.logprobs else [],
                             "ids": choice.model_extra.get("token_ids") or []}
    return out


def without_ids(choices: dict) -> dict:
    "Call ids are drawn afresh for each answer."
    return {index: choice | {"calls": [call[1:] for call in choice["calls"]]} for index, choice in choices.items()}


ANSWERS = ["hm, 2+2</think>It is 4.", "straße 日本 🙂</think>Ünïcödé 🙂🙂", "think</think>ok " + CALL.format(1), "a</think>" + CALL.format(1) + "\n" + CALL.format(-7),
           "never closed", "", "</think>", "x</think>a < b and <tool_call is no tag"]


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_stream_equals_complete(chunk):
    "Text, thinking, calls, log-probs, ids and finish reasons, for every answer at once (one choice each)."
    script = lambda prompt, params, choice: ANSWERS[choice]
    with serving(script, chunk=chunk) as (client, _, _):
        body = {"model": "glm52-test", "messages": HI, "tools": [PICK], "n": len(ANSWERS), "logprobs": True, "top_logprobs": 2, "seed": 1,
                "extra_body": {"return_token_ids": True}}
        whole = complete(client.chat.completions.create(**body))
        streamed = joined(client.chat.completions.create(**body, stream=True))
        assert without_ids(streamed) == without_ids(whole)
        assert whole[0]["reasoning_content"] == "hm, 2+2" and whole[0]["content"] == "It is 4."
        assert [json.loads(c[2]) for c in whole[3]["calls"]] == [{"k": 1}, {"k": -7}] and whole[3]["finish_reason"] == "tool_calls"
        assert len({c[0] for c in whole[3]["calls"]}) == 2
        assert whole[4]["reasoning_content"] == "never closed" and whole[4]["content"] == ""
        assert len(whole[1]["logprobs"]) == len(whole[1]["ids"]) == len((ANSWERS[1]).encode()) - len("</think>") + 1 + 1
        text = "".join(entry["token"] for entry in whole[0]["logprobs"][:8])
        assert text == "hm, 2+2</think>" and len(whole[0]["logprobs"][0]["top_logprobs"]) == 2


def test_completion_stream_equals_complete():
    with serving("Grüße 🙂 and more") as (client, _, _):
        body = {"model": "glm52-test", "prompt": ["ab", "日"], "n": 2, "echo": True, "logprobs": 3, "max_tokens": 40}
        whole = client.completions.create(**body)
        parts: dict[int, dict] = {}
        for chunk in client.completions.create(**body, stream=True):
            for piece in chunk.choices:
                part = parts.setdefault(piece.index, {"text": "", "tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []})
                part["text"] += piece.text
                part["finish_reason"] = piece.finish_reason
                for name, values in piece.logprobs.model_dump().items(): part[name] += values
        for choice in whole.choices:
            assert parts[choice.index] == {"text": choice.text, "finish_reason": choice.finish_reason} | choice.logprobs.model_dump()
        assert [c.text for c in whole.choices] == [p + "Grüße 🙂 and more" for p in ("ab", "ab", "日", "日")]
        assert whole.usage.prompt_tokens == 2 + 3 and whole.usage.completion_tokens == 4 * (len("Grüße 🙂 and more".encode()) + 1)


def test_text_offsets_cut_the_text():
    "`text[offset[i]:offset[i+1]]` is what token i added, whole characters included."
    with serving("é🙂z") as (client, _, _):
        choice = client.completions.create(model="glm52-test", prompt="日a", echo=True, logprobs=0, max_tokens=20).choices[0]
        ends = choice.logprobs.text_offset[1:] + [len(choice.text)]
        assert [choice.text[a:b] for a, b in zip(choice.logprobs.text_offset, ends)] == ["", "", "日", "a", "", "é", "", "", "", "🙂", "z", ""]


def test_usage_only_when_asked():
    "OA01: `stream_options: {}` asks for nothing."
    with serving("ok") as (_, _, url):
        for path, body in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "x"})):
            for options in ({}, None, {"include_usage": False}):
                lines = raw_stream(url, path, body | {"stream_options": options})
                assert lines[-1] == "[DONE]" and not any("usage" in json.loads(line) for line in lines[:-1])
            lines = raw_stream(url, path, body | {"stream_options": {"include_usage": True}})
            last = json.loads(lines[-2])
            assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
            assert all(json.loads(line)["usage"] is None for line in lines[:-2])


def test_every_choice_has_its_own_parser():
    "OA03: two choices whose characters alternate."
    script = lambda prompt, params, choice: CALL.format(("1", "22")[choice])
    with serving(script, chunk=1) as (client, _, _):
        body = {"model": "glm52-test", "messages": HI, "tools": [PICK], "n": 2, "extra_body": NO_THINKING}
        for choices in (joined(client.chat.completions.create(**body, stream=True)), complete(client.chat.completions.create(**body))):
            assert [(c["calls"][0][1], json.loads(c["calls"][0][2]), c["finish_reason"]) for _, c in sorted(choices.items())] == [
                ("pick", {"k": 1}, "tool_calls"), ("pick", {"k": 22}, "tool_calls")]


def test_empty_prompts_are_refused_and_serving_goes_on():
    "OA04."
    with serving("ok") as (client, engine, url):
        for path, body in (("/v1/completions", {"prompt": ""}), ("/v1/completions", {"prompt": [""]}), ("/v1/completions", {"prompt": []}),
                           ("/v1/completions", {"prompt": [[]]}), ("/v1/completions", {}), ("/v1/chat/completions", {"messages": []}), ("/v1/chat/completions", {})):
            response = httpx.post(url + path, json=body)
            assert response.status_code == 400 and set(response.json()["error"]) == {"message", "type", "param", "code"}, body
        assert not engine.seen
        assert client.completions.create(model="glm52-test", prompt="x").choices[0].text == "ok"


def test_scoring_a_prompt():
    "OA05: echo with max_tokens 0."
    with serving("never") as (client, _, _):
        response = client.completions.create(model="glm52-test", prompt="abc", echo=True, max_tokens=0, logprobs=1)
        choice = response.choices[0]
        assert choice.text == "abc" and response.usage.completion_tokens == 0 and choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.tokens == ["a", "b", "c"] and all(x < 0 for x in choice.logprobs.token_logprobs[1:])
        vllm = client.completions.create(model="glm52-test", prompt=[97, 98], max_tokens=0, extra_body={"prompt_logprobs": 1}).choices[0]
        assert vllm.text == "" and vllm.prompt_logprobs[0] is None and vllm.prompt_logprobs[1]["98"]["decoded_token"] == "b"


def test_context_limit_to_the_token():
    "OA06."
    with serving("y" * 100, max_model_len=64) as (_, engine, url):
        ask = lambda tokens, **more: httpx.post(f"{url}/v1/completions", json={"prompt": [97] * tokens, "ignore_eos": True} | more)
        responses = [ask(48, max_tokens=16), ask(48, max_tokens=17), ask(48), ask(64, max_tokens=1), ask(64, max_tokens=0), ask(64), ask(63)]
        assert [r.status_code for r in responses] == [200, 400, 200, 400, 200, 400, 200]
        assert responses[2].json()["usage"]["completion_tokens"] == 16 and responses[6].json()["usage"]["completion_tokens"] == 1
        error = responses[1].json()["error"]
        assert "64" in error["message"] and "48" in error["message"] and error["code"] == "context_length_exceeded"


def test_first_token_ends_the_turn():
    "OA08: an empty answer is a normal outcome."
    eos = byte_tokenizer().eos_token_ids[0]
    with serving([eos]) as (client, _, _):
        body = {"model": "glm52-test", "messages": HI, "extra_body": NO_THINKING}
        for choices in (joined(client.chat.completions.create(**body, stream=True)), complete(client.chat.completions.create(**body))):
            assert choices[0]["content"] == "" and choices[0]["finish_reason"] == "stop" and not choices[0]["calls"]
        assert client.chat.completions.create(**body).choices[0].message.content == ""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_numbers_that_are_not(path):
    "SA01, for every float field."
    body = {"messages": HI} if "chat" in path else {"prompt": "x"}
    with serving("ok") as (_, engine, url):
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            for value in ("NaN", "Infinity", "-Infinity", "1e999", '"NaN"', "-0.1" if "penalty" not in name else "-1e999"):
                text = json.dumps(body)[:-1] + f', "{name}": {value}}}'
                response = httpx.post(url + path, content=text, headers={"content-type": "application/json"})
                assert response.status_code == 400 and response.json()["error"]["message"], (name, value)
        text = json.dumps(body)[:-1] + ', "logit_bias": {"5": NaN}}'
        assert httpx.post(url + path, content=text).status_code == 400
        assert not engine.seen and httpx.post(url + path, json=body).status_code == 200


BAD = [  # body, status, what the message must say
    (b"{", 400, "JSON"), (b"[]", 400, "object"), (b"", 400, "JSON"), (b"\xff\xfe{", 400, "JSON"), (b'{"messages":' + b"[" * 100_000, 400, "nested"),
    (b'{"n": ' + b"9" * 5000 + b"}", 400, "JSON"),
    ({"messages": "hi"}, 400, "messages"), ({"messages": [{"role": "boss", "content": "x"}]}, 400, "boss"), ({"messages": [7]}, 400, "messages"),
    ({"messages": HI, "max_tokens": -1}, 400, "max_tokens"), ({"messages": HI, "max_completion_tokens": -1}, 400, "max_completion_tokens"),
    ({"messages": HI, "max_tokens": "many"}, 400, "max_tokens"), ({"messages": HI, "n": 0}, 400, "n is 0"), ({"messages": HI, "n": 1000}, 400, "128"),
    ({"messages": HI, "top_logprobs": 3}, 400, "logprobs"), ({"messages": HI, "logprobs": True, "top_logprobs": 21}, 400, "20"),
    ({"messages": HI, "tool_choice": "required"}, 400, "declares none"), ({"messages": HI, "tool_choice": {"type": "function", "function": {"name": "drop"}}, "tools": [PICK]}, 400, "drop"),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, 400, "has no schema"), ({"messages": HI, "response_format": {"type": "xml"}}, 400, "xml"), ({"messages": HI, "reasoning_effort": "huge"}, 400, "reasoning_effort"),
    ({"messages": HI, "thinking": {"type": "maybe"}}, 400, "thinking"), ({"messages": HI, "model": "gpt-4o"}, 404, "gpt-4o"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate"), ({"messages": HI, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"messages": HI, "max_tokens": 10**6}, 400, "maximum context length"), ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "9")]


@pytest.fixture(scope="module")
def plain():
    with serving("</think>ok") as (client, engine, url): yield client, engine, url


@pytest.mark.parametrize("body,status,says", BAD, ids=[str(b[0])[:50] for b in BAD])
def test_bad_input(plain, body, status, says):
    "Each gets a clear error of OpenAI's shape, and the next request its answer."
    client, engine, url = plain
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{url}/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and says in error["message"]
    assert client.chat.completions.create(model="glm52-test", messages=HI).choices[0].message.content == "ok"


@pytest.mark.parametrize("body,says", [({"prompt": [1, 10**6]}, "vocabulary"), ({"prompt": [-1]}, "vocabulary"), ({"prompt": ["a", 1]}, "prompt"), ({"prompt": [True]}, "prompt"),
                                       ({"prompt": "a", "suffix": "b"}, "suffix"), ({"prompt": "a", "best_of": 3}, "best_of"), ({"prompt": "a", "logprobs": 21}, "logprobs"),
                                       ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"), ({"prompt": {"a": 1}}, "prompt")])
def test_bad_completions(plain, body, says):
    _, _, url = plain
    response = httpx.post(f"{url}/v1/completions", json=body)
    assert response.status_code == 400 and says in response.json()["error"]["message"]


def test_the_client_raises_its_own_errors(plain):
    client, _, _ = plain
    with pytest.raises(openai.BadRequestError, match="max_tokens"): client.chat.completions.create(model="glm52-test", messages=HI, max_tokens=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-4o") as caught: client.chat.completions.create(model="gpt-4o", messages=HI)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError): client.models.retrieve("gpt-4o")


def test_harmless_and_unknown_fields_are_accepted(plain, caplog):
    client, _, _ = plain
    extra = {"temprature": 0.2, "nested": {"a": [1, {"b": None}]}, "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    assert client.chat.completions.create(model="glm52-test", messages=HI, extra_body=extra).choices[0].message.content == "ok"
    assert "temprature" in caplog.text and "metadata" not in caplog.text


def test_null_means_absent(plain):
    _, engine, url = plain
    names = ("temperature", "top_p", "n", "stop", "max_tokens", "seed", "tools", "tool_choice", "logprobs", "stream", "stream_options", "presence_penalty", "response_format")
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI} | dict.fromkeys(names))
    assert response.status_code == 200 and engine.seen[-1][1].temperature == 1.0


def test_fields_reach_the_engine(plain):
    client, engine, _ = plain
    client.completions.create(model="glm52-test", prompt="x", temperature=0.3, top_p=0.9, seed=7, stop=["a", "b"], presence_penalty=0.5, frequency_penalty=-0.5,
                              logit_bias={"65": -100}, max_tokens=9, extra_body={"top_k": 5, "min_p": 0.1, "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": True,
                                                                                 "repetition_penalty": 1.1, "skip_special_tokens": False})
    params = engine.seen[-1][1]
    assert (params.temperature, params.top_p, params.seed, list(params.stop), params.max_tokens) == (0.3, 0.9, 7, ["a", "b"], 9)
    assert (params.top_k, params.min_p, params.min_tokens, list(params.stop_token_ids), params.ignore_eos) == (5, 0.1, 2, [3], True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty, params.logit_bias, params.skip_special_tokens) == (0.5, -0.5, 1.1, {65: -100}, False)


def test_defaults_come_from_the_checkpoint_and_a_seed_is_reported():
    with serving("ok", defaults={"temperature": 0.6, "top_p": 0.95}) as (client, engine, _):
        first, second = [client.completions.create(model="glm52-test", prompt="x") for _ in range(2)]
        client.completions.create(model="glm52-test", prompt="x", temperature=0, seed=first.seed)
        assert [p.temperature for _, p in engine.seen] == [0.6, 0.6, 0] and engine.seen[0][1].top_p == 0.95
        assert first.seed != second.seed and [p.seed for _, p in engine.seen] == [first.seed, second.seed, first.seed]


def test_stop_string_and_reason(plain):
    with serving("one two three") as (client, _, _):
        choice = client.completions.create(model="glm52-test", prompt="x", stop=[" two"]).choices[0]
        assert choice.text == "one" and choice.finish_reason == "stop" and choice.stop_reason == " two"
        assert client.completions.create(model="glm52-test", prompt="x", max_tokens=3).choices[0].finish_reason == "length"


def test_tool_choice_none_shows_no_tools_and_makes_no_calls():
    with serving(CALL.format(1)) as (client, engine, _):
        body = {"model": "glm52-test", "messages": HI, "tools": [PICK], "extra_body": NO_THINKING}
        silent = client.chat.completions.create(**body, tool_choice="none").choices[0]
        assert not silent.message.tool_calls and silent.finish_reason == "stop"
        assert client.chat.completions.create(**body, tool_choice="auto").choices[0].finish_reason == "tool_calls"
        assert len(engine.seen[1][0]) > len(engine.seen[0][0])


def test_one_call_at_most():
    "parallel_tool_calls false: the answer ends where a second call begins, and the engine is told."
    script = CALL.format(1) + CALL.format(2) + "x" * 500
    with serving(script, chunk=4, delay=0.001) as (client, engine, _):
        body = {"model": "glm52-test", "messages": HI, "tools": [PICK], "parallel_tool_calls": False, "extra_body": NO_THINKING}
        for choices in (joined(client.chat.completions.create(**body, stream=True)), complete(client.chat.completions.create(**body))):
            assert [json.loads(c[2]) for c in choices[0]["calls"]] == [{"k": 1}] and choices[0]["finish_reason"] == "tool_calls"
        wait_until(lambda: len(engine.aborted) == 2 and not engine.running)


def test_truncated_call_is_not_a_tool_calls_finish():
    with serving(CALL.format(1)) as (client, _, _):
        choice = client.chat.completions.create(model="glm52-test", messages=HI, tools=[PICK], max_tokens=9, extra_body=NO_THINKING).choices[0]
        assert choice.finish_reason == "length"
        for call in choice.message.tool_calls or (): json.loads(call.function.arguments)


def test_thinking_switches(plain):
    client, engine, _ = plain
    ends = {}
    for name, extra in {"on": {}, "kwargs": NO_THINKING, "effort": {"reasoning_effort": "none"}, "zai": {"thinking": {"type": "disabled"}}, "flag": {"enable_thinking": False}}.items():
        client.chat.completions.create(model="glm52-test", messages=HI, extra_body=extra)
        ends[name] = byte_tokenizer().decode(engine.seen[-1][0])
    assert ends["on"].endswith("<think>") and all(text.endswith("</think>") for name, text in ends.items() if name != "on")


def test_tokenize_and_detokenize(plain):
    _, engine, url = plain
    out = httpx.post(f"{url}/tokenize", json={"prompt": "añb", "return_token_strs": True}).json()
    assert out["count"] == 4 and out["max_model_len"] == 8192 and out["token_strs"][0] == "a"
    assert httpx.post(f"{url}/detokenize", json={"tokens": out["tokens"]}).json() == {"prompt": "añb"}
    ids = httpx.post(f"{url}/tokenize", json={"messages": HI}).json()["tokens"]
    httpx.post(f"{url}/v1/chat/completions", json={"messages": HI})
    assert engine.seen[-1][0] == ids
    for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": HI}), ("/detokenize", {}), ("/detokenize", {"tokens": [10**9]})):
        assert httpx.post(url + path, json=body).status_code == 400


def test_models(plain):
    client, _, _ = plain
    assert [m.id for m in client.models.list()] == ["glm52-test"] and client.models.retrieve("glm52-test").max_model_len == 8192


def test_token_ids_only_without_a_tokenizer():
    with serving([1, 2, 3]) as (client, engine, url):
        engine.tokenizer_for_script, engine.tokenizer = engine.tokenizer, None
        engine.generate, original = _without_text(engine), engine.generate
        choice = client.completions.create(model="glm52-test", prompt=[5, 6], logprobs=1, max_tokens=3).choices[0]
        assert choice.text == "" and choice.token_ids == [1, 2, 3] and choice.logprobs.tokens == ["token_id:1", "token_id:2", "token_id:3"]
        for path, body in (("/v1/completions", {"prompt": "text"}), ("/v1/chat/completions", {"messages": HI}), ("/tokenize", {"prompt": "x"})):
            response = httpx.post(url + path, json=body)
            assert response.status_code == 400 and "no tokenizer" in response.json()["error"]["message"]


def _without_text(engine):
    from scripted import Logprob, StepOutput

    async def generate(request_id, prompt, params):
        for place, token in enumerate(engine.script):
            yield StepOutput(request_id, 0, "", [token], [{token: Logprob(-1.0, 1, "")}], finish_reason="length" if place == 2 else None)
    return generate


def wait_until(condition, seconds: float = 5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize("path,body", [("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": ["x", "y"], "n": 2})])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(path, body, stream):
    with serving("a" * 8000, delay=0.005) as (_, engine, url):
        if stream:
            with httpx.stream("POST", url + path, json=body | {"stream": True}) as response: next(response.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout): httpx.post(url + path, json=body, timeout=0.2)
        wait_until(lambda: not engine.running)
        assert len(engine.aborted) == len(body.get("prompt", [0]))


def test_fifty_streams_at_once():
    "Each gets its own text, and none waits for the others."
    script = lambda prompt, params, choice: f"</think>answer to {byte_tokenizer().decode(prompt)[-40:]}"
    async def all_of_them(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            async def one(number):
                stream = await client.chat.completions.create(model="glm52-test", messages=[{"role": "user", "content": f"question {number:02d}"}], stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return await asyncio.gather(*map(one, range(50)))
    with serving(script, delay=0.001, chunk=4) as (_, engine, url):
        texts = asyncio.run(all_of_them(url))
        assert [f"question {i:02d}" in text for i, text in enumerate(texts)] == [True] * 50 and not engine.running


def test_a_full_house_says_so():
    with serving("a" * 4000, delay=0.01, max_active=2) as (_, engine, url):
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as a, \
             httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as b:
            begun = a.iter_raw(), b.iter_raw()   # dropping an iterator would hang up
            for stream in begun: next(stream)
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
        wait_until(lambda: not engine.running)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_body_limit():
    with serving("ok", max_body=1000) as (_, _, url):
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 2000})
        assert response.status_code == 413 and response.json()["error"]["type"] == "request_too_large"
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200


def test_an_engine_that_fails():
    "Whole: a 500 without internals. Streamed: an error in the stream that clients raise, then the end."
    def script(prompt, params, choice): raise RuntimeError("secret prompt")
    with serving(script) as (client, _, url):
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert response.status_code == 500 and "secret" not in response.text and response.json()["error"]["type"] == "api_error"
        with pytest.raises(openai.APIError, match="internal error"): list(client.completions.create(model="glm52-test", prompt="x", stream=True))
        assert raw_stream(url, "/v1/completions", {"prompt": "x"})[-1] == "[DONE]"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                                             lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3)).map(lambda v: json.dumps(v).encode()))
def test_read_json_gives_an_object_or_an_api_error(body):
    try: assert isinstance(read_json(body), dict)
    except ApiError as error: assert error.status == 400


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=2), lambda x: st.lists(x, max_size=3), max_leaves=6))
def test_read_prompts_gives_prompts_or_an_api_error(value):
    try: prompts = read_prompts(value)
    except ApiError: return
    assert prompts and all(p and (isinstance(p, str) or all(type(i) is int for i in p)) for p in prompts)


def test_merge_keeps_order_within_a_stream_and_passes_errors_on():
    async def numbers(n, fail=False):
        for i in range(n):
            await asyncio.sleep(0)
            yield i
        if fail: raise KeyError("broken")

    async def collect(*streams): return [item async for item in merge(list(streams))]

    items = asyncio.run(collect(numbers(5), numbers(3)))
    assert [i for s, i in items if s == 0] == list(range(5)) and [i for s, i in items if s == 1] == list(range(3))
    with pytest.raises(KeyError): asyncio.run(collect(numbers(100), numbers(2, fail=True)))
