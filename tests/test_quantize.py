"FP8 checkpoints: complete, in the real names, bit for bit what quantising while loading gives; and never half a one."
import json
import logging
import re

import pytest
import torch
from safetensors import safe_open

import glm52.model.quantize as module
from glm52.config import checkpoint_tensors
from glm52.device import relative_error
from glm52.model.checkpoint import CheckpointError, fp8_scope, inspect_checkpoint, load_model, save_checkpoint
from glm52.model.decoder import Caches, random_model, tiny_config as make_tiny_config
from glm52.model.plan import RequestRows, StepPlan
from glm52.model.quantize import plan_files, quantize_checkpoint, unconverted
from glm52.ops.fp8 import dequantize_weight, quantize_weight, Fp8Weight

QUIET = {"notice": lambda text: None}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "The nano model in both scopes."
    folder = tmp_path_factory.mktemp("fp8")
    return {scope: (folder / scope, quantize_checkpoint("glm52-nano", folder / scope, scope, shard_bytes=5_000_000)) for scope in ("all", "moe-only")}


def logits(model, count=40):
    ids = torch.randint(300, 1900, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    caches = Caches.new(model.config, 1, model.dtype)
    return model.logits(model.forward(StepPlan.build([RequestRows(ids, 0, [0], "all")]), caches))


@pytest.mark.parametrize("scope", ["all", "moe-only"])
def test_it_is_complete_in_the_real_names(made, scope):
    path, done = made[scope]
    report = inspect_checkpoint(path)
    assert not report.problems and done.outcome == "applied"
    names = fp8_scope(inspect_checkpoint("glm52-nano"), scope).names
    assert report.fp8 == names
    if scope == "moe-only": assert names and all(re.search(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$", n) for n in names)
    else: assert names == {n for n, spec in checkpoint_tensors(report.config).items() if spec.fp8}
    assert not any("eh_proj" in n or "weights_proj" in n or "norm" in n or n.endswith("mlp.gate.weight") for n in names)
    assert sum(e.stop - e.start for e in report.entries.values()) == done.bytes_after


@pytest.mark.parametrize("scope", ["all", "moe-only"])
def test_values_are_those_of_the_source(made, scope):
    "FP8 tensors are the quantised source; all others are the source's bytes."
    report, source = inspect_checkpoint(made[scope][0]), inspect_checkpoint("glm52-nano")
    def read(r, name):
        with safe_open(r.entries[name].file, "pt") as f: return f.get_tensor(name)
    for name in list(source.entries)[::7]:
        old, new = read(source, name), read(report, name)
        if name not in report.fp8: assert new.dtype == old.dtype and torch.equal(old, new)
        else:
            scale = read(report, name + "_scale_inv")
            want = quantize_weight(old)
            assert new.dtype == torch.float8_e4m3fn and torch.equal(new.view(torch.uint8), want.weight.view(torch.uint8)) and torch.equal(scale, want.scale_inv)
            assert relative_error(old.float(), dequantize_weight(Fp8Weight(new, scale), torch.float32)) < 0.04


def test_the_configuration_says_what_stayed(made):
    for scope in ("all", "moe-only"):
        path = made[scope][0]
        config, source = json.loads((path / "config.json").read_text()), json.loads((inspect_checkpoint("glm52-nano").path / "config.json").read_text())
        entry = config.pop("quantization_config")
        assert config == {k: v for k, v in source.items() if k != "quantization_config"}
        assert entry["quant_method"] == "fp8" and entry["weight_block_size"] == [128, 128] and entry["fmt"] == "e4m3" and entry["activation_scheme"] == "dynamic"
        stays, fp8 = entry["modules_to_not_convert"], {n.removesuffix(".weight") for n in inspect_checkpoint(path).fp8}
        assert not fp8 & set(stays) and len(stays) == len(set(stays))
        assert {"lm_head", "model.embed_tokens", "model.norm", "model.layers.3.mlp.gate", "model.layers.7.eh_proj", "model.layers.7.shared_head.norm",
                "model.layers.0.self_attn.indexers_proj", "model.layers.6.self_attn.indexer.k_norm.bias"} <= set(stays)
        assert ("model.layers.0.self_attn.o_proj" in stays) == (scope == "moe-only")


def test_tokenizer_and_template_come_along(made):
    source = inspect_checkpoint("glm52-nano").path
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (made["all"][0] / name).read_bytes() == (source / name).read_bytes()


def test_shards_are_bounded(made):
    path, done = made["all"]
    sizes = [f.stat().st_size for f in path.glob("*.safetensors")]
    assert len(sizes) == done.files > 2 and max(sizes) < 5_000_000 + 100_000
    report = inspect_checkpoint("glm52-nano")
    alone = plan_files(report, frozenset(), 1)      # a tensor beyond the bound has a file of its own
    assert all(len(file) == 1 for file in alone) and len(alone) == len(report.entries)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scope, bound", [("all", 0.12), ("moe-only", 0.04)])
def test_logits_stay_close_and_equal_those_quantised_while_loading(made, scope, bound, dtype):
    plain = logits(load_model("glm52-nano", dtype, "cpu", **QUIET))
    stored = logits(load_model(made[scope][0], dtype, "cpu", **QUIET))
    assert 0 < relative_error(plain, stored) < bound
    assert torch.equal(stored, logits(load_model("glm52-nano", dtype, "cpu", quantize=scope, **QUIET)))


def test_the_saver_makes_the_same_tensors(made, tmp_path):
    "`save_checkpoint(quantize=True)` and the streamed command agree."
    save_checkpoint(load_model("glm52-nano", "bfloat16", "cpu", **QUIET), tmp_path / "saved", quantize=True)
    one, other = inspect_checkpoint(tmp_path / "saved"), inspect_checkpoint(made["all"][0])
    assert one.fp8 == other.fp8 and torch.equal(logits(load_model(tmp_path / "saved", "float32", "cpu", **QUIET)), logits(load_model(made["all"][0], "float32", "cpu", **QUIET)))


def test_outcomes_at_load_time(made, tmp_path):
    heard = []
    load_model("glm52-nano", "bfloat16", "cpu", quantize="moe-only", notice=heard.append)
    assert any("moe-only: applied, 240 of 314" in text for text in heard)
    heard.clear()
    load_model(made["all"][0], "bfloat16", "cpu", quantize="moe-only", notice=heard.append)
    assert any("not applicable" in text and "FP8 already" in text for text in heard)
    with pytest.raises(CheckpointError, match="scope 'experts' is not known"): load_model("glm52-nano", quantize="experts", **QUIET)
    dense = make_tiny_config(num_hidden_layers=3, first_k_dense_replace=3, num_nextn_predict_layers=0)
    save_checkpoint(random_model(dense), tmp_path / "dense")
    heard.clear()
    load_model(tmp_path / "dense", device="cpu", quantize="moe-only", notice=heard.append)
    assert any("not applicable, the model has no routed experts" in text for text in heard)
    done = quantize_checkpoint(tmp_path / "dense", tmp_path / "no", "moe-only")
    assert done.outcome == "not applicable" and not (tmp_path / "no").exists()


def test_what_is_refused(made, tmp_path):
    with pytest.raises(CheckpointError, match="exists already"): quantize_checkpoint("glm52-nano", made["all"][0])
    with pytest.raises(CheckpointError, match="no such model"): quantize_checkpoint(tmp_path / "nothing", tmp_path / "x")
    with pytest.raises(CheckpointError, match="not known"): quantize_checkpoint("glm52-nano", tmp_path / "x", "attention")
    assert quantize_checkpoint(made["all"][0], tmp_path / "x").outcome == "not applicable"
    (tmp_path / "y.partial").mkdir()
    with pytest.raises(CheckpointError, match="y.partial exists already"): quantize_checkpoint("glm52-nano", tmp_path / "y")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["y.partial"]


def test_a_failed_run_leaves_nothing(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        if "00002" in path.name: raise OSError("no space left on device")
        path.write_bytes(b"")
    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(OSError): quantize_checkpoint("glm52-nano", tmp_path / "x", shard_bytes=5_000_000)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(CheckpointError, match="1,000 are free"): quantize_checkpoint("glm52-nano", tmp_path / "x")


def test_values_that_fp8_cannot_hold_are_named(tmp_path):
    model = random_model(make_tiny_config())
    model.layers[0].attention.o[0, 0] = float("inf")
    save_checkpoint(model, tmp_path / "broken")
    with pytest.raises(CheckpointError, match="layers.0.self_attn.o_proj.weight holds values that are not finite"): quantize_checkpoint(tmp_path / "broken", tmp_path / "x")
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.partial").exists()


def test_transformers_loads_it(made):
    """On a CPU transformers turns FP8 back into BF16; the weights are then ours, so the answers are. Only the experts: it has no form
    of `kv_a_proj_with_mqa`, 576 rows in blocks of 128, which GLM-5.2-FP8 has too (transformers 5.24, fp8 without a GPU)."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate for FP8 checkpoints")
    from transformers import GlmMoeDsaForCausalLM
    path = made["moe-only"][0]
    hf = GlmMoeDsaForCausalLM.from_pretrained(path, local_files_only=True).eval().float()
    ids = torch.randint(300, 1900, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(): theirs = hf(ids).logits[0]
    plain = load_model("glm52-nano", "float32", "cpu", **QUIET)
    for name in inspect_checkpoint(path).fp8:        # our weights, rounded as the file's are
        place = plain.weights.places[name]
        place.copy_(dequantize_weight(quantize_weight(place), torch.float32).bfloat16())
    assert relative_error(logits(plain), theirs) < 1e-4


def test_zeros_that_fill_up_blocks_survive_a_deep_sleep():
    "At level 2 the weights' memory is given back and read again; nobody reads the zeros, so they are made again."
    from glm52.engine.engine import LLM
    from glm52.engine.sampling import SamplingParams
    llm = LLM("glm52-nano", dtype="float32", device="cpu", quantize="all", max_model_len=256, num_pages=8)
    say = lambda: llm.generate("[gMASK]<sop><|user|>17 + 25<|assistant|><think></think>", SamplingParams(temperature=0, max_tokens=8, logprobs=0), use_tqdm=False)[0].outputs[0]
    before, weights = say(), llm.engine.decoder.weights
    assert weights.filled_up
    llm.sleep(2)
    llm.wake_up()
    after = say()
    assert llm.engine.weights_version == 1 and after.token_ids == before.token_ids and after.cumulative_logprob == before.cumulative_logprob
    for tensor in weights.filled_up: tensor.fill_(3.0)      # whatever the memory held
    llm.engine.reload()
    assert say().cumulative_logprob == before.cumulative_logprob
