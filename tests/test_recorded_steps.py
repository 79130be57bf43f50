"""What CUDA graphs record, found out without a GPU: nothing in it waits for the device, takes anything from the host or is compiled while it is recorded."""
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/gpu/test_graphs_on_gpu.py records on it"),
              pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in ("triton", "tilelang")), reason="Triton or TileLang is not installed"),
              pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not there")]
WAITS = {"real widths, FP8 pages": "FP8 pages", "real widths in BF16": "experts of layer 1", "nano in fp16": "sparse_mla"}


def test_steps_that_are_recorded_never_wait_and_those_that_wait_are_known():
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, HERE / "fake_cuda.py"], text=True, capture_output=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    found = {(line := json.loads(text))["model"]: line for text in done.stdout.splitlines() if text.startswith("{")}
    assert len(found) == 7
    for name, said in found.items():
        if name in WAITS: assert WAITS[name] in said["waits"]
        else: assert said["recordings"] > 10 and said["launches"] > 300 and {"topk", "_index_scores_kernel", "_latent_kernel", "_add_norm_kernel"} <= set(said["kernels"])
    assert "_few_rows_kernel" in found["real widths"]["kernels"] and "_gate_up_few" in found["real widths"]["kernels"]
