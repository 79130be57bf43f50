"Grammars: what is bound, random walks judged by jsonschema, the mask against trying every token, refusals, prefills, forks."

import json, math, random

import jsonschema
import pytest
import torch
from hypothesis import given, settings, strategies as st

from glm52.chat.parsers import OutputParser, parse
from glm52.chat.structured import (MAX_SCHEMA_DEPTH, Grammar, GrammarError, allowed_ids, bounded_strings, naive_mask,
                                   read_tool_choice, structure_of, unbound_keywords)
from glm52.chat.tokenizer import byte_tokenizer, new_backend, Tokenizer
from transformers import PreTrainedTokenizerFast

OPEN, CLOSED = "<|user|>hi<|assistant|><think>", "<|user|>hi<|assistant|><think></think>"
TOKENIZER = byte_tokenizer()
WIDE = 320  # a model's vocabulary is padded beyond the tokenizer's


def merged_tokenizer():
    "Bytes and some merges, also across JSON punctuation and half characters."
    base = {word: i for word, i in TOKENIZER.hf.get_vocab().items() if i < 256}
    merges = [("{", '"'), ('"', ":"), ('"', "}"), ("a", "b"), ("1", "2"), ("Ã", "©"), ("ð", "Ł"), ("<", "/"), ("Ġ", '"')]
    vocab = base | {a + b: 256 + i for i, (a, b) in enumerate(merges)}
    hf = PreTrainedTokenizerFast(tokenizer_object=new_backend(vocab, merges), eos_token="<|endoftext|>")
    return Tokenizer(hf, [hf.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")])


MERGED = merged_tokenizer()


def compiled(tail=CLOSED, tokenizer=TOKENIZER, vocab_size=None, **request):
    return Grammar.compile(structure_of(**request), tokenizer, tail, vocab_size)


def admits(grammar, text, tokenizer=TOKENIZER):
    "Whether a grammar takes a text, and whether the turn could end there."
    grammar = grammar.fork()
    for token_id in tokenizer.encode(text):
        if token_id not in allowed_ids(grammar.mask(), grammar.vocab_size): return False, False
        grammar.accept(token_id)
    return True, TOKENIZER.eos_token_ids[0] in allowed_ids(grammar.mask(), grammar.vocab_size)


def wander(grammar, rng, tokenizer=TOKENIZER, most=600):
    "Random allowed tokens to the end of the turn; ends and closes are taken more often, so that it comes."
    ids = []
    ends = {*tokenizer.eos_token_ids} | {i for text in ("</think>", "</arg_value>", "</tool_call>", '"', "}", "]") for i in tokenizer.encode(text)}
    while not grammar.finished:
        allowed = allowed_ids(grammar.mask(), grammar.vocab_size)
        assert allowed, "there is always a next token"
        close = [i for i in allowed if i in ends]
        ids.append(rng.choice(close if close and rng.random() < 0.3 + len(ids) / most else allowed))
        grammar.accept(ids[-1])
        assert len(ids) < 4 * most
    return tokenizer.decode(ids, skip_special=True)


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 12}, "b": {"type": "boolean"}}, "required": ["a"]},
    {"type": "object", "properties": {"s": {"type": "string", "maxLength": 5}, "n": {"type": ["number", "null"]}}, "required": ["n", "s"]},
    {"type": "object", "properties": {"e": {"enum": ["red", "green"]}, "m": {"enum": ["auto", 3, None]}, "c": {"const": "x y"}}, "required": ["e", "m", "c"]},
    {"type": "object", "properties": {"l": {"type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2}}, "required": ["l"],
     "$defs": {"p": {"type": "object", "properties": {"x": {"type": "integer"}, "name": {"type": "string", "maxLength": 3}}, "required": ["x"],
                     "additionalProperties": False}}},
    {"type": "object", "properties": {"u": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "v": {"anyOf": [{"type": "integer"}, {"enum": ["all"]}]},
                                      "d": {"type": "string", "pattern": "^[a-f]{2,4}$"}, "z/~": {"type": "null"}}, "required": ["u", "v", "d", "z/~"]},
    {"type": "object", "properties": {"tree": {"$ref": "#/$defs/t"}}, "required": ["tree"], "$defs": {"t": {
        "type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 1}}, "additionalProperties": False}}},
    {"type": "object", "properties": {"1": {"const": 7}, "é": {"oneOf": [{"type": "boolean"}, {"type": "null"}]}}},
    {"type": "object", "properties": {"m": {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {
        "type": ["string", "null"], "minLength": 1, "maxLength": 3}}}, "required": ["m"]},
]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, MERGED], ids=["bytes", "merges"])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_whatever_is_chosen_the_content_fits_the_schema(schema, tokenizer):
    rng = random.Random(7)
    for tail in (OPEN, CLOSED) * 3:
        grammar = compiled(tail, tokenizer, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        text = wander(grammar, rng, tokenizer)
        parser = parse(text, None, tail)
        assert not parser.message.tool_calls and not parser.ended_in_thinking
        value = json.loads(parser.message.content)
        if "\ufffd" not in text: jsonschema.validate(value, schema)  # bytes that are no text are counted otherwise


@pytest.mark.parametrize("tokenizer", [TOKENIZER, MERGED], ids=["bytes", "merges"])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_whatever_is_chosen_the_call_fits_its_schema(schema, tokenizer):
    tools, rng = [{"name": "go", "parameters": schema}, {"name": "go_on"}], random.Random(11)
    for tail in (OPEN, CLOSED) * 3:
        for choice, parallel in (("required", True), ({"type": "function", "function": {"name": "go"}}, False)):
            text = wander(compiled(tail, tokenizer, tools=tools, tool_choice=choice, parallel=parallel), rng, tokenizer)
            parser = parse(text, tools, tail)
            calls = parser.message.tool_calls
            assert calls and parser.message.content is None and parser.finish_reason == "tool_calls"
            huge = {report.detail["key"] for report in parser.reports if report.kind == "not_converted"}  # 1e999 is no double
            assert all(abs(float(json.loads(calls[0].arguments)[key])) == math.inf for key in huge) and len(parser.reports) == len(huge)
            if huge: continue
            assert parallel or len(calls) == 1
            for call in calls:
                assert not call.incomplete and call.name in (["go", "go_on"] if parallel else ["go"])
                if "\ufffd" in call.arguments: continue  # bytes that are no text: allowed, as in any text, and counted otherwise
                if call.name == "go": jsonschema.validate(json.loads(call.arguments), schema)
                else: assert call.arguments == "{}"


def test_bounded_strings_are_json_and_values_are_left_alone():
    schema = {"type": "string", "minLength": 2, "maxLength": 3}
    grammar = compiled(response_format={"type": "json_schema", "schema": schema})
    for text, fits in (('"ab"', True), ('"é🙂x"', True), ('"a"', False), ('"abcd"', False), ('"a\tb"', False), ('"a\x01"', False), ('"a\x7f"', True)):
        assert (admits(grammar, text) == (True, True)) == fits, text
    for same in ({"const": schema}, {"enum": [schema]}, {"default": schema}, {"properties": {"maxLength": {"type": "string"}}}, {"maxLength": 3}, True):
        assert bounded_strings(same) == same
    assert bounded_strings({"properties": {"const": schema}}) != {"properties": {"const": schema}}


def test_json_object_and_thinking():
    grammar = compiled(OPEN, response_format={"type": "json_object"})
    assert admits(grammar, "so: {\"a\": no</think>{\"a\": [1, {\"é\": null}]}") == (True, True)
    assert admits(grammar, "so</think>") == (True, False)
    for text in ("so</think>[]", "so</think>Sure", "so<tool_call>", "so<think>", "so</think>{}x", "so<|endoftext|>"):
        assert admits(grammar, text) == (False, False)


def test_tools_beside_a_response_format():
    tools = [{"name": "f", "parameters": {"properties": {"k": {"type": "string"}}}}]
    grammar = compiled(tools=tools, response_format={"type": "json_object"})
    assert admits(grammar, "{}") == (True, True)
    assert admits(grammar, "<tool_call>f<arg_key>k</arg_key><arg_value>a </b> \"</arg_value></tool_call><tool_call>f</tool_call>") == (True, True)
    assert admits(grammar, "{}<tool_call>")[0] is False
    assert admits(compiled(tools=tools, tool_choice="none", response_format={"type": "json_object"}), "<tool_call>")[0] is False


def test_nothing_to_bind():
    tools = [{"name": "f"}]
    for request in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"}, {"response_format": {"type": "text"}}, {"tool_choice": "auto"}):
        assert structure_of(**request) is None


@pytest.mark.parametrize("tail, text, whole", [
    (CLOSED + "{\"a\": ", "3}", True), (OPEN + "half a th", "ought</think>{\"a\": 3}", True), ("…<|assistant|>", "{\"a\": 3}", True), ("", "{\"a\": 3}", True),
    ("…<|assistant|></think>", "{\"a\": 3}", True), ("<|assistant|><think>old</think>x<|user|>q<|assistant|><think>", "</think>{}", True)])
def test_the_prompt_decides_where_it_starts(tail, text, whole):
    assert admits(compiled(tail, response_format={"type": "json_object"}), text) == (True, whole)


def test_a_prefill_that_does_not_fit_is_refused():
    with pytest.raises(GrammarError, match="does not fit the structure"): compiled(CLOSED + "Sure: ", response_format={"type": "json_object"})


@pytest.mark.parametrize("tokenizer", [TOKENIZER, MERGED], ids=["bytes", "merges"])
def test_the_mask_is_what_trying_every_token_says(tokenizer):
    rng, tools = random.Random(3), [{"name": "go", "parameters": SCHEMAS[2]}, {"name": "gone", "parameters": SCHEMAS[1]}]
    for _ in range(3):
        grammar = compiled(OPEN, tokenizer, tools.__len__() + tokenizer.vocab_size + 40, tools=tools, response_format={"type": "json_object"})
        for _ in range(60):
            mask = grammar.mask()
            assert mask.dtype == torch.int32 and mask.shape == ((grammar.vocab_size + 31) // 32,) and mask.device.type == "cpu"
            allowed = allowed_ids(mask, grammar.vocab_size)
            assert sorted(allowed) == sorted(naive_mask(grammar, tokenizer))
            if grammar.finished: break
            grammar.accept(rng.choice(allowed))


def test_the_mask_is_what_the_sampler_reads():
    from glm52.engine.sampling import unpack_mask
    grammar = compiled(vocab_size=WIDE, response_format={"type": "json_object"})
    mask = grammar.mask()
    assert unpack_mask(mask[None], WIDE)[0].nonzero().flatten().tolist() == allowed_ids(mask, WIDE) == TOKENIZER.encode("{")
    for token_id in TOKENIZER.encode("{}"): grammar.accept(token_id)
    assert sorted(allowed_ids(grammar.mask(), WIDE)) == sorted(TOKENIZER.eos_token_ids)
    grammar.accept(TOKENIZER.eos_token_ids[1])
    assert grammar.finished and sorted(unpack_mask(grammar.mask()[None], WIDE)[0].nonzero().flatten().tolist()) == sorted(TOKENIZER.eos_token_ids)
    grammar.accept(TOKENIZER.eos_token_ids[0])


def test_a_wrong_token_changes_nothing_and_forks_are_apart():
    grammar = compiled(response_format={"type": "json_object"})
    before = grammar.mask()
    for token_id in (*TOKENIZER.encode("["), -1, 10_000, *TOKENIZER.eos_token_ids, *TOKENIZER.encode("<|system|>")):
        with pytest.raises(GrammarError, match=f"token {token_id} does not fit"): grammar.accept(token_id)
        assert torch.equal(grammar.mask(), before)
    draft = grammar.fork()
    for token_id in TOKENIZER.encode("{\"a"): draft.accept(token_id)
    assert torch.equal(grammar.mask(), before) and not torch.equal(draft.mask(), before)
    again = compiled(response_format={"type": "json_object"})
    assert torch.equal(again.mask(), before)


@pytest.mark.parametrize("request_, says", [
    ({"tool_choice": "required"}, "declares none"), ({"tool_choice": "perhaps", "tools": [{"name": "f"}]}, "'perhaps'"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [{"name": "f"}]}, "'g', which tools does not declare; it declares f"),
    ({"tool_choice": {"type": "function"}, "tools": [{"name": "f"}]}, "None, which tools does not declare"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tools": [{"name": "f"}]}, "allows no tool"),
    ({"tool_choice": 3, "tools": [{"name": "f"}]}, "is 3"),
    ({"response_format": {"type": "xml"}}, "'xml'"), ({"response_format": {"type": "json_schema"}}, "has no schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "has no schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "not a JSON schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": {"type": "array", "uniqueItems": True}}}},
     "response_format.schema/uniqueItems cannot be enforced"),
    ({"tool_choice": "any", "tools": [{"name": "f", "strict": True, "parameters": {"properties": {"d": {"type": "string", "format": "date"}}}}]},
     r"tools.f.d/format cannot be enforced"),
    ({"tool_choice": "any", "tools": [{"name": "f", "parameters": {"properties": 3}}]}, "properties is not an object"),
    ({"tool_choice": "any", "tools": [{"name": "f", "parameters": {"properties": {"<arg_key>": {}}}}]}, "cannot carry"),
])
def test_refusals(request_, says):
    with pytest.raises(GrammarError, match=says): structure_of(**request_)


@pytest.mark.parametrize("schema, says", [({"type": "float"}, "Unsupported type"), ({"type": 5}, "string"), ({"$ref": "#/gone"}, "gone"), ({"$ref": "#"}, "Circular"),
                                          (False, "cannot accept"), ({"type": "string", "pattern": "("}, "parenthesis"), ({"enum": []}, "empty")])
def test_broken_schemas_are_errors_with_the_reason(schema, says):
    with pytest.raises(GrammarError, match=f"(?i)cannot be compiled.*{says}"): compiled(response_format={"type": "json_schema", "schema": schema})


def test_deep_schemas_are_refused_and_recursive_ones_are_not():
    deep = {"type": "integer"}
    for _ in range(MAX_SCHEMA_DEPTH + 5): deep = {"anyOf": [deep, {"type": "null"}]}
    with pytest.raises(GrammarError, match="nested deeper"): structure_of(response_format={"type": "json_schema", "schema": deep})
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
    assert admits(compiled(response_format={"type": "json_schema", "schema": tree}), "[" * 300 + "]" * 300) == (True, True)


def test_what_is_not_enforced_is_named():
    schema = {"properties": {"a": {"type": "string", "minLength": 2, "pattern": "b"}, "l": {"type": "array", "items": {"not": {}}},
                             "u": {"type": ["string", "null"], "maxLength": 3}, "o": {"allOf": [{"type": "integer"}, {"minimum": 3}]}}}
    structure = structure_of([{"name": "f", "parameters": schema}], "required")
    assert sorted(structure.loose) == ["tools.f.a/minLength", "tools.f.a/pattern", "tools.f.l/items/not", "tools.f.o/allOf", "tools.f.u"]
    assert Grammar.compile(structure, TOKENIZER, CLOSED).loose == structure.loose
    assert list(unbound_keywords({"properties": {"not": {"type": "string"}}}, "s")) == [], "a property may be called not"
    assert structure_of([{"name": "f", "parameters": {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {}}}}}], "required").loose == ("tools.f",)


@pytest.mark.parametrize("choice, want", [
    (None, (False, ["f", "g"])), ("auto", (False, ["f", "g"])), ({"type": "auto"}, (False, ["f", "g"])), ("none", (False, [])), ({"type": "none"}, (False, [])),
    ("required", (True, ["f", "g"])), ({"type": "any"}, (True, ["f", "g"])), ({"type": "tool", "name": "g"}, (True, ["g"])),
    ({"type": "function", "name": "f"}, (True, ["f"])), ({"type": "function", "function": {"name": "f"}}, (True, ["f"])),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}, (True, ["g"])),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}}, (False, ["f"]))])
def test_every_spelling_of_a_choice(choice, want): assert read_tool_choice(choice, ["f", "g"]) == want


# No [ or < in text: they begin the special tokens, which a reply may not hold.
JSON = st.recursive(st.none() | st.booleans() | st.integers(-10**6, 10**6) | st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="[<"), max_size=6),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé ", min_size=1, max_size=3), inner, max_size=3), max_leaves=8)


@given(st.dictionaries(st.text("xyz", min_size=1, max_size=2), JSON, max_size=3))
@settings(max_examples=60, deadline=None)
def test_every_json_object_is_admitted_as_the_model_writes_it(value):
    text = json.dumps(value, ensure_ascii=False)
    assert admits(compiled(response_format={"type": "json_object"}), text) == (True, True)


def test_a_bound_stream_gives_the_same_message_cut_anywhere():
    tools = [{"name": "go", "parameters": SCHEMAS[1]}]
    text = wander(compiled(OPEN, tools=tools, tool_choice="required"), random.Random(2))
    whole, chars = parse(text, tools, OPEN, call_id=str), OutputParser(tools, OPEN, call_id=str)
    for character in text: chars.feed(character)
    chars.finish()
    assert chars.message == whole.message and chars.spans == whole.spans
