"""Proposers for tests: one that is always right, one that never is, one that guesses; and how they get into an engine."""

import random

from quire import LLM
from quire.contracts.speculative import SpeculativeConfig
from quire.speculate.draft import Draft
from quire.speculate.speculator import Speculator


class Fake:
    """Drafts `count` tokens with `guess(sequence, position, step_random)`, at every look anew."""

    def __init__(self, count):
        self.count = count
        self.released = []

    def apply(self, plan):
        pass

    def look(self, sequence, limit):
        sequence.memo = self.draft(sequence)[:limit]
        return len(sequence.memo)

    def propose(self, wanted):
        return [Draft.chain(tuple(sequence.memo[:limit])) for sequence, limit in wanted]

    def release(self, sequence):
        self.released.append((sequence.request.request_id, sequence.choice))


class Oracle(Fake):
    """Replays known outputs: prompt -> tokens, by choice; what comes after is 0."""

    def __init__(self, count, outputs):
        super().__init__(count)
        self.outputs = outputs

    def draft(self, sequence):
        output = self.outputs[sequence.request.prompt_token_ids, sequence.choice]
        num_done = len(sequence.token_ids) - sequence.num_prompt_tokens
        return (list(output[num_done : num_done + self.count]) + [0] * self.count)[: self.count]


class Adversary(Oracle):
    """Never right: every token is one beside the true one."""

    def draft(self, sequence):
        return [(token_id + 1) % 300 for token_id in super().draft(sequence)]


class Fickle(Oracle):
    """Right up to a random depth, of a random length, the ends of outputs included; seeded."""

    def __init__(self, count, outputs, seed=0):
        super().__init__(count, outputs)
        self.random = random.Random(seed)

    def draft(self, sequence):
        length, num_right = self.random.randint(0, self.count), self.random.randint(0, self.count)
        return [t if i < num_right else (t + 7) % 300 for i, t in enumerate(super().draft(sequence)[:length])]


PROPOSERS = {"oracle": Oracle, "adversary": Adversary, "fickle": Fickle}


def install(llm: LLM, proposer, count: int) -> None:
    """Let an engine draft with a proposer of ours, at full length always."""
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=count, adaptive=False)
    runner = llm.llm_engine._runner
    runner._speculator = Speculator(config, proposer, runner._decoder.spec.vocab_size)
