"""The plain path of the whole decoder on a CUDA device: loaded unchanged, same answers as on the CPU."""
import pytest
import torch

from glm52.device import relative_error
from glm52.model.checkpoint import load_model, save_checkpoint
from glm52.model.decoder import Backends, Caches, Capture, IMPLEMENTATIONS
from glm52.model.mtp import draft, mtp_forward
from glm52.model.plan import RequestRows, StepPlan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
PLAIN = {op: "torch" for op in IMPLEMENTATIONS}


def text(length, seed=1):
    return torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(model, chunk, kinds=("auto", "auto")):
    "Logits of a text of 150 tokens, what was captured for its last chunk, and three guesses of what follows."
    ids, pages, out = text(151), [4, 1, 3], []
    caches = Caches.new(model.config, 5, model.dtype, model.device, *kinds)
    for start in range(0, 150, chunk):
        part, capture = ids[start:start + chunk][:150 - start], Capture()
        hidden = model.forward(StepPlan.build([RequestRows(part, start, pages)], model.device), caches, capture)
        plan = StepPlan.build([RequestRows(ids[start + 1:start + 1 + len(part)], start + 1, pages, "none")], model.device)
        rows = mtp_forward(model, plan, hidden, caches)
        out.append(model.logits(hidden))
    return torch.cat(out).cpu(), capture, draft(model, rows, torch.tensor([len(plan) - 1], device=model.device), caches, 3)[1].cpu()


def test_float32_agrees_with_the_cpu(tiny_dir):
    here = run(load_model(tiny_dir, device="cpu"), 150)
    there = run(load_model(tiny_dir, device="cuda", backends=Backends.choose("cuda", **PLAIN)), 64)
    assert relative_error(here[0], there[0]) < 1e-4 and relative_error(here[2], there[2]) < 1e-4
    assert torch.equal(here[1].experts[-22:], there[1].experts.cpu())
    for layer in here[1].positions: assert torch.equal(here[1].positions[layer][-22:], there[1].positions[layer].cpu())


@pytest.mark.parametrize("kinds", [("auto", "auto"), ("fp8", "fp8")], ids=["plain cache", "fp8 cache"])
def test_bfloat16_and_fp8_run_and_stay_near(tiny_dir, tmp_path, kinds):
    model = load_model(tiny_dir, device="cpu")
    save_checkpoint(model, tmp_path, quantize=True)
    for path in (tiny_dir, tmp_path):
        here = run(load_model(path, "bfloat16", "cpu"), 150, kinds)[0]
        there = run(load_model(path, "bfloat16", "cuda"), 64, kinds)[0]
        assert there.isfinite().all() and relative_error(here[:8], there[:8]) < 0.6      # a random model: one flipped expert is a lot
