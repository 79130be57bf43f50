"""The matrix of promise 1 can find what it looks for, and finds nothing on the tiny model."""
import torch

from glm52.cli import task_prompts
from glm52.engine.engine import Engine, load_tokenizer
from glm52.engine.exact import BATCHES, CHUNKS, DRAFTS, answers, cells, exact, make_prompts
from glm52.model.checkpoint import resolve_model
from glm52.model.decoder import Decoder, random_model, tiny_config


def test_the_matrix_has_every_combination():
    every = list(cells())
    assert len(every) == len(set(every)) == len(BATCHES) * len(CHUNKS) * len(DRAFTS) * 8
    prompts = make_prompts(208, range(1000))
    assert len({tuple(p) for p in prompts}) == 208 and max(map(len, prompts)) + 32 <= 512


def test_a_warm_cell_is_warm_and_a_preempted_one_preempts(tiny_model):
    tallies = exact(tiny_model, quick=True, batches=(8,), count=12, say=lambda line: None)
    assert len(tallies) == 24 and not any(t.differ for t in tallies)
    assert all((t.proposed > 0) == (t.cell.drafts > 0) for t in tallies)
    for t in tallies:
        if t.cell.cache == "warm": assert t.cached > 0
        assert (t.preemptions > 0) == t.cell.preempt


def test_one_at_a_time_in_small_pieces_ends(tiny_model):
    tallies = exact(tiny_model, quick=True, batches=(1,), count=2, say=lambda line: None)
    assert len(tallies) == 24 and not any(t.differ for t in tallies) and all((t.preemptions > 0) == t.cell.preempt for t in tallies)


def test_a_model_that_looks_at_its_neighbours_is_caught():
    model = random_model(tiny_config())

    class Nosy(Decoder):
        "Its rows know how many they are."
        def logits(self, hidden): return super().logits(hidden) + 0.5 * len(hidden) * torch.linspace(-1, 1, self.config.vocab_size)

    model.__class__ = Nosy
    heard = []
    tallies = exact(model, quick=True, batches=(8,), count=12, say=heard.append)
    assert sum(len(t.differ) for t in tallies) > 20 and any("DIFFERENT" in line for line in heard) and "different" in heard[-1]


def test_quick_has_every_engine_and_every_treatment():
    some = list(cells(quick=True))
    assert len(some) == len(set(some)) == 72 and {(c.batch, c.chunk, c.drafts) for c in some} == {(c.batch, c.chunk, c.drafts) for c in cells()}
    for a in ("batch", "chunk", "drafts"):
        for b in ("cache", "preempt", "temperature"): assert {(getattr(c, a), getattr(c, b)) for c in some} == {(getattr(c, a), getattr(c, b)) for c in cells()}


def test_real_guesses_are_right_often_enough_to_matter():
    "The shipped model on its own tasks: right guesses and wrong ones, and no token differs."
    texts = task_prompts(load_tokenizer(resolve_model("glm52-nano")), 8)
    tallies = exact("glm52-nano", quick=True, batches=(8,), drafts=(5,), count=8, texts=texts, say=lambda line: None)
    assert not any(t.differ for t in tallies)
    proposed, accepted = sum(t.proposed for t in tallies), sum(t.accepted for t in tallies)
    assert proposed > 100 and 0.3 < accepted / proposed < 0.95


def test_a_prompt_whose_last_piece_is_one_token_arrives(tiny_model):
    "49 tokens in pieces of 16: what is left looks like decoding, three steps after every preemption."
    engine = Engine(tiny_model, None, max_num_seqs=1, max_model_len=128, num_pages=4, max_num_batched_tokens=16)
    assert len(answers(engine, {0: list(range(100, 149))}, 0.0, 4, preempt=True)[0]) == 4 and engine.scheduler.preemptions > 0
