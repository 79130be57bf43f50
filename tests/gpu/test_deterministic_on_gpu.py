"""Promise 1 on a GPU: in deterministic mode a row's bits come from that row alone, so an answer from its request alone."""
import pytest
import torch

from glm52.cli import task_prompts
from glm52.engine.engine import load_tokenizer
from glm52.engine.exact import exact
from glm52.model.checkpoint import load_model, resolve_model
from glm52.model.decoder import Caches, Capture, first_difference
from glm52.model.plan import RequestRows, StepPlan

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]


@pytest.fixture(scope="module")
def model():
    return load_model("glm52-nano", "bfloat16", "cuda", deterministic=True)


def states(model, requests, chunk, length=400):
    "Hidden states of the first request's rows after every layer, others beside it, its prompt in pieces."
    g, caches, out = torch.Generator().manual_seed(0), Caches.new(model.config, 8 * requests, model.dtype, model.device), None
    texts = [torch.randint(300, 1900, (n,), generator=g).tolist() for n in (length, 333, 300, 290, 256, 130, 70, 65)[:requests]]
    for start in range(0, length, chunk):
        rows = [RequestRows(text[start:start + chunk], start, list(range(8 * i, 8 * i + 8))) for i, text in enumerate(texts) if text[start:]]
        capture = Capture(hidden=[])
        model.forward(StepPlan.build(rows, model.device), caches, capture)
        part = [h[:min(chunk, length - start)].float().cpu() for h in capture.hidden]
        out = part if out is None else [torch.cat(both) for both in zip(out, part)]
    return out


@pytest.mark.parametrize("requests,chunk", [(8, 400), (1, 16), (1, 64), (8, 50), (3, 7)])
def test_no_layer_feels_who_else_is_there(model, requests, chunk):
    assert first_difference(states(model, 1, 400), states(model, requests, chunk), 0.0) is None


def test_the_matrix(model):
    texts = task_prompts(load_tokenizer(resolve_model("glm52-nano")), 12)
    tallies = exact(model, quick=True, batches=(8,), drafts=(0, 5), count=16, texts=texts, say=print)
    assert sum(t.prompts for t in tallies) > 80 and not any(t.differ for t in tallies)
