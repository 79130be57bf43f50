"""The parser: the public cases, a property test over random outputs and splits, schema types, bad input, speed.

GLM52_CASES=100000 pytest -s tests/test_parsers.py -k property    runs the property test on that many replies,
GLM52_LARGE=1 pytest -s tests/test_parsers.py -k megabytes        parses ten megabytes of each heavy kind.
"""

import cProfile, gc, json, math, os, pstats, random, re, time, tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from glm52.chat.parsers import (MAX_DEPTH, TAGS, Accept, Lexer, OutputParser, ParserError, Schema, json_string, naive_parse,
                                open_turn, parse, parse_command, to_json)
from glm52.chat.template import TemplateError, normalize_messages, render

CASES = [case for line in (Path(__file__).parent / "cases" / "public-reports.jsonl").read_text().splitlines()
         if (case := json.loads(line))["kind"] == "parse"]
TAIL = {"think_open": "<|assistant|><think>", "think_closed": "<|assistant|><think></think>"}
OPEN, CLOSED = TAIL["think_open"], TAIL["think_closed"]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
    "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": ["number", "null"]}, "b": {"type": "boolean"},
    "a": {"type": "array"}, "o": {"type": "object"}, "e": {"enum": ["auto", 3, True]}}}}}
    for name in ("look", "look_up", "ping")]


def number(index): return f"call_{index}"


def run(text, tools=TOOLS, tail=CLOSED, finish="stop", cuts=()):
    "A finished parser and its deltas, the text cut at `cuts`."
    parser, deltas, last = OutputParser(tools, tail, call_id=number), [], 0
    for cut in [*sorted(cuts), len(text)]:
        deltas += parser.feed(text[last:cut])
        last = cut
    return parser, deltas + parser.finish(finish)


def joined(deltas):
    "What an OpenAI client assembles from the deltas."
    message = {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": []}
    for delta in (d.to_openai() for d in deltas):
        for key in ("content", "reasoning_content"):
            if key in delta: message[key] = (message[key] or "") + delta[key]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"]), "a new call has the next index, and its id comes once"
                message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert call["index"] == len(message["tool_calls"]) - 1 and "name" not in call["function"]
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
                if call.get("incomplete"): message["tool_calls"][-1]["incomplete"] = True
    return message


def outcome(parser): return parser.message, parser.finish_reason, parser.spans, parser.reports, parser.ended_in_thinking


def check(parser, deltas, text):
    "What holds for every reply."
    assert parser.raw == text
    place = 0
    for span in parser.spans:
        assert span.start == place < span.end
        place = span.end
    assert place == len(text), "the spans cover every character once"
    message = parser.message
    assert joined(deltas) == message.to_openai()
    for kind, said in (("reasoning", message.reasoning_content), ("content", message.content)):
        assert "".join(text[s.start:s.end] for s in parser.spans if s.kind == kind) == (said or "")
    for call in message.tool_calls:
        assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict)
        call.arguments.encode()
    assert not message.tool_calls or all(not c.incomplete for c in message.tool_calls) or parser.finish_reason != "tool_calls"


# --- the public cases --------------------------------------------------------------------------------------------

def case_tail(given): return given.get("prompt_suffix", TAIL[given["prompt_tail"]])


def case_pieces(given, how):
    text = given["output"]
    if how == "given" and isinstance(given.get("chunks"), list): return given["chunks"]
    return list(text) if how == "chars" else [text]


@pytest.mark.parametrize("how", ["whole", "chars", "given"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_public_case(case, how):
    given, expect = case["given"], case["expect"]
    parser, deltas = OutputParser(given["tools"], case_tail(given), call_id=number), []
    for piece in case_pieces(given, how): deltas += parser.feed(piece)
    deltas += parser.finish(given["engine_finish"])
    check(parser, deltas, given["output"])
    assert parser.finish_reason == expect["finish_reason"]
    message = parser.message
    if expect["message"] is not None:
        assert (message.reasoning_content, message.content) == (expect["message"]["reasoning"], expect["message"]["content"])
        assert [{"name": c.name, "arguments": json.loads(c.arguments)} for c in message.tool_calls] == expect["message"]["tool_calls"]
    for tag in expect.get("content_must_not_contain", ()): assert tag not in (message.content or "")
    if "also" in expect["message"] if expect["message"] else False:
        assert parser.ended_in_thinking and [r.kind for r in parser.reports] == ["ended_in_thinking"]
    if "first_delta_has" in expect:
        first = next(d for d in deltas if d.kind == "tool_call").to_openai()["tool_calls"][0]
        assert first["id"] and first["type"] == "function" and first["function"]["name"]


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_public_case_through_the_command(case, chunk):
    given, expect = case["given"], case["expect"]
    how = {"prompt_tail": given["prompt_suffix"]} if "prompt_suffix" in given else {
        "thinking": "on" if given["prompt_tail"] == "think_open" else "off"}
    printed = json.loads(parse_command(given["output"], json.dumps(given["tools"]), finish=given["engine_finish"], chunk=chunk, **how))
    assert printed["finish_reason"] == expect["finish_reason"]
    if case["id"] == "TP16":
        (call,) = printed["message"]["tool_calls"]
        assert call["incomplete"] is True and json.loads(call["function"]["arguments"]) == {"text": "Dear neig"}
    if expect["message"] is not None:
        message = printed["message"]
        assert (message["reasoning_content"], message["content"]) == (expect["message"]["reasoning"], expect["message"]["content"])
        assert [{"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}
                for c in message["tool_calls"]] == expect["message"]["tool_calls"]


def test_all_public_cases_are_here():
    assert len(CASES) == 17 and {c["id"][:2] for c in CASES} == {"TP", "RP"}


# --- random outputs ----------------------------------------------------------------------------------------------

WORDS = ["a", " ", "\n", "x < y", "é🙂", "\"q\"", "\\", "</", "<t", "3", "-2.5", "true", "null", "[1, {\"k\": \"]\"}]", "{\"z\": 1}",
         "auto", "\x00", "\ud800", "look", "the tag "]
NAMES = ["look", "look_up", "ping", "unknown.tool", "3", "bad name", "{\"name\": \"look\", \"arguments\": {}}", ""]


def words(rng, tags=0.1, most=4):
    return "".join(rng.choice(TAGS) if rng.random() < tags else rng.choice(WORDS) for _ in range(rng.randint(0, most)))


def blank(rng): return rng.choice(["", "", "", "\n", " \t"])


def a_call(rng, name=None):
    "A well-formed call, its values with tags as data."
    out = "<tool_call>" + blank(rng) + (name or rng.choice(NAMES[:3])) + blank(rng)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        out += (f"<arg_key>{rng.choice('sinbaoeZ')}</arg_key>{blank(rng)}<arg_value>{words(rng)}</arg_value>{blank(rng)}")
    return out + "</tool_call>"


def an_output(rng, names=NAMES):
    "A reply: well formed, or bent."
    parts = [words(rng, 0.05), rng.choice(["</think>", "", "</think>\n"]), words(rng, 0.05)]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        parts += [blank(rng), a_call(rng, rng.choice([None, None, None, rng.choice(names)])), rng.choice(["", "", blank(rng), words(rng)])]
    if rng.random() < 0.25: rng.shuffle(parts)
    text = "".join(parts)
    for _ in range(rng.choice([0, 0, 1, 2, 4])): text = mutated(rng, text)
    return text[:400]


SCHEMAS = [{}, True, None, {"type": "string"}, {"type": "integer"}, {"type": ["number", "null"]}, {"type": "boolean"}, {"type": "array"},
           {"type": "object"}, {"enum": ["auto", 3, True, None]}, {"enum": [1, 2]}, {"const": "3"}, {"const": -2.5}, {"$ref": "#/$defs/n"},
           {"$ref": "#/$defs/loop"}, {"$ref": "#/properties/s"}, {"$ref": "#"}, {"anyOf": [{"type": "integer"}, {"type": "array"}]},
           {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}, {"allOf": [{"type": "integer"}, {"minimum": 1}]}, {"type": 5}, {"type": "float"}]
DEFS = {"n": {"type": "number"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "boolean"}]}}


def some_tools(rng):
    "Declarations: mostly the usual ones, otherwise other names with random schemas, or none."
    if rng.random() < 0.5: return TOOLS
    names = rng.sample(["look", "look_up", "ping", "unknown.tool", "3", "é", "bad-name"], rng.randint(0, 4))
    return [{"name": name, "parameters": {"properties": {key: rng.choice(SCHEMAS) for key in "sinbaoeZ" if rng.random() < 0.8}, "$defs": DEFS}}
            for name in names]


def mutated(rng, text):
    "One accident: a tag lost, doubled, moved or added, or a stretch cut out."
    tags = list(re.finditer("</?(?:think|tool_call|arg_key|arg_value)>", text))
    how = rng.choice(["drop", "double", "swap", "insert", "cut"])
    if how in ("drop", "double", "swap") and tags:
        tag = rng.choice(tags)
        new = {"drop": "", "double": tag[0] + blank(rng) + tag[0], "swap": rng.choice(TAGS)}[how]
        return text[:tag.start()] + new + text[tag.end():]
    a, b = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
    return text[:a] + rng.choice(TAGS + tuple(WORDS)) + text[a:] if how == "insert" else text[:a] + text[min(b, a + 8):]


def test_property_any_cut_gives_the_same_reply():
    """Random replies and declarations, whole and truncated at every character, under all two-way and random many-way
    splits: deltas joined = complete, every arguments string parses, spans cover every character once."""
    wanted, rng, replies, done = int(os.environ.get("GLM52_CASES", "1000")), random.Random(52), 0, 0
    while replies < wanted:
        text, tools, tail = an_output(rng), some_tools(rng), rng.choice([OPEN, OPEN, CLOSED, "<|assistant|>", ""])
        finish = rng.choice(["stop", "stop", "length"])
        ends = [len(text)] if rng.random() < 0.98 else range(len(text) + 1)
        for end in ends:
            short = text[:end]
            whole, deltas = run(short, tools, tail, finish)
            check(whole, deltas, short)
            want = outcome(whole)
            splits = [[i] for i in range(end + 1)] if len(ends) == 1 else []
            splits += [range(end + 1)] + [[rng.randint(0, end) for _ in range(rng.randint(2, 9))] for _ in range(3)]
            for cuts in splits:
                parser, deltas = run(short, tools, tail, finish, cuts)
                assert outcome(parser) == want, (short, tools, tail, finish, list(cuts))
                assert joined(deltas) == parser.message.to_openai(), (short, tools, tail, finish, list(cuts))
            replies, done = replies + 1, done + len(splits)
    print(f"\n{replies} replies, {done} splits")


# --- the rule inside thinking, against its plain statement --------------------------------------------------------

NAMED = "|".join(t["function"]["name"] for t in TOOLS)
VALUE_END = r"</arg_value>(?=\s*(?:</arg_value>\s*)*(?:<arg_key>|</tool_call>))"


def plain_rule(text):
    "Where thinking ends, and whether calls follow there: the rule of the chapter, said with whole strings."
    for match in re.finditer("<tool_call>", text):
        close = text.find("</think>")
        if 0 <= close < match.start(): break
        if _calls_to_the_end(text[match.start():]): return match.start(), True
    close = text.find("</think>")
    return (len(text), False) if close < 0 else (close, False)


def _calls_to_the_end(text):
    text = text.lstrip()
    while text:
        head = re.match(rf"<tool_call>\s*({NAMED})\s*(?=<arg_key>|</tool_call>)", text)
        if not head: return False
        text = text[head.end():]
        while text.startswith("<arg_key>"):
            key = re.match(r"<arg_key>((?:(?!</?(?:think|tool_call|arg_key|arg_value)>).)*)</arg_key>\s*<arg_value>", text, re.S)
            if not key: return False
            end = re.search(VALUE_END, text[key.end():])
            if not end: return False
            value = text[key.end():][:end.start()]
            if "</think>" in value and "<tool_call>" in value[value.index("</think>"):]: return False
            text = text[key.end() + end.end():].lstrip()
        if not text.startswith("</tool_call>"): return False
        text = text[len("</tool_call>"):].lstrip()
    return True


def test_thinking_ends_where_the_plain_rule_says():
    rng, calls = random.Random(5), 0
    for _ in range(4000):
        text = "x" + an_output(rng)
        parser, _ = run(text, tail=OPEN)
        end, call = plain_rule(text)
        said = parser.message.reasoning_content or ""
        first = text[:end]
        assert said.startswith(first), (text, said)
        assert call == (said == first and bool(parser.message.tool_calls) and not text[end:].startswith("</think>")), text
        calls += call
    assert calls > 200


@pytest.mark.parametrize("text, reasoning, content, calls", [
    ("hm<tool_call>ping</tool_call>", "hm", None, ["ping"]),
    ("hm <tool_call>ping</tool_call>\n<tool_call>look</tool_call>\n", "hm ", None, ["ping", "look"]),
    ("hm<tool_call>ping</tool_call> no", "hm<tool_call>ping</tool_call> no", None, []),
    ("hm<tool_call>ping</tool_call></think>ok", "hm<tool_call>ping</tool_call>", "ok", []),
    ("hm<tool_call>other</tool_call>", "hm<tool_call>other</tool_call>", None, []),
    ("hm<tool_call>ping", "hm<tool_call>ping", None, []),
    ("<tool_call> maybe</think>answer", "<tool_call> maybe", "answer", []),
    ("a <tool_call>look<arg_key>s</arg_key><arg_value>… no</think>Sure.<tool_call>look<arg_key>s</arg_key><arg_value>v</arg_value></tool_call>",
     "a <tool_call>look<arg_key>s</arg_key><arg_value>… no", "Sure.", ["look"]),
    ("a<tool_call>look<arg_key>s</arg_key><arg_value>x</think>y</arg_value></tool_call>", "a", None, ["look"]),
    ("q <tool_call>ping</tool_call> then <tool_call>look</tool_call>", "q <tool_call>ping</tool_call> then ", None, ["look"]),
    ("a</think>b<tool_call>ping</tool_call>", "a", "b", ["ping"]),
    ("<think>a</think>b", "a", "b", []), ("\n</think>b", None, "b", []), ("a</think></think>b", "a", "b", []),
])
def test_thinking(text, reasoning, content, calls):
    for cuts in ((), range(len(text))):
        parser, deltas = run(text, tail=OPEN, cuts=cuts)
        check(parser, deltas, text)
        message = parser.message
        assert (message.reasoning_content, message.content, [c.name for c in message.tool_calls]) == (reasoning, content, calls)
        assert parser.ended_in_thinking == (not calls and "</think>" not in text)


def test_without_declared_tools_thinking_holds_nothing_back():
    parser = OutputParser([], OPEN)
    assert [d.text for d in parser.feed("a<tool_call>f")] == ["a<tool_call>f"]


# --- outside thinking --------------------------------------------------------------------------------------------

def arguments(text, tools=TOOLS, finish="stop"):
    "Arguments of the only call, and the kinds of reports."
    parser, deltas = run(text, tools, finish=finish)
    check(parser, deltas, text)
    again, _ = run(text, tools, finish=finish, cuts=range(len(text)))
    assert outcome(again) == outcome(parser)
    (call,) = parser.message.tool_calls
    return json.loads(call.arguments), [r.kind for r in parser.reports]


def body(inner, name="look"): return f"<tool_call>{name}{inner}</tool_call>"


def argument(key, value): return f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"


@pytest.mark.parametrize("inner, want, kinds", [
    ("", {}, []), ("\n", {}, []), ("</arg_value>", {}, ["stray_tag"]),
    (argument("s", " keep \n"), {"s": " keep \n"}, []),
    (argument("s", "\"quoted\""), {"s": "\"quoted\""}, []),
    ("\n<arg_key> s </arg_key>\n<arg_value>v</arg_value>\n", {"s": "v"}, []),
    ("<arg_key>s</arg_key>v</arg_value>", {"s": "v"}, ["missing_value_open"]),
    ("<arg_key>s</arg_key>  v</arg_value>", {"s": "  v"}, ["missing_value_open"]),
    ("<arg_key>s<arg_value>v</arg_value>", {"s": "v"}, ["missing_key_close"]),
    ("<arg_key>s</arg_key></arg_key><arg_value>v</arg_value>", {"s": "v"}, ["stray_tag"]),
    ("<arg_key><arg_key>s</arg_key><arg_value>v</arg_value>", {"s": "v"}, ["stray_tag"]),
    (argument("s", "v") + "</arg_value>", {"s": "v"}, ["stray_tag"]),
    (argument("s", "v</arg_value> </arg_value>w"), {"s": "v</arg_value> </arg_value>w"}, []),
    ("<arg_key>s</arg_key>", {}, ["missing_value"]), ("<arg_key>s</arg_key>" + argument("i", 3), {"i": 3}, ["missing_value"]),
    ("<arg_key>s", {}, ["missing_value"]),
    (argument("s", "a") + argument("s", "b"), {"s": "a"}, ["duplicate_key"]),
    (argument("i", "3.0") + argument("n", "null") + argument("b", "True"), {"i": 3, "n": None, "b": True}, []),
    (argument("i", "three"), {"i": "three"}, ["not_converted"]),
    (argument("s", "<tool_call>x</tool_call><think>"), {"s": "<tool_call>x</tool_call><think>"}, []),
    (argument("free", "3"), {"free": "3"}, []),
])
def test_calls_and_their_accidents(inner, want, kinds): assert arguments(body(inner)) == (want, kinds)


def test_unknown_tools_are_called_and_reported():
    assert arguments(body(argument("k", "1"), "new_tool")) == ({"k": "1"}, ["unknown_tool"])
    (report,) = run(body("", "new_tool"))[0].reports
    assert report.to_dict() == {"kind": "unknown_tool", "start": 0, "end": 19, "call": 0, "name": "new_tool"}


@pytest.mark.parametrize("text", ["Write <tool_call> to call.", "<tool_call> maybe", "<tool_call></tool_call>", "<tool_call>a b</tool_call>",
                                  "<tool_call>" + "n" * 300 + "</tool_call>", "see </tool_call> and <arg_key>k</arg_key>", "a < b <", "<tool_call>what"])
def test_a_mention_stays_prose(text):
    for cuts in ((), range(len(text))):
        parser, deltas = run(text, cuts=cuts)
        check(parser, deltas, text)
        assert parser.message.content == text and not parser.message.tool_calls and parser.finish_reason == "stop"


def test_json_style_and_malformed_calls_are_reported_with_what_they_say():
    text = "Ok <tool_call>{\"name\": \"look\", \"arguments\": {\"s\": 1}}</tool_call> and <tool_call>a b</tool_call>"
    for cuts in ((), range(len(text))):
        parser, _ = run(text, cuts=cuts)
        one, two = parser.reports
        assert parser.message.content == text
        assert (one.kind, one.detail["name"], one.detail["arguments"]) == ("json_call", "look", {"s": 1})
        assert one.detail["text"] == text[one.start:one.end] and two.kind == "malformed_call" and two.detail["text"].endswith("a b</tool_call>")
    assert run("<tool_call>{\"name\": \"lo", finish="length")[0].reports[0].kind == "json_call"


@pytest.mark.parametrize("text, content, names", [
    ("On it.\n<tool_call>ping</tool_call>", "On it.\n", ["ping"]), ("\n\n<tool_call>ping</tool_call>\n", None, ["ping"]),
    ("<tool_call>ping</tool_call></tool_call>\n<tool_call>look</tool_call>", None, ["ping", "look"]),
    ("<tool_call>ping</tool_call>\nDone.", "\nDone.", ["ping"]), ("</think>hi", "hi", []), ("<think></think>hi", "hi", []), ("  ", None, []),
    ("\n\nhi", "\n\nhi", [])])
def test_text_around_calls(text, content, names):
    for cuts in ((), range(len(text))):
        parser, deltas = run(text, cuts=cuts)
        check(parser, deltas, text)
        assert (parser.message.content, [c.name for c in parser.message.tool_calls]) == (content, names)


def test_switched_off_calls_are_text():
    parser = parse("<tool_call>ping</tool_call>", TOOLS, CLOSED, calls=False)
    assert parser.message.content == "<tool_call>ping</tool_call>" and parser.finish_reason == "stop"


def test_every_truncation_of_a_call_gives_prefixes_and_no_markup():
    text = "Hi.<tool_call>look<arg_key>s</arg_key><arg_value>Dear <b>neighbour</b></arg_value><arg_key>i</arg_key><arg_value>42</arg_value></tool_call>"
    full = json.loads(run(text)[0].message.tool_calls[0].arguments)
    for end in range(len(text)):
        for cuts in ((), range(end)):
            parser, deltas = run(text[:end], finish="length", cuts=cuts)
            check(parser, deltas, text[:end])
            assert parser.finish_reason == "length" and not any(tag in (parser.message.content or "") for tag in TAGS)
            for call in parser.message.tool_calls:
                assert call.incomplete and call.name == "look"
                got = json.loads(call.arguments)
                assert full["s"].startswith(got.get("s", "")) and str(full["i"]).startswith(str(got.get("i", "")))
            assert bool(parser.message.tool_calls) == (end >= text.index("look") + 4)


# --- the start state ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tail, text, want", [
    ("<|user|>q<|assistant|><think>", "a</think>b", ("a", "b")), ("<|user|>q<|assistant|><think></think>", "b", (None, "b")),
    ("<|assistant|><think>old</think>hi<|user|>next<|assistant|><think>", "new</think>b", ("new", "b")),
    ("<|assistant|><think>half", " more</think>b", (" more", "b")), ("<|assistant|><think>r</think>It is ", "4.", (None, "4.")),
    ("<|assistant|><think>r</thi", "nk>4.", (None, "4.")), ("<|assistant|></think>", "b", (None, "b")), ("<|assistant|>", "<think>a</think>b", ("a", "b")),
    ("… text<think>", "a</think>b", ("a", "b")), ("…</think>", "b", (None, "b")), ("", "b", (None, "b")),
    ("<|assistant|><think>x<|user|>y", "b", (None, "b"))])
def test_start_state_comes_from_the_prompt(tail, text, want):
    for cuts in ((), range(len(text))):
        parser, deltas = run(text, tail=tail, cuts=cuts)
        check(parser, deltas, text)
        assert (parser.message.reasoning_content, parser.message.content) == want


def test_a_prefilled_call_goes_on():
    tail = CLOSED + "Ok.<tool_call>ping</tool_call><tool_call>look<arg_key>s</arg_key><arg_value>Dear "
    text = "you</arg_value></tool_call>"
    for cuts in ((), range(len(text))):
        parser, deltas = run(text, tail=tail, cuts=cuts)
        check(parser, deltas, text)
        assert [(c.name, json.loads(c.arguments)) for c in parser.message.tool_calls] == [("look", {"s": "Dear you"})]
        assert parser.message.content is None and parser.finish_reason == "tool_calls"


def test_open_turn_reads_only_the_last_turn(): assert open_turn("<|assistant|><think>a</think>b<|observation|>") == ""


# --- types -------------------------------------------------------------------------------------------------------

def typed(schema, text, defs=None):
    "What an argument of one schema becomes."
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"k": schema}, "$defs": defs or {}}}}
    return arguments(body(argument("k", text), "f"), [tool])[0]["k"]


@pytest.mark.parametrize("schema, text, want", [
    ({"type": "integer"}, "5", 5), ({"type": "integer"}, "-0", 0), ({"type": "integer"}, "3.0", 3), ({"type": "integer"}, "1e3", 1000),
    ({"type": "integer"}, "3.5", "3.5"), ({"type": "integer"}, "007", "007"), ({"type": "integer"}, "5 apples", "5 apples"),
    ({"type": "integer"}, "9" * 200, int("9" * 200)), ({"type": "integer"}, "9" * 5000, "9" * 5000), ({"type": "integer"}, "", ""),
    ({"type": "number"}, "49.50", 49.5), ({"type": "number"}, "7", 7), ({"type": "number"}, "1e400", "1e400"), ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "TRUE", True), ({"type": "boolean"}, "yes", "yes"), ({"type": "null"}, "null", None), ({"type": "null"}, "x", "x"),
    ({"type": "array"}, "[1, \"a\"]", [1, "a"]), ({"type": "array"}, "{}", "{}"), ({"type": "array"}, "['a']", "['a']"), ({"type": "array"}, "[NaN]", "[NaN]"),
    ({"type": "object"}, " {\"a\": {\"b\": []}} ", {"a": {"b": []}}), ({"type": "object"}, "[]", "[]"), ({"type": "object"}, "{", "{"),
    ({"type": ["integer", "null"]}, "null", None), ({"type": ["integer", "string"]}, "5", "5"), ({"type": ["string", "null"]}, "null", "null"),
    ({"anyOf": [{"type": "integer"}, {"type": "array"}]}, "[5]", [5]), ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5"),
    ({"anyOf": [{"type": "integer"}, {}]}, "5", "5"), ({"oneOf": [{"type": "boolean"}, {"type": "null"}]}, "false", False),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "null"]}]}, "5", 5), ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, "5", 5),
    ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "5", 5), ({"type": "integer", "nullable": True}, "null", None),
    ({"enum": ["auto", 3, None, True]}, "auto", "auto"), ({"enum": ["auto", 3, None, True]}, "3", 3), ({"enum": ["auto", 3, None, True]}, "null", None),
    ({"enum": ["auto", 3, None, True]}, "true", True), ({"enum": ["auto", 3]}, "4", "4"), ({"enum": ["1", 1]}, "1", "1"), ({"enum": ["a", "b"]}, "3", "3"),
    ({"enum": [1, 2]}, "3", 3), ({"type": "string", "enum": ["1", 1]}, "1", "1"), ({"type": "integer", "enum": [1, "x"]}, "1", 1),
    ({"const": 7}, "7", 7), ({"const": "7"}, "7", "7"), ({"const": None}, "null", None), ({"const": [1]}, "[1]", [1]),
    ({"properties": {"a": {}}}, "{\"a\": 1}", {"a": 1}), ({"items": {}}, "[1]", [1]),
    ({"$ref": "#/$defs/n"}, "5", 5), ({"$ref": "#/$defs/loop"}, "5", "5"), ({"$ref": "#/$defs/pair"}, "5", 5), ({"$ref": "#/$defs/a~1b%"}, "5", 5),
    ({"$ref": "#/gone"}, "5", "5"), ({"$ref": "http://x/y"}, "5", "5"), ({"$ref": "#"}, "5", "5"), ({"$ref": 3}, "5", "5"),
    ({}, "5", "5"), (True, "5", "5"), (None, "5", "5"), ({"type": "float"}, "5", "5"), ({"type": 5}, "5", "5"), ({"type": [[]]}, "5", "5"), ({"anyOf": 3}, "5", "5"),
    ({"anyOf": []}, "5", "5"), ({"enum": []}, "5", "5"), ({"type": "integer", "allOf": [{"type": "string"}]}, "5", "5"),
])
def test_types(schema, text, want):
    defs = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}, "a/b%": {"type": "integer"},
            "pair": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/pair"}]}}
    got = typed(schema, text, defs)
    assert got == want and type(got) is type(want)


def test_properties_are_found_through_references_and_combinations():
    root = {"$ref": "#/$defs/args", "$defs": {"args": {"allOf": [{"properties": {"k": {"type": "integer"}}},
            {"anyOf": [{"$ref": "#/$defs/args"}]}], "additionalProperties": {"type": "boolean"}}}}
    assert Schema(root).accept("k") == Accept(frozenset({"integer"})) and Schema(root).accept("z") == Accept(frozenset({"boolean"}))
    for root in (None, 3, [], {"properties": 3}, {"properties": {"k": 3}}, {"$ref": "#"}, {"allOf": [{"$ref": "#"}] * 9}):
        assert "string" in Schema(root).accept("k").types


def test_schemas_that_explode_are_read_in_no_time():
    doubled = {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)} | {"d60": {"type": "integer"}},
               "properties": {"k": {"$ref": "#/$defs/d0"}}}
    deep = {"type": "integer"}
    for _ in range(900): deep = {"anyOf": [deep, {"type": "null"}]}
    wide = {"allOf": [{"allOf": [{"x": i}] * 50} for i in range(50)]}
    start = time.perf_counter()
    Schema(doubled).accept("k"), Schema({"properties": {"k": deep}}).accept("k"), Schema(wide).accept("k")
    assert time.perf_counter() - start < 2


@given(st.text(st.characters(), max_size=30), st.lists(st.integers(0, 30), max_size=4))
@settings(max_examples=200, deadline=None)
def test_escaped_pieces_join_to_the_escape_of_the_whole(text, cuts):
    cuts = [0, *sorted(c for c in cuts if c <= len(text)), len(text)]
    pieces = "".join(json_string(text[a:b], quotes=False) for a, b in zip(cuts, cuts[1:]))
    assert f"\"{pieces}\"" == json_string(text) and json.loads(json_string(text)) == json.loads(json.dumps(text))
    pieces.encode()


def test_to_json_keeps_what_was_written():
    assert to_json(" 49.50 ", Accept(frozenset({"number"}))) == "49.50"
    assert to_json("[1,  2]", Accept(frozenset({"array"}))) == "[1,  2]"
    assert to_json("[\"\ud800\"]", Accept(frozenset({"array"}))) == "[\"\\ud800\"]"


# --- round trip --------------------------------------------------------------------------------------------------

TEXTS = st.lists(st.sampled_from(["a", " ", "\n", "<", ">", "é", "\"", "<b>", "&"]), max_size=6).map("".join)
PLAIN = TEXTS.map(str.strip)
VALUES = {"s": st.one_of(TEXTS, st.sampled_from(["x</arg_value>y", "<tool_call>z", "3", "null"])), "i": st.integers(), "b": st.booleans(),
          "n": st.one_of(st.none(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
          "a": st.lists(st.one_of(TEXTS, st.integers()), max_size=3), "o": st.dictionaries(TEXTS, st.integers(), max_size=2),
          "e": st.sampled_from(["auto", 3, True])}
CALLS = st.lists(st.fixed_dictionaries({"id": st.none(), "type": st.just("function"), "function": st.fixed_dictionaries({
    "name": st.sampled_from(["look", "look_up", "ping"]), "arguments": st.fixed_dictionaries({}, optional=VALUES)})}), max_size=3)
TURN = st.fixed_dictionaries({"role": st.just("assistant"), "content": PLAIN, "tool_calls": CALLS,
                              "reasoning_content": TEXTS.filter(lambda t: not t or t.strip())})


@given(st.lists(st.tuples(PLAIN, TURN, st.booleans()), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_round_trip_of_rendered_turns(turns):
    messages = []
    for ask, turn, tool in turns: messages += [{"role": "user", "content": ask}, turn] + [{"role": "tool", "content": ask, "tool_call_id": None}] * tool
    normal, _ = normalize_messages(messages, TOOLS)
    assert normal == messages
    text = render(messages, TOOLS, clear_thinking=False, add_generation_prompt=False)
    place = text.index("</tool_call>\n") if "</tool_call>\n" in text else 0
    place = text.index("<|user|>")
    for turn in (m for m in messages if m["role"] == "assistant"):
        head = text.index("<|assistant|><think>", place) + len("<|assistant|><think>")
        place = next((i for i in sorted(text.find(m, head) for m in ("<|user|>", "<|observation|>")) if i >= 0), len(text))
        parser = parse(text[head:place], TOOLS, text[:head])
        message = parser.message
        assert (message.content or "", message.reasoning_content or "") == (turn["content"], turn["reasoning_content"])
        got = [(c.name, json.loads(c.arguments)) for c in message.tool_calls]
        assert got == [(c["function"]["name"], c["function"]["arguments"]) for c in turn["tool_calls"]]
        assert not parser.reports


@given(TURN)
@settings(max_examples=100, deadline=None)
def test_the_naive_parser_agrees_on_well_formed_replies(turn):
    text = render([{"role": "user", "content": "u"}, turn], add_generation_prompt=False).split("<|assistant|><think>")[1]
    reasoning, content, calls = naive_parse(text, thinking=True)
    message = parse(text, None, OPEN).message
    assert (message.reasoning_content or "", message.content or "") == (reasoning, content)
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == calls


# --- bad input and speed -----------------------------------------------------------------------------------------

def test_deep_json_is_a_value_up_to_a_limit_and_text_beyond():
    nest = lambda n: "[" * n + "]" * n
    assert arguments(body(argument("a", nest(MAX_DEPTH))))[0] == {"a": json.loads(nest(MAX_DEPTH))}
    for depth in (MAX_DEPTH + 1, 5_000, 200_000): assert arguments(body(argument("a", nest(depth))))[0] == {"a": nest(depth)}
    wide = "[" + ", ".join(["[]"] * 500) + ", \"" + "[" * 500 + "\"]"
    assert arguments(body(argument("a", wide)))[0] == {"a": json.loads(wide)}


def test_a_thousand_calls_and_odd_characters():
    text = "".join(body(argument("s", f"{i}\x00\ud800")) for i in range(1000))
    parser, deltas = run(text)
    check(parser, deltas, text)
    assert [json.loads(c.arguments)["s"] for c in parser.message.tool_calls] == [f"{i}\x00\ud800" for i in range(1000)]


def test_bad_uses_are_errors():
    parser, _ = run("x")
    for act in (lambda: parser.feed("y"), parser.finish):
        with pytest.raises(RuntimeError, match="finished"): act()
    with pytest.raises(TemplateError, match="tools is an object"): OutputParser({"name": "f"})
    for options, says in (({}, "either"), ({"thinking": "on", "prompt_tail": ""}, "either"), ({"thinking": "maybe"}, "maybe"),
                          ({"thinking": "on", "finish": "now"}, "now"), ({"thinking": "on", "chunk": -1}, "chunk")):
        with pytest.raises(ParserError, match=says): parse_command("x", **options)
    with pytest.raises(TemplateError, match="tools file is not valid JSON"): parse_command("x", "{", thinking="on")


HEAVY = {
    "text": ("word and word " * 80, CLOSED), "thinking": ("word and word " * 80, OPEN),
    "string value": (None, CLOSED), "open tags in prose": ("<tool_call> ", CLOSED), "tags in prose": ("</arg_value><think>", CLOSED),
    "unclosed calls in thinking": ("<tool_call>look<arg_key>s</arg_key><arg_value>v", OPEN),
    "calls quoted in thinking": (body(argument("s", "</think><think>")) + " ", OPEN),
    "closes in a value": (None, CLOSED), "blanks": (" ", CLOSED), "calls": (body(argument("i", "3")), CLOSED), "half tags": ("</arg_valu", CLOSED),
    "calls then text": (None, OPEN),
}


def heavy(kind, size):
    unit, tail = HEAVY[kind]
    if kind == "string value": return f"<tool_call>look<arg_key>s</arg_key><arg_value>{'0123 é' * (size // 6)}", tail
    if kind == "closes in a value": return f"<tool_call>look<arg_key>s</arg_key><arg_value>{'x</arg_value> ' * (size // 14)}", tail
    if kind == "calls then text": return body(argument("s", "</think><think>")) * (size // 73) + "z", tail
    return unit * (size // len(unit)), tail


def fed(kind, size, piece=4096):
    "A function that parses a heavy reply."
    text, tail = heavy(kind, size)
    def act():
        parser = OutputParser(TOOLS, tail)
        for i in range(0, len(text), piece): parser.feed(text[i:i + piece])
        parser.finish("length")
        return parser
    return act


def calls_made(act):
    "Function calls, of Python and of C: the same number on any machine."
    profile = cProfile.Profile()
    profile.runcall(act)
    return pstats.Stats(profile).total_calls


def seconds(act):
    "The least of three runs, without the collector, whose work depends on everything else that is alive."
    gc.disable()
    try:
        best = math.inf
        for _ in range(3):
            start = time.process_time()
            act()
            best = min(best, time.process_time() - start)
        return best
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", HEAVY)
def test_work_and_time_grow_with_length(kind):
    "Four times the text is four times the calls and about four times the time; a quadratic machine would take sixteen times."
    assert calls_made(fed(kind, 160_000)) < 4.3 * calls_made(fed(kind, 40_000)) + 200
    small, large = seconds(fed(kind, 60_000)), seconds(fed(kind, 240_000))
    assert large < 9 * small + 0.05 and large < 0.24 + 0.3, (small, large)


@pytest.mark.parametrize("kind", HEAVY)
def test_memory_grows_with_length(kind):
    "At most 200 bytes a character at the peak, the reply itself included, whatever is held back."
    act = fed(kind, 100_000)
    tracemalloc.start()
    act()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * 100_000, peak / 100_000


@pytest.mark.skipif("GLM52_LARGE" not in os.environ, reason="ten megabytes of each kind take a minute: GLM52_LARGE=1")
@pytest.mark.parametrize("kind", HEAVY)
def test_ten_megabytes(kind):
    act, start = fed(kind, 10_000_000), time.process_time()
    act()
    spent = time.process_time() - start
    print(f"{kind}: {spent:.2f} s")
    assert spent < 10


def test_lexer_gives_back_every_character():
    rng = random.Random(1)
    for _ in range(200):
        text = words(rng, 0.5, 12)
        lexer, out, i = Lexer(), [], 0
        while i < len(text):
            step = rng.randint(1, 5)
            out += lexer.feed(text[i:i + step])
            i += step
        assert "".join(x.text for x in out) + lexer.carry == text
        assert len(lexer.carry) < 12 and [x.text for x in out if x.tag] == re.findall("|".join(TAGS), text)
