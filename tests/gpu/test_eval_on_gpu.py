"The op that the evaluation binds on a GPU, and a few questions through the whole of it."
import pytest
import torch

from glm52.eval import Group, acceptance, ask, correct, from_engine, new_llm
from glm52.ops.fp8 import quantize_weight
from glm52.ops.moe import moe_torch, moe_wide

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("fp8", [False, True])
def test_all_experts_at_once(fp8):
    g = torch.Generator("cuda").manual_seed(0)
    x, gate_up, down = (torch.randn(*s, generator=g, device="cuda").mul(f).bfloat16() for s, f in (((5000, 256), 1), ((16, 256, 256), 1 / 16), ((16, 256, 128), 1 / 11)))
    ids, weights = torch.rand(5000, 16, generator=g, device="cuda").topk(4).indices, torch.rand(5000, 4, generator=g, device="cuda")
    if fp8: gate_up, down = quantize_weight(gate_up), quantize_weight(down)
    got, want = moe_wide(x, ids, weights, gate_up, down).float(), moe_torch(x, ids, weights, gate_up, down).float()
    assert (got - want).norm() / want.norm() < (0.04 if fp8 else 0.01)


def test_questions_are_answered_and_drafted():
    llm = new_llm("glm52-nano", "bfloat16", max_model_len=4096, num_pages=2000)
    questions = [q for group in (Group("sort"), Group("lookup", (2000, 3000))) for q in ask(group, 20, llm.tokenizer)]
    answers = from_engine(llm, questions)
    assert sum(map(correct, questions, answers)) >= 36
    assert all(row["mean_full"] > 4 for row in acceptance(llm.engine.decoder, questions, answers))
