"""Steps on tensors that say they are on a Hopper GPU and hold no numbers, as a program. torch refuses what would wait for a number; Triton's kernels are bound to their arguments, not
compiled; TileLang's programs compare their arguments with what they declare. While a step is recorded, nothing may be copied from the host or be compiled. One JSON line a model."""
import json
import os
import subprocess
import sys
import tempfile
import types

os.environ["TRITON_INTERPRET"] = "0"      # before Triton is imported

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RECORDING, LAUNCHES, KNOWN = [False], [], set()
PRETENCES = dict(is_available=lambda: True, device_count=lambda: 1, get_device_capability=lambda *_: (9, 0), is_current_stream_capturing=lambda: RECORDING[0],
                 get_device_properties=lambda *_: types.SimpleNamespace(multi_processor_count=132))


def pretend() -> None:
    "A GPU, for torch and for Triton."
    for name, value in PRETENCES.items(): setattr(torch.cuda, name, value)
    with tempfile.TemporaryDirectory() as folder:      # a build of torch for the CPU has nothing that switches between GPUs
        with open(f"{folder}/guard.cc", "w") as f:
            f.write("#include <c10/core/impl/DeviceGuardImplInterface.h>\nC10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);\n")
        home = os.path.dirname(torch.__file__)
        subprocess.run(["g++", "-std=c++20", "-w", "-shared", "-fPIC", f"-I{home}/include", "guard.cc", "-o", "guard.so", f"-L{home}/lib", "-lc10"], cwd=folder, check=True)
        torch.ops.load_library(f"{folder}/guard.so")
    FakeTensor.data_ptr = lambda self: self.storage_offset() * self.element_size()      # all storages begin at multiples of 512 bytes
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit
    driver.set_active(types.SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda _: 0,
                                            map_python_to_cpp_type=lambda kind: kind))
    jit.JITFunction.run = bind


class Pointer:
    "What Triton asks of a tensor."

    def __init__(self, tensor: torch.Tensor):
        assert tensor.device.type == "cuda", f"a tensor on the {tensor.device}"
        self.dtype, self.data_ptr = tensor.dtype, tensor.data_ptr


def bind(self, *args, grid, warmup, **kwargs) -> None:
    "In place of a launch: which variant of the kernel these arguments need."
    name, (*_, binder) = self.fn.__name__, self.device_caches[0]
    _, special, options = binder(*(Pointer(a) if isinstance(a, FakeTensor) else a for a in args), **kwargs, debug=False)
    assert len(grid) <= 3 and max(grid[1:], default=0) <= 65535, f"{name}: a grid of {grid}"
    launched(name, (name, str(special), str(options)))


def launched(name: str, variant) -> None:
    assert variant in KNOWN or not RECORDING[0], f"{name} is compiled while a step is recorded"
    KNOWN.add(variant)
    LAUNCHES.append((name, RECORDING[0]))


def declared(func, **_):
    "In place of a compiled TileLang program."
    name = str(func.attrs["global_symbol"])

    def call(*args):
        sizes = {}
        for parameter, given in zip(func.params, args, strict=True):
            assert isinstance(given, torch.Tensor) == (parameter in func.buffer_map), f"{name}: {parameter}"
            if parameter not in func.buffer_map: continue
            buffer = func.buffer_map[parameter]
            assert given.device.type == "cuda" and given.is_contiguous() and str(given.dtype) == f"torch.{buffer.dtype}", f"{name}: {parameter} {given}"
            for size, there in zip(buffer.shape, given.shape, strict=True): assert sizes.setdefault(str(size), there) == there == int(getattr(size, "value", there)), f"{name}: {parameter} {given.shape}"
        launched(name, func)
    return call


class NothingFromTheHost(TorchDispatchMode):
    "While recording."

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if RECORDING[0]:
            places = {t.device.type for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor) and (t.dim() or t.device.type != "cpu")}
            assert places <= {"cuda"}, f"{func} touches the host while a step is recorded"
        return out


class Recorder:
    "As that of the chapter graphs."

    def __init__(self, device): pass
    def warm_up(self, call): call()

    def record(self, call):
        RECORDING[0] = True
        try: call()
        finally: RECORDING[0] = False
        return types.SimpleNamespace(replay=lambda: None)


def plan_of(batch: int, rows: int, context: int):
    from glm52.model.plan import RequestRows, StepPlan
    plan = StepPlan.build([RequestRows([5] * rows, context, range(-(-(context + rows) // 64)))] * batch)
    return StepPlan(**{name: torch.empty(value.shape, dtype=value.dtype, device="cuda") if isinstance(value, torch.Tensor) else value for name, value in vars(plan).items()})


def record(config, dtype, fp8, pages, cases, deterministic=False) -> dict:
    "Every case three times: warmed up, recorded, replayed; with the MTP layer's rows and, for one row a request, three drafts."
    from glm52.engine import graphs
    from glm52.model.decoder import Caches, Decoder
    model = Decoder(config, dtype, "cuda", fp8=fp8, deterministic=deterministic)
    caches, before = Caches.new(config, 200, dtype, "cuda", pages, pages), len(LAUNCHES)
    if reason := graphs.waits(model, caches):
        try: graphs.StepRecording(model, caches, graphs.Shape(1, 1, 1, config.index_topk, False), True, Recorder(None)).run()
        except DataDependentOutputException: return {"waits": reason}
        raise AssertionError(f"it is said that {reason}, and nothing did")
    made, first = graphs.Graphs(model, caches, drafts=True), torch.zeros(300, config.hidden_size, dtype=dtype, device="cuda")
    for batch, rows, context in cases * 3:
        plan = plan_of(batch, rows, context)
        hidden = made.step(plan, rows, first[:batch])
        assert hidden.shape == (batch * rows, config.hidden_size)
        if rows > 1: continue
        with torch.inference_mode():
            hidden, again = made.first_draft(plan, first[:batch])
            for k in (1, 2, 3): hidden = again(torch.zeros(batch, dtype=torch.int64, device="cuda"), k)
        model.logits(hidden)
    recorded = [name for name, recording in LAUNCHES[before:] if recording]
    return {"recordings": sum(r.run.graph is not None for r in made.steps.values()) + sum((r.first.graph is not None) + (r.later.graph is not None) for r in made.chains.values()),
            "launches": len(recorded), "kernels": sorted(set(recorded))}


def main() -> None:
    pretend()
    import tilelang
    from glm52.config import ModelConfig, checkpoint_tensors
    from glm52.engine import graphs
    from glm52.model.checkpoint import resolve_model
    from glm52.model.decoder import tiny_config
    tilelang.compile, graphs.Recorder = declared, Recorder
    nano = ModelConfig.from_dir(resolve_model("glm52-nano"))
    real = dict(num_hidden_layers=3, num_attention_heads=64, hidden_size=6144, intermediate_size=12288, moe_intermediate_size=2048, q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192,
                qk_rope_head_dim=64, v_head_dim=256, index_topk=2048, index_n_heads=32, index_head_dim=128, n_routed_experts=256, num_experts_per_tok=8, first_k_dense_replace=1,
                vocab_size=154880, max_position_embeddings=131072)
    wide, plain = tiny_config(**real), ("embed", "lm_head", "norm", "weights_proj", "eh_proj", "mlp.gate.", "bias")
    names = lambda config: frozenset(n for n, spec in checkpoint_tensors(config).items() if len(spec.shape) == 2 and not any(p in n for p in plain))
    small, large = [(1, 1, 100), (3, 1, 300), (4, 2, 300), (8, 8, 600), (64, 1, 300)], [(1, 1, 500), (1, 1, 5000), (2, 6, 5000), (11, 1, 5000), (256, 1, 9000), (1, 1, 40000)]
    models = {"nano": (nano, torch.bfloat16, frozenset(), "auto", small), "nano in FP8, deterministic": (nano, torch.bfloat16, names(nano), "auto", small, True),
              "real widths": (wide, torch.bfloat16, names(wide), "auto", large), "real widths, deterministic, FP8 pages": (wide, torch.bfloat16, names(wide), "fp8", large, True),
              "real widths, FP8 pages": (wide, torch.bfloat16, names(wide), "fp8", large), "real widths in BF16": (wide, torch.bfloat16, frozenset(), "auto", large),
              "nano in fp16": (nano, torch.float16, frozenset(), "auto", small)}
    with FakeTensorMode(allow_non_fake_inputs=True), NothingFromTheHost():
        for name, model in models.items(): print(json.dumps({"model": name, **record(*model)}), flush=True)


if __name__ == "__main__": main()
