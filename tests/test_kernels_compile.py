"""Every kernel becomes a binary for Hopper on a machine that has no GPU."""
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import compile_kernels

HERE = Path(__file__).resolve().parent
OTHER = os.environ.get("GLM52_TRITON_36", "")


def compiled(kind: str, first: str = "") -> dict[str, dict]:
    "Kernel -> what its binary holds; `first` is a folder whose packages come before all others."
    path = os.pathsep.join(filter(None, [first, str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, HERE / "compile_kernels.py", kind], text=True, capture_output=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    return {(found := json.loads(line))["kernel"]: found for line in done.stdout.splitlines() if line.startswith("{")}


def judge_triton(found):
    assert found.keys() == compile_kernels.TRITON.keys()
    for name, facts in found.items():
        if name.startswith("index_scores"):
            assert facts["wgmma"] and facts["asynchronous"], f"{name}: no matrix instruction of Hopper, or loads that wait: {facts}"
        if name.startswith(("linear_fp8", "experts, few", "experts, many")):
            assert facts["wgmma"] and facts["fp8"] and facts["asynchronous"], f"{name}: no FP8 matrix instruction, or loads that wait: {facts}"
        if name.startswith(("lm_head", "absorb")): assert facts["asynchronous"] and facts["wgmma"] == ("absorb" not in name or "256" in name), f"{name}: {facts}"
        if facts.get("exact"): assert not facts["fused"], f"{name}: a fused multiply-add decides a token"
        assert facts.get("spilled", 0) == 0 or facts["compiler"] != "3.6.0", f"{name}: {facts['spilled']} bytes do not fit the registers: {facts}"
        assert 0 <= facts["shared"] <= 227 * 1024 and facts["binary"] > 1000


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_compile():
    judge_triton(compiled("triton"))


@pytest.mark.skipif(not (Path(OTHER) / "triton").is_dir() or not OTHER, reason="GLM52_TRITON_36 names no folder that holds Triton 3.6.0")
def test_triton_kernels_compile_with_triton_36():
    found = compiled("triton", OTHER)
    assert {facts["compiler"] for facts in found.values()} == {"3.6.0"}
    judge_triton(found)


@pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="TileLang is not installed")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not there")
def test_topk_and_sparse_attention_compile():
    found = compiled("tilelang")
    assert found.keys() == compile_kernels.TILELANG.keys()
    for name, facts in found.items():
        if name.startswith("sparse"): assert facts["wgmma"] and facts["asynchronous"], f"{name}: {facts}"
        assert facts["cluster"] == ("8 blocks" in name or "cluster" in name), f"{name}: {facts}"
