"""The judge of closeness and the choice of implementations."""
import os
import subprocess
import sys

import pytest
import torch

from glm52.device import H200, assert_close, measure, missing_package, pick_device, relative_error, resolve


def test_relative_error_is_the_rms_ratio():
    ref = torch.tensor([3.0, 4.0])
    assert relative_error(ref, torch.tensor([3.0, 4.5])) == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_assert_close_refuses_nan_and_stray_infinity(bad):
    ref = torch.ones(3)
    with pytest.raises(AssertionError, match="softmax"):
        assert_close("softmax", ref, torch.tensor([1.0, bad, 1.0]), ratio=1.0)


def test_nan_in_both_is_not_agreement():
    both = torch.tensor([1.0, float("nan")])
    with pytest.raises(AssertionError):
        assert_close("scores", both, both.clone())


def test_equal_infinities_agree():
    masked = torch.tensor([1.0, float("-inf")])
    assert assert_close("scores", masked, masked.clone()) == 0.0


def test_shapes_must_match():
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(torch.ones(2), torch.ones(2, 1))


def test_resolve_prefers_torch_on_the_cpu_and_names_what_is_missing(monkeypatch):
    table = {"torch": torch.sqrt, "tilelang": "glm52.kernels.absent:function"}
    assert resolve("op", table, None, "cpu").name == "torch"
    with pytest.raises(ValueError, match="torch, tilelang"):
        resolve("op", table, "cuda_core")
    monkeypatch.setattr("glm52.device.missing_package", lambda name: "'glm52[gpu]'")
    with pytest.raises(ImportError, match=r"pip install 'glm52\[gpu\]'"):
        resolve("op", table, "tilelang")


def test_resolve_on_a_gpu_takes_the_first_kernel_that_is_installed(monkeypatch):
    monkeypatch.setattr("glm52.device.missing_package", lambda name: "'glm52[gpu]'" if name == "tilelang" else None)
    table = {"torch": torch.sqrt, "tilelang": "no.such:thing", "triton": "torch:sqrt", "flash_mla": "no.such:thing"}
    chosen = resolve("op", table, None, "cuda")
    assert (chosen.name, chosen.function) == ("triton", torch.sqrt)
    assert missing_package("torch") is None


def test_a_gpu_that_is_not_there_is_an_error():
    if torch.cuda.is_available(): pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="sees no CUDA GPU"):
        pick_device("cuda")


def test_a_gpu_with_a_number_becomes_the_current_one(monkeypatch):
    "Triton launches on the current GPU, whatever its arguments' is."
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    assert [str(pick_device(name)) for name in ("cuda", "cuda:1", torch.device("cuda:0"), "cpu")] == ["cuda", "cuda:1", "cuda:0", "cpu"]
    assert current == ["cuda:1", "cuda:0"]
    with pytest.raises(ValueError, match="'cuda:2' was asked for, and torch sees 2 GPU"): pick_device("cuda:2")


def test_the_interpreter_is_chosen_before_triton_is_imported():
    code = "import glm52.device, os; print(os.environ.get('TRITON_INTERPRET'))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == ("None" if torch.cuda.is_available() else "1")


def test_measure_and_floor():
    assert measure(lambda: torch.zeros(10), repeats=3, device="cpu") > 0
    assert H200.floor_us(4.47e6) == pytest.approx(1.0)
    assert H200.floor_us(0, 1450e6, "fp8") == pytest.approx(1.0)
