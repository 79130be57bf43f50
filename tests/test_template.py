"The chat template: its text to the letter, the public cases, every message shape, every refusal."

import copy, json, time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import glm52.chat
from glm52.chat.template import (TEMPLATE, TemplateError, compare_template, normalize_messages, normalize_tools,
                                 probe_conversations, render, render_command, show_tokens)
from glm52.chat.tokenizer import byte_tokenizer

CASES = {case["id"]: case for line in (Path(__file__).parent / "cases" / "public-reports.jsonl").read_text().splitlines()
         if (case := json.loads(line))["kind"] == "template"}
LETTERS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=12)
ASK = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "description": "ü", "parameters": {"type": "object"}}}


def test_the_whole_format_to_the_letter():
    tools = [TOOL | {"function": TOOL["function"] | {"strict": True}},
             {"type": "function", "function": {"name": "later", "defer_loading": True}}]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {
        "s": " raw \n", "i": 3, "f": 1.5, "b": True, "n": None, "l": [1, "é"], "o": {"k": "v"}}}}
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "u1"},
                {"role": "assistant", "content": " a1 ", "reasoning_content": "gone"}, {"role": "user", "content": "u2"},
                {"role": "assistant", "content": None, "reasoning_content": " r\n", "tool_calls": [call, call]},
                {"role": "tool", "content": "t1"}, {"role": "tool", "content": "t2"}]
    wire = ("<tool_call>look<arg_key>s</arg_key><arg_value> raw \n</arg_value><arg_key>i</arg_key><arg_value>3</arg_value>"
            "<arg_key>f</arg_key><arg_value>1.5</arg_value><arg_key>b</arg_key><arg_value>true</arg_value>"
            "<arg_key>n</arg_key><arg_value>null</arg_value><arg_key>l</arg_key><arg_value>[1, \"é\"]</arg_value>"
            "<arg_key>o</arg_key><arg_value>{\"k\": \"v\"}</arg_value></tool_call>")
    want = ("[gMASK]<sop><|system|>Reasoning Effort: Max<|system|>\n# Tools\n\nYou may call one or more functions to assist "
            "with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
            "{\"name\": \"look\", \"description\": \"ü\", \"parameters\": {\"type\": \"object\"}}\n</tools>\n\n"
            "For each function call, output the function name and arguments within the following XML format:\n"
            "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
            "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
            "<|system|>S<|user|>u1<|assistant|><think></think>a1<|user|>u2<|assistant|><think> r\n</think>" + wire + wire +
            "<|observation|><tool_response>t1</tool_response><tool_response>t2</tool_response><|assistant|><think>")
    assert render(messages, tools) == want
    assert render(messages, tools, tokenizer=byte_tokenizer(TEMPLATE)) == want
    assert render(messages, tools, reasoning_effort="high") == want.replace("Effort: Max", "Effort: High")
    assert render(messages, tools, clear_thinking=False) == want.replace("<think></think>a1", "<think>gone</think>a1")
    off = want.replace("<|system|>Reasoning Effort: Max", "") + "</think>"
    assert render(messages, tools, enable_thinking=False) == render(messages, tools, reasoning_effort="none") == off
    assert render(messages, tools, add_generation_prompt=False) == want.removesuffix("<|assistant|><think>")


@pytest.mark.parametrize("effort, line", [("high", "High"), ("max", "Max"), ("low", "Max"), ("medium", "Max"), (None, "Max")])
def test_effort(effort, line):
    assert render([ASK], reasoning_effort=effort).startswith(f"[gMASK]<sop><|system|>Reasoning Effort: {line}<|user|>")


def check(text, expect):
    for wanted in expect.get("must_contain", []): assert wanted in text
    turns = text[text.index("<|user|>"):]  # the schema among the declarations has {"spot" too, rightly
    for banned in expect.get("must_not_contain", []): assert banned not in turns


@pytest.mark.parametrize("name", ["CT01", "CT03", "CT05"])
def test_public_case(name):
    given, expect = CASES[name]["given"], CASES[name]["expect"]
    text = render(given["messages"], given.get("tools"))
    if name == "CT05": assert given["messages"][0]["content"] in text
    check(text, expect)
    other = copy.deepcopy(given["messages"])
    for message in other:
        if message["role"] == "developer": message["role"] = "system"
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert render(other, given.get("tools")) == text


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_public_case_ct07(field):
    given, expect = CASES["CT07"]["given"], CASES["CT07"]["expect"]
    messages = json.loads(json.dumps(given["messages"]).replace("$FIELD", field))
    check(render(messages, given["tools"]), expect["default"])
    check(render(messages, given["tools"], clear_thinking=False), expect["clear_thinking_false"])


def test_all_template_cases_are_used(): assert sorted(CASES) == ["CT01", "CT03", "CT05", "CT07"]


def test_reasoning_inside_content_is_found():
    for content in ("<think>why</think>because", "why</think>because"):
        (_, message), _ = normalize_messages([ASK, {"role": "assistant", "content": content}])
        assert (message["reasoning_content"], message["content"]) == ("why", "because")
    (_, message), _ = normalize_messages([ASK, {"role": "assistant", "content": "a</think>b", "reasoning_content": ""}])
    assert (message["reasoning_content"], message["content"]) == ("", "a</think>b")


def test_interleaved_reasoning_is_kept_in_each_turn_of_the_loop():
    turn = lambda n: [{"role": "assistant", "content": "", "reasoning": f"r{n}",
                       "tool_calls": [{"id": f"c{n}", "function": {"name": "look", "arguments": "{}"}}]},
                      {"role": "tool", "tool_call_id": f"c{n}", "content": f"t{n}"}]
    text = render([ASK, *turn(1), *turn(2)])
    assert "<think>r1</think><tool_call>look</tool_call><|observation|><tool_response>t1</tool_response>" \
           "<|assistant|><think>r2</think><tool_call>look</tool_call>" in text


def test_anthropic_and_openai_forms_render_the_same():
    openai = [{"role": "system", "content": "S"}, ASK,
              {"role": "assistant", "content": "on it", "reasoning_content": "hm",
               "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{\"a\": 1}"}}]},
              {"role": "tool", "tool_call_id": "t1", "content": "r\nmore"}, {"role": "user", "content": "and?"}]
    anthropic = [ASK, {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "on it"},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}]},
                 {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1",
                     "content": [{"type": "text", "text": "r"}, {"type": "text", "text": "more"}]},
                    {"type": "text", "text": "and?"}]}]
    theirs = [{"name": "look", "description": "ü", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]
    assert render(anthropic, theirs, style="anthropic", system=[{"type": "text", "text": "S"}]) == render(openai, [TOOL])


def test_billing_header_is_dropped_from_system_only():
    head = lambda n: {"type": "text", "text": f"x-anthropic-billing-header: cc_version=9.9; cch={n};"}
    ask = [{"role": "user", "content": [head("u")]}]
    one, two = (render(ask, style="anthropic", system=[head(n), {"type": "text", "text": "You are a helper."}]) for n in "ab")
    assert one == two and "You are a helper." in one and "cch=u" in one
    assert "<|system|>x-" not in render([{"role": "system", "content": [head("c")]}, *ask], style="anthropic")


def test_tool_forms_and_deferred_loading():
    bare, anthropic = TOOL["function"], {"name": "look", "description": "ü", "input_schema": {"type": "object"}}
    assert normalize_tools([TOOL]) == normalize_tools([bare]) == normalize_tools([anthropic])
    deferred = TOOL | {"defer_loading": True}
    assert "# Tools" not in render([ASK], [deferred])
    search = {"role": "tool", "content": [{"type": "tool_reference", "tool_name": "look"}]}
    line = json.dumps(bare, ensure_ascii=False)
    assert f"<tool_response><tools>\n{line}\n</tools></tool_response>" in render([ASK, search], [deferred])


@pytest.mark.parametrize("message, options, tail", [
    ({"content": "It is "}, {}, "<think></think>It is "), ({"content": "It is "}, {"enable_thinking": False}, "<think></think>It is "),
    ({"reasoning_content": "hm "}, {}, "<think>hm "), ({"reasoning_content": "hm", "content": "So"}, {}, "<think>hm</think>So"),
    ({"content": "<think>hm "}, {}, "<think>hm "), ({"content": ""}, {}, "<think>"),
    ({"content": ""}, {"enable_thinking": False}, "<think></think>")])
def test_prefill(message, options, tail):
    message = {"role": "assistant", **message}
    text = render([ASK, message], continue_final_message=True, **options)
    assert text.endswith("<|user|>hi<|assistant|>" + tail)
    if isinstance(message.get("content"), str) and not message.get("reasoning_content"):
        assert render([ASK, message], style="anthropic", **options).endswith("<|assistant|>" + tail) \
            or message["content"].startswith("<think>") or message["content"] == ""


def calls(arguments): return [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


def nested(depth):
    value = []
    for _ in range(depth): value = [value]
    return value


BAD = [
    (calls(json.dumps({"a": nested(300)})), None, "nested deeper than 100"), (calls("{\"a\": " + "[" * 700 + "]" * 700 + "}"), None, "nested deeper"),
    (calls({"a": nested(5000)}), None, "nested deeper"), ([{"role": "user", "content": {"a": nested(5000)}}], None, "content is an object"),
    (calls({"a": float("nan")}), None, "holds nan"), (calls("{\"a\": [1e999]}"), None, "holds inf"), (calls({"a": 10 ** 5000}), None, "3,000 digits"),
    (calls({"a": {1, 2}}), None, r"holds set \(\{1, 2\}\)"), (calls({"a": {1: 2}}), None, "a key in .* is a number"), (calls({1: 2}), None, "a key in"),
    (calls({"a</arg_key>": 1}), None, "markup of the wire format"),
    ([ASK], [{"name": "f", "parameters": {"a": nested(5000)}}], r"tools\[0\] is nested deeper"),
    ([ASK], [{"name": "f", "parameters": {"maximum": float("inf")}}], "holds inf"), ([ASK], [{"name": "f", "description": "\ud800"}], r"tools\[0\] has a lone surrogate"),
    ([], None, "empty"), (None, None, "messages is null"), ({"role": "user"}, None, "messages is an object"),
    (["hi"], None, r"messages\[0\] is text"), ([{"role": "robot", "content": "x"}], None, "role is 'robot'"),
    ([{"content": "x"}], None, "role is None"), ([{"role": "user", "content": 3}], None, r"content is a number \(3\)"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], None, "text only"),
    ([{"role": "user", "content": [{"type": "text"}]}], None, r"content\[0\].text is null"),
    ([{"role": "user", "content": [3]}], None, r"content\[0\] is a number"),
    ([{"role": "user", "content": "a\ud800"}], None, "lone surrogate at character 1"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": \"\\ud800\"}"}}]}], None, "surrogate"),
    ([{"role": "assistant", "tool_calls": {"a": 1}}], None, "tool_calls is an object"),
    ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], None, "type is 'custom'"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "a b"}}]}], None, "no blanks"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": 4}}]}], None, "name is a number"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}], None, "arguments is an array"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": NaN}"}}]}], None, "NaN"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{" * 9}}]}], None, "not valid JSON"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 200_000}}]}], None, "not valid JSON"),
    ([{"role": "assistant", "reasoning_content": 3}], None, "reasoning_content is a number"),
    ([{"role": "tool", "content": [{"type": "tool_reference", "tool_name": "gone"}]}], None, "'gone', which is not in tools"),
    ([ASK], {"name": "x"}, "tools is an object"), ([ASK], ["x"], r"tools\[0\] is text"), ([ASK], [{"function": 3}], "function is a number"),
    ([ASK], [{"name": "a b"}], "blanks"), ([ASK], [{"name": ""}], "blanks"), ([ASK], [TOOL, TOOL], "declared twice"),
    ([ASK], [{"name": "a", "parameters": []}], "parameters is an array"), ([ASK], [{"type": "web_search"}], "web_search"),
]


@pytest.mark.parametrize("messages, tools, says", BAD)
def test_refusals_say_what_and_where(messages, tools, says):
    with pytest.raises(TemplateError, match=says): render(messages, tools)


@pytest.mark.parametrize("options, says", [
    ({"enable_thinking": "yes"}, "enable_thinking is text"), ({"clear_thinking": 1}, "clear_thinking"),
    ({"reasoning_effort": "huge"}, "huge"), ({"style": "other"}, "style is 'other'"), ({"continue_final_message": True}, "only an assistant")])
def test_options_are_checked(options, says):
    with pytest.raises(TemplateError, match=says): render([ASK], **options)


@pytest.mark.parametrize("message, options, says", [
    ({"tool_calls": [{"function": {"name": "f"}}]}, {}, "turn has ended"),
    ({"reasoning_content": "r"}, {"enable_thinking": False}, "enable_thinking is false")])
def test_prefills_that_cannot_be(message, options, says):
    with pytest.raises(TemplateError, match=says):
        render([ASK, {"role": "assistant", **message}], continue_final_message=True, **options)
    with pytest.raises(TemplateError, match="before it"):
        render([{"role": "assistant", "content": "x"}], continue_final_message=True)


def test_anthropic_refusals():
    for content, says in (([{"type": "redacted_thinking"}], "redacted"), (3, "content is a number"), ([3], r"content\[0\]"),
                          ([{"type": "image"}], "text only")):
        with pytest.raises(TemplateError, match=says):
            render([ASK, {"role": "assistant", "content": content}, ASK], style="anthropic")


def test_the_jinja_file_alone_refuses_what_it_would_print_wrong():
    hf = byte_tokenizer(TEMPLATE).hf
    call = {"function": {"name": "f", "arguments": "{}"}}
    for messages in ([{"role": "robot", "content": "x"}], [{"role": "user", "content": {"a": 1}}], [{"role": "user", "content": [{"a": 1}]}],
                     [{"role": "assistant", "content": "", "tool_calls": [call]}]):
        with pytest.raises(Exception, match="role|content|arguments"): hf.apply_chat_template(messages, tokenize=False)


@given(st.lists(st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": LETTERS}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": LETTERS, "reasoning_content": LETTERS, "tool_calls": st.lists(
        st.fixed_dictionaries({"id": st.none(), "type": st.just("function"), "function": st.fixed_dictionaries(
            {"name": st.sampled_from("fg"), "arguments": st.dictionaries(LETTERS, st.one_of(LETTERS, st.integers()), max_size=2)})}),
        max_size=2)})), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_the_normal_form_is_a_fixed_point_and_every_text_is_in_the_prompt(messages):
    normal, _ = normalize_messages(messages)
    for message in normal: message.pop("tool_call_id", None)
    assert normal == messages
    text = render(messages, clear_thinking=False)
    for message in messages:
        assert message["content"].strip() in text and message.get("reasoning_content", "") in text


def test_comparison_names_the_first_difference():
    assert compare_template(TEMPLATE, TEMPLATE) is None
    broken = {"one question": ("'[gMASK]<sop>'", "'[gMASK]<sop> '"), "calls and results": ("~ '</tool_response>'", "~ '</tool_response>\\n'"),
              "thinking off": ("else '<|assistant|><think></think>'", "else '<|assistant|></think>'"),
              "tools": ("'strict'", "'other'"), "second turn": ("| trim", ""), "second turn, thinking kept": ("keep_all or ", "")}
    for case, (old, new) in broken.items():
        assert old in TEMPLATE
        assert compare_template(TEMPLATE, TEMPLATE.replace(old, new)).case == case
    assert "error" in compare_template(TEMPLATE, "{{ raise_exception('no') }}").theirs
    assert len({name for name, *_ in probe_conversations()}) == 12


def test_the_nano_model_ships_this_template():
    assert compare_template(TEMPLATE, (Path(glm52.chat.__file__).parent.parent / "nano" / "weights" / "chat_template.jinja").read_text()) is None


def test_ten_megabytes_of_prompt_and_a_thousand_turns():
    start = time.process_time()
    assert len(render([{"role": "user", "content": "x" * 10_000_000}])) > 10_000_000
    turns = [ASK, {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
             {"role": "tool", "content": "r"}] * 1000
    assert render(turns).count("<tool_response>r</tool_response>") == 1000
    assert time.process_time() - start < 5


def test_render_command_shows_every_boundary():
    body = json.dumps({"messages": [ASK], "tools": [TOOL]})
    plain = render_command(body, colour=False)
    assert plain.replace("│", "") == render([ASK], [TOOL]) and plain.endswith("<|user|>│h│i│<|assistant|>│<think>")
    assert render_command(body).count("\033[1;36m<|user|>\033[0m") == 1
    with pytest.raises(TemplateError, match="messages file is not valid JSON"): render_command("{")
    assert show_tokens("é", byte_tokenizer(), colour=False) == "│é"
