"""Proposers for tests: one that is always right, one that never is, one that guesses; and how they get into an engine."""

import random

from quire import LLM
from quire.contracts.speculative import SpeculativeConfig
from quire.speculate.acceptance import TreeRecord
from quire.speculate.draft import ROOT, Draft
from quire.speculate.draft_controller import DraftController
from quire.speculate.proposer import Proposer
from quire.speculate.speculator import Speculator


def path_to(draft, node):
    """Return the indices of the tokens on the way to `node`, itself included."""
    return () if node == ROOT else (*path_to(draft, draft.parents[node]), node)


class Fake(Proposer):
    """Drafts `count` tokens with `guess(sequence, position, step_random)`, at every look anew."""

    def __init__(self, count):
        self.count = count
        self.released = []

    def num_available(self, sequence, limit):
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
    """Never right: every token differs from the true one."""

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


class RandomTree(Oracle):
    """Random trees of random tokens, siblings that are equal among them."""

    record = TreeRecord

    def __init__(self, count, outputs, seed=0):
        super().__init__(count, outputs)
        self.random = random.Random(seed)

    def num_available(self, sequence, limit):
        sequence.memo = self.tree(sequence)
        return min(limit, len(sequence.memo))

    def propose(self, wanted):
        return [Draft(one.memo.tokens[:limit], one.memo.parents[:limit]) for one, limit in wanted]

    def tree(self, sequence):
        size = self.random.randint(0, self.count)
        parents = tuple(self.random.randint(-1, node - 1) for node in range(size))
        return Draft(tuple(self.random.randrange(300) for _ in parents), parents)


class OracleTree(RandomTree):
    """The true continuation, with wrong siblings of every token, which have wrong descendants."""

    def tree(self, sequence):
        return self.hide(sequence, self.count)

    def hide(self, sequence, num_right):
        right = Oracle.draft(self, sequence)
        tokens, parents, depths, last = [], [], {-1: 0}, -1
        for node in range(self.count):
            is_right = depths[last] < num_right and self.random.random() < 0.5
            parent = last if is_right else self.random.choice(list(depths))
            wrong = (right[min(depths[parent], len(right) - 1)] + 1 + self.random.randrange(200)) % 300
            tokens.append(right[depths[last]] if is_right else wrong)
            parents.append(parent)
            depths[node] = depths[parent] + 1
            last = node if is_right else last
        return Draft(tuple(tokens), tuple(parents))


class FickleTree(OracleTree):
    """The same, but right only up to a random depth, and of a random size."""

    def tree(self, sequence):
        tree = self.hide(sequence, self.random.randint(0, self.count))
        size = self.random.randint(0, self.count)
        return Draft(tree.tokens[:size], tree.parents[:size])


PROPOSERS = {"oracle": Oracle, "adversary": Adversary, "fickle": Fickle}
TREES = {"random tree": RandomTree, "oracle tree": OracleTree, "fickle tree": FickleTree}
PROPOSERS |= TREES
TREE_COUNT = 14


def install(llm: LLM, proposer, count: int) -> None:
    """Let an engine draft with a proposer of ours, at full length always; trees are larger."""
    if proposer.record is TreeRecord:
        count = proposer.count = TREE_COUNT
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=count, adaptive=False)
    runner = llm.llm_engine.runner
    runner.use_speculator(Speculator(config, proposer, runner.executor.vocab_size))


class PausedController(DraftController):
    """A controller that has disabled drafts for `disabled_left` steps, whatever it has measured."""

    disabled_left = 0

    def skip_steps(self, num_steps):
        super().skip_steps(num_steps)
        self.disabled_left = max(0, self.disabled_left - num_steps)
