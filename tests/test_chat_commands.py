"`glm52 parse` and `glm52 render`, run as a person runs them: the public cases, whole and one character at a time."

import json, os, subprocess, sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from glm52.cli import app

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "public-reports.jsonl").read_text().splitlines()]
PARSE = [case for case in CASES if case["kind"] == "parse"]
RENDER = [case for case in CASES if case["kind"] == "template" and "messages" in case["given"]]


def parse_arguments(case, folder, chunk):
    "The command line of a case."
    given, tools = case["given"], folder / "tools.json"
    tools.write_text(json.dumps(given["tools"]))
    start = ["--prompt-tail", given["prompt_suffix"]] if "prompt_suffix" in given else [
        "--thinking", "on" if given["prompt_tail"] == "think_open" else "off"]
    return ["parse", "--tools", str(tools), *start, "--finish", given["engine_finish"], "--chunk", str(chunk)]


def check(printed, case):
    "What the command printed, against the case."
    found, expect = json.loads(printed), case["expect"]
    assert found["finish_reason"] == expect["finish_reason"] and found["message"]["role"] == "assistant"
    message, want = found["message"], expect["message"]
    if want is not None:
        assert (message["reasoning_content"], message["content"]) == (want["reasoning"], want["content"])
        assert [{"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
                for call in message["tool_calls"]] == want["tool_calls"]
    for call in message["tool_calls"]: assert call["type"] == "function" and call["id"] and json.loads(call["function"]["arguments"]) is not None
    for tag in expect.get("content_must_not_contain", ()): assert tag not in (message["content"] or "")


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("case", PARSE, ids=lambda case: case["id"])
def test_parse(case, chunk, tmp_path):
    result = CliRunner().invoke(app, parse_arguments(case, tmp_path, chunk), input=case["given"]["output"].encode())
    assert result.exit_code == 0, result.output
    check(result.stdout, case)


@pytest.mark.parametrize("case", RENDER, ids=lambda case: case["id"])
def test_render(case, tmp_path):
    given, body, tools = case["given"], tmp_path / "messages.json", tmp_path / "tools.json"
    body.write_text(json.dumps(given["messages"]).replace("$FIELD", "reasoning_content"))
    tools.write_text(json.dumps(given.get("tools") or []))
    result = CliRunner().invoke(app, ["render", str(body), "--tools", str(tools), "--no-colour"])
    assert result.exit_code == 0, result.output
    text, expect = result.stdout.replace("│", ""), case["expect"].get("default", case["expect"])
    assert text.startswith("[gMASK]<sop>") and text.rstrip("\n").endswith("<|assistant|><think>")
    for wanted in expect.get("must_contain", ()): assert wanted in text
    for banned in expect.get("must_not_contain", ()): assert banned not in text[text.index("<|user|>"):]


def command(*arguments, stdin=b""):
    "A process of its own."
    return subprocess.run([sys.executable, "-m", "glm52.cli", *map(str, arguments)], input=stdin, capture_output=True, timeout=120,
                          env=os.environ | {"HF_HUB_OFFLINE": "1"})


def test_as_a_process(tmp_path):
    "Bytes in, JSON out; a wrong use is a message, not a traceback."
    case = next(case for case in PARSE if case["id"] == "TP16")
    done = command(*parse_arguments(case, tmp_path, 1), stdin=case["given"]["output"].encode())
    assert done.returncode == 0, done.stderr.decode()
    check(done.stdout, case)
    (tmp_path / "bad.json").write_text('[{"role": "robot", "content": "x"}]')
    done = command("render", tmp_path / "bad.json")
    assert done.returncode != 0 and b"robot" in done.stderr + done.stdout and b"Traceback" not in done.stderr


def test_bytes_that_are_no_text_and_wrong_uses():
    done = CliRunner().invoke(app, ["parse", "--thinking", "off"], input=b"a\xff\x00</think>")
    assert done.exit_code == 0 and json.loads(done.stdout)["message"]["content"] == "a\udcff\x00</think>"
    assert "\\udcff" in done.stdout, "printed as an escape, so that any terminal and file takes it"
    done = CliRunner().invoke(app, ["parse"], input=b"x")
    assert done.exit_code != 0 and "--thinking" in done.output
