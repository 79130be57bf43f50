"""The server as a machine: its door, names, patience, metrics and end; and the real engine under many clients, with token ids only."""
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import openai
import pytest
from scripted import ScriptedEngine
from typer.testing import CliRunner

from glm52.cli import app
from glm52.engine.engine import AsyncEngine
from glm52.server.app import ServeError, claim, create_app
from glm52.server.protocol import Service, live

HI = [{"role": "user", "content": "hi"}]


def wait_until(condition, seconds: float = 10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def serving(script="</think>ok", door=None, service=None, **options):
    "(address, engine) of a whole live server."
    engine = ScriptedEngine(script, **options)
    with live(create_app(Service(engine, "glm52-test", **(service or {})), **(door or {}))) as url: yield url, engine


def test_the_key():
    "Missing and wrong keys are 401 in OpenAI's form; both ways of sending it work; /health needs none."
    with serving(door={"api_key": "correct horse"}) as (url, _):
        ask = lambda headers, path="/v1/models": httpx.get(url + path, headers=headers)
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "correct"}, {"x-api-key": "wrong"}, {"authorization": "Bearer"}):
            response = ask(headers)
            assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error" and response.headers["www-authenticate"] == "Bearer"
        assert ask({"authorization": "Bearer correct horse"}).status_code == ask({"x-api-key": "correct horse"}).status_code == 200
        assert ask({}, "/health").status_code == 200 and ask({}, "/metrics").status_code == 401
        with openai.OpenAI(base_url=f"{url}/v1", api_key="nope", max_retries=0) as client, pytest.raises(openai.AuthenticationError): client.models.list()


def test_pages_of_other_origins_are_refused():
    with serving(door={"allowed_origins": ["http://friend.example"]}) as (url, _):
        ask = lambda origin: httpx.get(f"{url}/v1/models", headers={"origin": origin})
        assert ask("http://evil.example").status_code == 403 and ask("null").status_code == 403
        friend = ask("http://friend.example")
        assert friend.status_code == 200 and friend.headers["access-control-allow-origin"] == "http://friend.example"
        assert ask(url).status_code == 200


def test_every_answer_has_a_name():
    with serving() as (url, _):
        assert httpx.get(f"{url}/health", headers={"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
        drawn = httpx.get(f"{url}/health", headers={"x-request-id": "a b<script>"}).headers["x-request-id"]
        assert len(drawn) == 32 and httpx.get(f"{url}/nowhere").headers["x-request-id"] != drawn


def test_unknown_paths_and_methods_are_errors_of_the_api():
    with serving() as (url, _):
        for response, status in ((httpx.get(f"{url}/v1/nothing"), 404), (httpx.get(f"{url}/v1/chat/completions"), 405)):
            assert response.status_code == status and "/docs" in response.json()["error"]["message"]
        assert httpx.get(f"{url}/openapi.json").json()["info"]["title"] == "glm52"
        assert httpx.get(f"{url}/version").json()["version"]


def test_a_full_house_says_when_to_come_back():
    with serving("a" * 4000, delay=0.01, service={"max_active": 1}) as (url, engine):
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response:
            begun = response.iter_raw()
            next(begun)
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        wait_until(lambda: not engine.running)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_patience_ends(stream):
    "An answer that takes too long is an error that says so, and the engine is told to stop."
    with serving("a" * 4000, delay=0.02, service={"timeout": 0.15}) as (url, engine):
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "stream": stream})
        assert "0.15 s" in response.text and (response.status_code == 200 if stream else response.status_code == 504)
        wait_until(lambda: not engine.running)
        assert engine.aborted


def test_health_and_a_failed_engine():
    with serving() as (url, engine):
        state = httpx.get(f"{url}/health").json()
        assert state["status"] == "ok" and state["model"] == "glm52-test" and state["implementations"][0]["why"]
        engine.failure = RuntimeError("out of memory")
        assert httpx.get(f"{url}/health").status_code == 503


def test_metrics():
    with serving("abc") as (url, engine):
        httpx.post(f"{url}/v1/completions", json={"prompt": "xy"})
        httpx.post(f"{url}/v1/completions", content=b"{")
        text = httpx.get(f"{url}/metrics").text
        for line in ('glm52:requests_total{outcome="finished"} 1.0', "glm52:prompt_tokens_total 2.0", "glm52:generation_tokens_total 4.0", "glm52:num_requests_running 0.0",
                     'glm52:http_responses_total{path="/v1/completions",status="200"} 1.0', 'glm52:http_responses_total{path="/v1/completions",status="400"} 1.0',
                     "glm52:time_to_first_token_seconds_count 1.0"):
            assert line in text, line


def test_metrics_labels_are_bounded():
    with serving() as (url, _):
        for number in range(20): httpx.get(f"{url}/v1/invented-{number}")
        text = httpx.get(f"{url}/metrics").text
        assert "invented" not in text and 'path="other",status="404"} 20.0' in text


def test_a_port_in_use_is_known_before_loading():
    with claim("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match="in use.*--port"): claim("127.0.0.1", port)
        said = CliRunner().invoke(app, ["serve", "/no/such/model", "--port", str(port)])
        assert said.exit_code == 1 and "in use" in said.output and "/no/such" not in said.output
    with pytest.raises(ServeError, match="not an address"): claim("no.such.host.invalid", 0)
    with pytest.raises(ServeError, match="65535"): claim("127.0.0.1", 70000)


# ---- the real engine ------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def real(tiny_model):
    "A live server over the engine and a tiny random model, which has no tokenizer."
    engine = AsyncEngine(tiny_model, num_pages=64, max_num_seqs=16)
    with live(create_app(Service(engine, "tiny"))) as url: yield url, engine


def ids_of(url, prompt, **fields) -> list:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0.8, "seed": 5, "ignore_eos": True} | fields
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def test_token_ids_through_the_real_engine(real):
    url, _ = real
    alone = [ids_of(url, [1 + i, 7, 9])[0] for i in range(3)]
    assert ids_of(url, [[1 + i, 7, 9] for i in range(3)]) == alone and len(alone[0]) == 12
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        body = {"model": "tiny", "prompt": [1, 7, 9], "max_tokens": 12, "temperature": 0.8, "seed": 5, "extra_body": {"ignore_eos": True}}
        chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        assert sum((chunk.choices[0].token_ids for chunk in chunks if chunk.choices), []) == alone[0] and chunks[-1].usage.completion_tokens == 12
        two = client.completions.create(**body, n=2, logprobs=2, echo=True)
        assert two.choices[0].token_ids == alone[0] != two.choices[1].token_ids
        assert len(two.choices[0].logprobs.token_logprobs) == 3 + 12 and two.choices[0].logprobs.token_logprobs[0] is None
        scored = client.completions.create(model="tiny", prompt=[1, 7, 9], max_tokens=0, echo=True, logprobs=1)
        assert scored.choices[0].logprobs.token_logprobs == two.choices[0].logprobs.token_logprobs[:3] and scored.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_the_engine(real, stream):
    "Running count and pages return to where they were."
    url, engine = real
    body = {"prompt": [[3, 4], [5, 6]], "max_tokens": 2000, "ignore_eos": True, "stream": stream, "n": 2}
    if stream:
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            begun = response.iter_raw()
            next(begun)
            assert engine.stats()["running"] > 0
    else:
        with pytest.raises(httpx.ReadTimeout): httpx.post(f"{url}/v1/completions", json=body, timeout=0.3)
    wait_until(lambda: engine.stats()["running"] == engine.stats()["waiting"] == 0 and engine.stats()["pages_free"] == engine.stats()["pages_total"])
    assert len(ids_of(url, [1])[0]) == 12


def test_bad_input_leaves_the_engine_serving(real):
    url, engine = real
    longest = engine.max_model_len
    for body, status in (({"prompt": [1] * longest, "max_tokens": 1}, 400), ({"prompt": []}, 400), ({"prompt": [10**9]}, 400), ({"prompt": [1], "max_tokens": -1}, 400),
                         ({"prompt": [1], "temperature": -1}, 400), ({"prompt": "text"}, 400), ({"prompt": [1], "model": "other"}, 404), ({"prompt": [1], "stop": "x"}, 400)):
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert response.status_code == status and response.json()["error"]["message"], body
        assert len(ids_of(url, [1], max_tokens=2)[0]) == 2


def test_fifty_streams_through_the_real_engine(real):
    url, engine = real

    async def everybody():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            async def one(number):
                stream = await client.completions.create(model="tiny", prompt=[number, 3], max_tokens=4, temperature=0, stream=True, extra_body={"ignore_eos": True})
                return sum([chunk.choices[0].token_ids async for chunk in stream], [])
            return await asyncio.gather(*map(one, range(50)))

    answers = asyncio.run(everybody())
    assert [len(ids) for ids in answers] == [4] * 50
    for number in (0, 31): assert answers[number] == ids_of(url, [number, 3], max_tokens=4, temperature=0)[0]
    wait_until(lambda: engine.stats()["running"] == 0)


# ---- a process of its own ---------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def nano():
    "`glm52 serve` as a person starts it: (address, process)."
    with socket.create_server(("127.0.0.1", 0)) as probe: port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "glm52.cli", "serve", "--port", str(port)], stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or reachable(url), 60)
        assert process.poll() is None, process.stderr.read()
        yield url, process
    finally:
        process.kill()
        process.communicate()


def reachable(url: str) -> bool:
    try: return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError: return False


def test_a_signal_lets_answers_end(nano):
    "SIGTERM during a stream; the stream ends as an answer, the exit code is 0."
    url, process = nano
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "1 + 1", "max_tokens": 60, "ignore_eos": True, "stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert process.wait(20) == 0


def test_drafts_are_counted_by_place():
    "As the engine counts them, and never twice."
    from types import SimpleNamespace
    from glm52.server.metrics import Metrics
    stats = {"drafts_proposed": [5, 5], "drafts_accepted": [4, 2]}
    metrics = Metrics(SimpleNamespace(on_finish=[], engine=SimpleNamespace(stats=lambda: stats)))
    for _ in range(2): text = metrics.response().body.decode()
    for line in ("num_drafts_total 5.0", "num_draft_tokens_total 10.0", "num_accepted_tokens_total 6.0", 'num_accepted_tokens_per_pos_total{position="1"} 2.0'):
        assert f"glm52:spec_decode_{line}" in text
    stats |= {"drafts_proposed": [6, 6], "drafts_accepted": [5, 2]}
    assert "glm52:spec_decode_num_draft_tokens_total 12.0" in metrics.response().body.decode()
