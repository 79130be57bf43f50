"""Replies written by hand, as a model under tool use could write them. The right answer of each was decided from the
rules of the chapter before the parser was asked. Whole, by character and in threes; then through a live server."""

import asyncio
import json

import pytest
from scripted import ScriptedEngine
from test_openai import complete, joined, raw_stream, serving

from glm52.chat.parsers import OutputParser, parse
from glm52.chat.tokenizer import Detokenizer, byte_tokenizer
from glm52.server.metrics import Metrics
from glm52.server.openai import ChatRequest, start_chat
from glm52.server.protocol import Service

TEXT = {"type": "string"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
         for name, properties in {
             "ping": {}, "write": {"path": TEXT, "content": TEXT, "mode": {"type": "integer"}},
             "run": {"cmd": TEXT, "timeout": {"type": ["number", "null"]}}, "edit": {"edits": {"type": "array"}, "path": TEXT},
             "查询天气": {"城市": TEXT, "天数": {"type": "integer"}}}.items()]
OPEN, CLOSED = "<|assistant|><think>", "<|assistant|><think></think>"
SOURCE = '''import re
CALL = re.compile("<tool_call>(.*?)</tool_call>")
def f(s): return s.replace("</arg_value>", "")  # <think>hm</think>
'''


def arg(key, value): return f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"


def call(name, *arguments): return f"<tool_call>{name}{''.join(arguments)}</tool_call>"


# title, prompt tail, reply, engine's reason, reasoning, content, [(name, arguments, incomplete)], reason, reports
REPLIES = [
    ('python source about the tags', CLOSED, call('write', arg('path', 'p.py'), arg('content', SOURCE)),
     'stop', None, None, [('write', {'path': 'p.py', 'content': SOURCE}, False)], 'tool_calls', []),
    ('nested XML with the same tag names', CLOSED,
     call('write', arg('content', '<cfg><arg_value>1</arg_value><b/></cfg>')), 'stop', None, None,
     [('write', {'content': '<cfg><arg_value>1</arg_value><b/></cfg>'}, False)], 'tool_calls', []),
    ('fence with a placeholder call, then prose', CLOSED,
     'Use ```xml\n<tool_call>{name}<arg_key>k</arg_key></tool_call>\n```\nDone', 'stop', None,
     'Use ```xml\n<tool_call>{name}<arg_key>k</arg_key></tool_call>\n```\nDone', [], 'stop',
     ['malformed_call']),
    ('fence round a real call', CLOSED, 'Run:\n```\n' + call('ping') + '\n```', 'stop', None,
     'Run:\n```\n\n```', [('ping', {}, False)], 'tool_calls', []),
    ('half a call, begun again before any key', CLOSED, '<tool_call>write\n' + call('ping'), 'stop', None,
     '<tool_call>write\n', [('ping', {}, False)], 'tool_calls', []),
    ('half a call, begun again inside a value', CLOSED,
     '<tool_call>write<arg_key>path</arg_key><arg_value>a.txt' + call('write', arg('path', 'a.txt')),
     'stop', None, None,
     [('write', {'path': 'a.txt<tool_call>write<arg_key>path</arg_key><arg_value>a.txt'}, False)],
     'tool_calls', []),
    ('double close of thinking', OPEN, 'hm</think></think>Hi', 'stop', 'hm', 'Hi', [], 'stop',
     ['stray_tag']),
    ('double close of thinking with lines between', OPEN, 'hm</think>\n\n</think>\nHi', 'stop', 'hm',
     '\nHi', [], 'stop', ['stray_tag']),
    ('thinks although thinking is closed', CLOSED, 'Let me see.</think>It is 4.', 'stop', None,
     'Let me see.</think>It is 4.', [], 'stop', []),
    ('call inside thinking, prose on the next line', OPEN, 'hm' + call('ping') + '\nNo, wait.', 'stop',
     'hm' + call('ping') + '\nNo, wait.', None, [], 'stop', ['quoted_call', 'ended_in_thinking']),
    ('call in thinking rehearsed, then made', OPEN, 'hm ' + call('ping') + '</think>' + call('ping'),
     'stop', 'hm ' + call('ping'), None, [('ping', {}, False)], 'tool_calls', ['quoted_call']),
    ('placeholder in thinking, a real call at its unclosed end', OPEN,
     'Form: <tool_call>name</tool_call>, so\n' + call('ping') + '\n', 'stop',
     'Form: <tool_call>name</tool_call>, so\n', None, [('ping', {}, False)], 'tool_calls', []),
    ('Chinese all through', OPEN, '好的。</think>我来查。\n' + call('查询天气', arg('城市', '北京'), arg('天数', '３')),
     'stop', '好的。', '我来查。\n', [('查询天气', {'城市': '北京', '天数': '３'}, False)], 'tool_calls', ['not_converted']),
    ('CRLF everywhere', CLOSED,
     '<tool_call>run\r\n<arg_key>cmd</arg_key>\r\n<arg_value>dir\r\n</arg_value>\r\n<arg_key>timeout</arg_key>\r\n<arg_value>5\r\n</arg_value>\r\n</tool_call>\r\n',
     'stop', None, None, [('run', {'cmd': 'dir\r\n', 'timeout': 5}, False)], 'tool_calls', []),
    ('shell with redirections and heredoc', CLOSED,
     call('run', arg('cmd', "cat <<'</arg_value>' > a\nx\n</arg_value>\nls </dev/null")), 'stop', None,
     None, [('run', {'cmd': "cat <<'</arg_value>' > a\nx\n</arg_value>\nls </dev/null"}, False)],
     'tool_calls', []),
    ('JSON edits with a tag in a string', CLOSED,
     call('edit', arg('edits', '[{"old": "</arg_value>", "new": "<arg_key>"}]')), 'stop', None, None,
     [('edit', {'edits': [{'old': '</arg_value>', 'new': '<arg_key>'}]}, False)], 'tool_calls', []),
    ('JSON spread over lines, bare newline in a string', CLOSED,
     call('edit', arg('edits', '[{"old": "a\nb"}]')), 'stop', None, None,
     [('edit', {'edits': '[{"old": "a\nb"}]'}, False)], 'tool_calls', ['not_converted']),
    ('python literals instead of JSON', CLOSED,
     call('edit', arg('edits', "[{'a': True}]")) + call('run', arg('timeout', 'None')), 'stop', None, None,
     [('edit', {'edits': "[{'a': True}]"}, False), ('run', {'timeout': None}, False)], 'tool_calls',
     ['not_converted']),
    ('function syntax', CLOSED, '<tool_call>ping()</tool_call>', 'stop', None,
     '<tool_call>ping()</tool_call>', [], 'stop', ['malformed_call']),
    ('JSON call in a fence', CLOSED, '<tool_call>\n```json\n{"name": "ping"}\n```\n</tool_call>', 'stop',
     None, '<tool_call>\n```json\n{"name": "ping"}\n```\n</tool_call>', [], 'stop', ['malformed_call']),
    ('JSON call', CLOSED,
     '<tool_call>\n{"name": "run", "arguments": "{\\"cmd\\": \\"ls\\"}"}\n</tool_call>', 'stop', None,
     '<tool_call>\n{"name": "run", "arguments": "{\\"cmd\\": \\"ls\\"}"}\n</tool_call>', [], 'stop',
     ['json_call']),
    ("another model's format", CLOSED, '<function_calls><invoke name="ping"></invoke></function_calls>',
     'stop', None, '<function_calls><invoke name="ping"></invoke></function_calls>', [], 'stop', []),
    ('thinks again after a call', CLOSED, call('ping') + '\n<think>and now?</think>Done.', 'stop',
     'and now?', 'Done.', [('ping', {}, False)], 'tool_calls', []),
    ('name ends the turn', CLOSED, 'Now <tool_call>ping', 'stop', None, 'Now <tool_call>ping', [], 'stop',
     ['malformed_call']),
    ('limit in the last tag of a call', CLOSED, '<tool_call>ping</tool_ca', 'length', None, None,
     [('ping', {}, True)], 'length', ['incomplete_call']),
    ('limit inside the name', CLOSED, 'Ok.<tool_call>wri', 'length', None, 'Ok.', [], 'length',
     ['truncated_call']),
    ('limit in a key', CLOSED, '<tool_call>write' + arg('path', 'a') + '<arg_key>con', 'length', None, None,
     [('write', {'path': 'a'}, True)], 'length', ['missing_value', 'incomplete_call']),
    ('limit in an escape of a typed value', CLOSED,
     '<tool_call>edit<arg_key>edits</arg_key><arg_value>["a\\', 'length', None, None,
     [('edit', {'edits': '["a\\'}, True)], 'length', ['not_converted', 'incomplete_call']),
    ('limit inside the second call in thinking', OPEN,
     'hm' + call('ping') + '<tool_call>write<arg_key>path</arg_key><arg_value>a', 'length',
     'hm' + call('ping') + '<tool_call>write<arg_key>path</arg_key><arg_value>a', None, [], 'length',
     ['ended_in_thinking']),
    ('a value with doubled close at its end', CLOSED,
     call('write', arg('content', 'x</arg_value>')) + call('ping'), 'stop', None, None,
     [('write', {'content': 'x'}, False), ('ping', {}, False)], 'tool_calls', ['stray_tag']),
    ('documentation of the format inside a value: the first whole close wins', CLOSED,
     call('write', arg('content', 'Say ' + call('f', arg('k', 'v')) + ' twice')), 'stop', None,
     ' twice</arg_value></tool_call>',
     [('write', {'content': 'Say <tool_call>f<arg_key>k</arg_key><arg_value>v'}, False)], 'tool_calls', []),
    ('prose between and after calls', CLOSED, 'A' + call('ping') + ' then ' + call('ping') + ' end', 'stop',
     None, 'A then  end', [('ping', {}, False), ('ping', {}, False)], 'tool_calls', []),
    ('thinking opened twice', OPEN, '<think>\nhm <think> still</think>x', 'stop', '\nhm <think> still', 'x',
     [], 'stop', ['stray_tag']),
    ('empty key and a key of blanks', CLOSED, call('write', arg('', 1), arg(' ', 2)), 'stop', None, None,
     [('write', {'': '1'}, False)], 'tool_calls', ['duplicate_key']),
    ('closing tags in the wrong order', CLOSED,
     '<tool_call>run<arg_key>cmd</arg_key><arg_value>ls</tool_call></arg_value>', 'stop', None, None,
     [('run', {'cmd': 'ls</tool_call>'}, True)], 'stop', ['incomplete_call']),
    ('emoji with joiners and a skin tone', CLOSED,
     '👩🏽\u200d💻 ok' + call('run', arg('cmd', 'echo 👨\u200d👩\u200d👧\u200d👦')), 'stop', None, '👩🏽\u200d💻 ok',
     [('run', {'cmd': 'echo 👨\u200d👩\u200d👧\u200d👦'}, False)], 'tool_calls', []),
    ('NUL, escape codes and a backspace', CLOSED, call('run', arg('cmd', '\x00\x1b[31m\x08\u2028')), 'stop',
     None, None, [('run', {'cmd': '\x00\x1b[31m\x08\u2028'}, False)], 'tool_calls', []),
    ('upper case tags are not tags', CLOSED, '<TOOL_CALL>ping</TOOL_CALL>', 'stop', None,
     '<TOOL_CALL>ping</TOOL_CALL>', [], 'stop', []),
    ('a tag with a blank is not a tag', OPEN, 'hm</think >more</think>x', 'stop', 'hm</think >more', 'x',
     [], 'stop', []),
    ('call named in thinking with an undeclared tool at its end', OPEN, 'try' + call('pong'), 'stop',
     'try' + call('pong'), None, [], 'stop', ['ended_in_thinking']),
]


def read(text, tail, finish="stop", size=None):
    "A finished parser, fed `size` characters at a time."
    parser, size = OutputParser(TOOLS, tail, call_id=str), size or max(len(text), 1)
    for i in range(0, len(text), size): parser.feed(text[i:i + size])
    parser.finish(finish)
    return parser


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply[0].replace(" ", "-"))
def test_written_reply(reply, size):
    _, tail, text, finish, reasoning, content, calls, reason, reports = reply
    parser = read(text, tail, finish, size)
    message = parser.message
    assert (message.reasoning_content, message.content) == (reasoning, content)
    assert [(c.name, json.loads(c.arguments), c.incomplete) for c in message.tool_calls] == calls
    assert parser.finish_reason == reason and [report.kind for report in parser.reports] == reports
    assert "".join(text[span.start:span.end] for span in parser.spans) == text


@pytest.mark.parametrize("reply", [reply for reply in REPLIES if reply[3] == "stop"], ids=lambda reply: reply[0].replace(" ", "-"))
def test_bytes_of_a_character_may_come_in_different_tokens(reply):
    "One token a byte: the detokenizer gives whole characters, the machine the same reply."
    _, tail, text, *_ = reply
    tokenizer, parser = byte_tokenizer(), OutputParser(TOOLS, tail, call_id=str)
    detokenizer = Detokenizer(tokenizer)
    for token_id in tokenizer.encode(text): parser.feed(detokenizer.push([token_id]))
    parser.feed(detokenizer.flush())
    parser.finish()
    whole = parse(text, TOOLS, tail, call_id=str)
    assert (parser.message, parser.spans, parser.reports) == (whole.message, whole.spans, whole.reports)


@pytest.mark.parametrize("tail", [OPEN, CLOSED])
def test_the_server_says_the_same_streamed_and_complete(tail):
    "Through the official client, one token a step: what the server sends is what the machine says, either way."
    chosen = [reply for reply in REPLIES if reply[1] == tail and reply[3] == "stop"]
    options = {"model": "glm52-test", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS,
               "extra_body": {"chat_template_kwargs": {"enable_thinking": tail == OPEN}}}
    for start in range(0, len(chosen), 8):
        replies = chosen[start:start + 8]
        with serving(lambda prompt, params, choice: replies[choice][2], chunk=1) as (client, _, _):
            whole = complete(client.chat.completions.create(**options, n=len(replies)))
            streamed = joined(client.chat.completions.create(**options, n=len(replies), stream=True))
        for i, (title, _, _, _, reasoning, content, calls, reason, _) in enumerate(replies):
            for answer in (whole[i], streamed[i]):
                assert (answer["reasoning_content"], answer["content"]) == (reasoning or "", content or ""), title
                assert [(name, json.loads(arguments)) for _, name, arguments in answer["calls"]] == [c[:2] for c in calls], title
                assert answer["finish_reason"] == reason, title


def test_reports_reach_the_client_and_are_counted():
    "Beside the finish reason, streamed and complete alike; nothing where nothing is wrong."
    replies = [reply for reply in REPLIES if reply[1] == CLOSED and reply[3] == "stop"][:8]
    body = {"model": "glm52-test", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "n": len(replies),
            "chat_template_kwargs": {"enable_thinking": False}}
    with serving(lambda prompt, params, choice: replies[choice][2], chunk=3) as (client, _, url):
        extra = {"chat_template_kwargs": body["chat_template_kwargs"]}
        whole = client.chat.completions.create(**{key: body[key] for key in ("model", "messages", "tools", "n")}, extra_body=extra)
        ends = [choice for line in raw_stream(url, "/v1/chat/completions", body) if line != "[DONE]"
                for choice in json.loads(line)["choices"] if choice["finish_reason"]]
    for choice in whole.choices:
        told = choice.model_extra.get("reports", [])
        assert [report["kind"] for report in told] == replies[choice.index][8]
        assert told == next(end for end in ends if end["index"] == choice.index).get("reports", [])
    assert any("reports" in end for end in ends) and not all("reports" in end for end in ends)


def test_a_turn_that_ends_in_thinking_is_counted():
    "On `/metrics`, by kind, once the generation has ended."
    async def run():
        service = Service(ScriptedEngine("never closed"), "glm52-test")
        metrics = Metrics(service)
        generation, pieces = await start_chat(service, ChatRequest(model="glm52-test", messages=[{"role": "user", "content": "hi"}]))
        async for _ in pieces: pass
        return generation.reports, metrics.response().body.decode()
    reports, text = asyncio.run(run())
    assert reports == {"ended_in_thinking": 1} and 'glm52:parser_reports_total{kind="ended_in_thinking"} 1.0' in text
