"""Kernels that nvcc compiles come first, side by side: one takes it half a minute, and a file of tests launches dozens."""
import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch


def build(job):
    "Compile one; TileLang keeps it on disk, where the tests find it."
    module, *shape = job
    importlib.import_module(f"glm52.kernels.{module}").build(*shape)


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    "A test file that launches TileLang's kernels lists them in `kernels()`."
    if not hasattr(request.module, "kernels") or not torch.cuda.is_available(): return
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build, request.module.kernels()))
