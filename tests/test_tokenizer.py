"Tokenizer and detokenizer: random text cut anywhere, every marker, files that are missing or broken."

import json

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import models, trainers
import tokenizers
from transformers import PreTrainedTokenizerFast

from glm52.chat.tokenizer import (EOS_TOKENS, MARKUP_TOKENS, SPECIAL_TOKENS, Detokenizer, Tokenizer, TokenizerError,
                                  byte_characters, byte_tokenizer, naive_detokenize, new_backend)

BYTES = byte_tokenizer()
PROSE = ["the quick brown fox, 12345 times", "größer als 日本語 und naïve 🙂 emoji", "def f(x):\n    return x\n"] * 3


def trained():
    "A small trained vocabulary of GLM's build, so that tokens span characters and characters span tokens."
    backend = new_backend({}, [])
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = backend.pre_tokenizer
    learner.train_from_iterator(PROSE, trainers.BpeTrainer(vocab_size=340, initial_alphabet=byte_characters(),
                                                           show_progress=False))
    model = json.loads(learner.to_str())["model"]
    hf = PreTrainedTokenizerFast(tokenizer_object=new_backend(model["vocab"], [tuple(m) for m in model["merges"]]),
                                 eos_token="<|endoftext|>", clean_up_tokenization_spaces=False)
    return Tokenizer(hf)


TRAINED = trained()
TEXT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aé世🙂\u200d�\x00<>|")), max_size=40)
MIXED = st.lists(st.one_of(TEXT, st.sampled_from(SPECIAL_TOKENS)), max_size=6).map("".join)


def stream(tokenizer, ids, cuts, skip=False):
    "All pieces of a stream cut at `cuts`, the flush last."
    detokenizer, pieces, last = Detokenizer(tokenizer, skip_special_tokens=skip), [], 0
    for cut in [*sorted(cuts), len(ids)]:
        pieces.append(detokenizer.push(ids[last:cut])); last = cut
    return [*pieces, detokenizer.flush()]


@given(MIXED, st.lists(st.integers(0, 200), max_size=8), st.sampled_from([BYTES, TRAINED]))
@settings(max_examples=300, deadline=None)
def test_text_round_trips_cut_anywhere(text, cuts, tokenizer):
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids, [c for c in cuts if c <= len(ids)])
    assert "".join(pieces) == text and pieces[-1] == ""
    assert "".join(stream(tokenizer, ids, range(len(ids)))) == text
    assert "".join(tokenizer.pieces(ids)) == text and len(tokenizer.pieces(ids)) == len(ids)


@given(st.lists(st.integers(0, len(TRAINED.hf) - 1), max_size=60), st.data(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_decode_as_transformers_does(ids, data, skip):
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    want = TRAINED.hf.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(TRAINED, ids, cuts, skip)) == want == TRAINED.decode(ids, skip_special=skip)


@given(TEXT)
@settings(max_examples=100, deadline=None)
def test_nothing_unfinished_is_shown(text):
    "Every prefix of what was sent is a prefix of the text: no replacement character for half a character."
    sent, detokenizer = "", Detokenizer(BYTES)
    for i in BYTES.encode(text):
        sent += detokenizer.push([i])
        assert text.startswith(sent)


def test_naive_and_incremental_agree_without_replacement_characters():
    ids, sent, detokenizer, again = BYTES.encode("héllo 🙂 <think>x</think>"), "", Detokenizer(BYTES), ""
    for n, i in enumerate(ids, 1):
        sent += naive_detokenize(BYTES, ids[:n], sent)
        again += detokenizer.push([i])
        assert sent == again


def test_flush_shows_an_unfinished_character_once_and_resets():
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(BYTES.encode("a🙂")[:-1]) == "a"
    assert detokenizer.flush() == "�" and detokenizer.flush() == ""
    assert detokenizer.push(BYTES.encode("b")) == "b"


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_each_marker_is_one_token_and_only_markup_survives_skipping(token):
    (token_id,) = BYTES.encode(token)
    assert token_id == 256 + SPECIAL_TOKENS.index(token) and BYTES.token_text(token_id) == token
    assert BYTES.decode([token_id], skip_special=True) == (token if token in MARKUP_TOKENS else "")


def test_order_of_the_markers_is_glms():
    place = {token: 154820 + i for i, token in enumerate(SPECIAL_TOKENS)}
    known = {"<|endoftext|>": 154820, "[gMASK]": 154822, "<sop>": 154824, "<|system|>": 154826, "<|user|>": 154827,
             "<|assistant|>": 154828, "<|observation|>": 154829, "<think>": 154841, "</think>": 154842,
             "<tool_call>": 154843, "</tool_call>": 154844, "<arg_key>": 154847, "</arg_key>": 154848,
             "<arg_value>": 154849, "</arg_value>": 154850}
    assert {token: place[token] for token in known} == known and len(SPECIAL_TOKENS) == 36


def test_digits_split_in_threes_and_words_keep_their_blank():
    pieces = [piece for piece, _ in new_backend({}, []).pre_tokenizer.pre_tokenize_str("in 20261 it's ok!\n\n x")]
    assert pieces == ["in", "Ġ", "202", "61", "Ġit", "'s", "Ġok", "!ĊĊ", "Ġx"]


def test_an_id_without_a_token_is_empty_and_a_negative_one_an_error():
    assert BYTES.token_bytes(154_879) == b"" and BYTES.decode([104, 154_879, 105]) == "hi"
    with pytest.raises(TokenizerError, match="negative"): BYTES.token_bytes(-1)


def test_lone_surrogate_is_named():
    with pytest.raises(TokenizerError, match=r"'\\ud83d' at character 2"): BYTES.encode("ab\ud83d")


def test_directory_round_trip_and_eos_ids(tmp_path):
    TRAINED.hf.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    loaded = Tokenizer.from_dir(tmp_path)
    text = "größer <|user|> 123 日本語"
    assert loaded.encode(text) == TRAINED.encode(text) and loaded.eos_token_ids == (3, 5)
    assert loaded.vocab_size == TRAINED.vocab_size and not loaded.has_template
    with pytest.raises(TokenizerError, match="chat_template.jinja"): loaded.render([{"role": "user", "content": "x"}])
    assert {BYTES.token_text(i) for i in BYTES.eos_token_ids} == set(EOS_TOKENS)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer.json"): Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be read"): Tokenizer.from_dir(tmp_path)
    TRAINED.hf.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(TokenizerError, match="generation_config.json"): Tokenizer.from_dir(tmp_path)


def test_a_tokenizer_that_does_not_decode_bytes_is_refused():
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(TokenizerError, match="byte-level"): Tokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
