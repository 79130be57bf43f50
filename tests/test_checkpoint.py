"""Checkpoints: what loads, what is refused and in which words, how much memory it takes."""
import dataclasses
import json
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conftest import write_checkpoint
from glm52.model.checkpoint import CheckpointError, inspect_checkpoint, load_model, model_dtype, read_header, resolve_model, save_checkpoint
from glm52.model.decoder import Caches, random_model, tiny_config as make_config
from glm52.model.plan import RequestRows, StepPlan
from glm52.ops.fp8 import Fp8Weight, linear, quantize_weight
from glm52.ops.moe import swiglu


def values(model):
    return {name: place.read() if hasattr(place, "read") else place for name, place in model.weights.places.items()}


def same(a, b):
    a, b = values(a), values(b)
    return a.keys() == b.keys() and all(
        all(torch.equal(x.float(), y.float()) for x, y in zip(a[n], b[n])) if isinstance(a[n], Fp8Weight) else torch.equal(a[n], b[n]) for n in a)


def hidden(model, ids=tuple(range(40))):
    caches = Caches.new(model.config, 1, model.dtype)
    return model.forward(StepPlan.build([RequestRows(list(ids), 0, [0])]), caches)


def edit(path, change):
    "Rewrite the only safetensors file of a checkpoint through `change(tensors)`."
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture
def copy(tiny_dir, tmp_path):
    return shutil.copytree(tiny_dir, tmp_path / "copy")


# ---------------------------------------------------------------- what loads

def test_load_is_what_was_written(tiny_dir, tiny_model):
    model = load_model(tiny_dir, device="cpu")
    assert same(model, tiny_model) and model.dtype == torch.float32 and torch.equal(hidden(model), hidden(tiny_model))


@pytest.mark.parametrize("shard_bytes", [10**9, 700_000, 1])
def test_save_and_load_whole_and_in_shards(tiny_model, tmp_path, shard_bytes):
    save_checkpoint(tiny_model, tmp_path, shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors").exists() == (shard_bytes == 10**9)
    loaded = load_model(tmp_path, device="cpu")
    assert same(loaded, tiny_model) and loaded.config == dataclasses.replace(tiny_model.config, dtype="float32")


def test_dtype_is_converted_on_the_way(tiny_dir, tiny_model, tmp_path):
    half = load_model(tiny_dir, dtype="bfloat16", device="cpu")
    for name, tensor in values(half).items():
        wanted = values(tiny_model)[name]
        assert torch.equal(tensor, wanted if name.endswith("e_score_correction_bias") else wanted.bfloat16()), name
    save_checkpoint(half, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        assert {str(f.get_tensor(n).dtype) for n in f.keys()} == {"torch.bfloat16", "torch.float32"}
    assert load_model(tmp_path, device="cpu").dtype == torch.bfloat16
    wide = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert all(torch.equal(values(wide)[n], t.float()) for n, t in values(half).items())
    with pytest.raises(CheckpointError, match="float16.*bfloat16 and float32"): model_dtype("float16", tiny_model.config)


def test_fp8_round_trip(tmp_path):
    "Blocks of 128 that fit stay FP8, those that do not are widened with a notice; kv_b is dequantised before it is cut."
    config = make_config(hidden_size=256, intermediate_size=256, moe_intermediate_size=128, q_lora_rank=128, kv_lora_rank=96, n_routed_experts=4)
    model, notices = random_model(config), []
    save_checkpoint(model, tmp_path, quantize=True)
    report = inspect_checkpoint(tmp_path)
    assert report.problems == [] and report.fp8 == {name for name, spec in model.weights.specs.items() if spec.fp8}
    loaded = load_model(tmp_path, device="cpu", notice=notices.append)
    assert notices == []
    for name, spec in loaded.weights.specs.items():
        got, wanted = values(loaded)[name], values(model)[name]
        if "kv_b_proj" in name:
            q = quantize_weight(wanted)
            assert torch.equal(got, q.weight.float() * q.scale_inv.repeat_interleave(128, 0)[:got.shape[0]].repeat_interleave(128, 1)[:, :got.shape[1]])
        elif spec.fp8: assert isinstance(got, Fp8Weight) and torch.equal(got.weight.float(), quantize_weight(wanted).weight.float()), name
        else: assert torch.equal(got, wanted), name
    error = (hidden(loaded)[:14] - hidden(model)[:14]).norm() / hidden(model)[:14].norm()
    assert 1e-3 < error < 0.5
    save_checkpoint(loaded, tmp_path / "again")          # FP8 values go back as they came
    assert same(load_model(tmp_path / "again", device="cpu"), loaded)


def test_fp8_rows_that_are_no_whole_blocks_are_filled_up(tiny_model, tmp_path):
    "64 rows of gate and of up begin a block each; the zeros between them change nothing."
    save_checkpoint(tiny_model, tmp_path, quantize=True)
    notices = []
    model = load_model(tmp_path, device="cpu", notice=notices.append)
    dense, experts, c = model.layers[0].feed_forward, model.layers[3].feed_forward, model.config
    assert notices == [] and all(isinstance(w, Fp8Weight) for w in (dense.gate_up, dense.down, experts.gate_up, experts.down, experts.shared_gate_up, experts.shared_down))
    assert dense.gate_up.weight.shape == (512, c.hidden_size) and experts.gate_up.weight.shape == (c.n_routed_experts, 256, c.hidden_size)
    assert experts.down.weight.shape == (c.n_routed_experts, c.hidden_size, 128) and experts.down.weight[..., 64:].float().abs().max() == 0
    x = torch.randn(9, c.hidden_size, generator=torch.Generator().manual_seed(0))
    for e in range(2):
        gate, up, down = (model.weights.places[f"model.layers.3.mlp.experts.{e}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        want = linear(torch.nn.functional.silu(linear(x, gate)) * linear(x, up), down)
        got = swiglu(x, Fp8Weight(experts.gate_up.weight[e], experts.gate_up.scale_inv[e]), Fp8Weight(experts.down.weight[e], experts.down.scale_inv[e]))
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    save_checkpoint(model, tmp_path / "again")
    assert same(load_model(tmp_path / "again", device="cpu"), model)


def test_half_a_stack_in_fp8_is_said(tiny_model, tmp_path):
    "Gate in FP8 beside an up in float32: both are kept in float32."
    save_checkpoint(tiny_model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name], tensors[name + "_scale_inv"] = quantize_weight(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    notices = []
    model = load_model(tmp_path, device="cpu", notice=notices.append)
    assert len(notices) == 1 and "kept in float32" in notices[0] and name in notices[0] and isinstance(model.layers[0].feed_forward.gate_up, torch.Tensor)


def test_progress_counts_every_byte(tiny_dir):
    heard = []
    load_model(tiny_dir, device="cpu", on_bytes=lambda done, total: heard.append((done, total)))
    assert heard[-1][0] == heard[-1][1] == inspect_checkpoint(tiny_dir).bytes and [d for d, _ in heard] == sorted(d for d, _ in heard)


# ---------------------------------------------------------------- what is refused

@pytest.mark.parametrize("change, words", {
    "missing": (lambda t: t.pop("model.layers.4.mlp.experts.3.up_proj.weight"), "missing: model.layers.4.mlp.experts.3.up_proj.weight"),
    "index weights of a full layer": (lambda t: t.pop("model.layers.2.self_attn.indexer.wk.weight"), "missing: model.layers.2.self_attn.indexer.wk.weight"),
    "no mtp layer": (lambda t: [t.pop(n) for n in list(t) if n.startswith("model.layers.7.")], "num_nextn_predict_layers"),
    "extra": (lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.ones(1)}), "not part of this model: model.layers.0.mlp.gate.weight"),
    "scale alone": (lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(4, 1)}), "lm_head.weight is F32 with lm_head.weight_scale_inv"),
    "unknown scale": (lambda t: t.update({"model.what_scale_inv": torch.ones(1)}), "not part of this model: model.what_scale_inv"),
    "misshapen": (lambda t: t.update({"lm_head.weight": torch.ones(512, 127)}), r"lm_head.weight is \[512, 127\], config.json makes it \[512, 128\]"),
    "integers": (lambda t: t.update({"model.norm.weight": torch.ones(128, dtype=torch.int32)}), "model.norm.weight has type I32"),
    "fp8 without scale": (lambda t: t.update({"lm_head.weight": torch.ones(512, 128).to(torch.float8_e4m3fn)}), "F8_E4M3 without"),
    "fp8 with the wrong scale": (lambda t: t.update({"lm_head.weight": torch.ones(512, 128).to(torch.float8_e4m3fn), "lm_head.weight_scale_inv": torch.ones(1, 1)}),
                                 r"lm_head.weight_scale_inv is \[1, 1\], 128x128 blocks make it \[4, 1\]"),
}.values(), ids=lambda v: v if isinstance(v, str) else "")
def test_tensors_that_do_not_fit_are_refused_by_name(copy, change, words):
    edit(copy, change)
    with pytest.raises(CheckpointError, match=words): load_model(copy, device="cpu")
    assert "PROBLEM" in repr(inspect_checkpoint(copy))


def test_index_tensors_on_shared_layers_are_skipped_with_a_notice(copy, tiny_model):
    "Some published conversions carry them (IX02); they are the one exception to refusing extra tensors."
    edit(copy, lambda t: t.update({"model.layers.4.self_attn.indexer.wk.weight": torch.randn(32, 128)}))
    notices = []
    model = load_model(copy, device="cpu", notice=notices.append)
    assert notices == ["skipped, indexer on a shared layer: model.layers.4.self_attn.indexer.wk.weight"] and same(model, tiny_model)


def test_many_missing_names_are_counted(copy):
    edit(copy, lambda t: [t.pop(n) for n in list(t) if ".experts." in n])
    with pytest.raises(CheckpointError, match="and 116 more"): load_model(copy, device="cpu")


def test_corrupt_and_truncated_files_are_named(copy):
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    for name, data, words in (("cut", whole[:-1000], "cut short"), ("cut in the header", whole[:100], "cut short"), ("empty", b"", "cut short"),
                              ("longer", whole + b"x", "too long"), ("no header", struct.pack("<Q", 50) + b"{" * 100, "damaged"),
                              ("text", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
                              ("noise", b"GGUF" * 50, "not a safetensors file"),
                              ("entry", struct.pack("<Q", 12) + b'{"a": {}}   ', "entry for a is damaged")):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=words) as error: load_model(copy, device="cpu")
        assert str(file) in str(error.value), name
    header = json.loads(whole[8:8 + struct.unpack("<Q", whole[:8])[0]])
    header["lm_head.weight"]["shape"] = [512, 1000]     # shape and bytes disagree
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + whole[8 + struct.unpack("<Q", whole[:8])[0]:])
    with pytest.raises(CheckpointError, match="lm_head.weight"): load_model(copy, device="cpu")


def test_shards_are_checked_against_the_index(tiny_model, tmp_path):
    save_checkpoint(tiny_model, tmp_path, shard_bytes=3_000_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    moved = tmp_path / shards[1]
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{shards[1]} is listed but not here"): load_model(tmp_path, device="cpu")
    (tmp_path / "elsewhere").rename(moved)
    wrong = index["weight_map"] | {"lm_head.weight": shards[0]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(CheckpointError, match="lm_head.weight is in it, but it is not"): load_model(tmp_path, device="cpu")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"): load_model(tmp_path, device="cpu")


def test_directories_and_names(tmp_path, copy):
    with pytest.raises(CheckpointError, match="no such model directory.*glm52-nano"): load_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no config.json"): load_model(tmp_path)
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"): load_model(copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match="llama.*glm_moe_dsa"): load_model(copy)
    assert resolve_model(copy) == copy


# ---------------------------------------------------------------- inspect, memory

def test_inspect_reads_headers_only(copy):
    report = inspect_checkpoint(copy)
    assert report.problems == [] and "complete" in repr(report) and len(report.entries) == 258
    file = copy / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as f: f.seek(size - 1_000_000), f.write(b"\0" * 1000)      # damage in the data is not seen
    assert inspect_checkpoint(copy).problems == [] and set(read_header(file)) == set(report.entries)


def test_glm_5_2_names_are_complete_without_a_byte_of_data(tmp_path):
    "The published layout, FP8: 118,629 names against the real config; only the comparison runs."
    from glm52.config import ModelConfig, checkpoint_tensors
    from glm52.model.checkpoint import Entry, compare
    from test_config import GLM_5_2
    config = ModelConfig.from_dict(GLM_5_2)
    entries = {}
    for name, spec in checkpoint_tensors(config).items():
        entries[name] = Entry(tmp_path, "F8_E4M3" if spec.fp8 else "F32" if spec.f32 else "BF16", spec.shape, 0, 0)
        if spec.fp8: entries[name + "_scale_inv"] = Entry(tmp_path, "F32", spec.scale_shape, 0, 0)
    report = compare(tmp_path, config, entries)
    assert len(entries) == 118_629 and report.problems == [] and len(report.fp8) == 59_044


MEMORY = """
import resource, sys, torch
from glm52.model.checkpoint import load_model
load_model(sys.argv[1], device="cpu")          # everything is imported, every cache is warm
before = int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024
with open("/proc/self/clear_refs", "w") as f: f.write("5")
model = load_model(sys.argv[2], device="cpu")
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
print(peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_near_the_size_of_the_model(tiny_dir, tmp_path):
    config = make_config(hidden_size=512, moe_intermediate_size=256, n_routed_experts=16, vocab_size=4096)
    path = write_checkpoint(tmp_path / "large", config, dtype=torch.bfloat16)
    size = inspect_checkpoint(path).bytes
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tiny_dir), str(path)], capture_output=True, text=True, check=True)
    assert size > 60e6 and int(done.stdout) < 1.25 * size, (int(done.stdout) / size, size)
