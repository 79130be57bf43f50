"""A model for tests of scheduling: its cache is a dictionary, its next token a checksum of what lies in the sequence's pages."""
import random


class ChecksumModel:
    "Reads every token back from the pages, so a shared, lost or unwritten page changes the answer."

    def __init__(self, page_size: int, vocab: int = 23, drafts: int = 0, seed: int = 0):
        self.cache, self.size, self.vocab, self.drafts, self.random = {}, page_size, vocab, drafts, random.Random(seed)

    def next_token(self, tokens) -> int:
        return sum((place + 3) * (token + 1) for place, token in enumerate(tokens)) % self.vocab

    def rows(self, rows) -> list[int]:
        "Write the rows, then sample; drafts are guessed well or badly and verified, wrong ones end the run."
        s, tokens = rows.sequence, list(rows.sequence.tokens)
        for _ in range(rows.drafts): tokens.append(self.next_token(tokens) if self.random.random() < 0.7 else 0)
        assert rows.count >= 1 and rows.start + rows.count <= len(tokens)
        assert (rows.start + rows.count == len(tokens)) or not rows.sample
        assert not rows.drafts or rows.sample and rows.start and rows.count == 1 + rows.drafts <= 1 + s.depth, "drafts that nobody asked for"
        assert not rows.drafts or rows.start + rows.count < s.limit, "a draft beyond what the answer may have"
        for position in range(rows.start, rows.start + rows.count):
            self.cache[s.pages[position // self.size], position % self.size] = position, tokens[position]
        if not rows.sample: return []
        new = []
        for last in range(rows.start + rows.count - rows.drafts - 1, rows.start + rows.count):
            seen = [self.cache[s.pages[position // self.size], position % self.size] for position in range(last + 1)]
            assert [position for position, _ in seen] == list(range(last + 1)), "a page holds somebody else's rows"
            new.append(self.next_token(token for _, token in seen))
            if last + 1 < rows.start + rows.count and tokens[last + 1] != new[-1]: break
        return new

    def step(self, scheduler) -> list:
        "One scheduled step; returns its progress."
        step = scheduler.schedule()
        assert step.tokens <= scheduler.max_num_batched_tokens and step.tokens == sum(rows.count for rows in step.rows)
        assert len({id(rows.sequence) for rows in step.rows}) == len(step.rows)
        progress = scheduler.update(step, [self.rows(rows) for rows in step.rows])
        for rows in step.rows: rows.sequence.depth = self.random.randint(0, self.drafts)
        return progress

    def solo(self, prompt, max_tokens, stop_ids=frozenset()) -> tuple[list[int], str]:
        "The answer of a request alone."
        tokens = list(prompt)
        while len(tokens) - len(prompt) < max_tokens:
            tokens.append(self.next_token(tokens))
            if tokens[-1] in stop_ids: return tokens[len(prompt):], "stop"
        return tokens[len(prompt):], "length"
