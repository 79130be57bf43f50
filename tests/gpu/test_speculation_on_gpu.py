"""Guesses on a GPU: right as often as on the CPU, under both rules, and every book in order."""
import pytest
import torch

from glm52.cli import task_prompts
from glm52.engine.engine import LLM
from glm52.engine.sampling import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_guesses_are_mostly_right(rule, dtype):
    llm = LLM("glm52-nano", dtype=dtype, device="cuda", num_speculative_tokens=5, acceptance=rule, max_model_len=1024)
    prompts = [{"prompt_token_ids": ids} for ids in task_prompts(llm.tokenizer, 44)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=60, frequency_penalty=0.1 * (i % 3 == 0), logprobs=1 if i % 5 == 0 else None, min_tokens=3 * (i % 4 == 0)) for i in range(len(prompts))]
    results = [result for _ in range(2) for result in llm.generate(prompts, params, use_tqdm=False)]      # the second time from the prefix cache
    llm.engine.check_integrity()
    assert all(r.outputs[0].finish_reason in ("stop", "length") for r in results) and sum(r.num_cached_tokens for r in results) > 0
    proposed, accepted = sum(llm.engine.drafts.proposed), sum(llm.engine.drafts.accepted)
    assert proposed > 500 and accepted / proposed > 0.6
