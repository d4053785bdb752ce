"""What is drafted of constrained sequences, and what the pace learns of it."""

from types import SimpleNamespace

import pytest
from proposers import Fake

from quire.base.ids import SequenceId
from quire.contracts.speculative import SpeculativeConfig
from quire.contracts.step import StepPlan
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.forced import fit_draft
from quire.speculate.speculator import Speculator


class Sampling:
    """Of a sequence whose constraint forces `forced`, and takes the tokens of `fitting`."""

    def __init__(self, forced=(), fitting=(), is_constrained=True):
        self.matcher = object() if is_constrained else None
        self._forced, self._fitting = forced, fitting

    def forced_tokens(self):
        return self._forced

    def num_fitting(self, tokens):
        return next((i for i, (a, b) in enumerate(zip(tokens, self._fitting, strict=False)) if a != b),
                    min(len(tokens), len(self._fitting)))  # fmt: skip


@pytest.mark.parametrize(
    ("forced", "fitting", "drafted", "limit", "expected"),
    [
        ((), (1, 2, 3), (1, 2, 3), 4, (1, 2, 3)),
        ((), (1, 2, 3), (1, 2, 4), 4, (1, 2)),
        ((), (1, 2, 3), (4, 2), 4, ()),
        ((1, 2), (1, 2, 3), (), 4, (1, 2)),
        ((1, 2), (1, 2, 3), (7, 8), 4, (1, 2)),
        ((1, 2), (1, 2, 3, 4), (1, 2, 3, 9), 4, (1, 2, 3)),
        ((1, 2), (1, 2, 3), (1, 9), 4, (1, 2)),
        ((1, 2), (1, 2, 3), (1,), 4, (1, 2)),
        ((1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (1, 2), 3, (1, 2, 3)),
    ],
)
def test_draft_has_what_is_forced_and_then_what_fits(forced, fitting, drafted, limit, expected):
    sampling = Sampling(forced, fitting)
    assert fit_draft(sampling, Draft.chain(drafted), forced, limit) == Draft.chain(expected)


def test_draft_is_left_alone_when_it_is_a_tree_or_nothing_is_constrained():
    tree = Draft((1, 2, 3), (-1, -1, 0))
    assert fit_draft(Sampling((), ()), tree, (), 4) is tree
    chain = Draft.chain((1, 2))
    assert fit_draft(Sampling(is_constrained=False), chain, (), 4) is chain


class Guess(Fake):
    """Drafts the same always."""

    def draft(self, sequence):
        return [1, 2, 3]


class Pace:
    """Lets all be drafted, and notes what it is told."""

    is_asleep = False

    def __init__(self):
        self.verified, self.steps = [], []

    def choose(self, offers):
        return [count for _, count in offers]

    def note_verified(self, record, num_drafts, path):
        self.verified.append((num_drafts, len(path)))

    def note_step(self, num_sequences, num_drafts, duration_s):
        self.steps.append((num_sequences, num_drafts))


def plan(step_id, slots=None):
    return StepPlan(step_id, {SequenceId(0): 1}, (), num_draft_slots=slots)


def start(sampling):
    speculator = Speculator(SpeculativeConfig(method="ngram", num_speculative_tokens=3), Guess(3), 300)
    speculator._pace = pace = Pace()
    request = SimpleNamespace(request_id="r", prompt_token_ids=(5,))
    speculator.begin(plan(0))
    speculator.follow(DraftedSequence(SequenceId(0), request, 0, [5, 6], sampling, None))
    assert speculator.propose(plan(0)) == {}
    return speculator, pace


@pytest.mark.parametrize(
    ("sampling", "drafted", "path", "learnt"),
    [
        (Sampling((), (1, 2)), (1, 2), (0, 1), (3, 2)),
        (Sampling((), (9,)), (), (), (3, 0)),
        (Sampling((9,), (9,)), (9,), (0,), (3, 0)),
    ],
    ids=["cut", "refused", "forced otherwise"],
)
def test_pace_learns_of_drafts_that_a_constraint_does_not_take(sampling, drafted, path, learnt):
    speculator, pace = start(sampling)
    wishes = speculator.end(plan(0), {SequenceId(0): ()})
    assert wishes == {SequenceId(0): 3}
    speculator.begin(plan(1, wishes))
    found = speculator.propose(plan(1, wishes))
    assert found == ({SequenceId(0): Draft.chain(drafted)} if drafted else {})
    speculator.end(plan(1), {SequenceId(0): path})
    assert pace.verified == [learnt]
    speculator.begin(plan(2))
    assert pace.steps == [(1, 0), (1, 3)]


def test_steps_with_forced_tokens_alone_tell_the_pace_nothing():
    speculator, pace = start(Sampling((9,), (9,)))
    speculator.end(plan(0), {SequenceId(0): ()})
    speculator._num_wanted.clear()
    speculator.begin(plan(1))
    assert speculator.propose(plan(1, {SequenceId(0): 1})) == {SequenceId(0): Draft.chain((9,))}
    speculator.end(plan(1), {SequenceId(0): (0,)})
    speculator.begin(plan(2))
    assert (pace.verified, pace.steps) == ([], [(1, 0)])
