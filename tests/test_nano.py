"""The shipped model: complete, small, readable by transformers, and right about what it was trained for."""
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from glm52.chat.parsers import parse
from glm52.chat.template import TEMPLATE, render as render_prompt
from glm52.engine.engine import LLM
from glm52.engine.sampling import SamplingParams
from glm52.model.checkpoint import inspect_checkpoint, resolve_model
from glm52.nano.tasks import FAMILIES, Maker, draw_item, held_out_items, is_held_out, judge, prompt_and_answer, render

PATH = resolve_model("glm52-nano")
WEATHER = [{"type": "function", "function": {"name": "get_weather", "description": "Get the weather for a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


@pytest.fixture(scope="module")
def llm(): return LLM("glm52-nano", dtype="float32", device="cpu", max_model_len=9000, num_pages=300)


def answers(llm, items, **sampling):
    "Prompt text of each item, continued."
    params = SamplingParams(**{"temperature": 0, "max_tokens": 200} | sampling)
    prompts = [prompt_and_answer(item)[0] for item in items]
    return [llm.tokenizer.decode(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def share_right(llm, items): return sum(judge(i, text) for i, text in zip(items, answers(llm, items))) / len(items)


def test_files_are_complete_and_small():
    report = inspect_checkpoint("glm52-nano")
    assert not report.problems and not report.notices
    assert report.config.describe().total_parameters <= 14_000_000
    sizes = [f.stat().st_size for f in PATH.glob("*.safetensors")]
    assert max(sizes) < 15_000_000 and sum(sizes) <= 28_000_000
    assert (PATH / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((PATH / "generation_config.json").read_text())["eos_token_id"] == list(report.config.eos_token_id)


def test_vocabulary(llm):
    t = llm.tokenizer
    assert t.vocab_size == llm.config.vocab_size == 2048
    assert [t.token_text(i) for i in t.encode("2026")] == ["2", "0", "2", "6"]
    assert t.eos_token_ids == tuple(t.encode("<|endoftext|><|user|><|observation|>"))
    for text in ("Zürich, 東京 🙂\r\n\t x", "".join(map(chr, range(32, 127)))): assert t.decode(t.encode(text)) == text


def test_training_text_is_what_the_template_renders():
    make = Maker("template")
    for _ in range(150):
        item = draw_item(make)
        for m in item.messages[:-1]:
            if not item.thinking: m.pop("reasoning_content", None)   # with thinking off no client has any to send back
        effort = {} if item.effort == "max" else {"reasoning_effort": item.effort}
        assert render_prompt(item.messages[:-1], item.tools or None, enable_thinking=item.thinking, **effort) == prompt_and_answer(item)[0]


def test_items_are_the_same_in_every_process():
    "A seed names its items, whatever order this process keeps sets of strings in."
    ask = "from glm52.nano.tasks import *; print([i.messages for f in FAMILIES for i in held_out_items(f, 20, 3)])"
    said = [subprocess.run([sys.executable, "-c", ask], env=os.environ | {"PYTHONHASHSEED": str(n)}, capture_output=True, text=True, check=True).stdout for n in (1, 2)]
    assert len(said[0]) > 10_000 and said[0] == said[1]


def test_training_and_held_out_items_are_apart():
    "By hash; sums of single digits and the times table are for training only, so no hash is asked."
    make, basic = Maker("apart"), re.compile(r"\d[+-]\d|\d+\*\d+")
    trained = {draw_item(make).key for _ in range(1500)}
    held_out = {item.key for family in FAMILIES for item in held_out_items(family, 40, seed=9)}
    assert not trained & held_out and not any(basic.fullmatch(key) for key in held_out)
    assert all(map(is_held_out, held_out))
    assert [key for key in trained if is_held_out(key) and not basic.fullmatch(key)] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_loads_unchanged_in_transformers_and_says_the_same(dtype):
    "Greedy ids of 50 prompts, alone there and together here; in bfloat16 roundings differ, so only nearly all."
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    theirs = transformers.GlmMoeDsaForCausalLM.from_pretrained(PATH, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    items = [item for n, family in enumerate(FAMILIES) for item in held_out_items(family, 5 if n < 6 else 4, seed=1)]
    ours = LLM("glm52-nano", dtype=dtype, device="cpu", max_model_len=2048, num_pages=400)
    prompts = [ours.tokenizer.encode(prompt_and_answer(item)[0]) for item in items]
    got = [o.outputs[0].token_ids for o in ours.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)]
    same = 0
    for prompt, ids in zip(prompts, got):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + ids[:-1]]), use_cache=False).logits[0, len(prompt) - 1:]
        same += logits.argmax(-1).tolist() == ids
    assert len(items) == 50
    assert same == 50 if dtype == "float32" else same >= 48


def test_sums_and_short_look_ups(llm):
    sums = [i for i in held_out_items("arithmetic", 40, seed=3)]
    assert share_right(llm, sums) >= 0.9
    assert share_right(llm, held_out_items("lookup", 25, seed=3)) >= 0.9


def test_a_look_up_far_beyond_top_k(llm):
    "Tables of 2,000 tokens; the model attends to 256 positions."
    assert share_right(llm, held_out_items("lookup", 3, seed=4, pairs=240)) == 1


def test_the_weather_is_asked_of_a_tool(llm):
    for city in ("Paris", "Oslo"):
        prompt = render_prompt([{"role": "user", "content": f"What is the weather in {city}?"}], WEATHER, tokenizer=llm.tokenizer)
        text = llm.generate(prompt, use_tqdm=False)[0].outputs[0].text
        reply = parse(text, WEATHER, prompt)
        assert [(c.name, json.loads(c.arguments)) for c in reply.message.tool_calls] == [("get_weather", {"city": city})]
        assert reply.finish_reason == "tool_calls" and city in reply.message.reasoning_content


def test_32_mixed_requests_are_what_each_is_alone(llm):
    "Temperatures 0 and 1, prompts of 4 to 400 tokens, chunks, preemption: the same ids."
    make = Maker("mixed")
    prompts = [llm.tokenizer.encode(prompt_and_answer(draw_item(make))[0])[-400:] for _ in range(32)]
    params = [SamplingParams(temperature=i % 2, top_p=0.95 if i % 4 == 1 else 1.0, top_k=20 if i % 8 == 3 else 0, seed=i, max_tokens=20, ignore_eos=True,
                             frequency_penalty=0.5 if i % 5 == 0 else 0.0) for i in range(32)]
    small = LLM(llm.engine.decoder, tokenizer=llm.tokenizer, max_model_len=512, num_pages=40, max_num_seqs=16, max_num_batched_tokens=100)
    together = small.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    small.engine.check_integrity()
    for prompt, p, result in zip(prompts, params, together):
        alone = llm.generate({"prompt_token_ids": prompt}, p, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == result.outputs[0].token_ids
