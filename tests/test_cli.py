"""The command line as a person uses it: answers on standard output, errors in one sentence, exit codes that scripts can trust."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from typer.testing import CliRunner

import glm52
from glm52.cli import app
from glm52.model.checkpoint import resolve_model

NANO = resolve_model("glm52-nano")


def run(*arguments, input=None):
    "In this process: exit code, standard output, standard error."
    result = CliRunner().invoke(app, list(arguments), input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit): raise result.exception
    return result.exit_code, result.stdout, result.stderr


def start(*arguments):
    "As a program of its own."
    return subprocess.Popen([sys.executable, "-m", "glm52.cli", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"PYTHONUNBUFFERED": "1"})


@pytest.fixture
def copy(tmp_path):
    "A checkpoint directory of its own, to be spoiled."
    return shutil.copytree(NANO, tmp_path / "model")


def test_version_help_and_usage():
    assert run("--version") == (0, glm52.__version__ + "\n", "")
    code, out, _ = run("--help")
    assert code == 0 and all(name in out for name in ("serve", "chat", "generate", "inspect", "env", "parse", "render", "bench"))
    assert run("serve", "--port", "many")[0] == 2 and run("fly")[0] == 2


def test_env_says_what_runs_and_why():
    code, out, _ = run("env", "--device", "cpu")
    assert code == 0 and all(op in out for op in ("topk", "sparse_mla", "moe", "no GPU")) and "torch" in out
    assert run("env", "--device", "tpu")[0] == 1


def test_inspect(copy):
    code, out, _ = run("inspect", str(copy))
    assert code == 0 and "complete: every tensor is there" in out and "renders as GLM-5.2's" in out and "2,048 tokens" in out
    (copy / "tokenizer.json").unlink()
    assert "token ids only" in run("inspect", str(copy))[1]
    (copy / "model-00002-of-00002.safetensors").unlink()
    code, _, err = run("inspect", str(copy))
    assert code == 1 and "model-00002-of-00002.safetensors" in err


SPOILED = {
    "cut short": (lambda d: (d / "model-00001-of-00002.safetensors").open("r+b").truncate(9_000_000), "cut short"),
    "not safetensors": (lambda d: (d / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 100), "safetensors"),
    "another architecture": (lambda d: (d / "config.json").write_text('{"model_type": "llama"}'), "llama"),
    "no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json"),
    "another size": (lambda d: (d / "config.json").write_text((d / "config.json").read_text().replace('"hidden_size": 256', '"hidden_size": 128')), "128"),
    "broken tokenizer": (lambda d: (d / "tokenizer.json").write_text("{"), "tokenizer.json"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_errors_are_sentences(copy, name):
    "Serving refuses with one line that names the thing, before a port answers."
    spoil, said = SPOILED[name]
    spoil(copy)
    code, out, err = run("serve", str(copy), "--port", "0")
    assert code == 1 and not out and err.startswith("glm52: ") and said in err and "Traceback" not in err, err
    assert run("generate", "hi", "--model", str(copy))[0] == 1


def test_unknown_directory_and_port_in_use():
    code, _, err = run("serve", "/no/such/model", "--port", "0")
    assert code == 1 and "/no/such/model" in err and "glm52-nano" in err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = run("serve", "--port", str(taken.getsockname()[1]))
    assert code == 1 and "in use" in err and "--port" in err
    assert run("serve", "--host", "no.such.host.invalid", "--port", "0")[0] == 1
    assert run("serve", "--max-model-len", "99999999", "--port", "0")[0] == 1


def test_generate():
    code, out, _ = run("generate", "What is 20 + 30?", "--dtype", "float32")
    assert (code, out) == (0, "20 + 30 = 50\n")
    code, out, _ = run("generate", "-", "--json", input="What is 20 + 30?")
    assert "50" in json.loads(out)["content"] and json.loads(out)["reasoning_content"]
    code, out, _ = run("generate", "[gMASK]<sop><|user|>Hello<|assistant|><think></think>", "--raw", "--json", "--max-tokens", "2", "--temperature", "0")
    assert len(json.loads(out)["token_ids"]) == 2 and json.loads(out)["finish_reason"] == "length"
    assert run("generate", "x", "--temperature", "nan")[0] == 1


def test_chat_with_a_tool(tmp_path):
    "Two turns, a call that the person answers, a new start, the end of input."
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "get_weather", "description": "Get the weather for a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]))
    code, out, err = run("chat", "--tools", str(tools), "--dtype", "float32", "--temperature", "0", input="What is the weather in Oslo?\n{\"temperature\": 7}\nWhat is 2 + 3?\n/reset\nHello\n")
    assert code == 0, err
    assert "2 + 3 = 5" in out and 'result of get_weather({"city": "Oslo"})' in out and "7" in out.split("result of")[1]
    tools.write_text("[")
    assert run("chat", "--tools", str(tools))[0] == 1


def test_serve_answers_and_leaves_in_good_order():
    "A real process: it says where it listens, answers, and ends with 0 after an interrupt."
    server = start("serve", "--port", "0", "--dtype", "float32", "--max-model-len", "1024")
    try:
        line = next(line for line in server.stderr if "serves" in line)
        url = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        end = time.monotonic() + 30
        while True:
            try: assert httpx.get(f"{url}/health").status_code == 200; break
            except httpx.TransportError: assert time.monotonic() < end; time.sleep(0.1)
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "What is 4 + 4?"}]}, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "4 + 4 = 8"
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
    finally: server.kill()


def test_an_open_server_is_announced_and_the_key_comes_from_the_environment(monkeypatch):
    started = {}
    monkeypatch.setattr("glm52.server.app.run", lambda app, listener, **rest: started.update(app=app))
    _, _, err = run("serve", "--host", "0.0.0.0", "--port", "0", "--max-model-len", "256", "--num-pages", "8")
    assert "without an API key" in err
    monkeypatch.setenv("GLM52_API_KEY", "from the environment")
    _, _, err = run("serve", "--host", "0.0.0.0", "--port", "0", "--max-model-len", "256", "--num-pages", "8")
    assert "without an API key" not in err
    guard = next(m for m in started["app"].user_middleware if m.cls.__name__ == "Guard")
    assert guard.kwargs["api_key"] == "from the environment"


def test_generate_with_guesses_says_the_same():
    plain = run("generate", "Sort: 9 4 7 1", "--json", "--seed", "3", "--max-tokens", "40")
    assert plain[0] == 0 and run("generate", "Sort: 9 4 7 1", "--json", "--seed", "3", "--max-tokens", "40", "--num-speculative-tokens", "5") == plain
    assert run("generate", "x", "--num-speculative-tokens", "8")[0] == 2
