"""What many tests share: a tiny random GLM-5.2-shaped model, in memory and on disk."""
import importlib
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from safetensors.torch import save_file

from glm52.config import ModelConfig
from glm52.model.decoder import Decoder, random_model, random_tensors, tiny_config as make_tiny_config


def write_checkpoint(path: Path, config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, drop=(), add=None) -> Path:
    "A checkpoint of noise, written tensor by tensor without the engine's own `save_checkpoint`."
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype) for name, tensor in random_tensors(config, seed)}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop} | (add or {})
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}))
    return path


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    "7 layers (3 dense, 4 sparse), layers 3 to 5 share layer 2's selection, top-k 16, one MTP layer."
    return make_tiny_config()


@pytest.fixture(scope="session")
def tiny_dir(tiny_config, tmp_path_factory) -> Path:
    "A float32 checkpoint directory of the tiny model, MTP layer included; no tokenizer."
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", tiny_config)


@pytest.fixture(scope="session")
def tiny_model(tiny_config) -> Decoder:
    "The same weights as `tiny_dir`, in memory, float32 on the CPU. Shared: do not change it."
    return random_model(tiny_config)


@pytest.fixture
def one_core():
    "torch on one thread: figures of processor time, and more than one worker on the machine."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(job):
    "Compile one kernel; TileLang keeps it on disk, where the tests find it."
    module, *shape = job
    importlib.import_module(f"glm52.kernels.{module}").build(*shape)


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    "A test file that launches TileLang's kernels on a GPU lists them in `kernels()`; they are compiled side by side first, for one takes nvcc half a minute."
    if not hasattr(request.module, "kernels") or not torch.cuda.is_available(): return
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build, request.module.kernels()))
