"""How many drafts there are, what is drafted of constrained sequences, and what the controller learns of it."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from proposers import Fake, PausedController

from quire.base.ids import SequenceId
from quire.contracts.speculative import SpeculativeConfig
from quire.contracts.step import StepPlan
from quire.speculate import speculator as speculator_module
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.forced import fit_draft
from quire.speculate.speculator import Speculator, share_drafts


class Sampling:
    """Of a sequence whose constraint forces `forced`, and takes the tokens of `fitting`."""

    def __init__(self, forced=(), fitting=(), is_constrained=True):
        self.matcher = object() if is_constrained else None
        self.forced, self._fitting = forced, fitting

    def forced_tokens(self):
        return self.forced

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


class Controller:
    """Lets all be drafted, and notes what it is told."""

    is_disabled, is_reading, num_skippable = False, True, 0

    def __init__(self):
        self.verified, self.steps, self.passed = [], [], []
        self.is_trial = False

    def note_start(self):
        pass

    def choose(self, offers):
        return [count for _, count in offers]

    def note_verified(self, record, num_drafts, path):
        self.verified.append((num_drafts, len(path)))

    def note_step(self, num_sequences, num_drafts, duration_s, num_caught_up):
        self.steps.append((num_sequences, num_drafts))

    def pass_step(self, num_drafts, num_caught_up):
        self.passed.append(num_drafts)

    def cancel_trial(self):
        self.is_trial = False


def plan(step_id, slots=None, num_prompt_tokens=0):
    scheduled = {SequenceId(0): 1} | ({SequenceId(1): num_prompt_tokens} if num_prompt_tokens else {})
    return StepPlan(step_id, scheduled, (), num_draft_slots=slots)


def start(sampling, controller=None):
    speculator = Speculator(SpeculativeConfig(method="ngram", num_speculative_tokens=3), Guess(3), 300)
    speculator.controller = controller = controller or Controller()
    request = SimpleNamespace(request_id="r", prompt_token_ids=(5,))
    speculator.begin(plan(0))
    speculator.follow(DraftedSequence(SequenceId(0), request, 0, [5, 6], sampling, None))
    assert speculator.propose(plan(0)) == {}
    return speculator, controller


@pytest.mark.parametrize(
    ("sampling", "drafted", "path", "learnt"),
    [
        (Sampling((), (1, 2)), (1, 2), (0, 1), (3, 2)),
        (Sampling((), (9,)), (), (), (3, 0)),
        (Sampling((9,), (9,)), (9,), (0,), (3, 0)),
    ],
    ids=["cut", "refused", "forced otherwise"],
)
def test_the_controller_learns_of_drafts_that_a_constraint_does_not_take(sampling, drafted, path, learnt):
    speculator, controller = start(sampling)
    wishes = speculator.end(plan(0), {SequenceId(0): ()})
    assert wishes == {SequenceId(0): 3}
    speculator.begin(plan(1, wishes))
    found = speculator.propose(plan(1, wishes))
    assert found == ({SequenceId(0): Draft.chain(drafted)} if drafted else {})
    speculator.end(plan(1), {SequenceId(0): path})
    assert controller.verified == [learnt]
    speculator.begin(plan(2))
    assert controller.steps == [(1, 0), (1, 3)]


def test_drafts_that_were_asked_for_count_when_doubtful_ones_are_left_out():
    class Doubting(Guess):
        stops_early = True

        def num_available(self, sequence, limit):
            return 5

        def propose(self, wanted):
            return [Draft.chain((1, 2, 3)) for _ in wanted]

    speculator = Speculator(SpeculativeConfig(method="ngram", num_speculative_tokens=5), Doubting(5), 300)
    speculator.controller = controller = Controller()
    request = SimpleNamespace(request_id="r", prompt_token_ids=(5,))
    speculator.begin(plan(0))
    speculator.follow(DraftedSequence(SequenceId(0), request, 0, [5, 6], Sampling(is_constrained=False), None))
    speculator.propose(plan(0))
    wishes = speculator.end(plan(0), {SequenceId(0): ()})
    speculator.begin(plan(1, wishes))
    assert speculator.propose(plan(1, wishes)) == {SequenceId(0): Draft.chain((1, 2, 3))}
    speculator.end(plan(1), {SequenceId(0): (0, 1)})
    speculator.begin(plan(2))
    assert (controller.steps, controller.verified) == ([(1, 0), (1, 5)], [(5, 2)])


def test_steps_with_forced_tokens_alone_tell_the_controller_nothing():
    speculator, controller = start(Sampling((9,), (9,)))
    controller.choose = lambda offers: [0] * len(offers)
    speculator.end(plan(0), {SequenceId(0): ()})
    speculator.begin(plan(1))
    assert speculator.propose(plan(1, {SequenceId(0): 1})) == {SequenceId(0): Draft.chain((9,))}
    speculator.end(plan(1), {SequenceId(0): (0,)})
    speculator.begin(plan(2))
    assert (controller.verified, controller.steps, controller.passed) == ([], [(1, 0)], [0])


def test_the_controller_is_told_of_steps_with_prompt_tokens_when_they_tell_it_nothing():
    speculator, controller = start(Sampling(is_constrained=False))
    wishes = speculator.end(plan(0), {SequenceId(0): ()})
    for step_id in (1, 2, 3):
        step = plan(step_id, wishes, num_prompt_tokens=64)
        speculator.begin(step)
        speculator.propose(step)
        wishes = speculator.end(step, {SequenceId(0): (0, 1)})
    speculator.begin(StepPlan(4, {}, ()))
    speculator.begin(plan(5))
    assert (controller.steps, controller.passed) == ([(1, 0)], [3, 3, 3])


def test_a_sleep_ends_when_every_step_has_prompt_tokens():
    speculator, controller = start(Sampling(is_constrained=False), PausedController(3))
    controller.disabled_left = 50
    for step_id in range(1, 60):
        step = plan(step_id, num_prompt_tokens=64)
        speculator.begin(step)
        speculator.propose(step)
        speculator.end(step, {SequenceId(0): ()})
    assert controller.disabled_left == 0


@pytest.mark.parametrize("disturbance", ["prompt", "forced"])
def test_a_trial_waits_when_the_step_would_tell_nothing(disturbance):
    speculator, controller = start(Sampling(is_constrained=False))
    wishes = speculator.end(plan(0), {SequenceId(0): ()})
    slots = dict(wishes)
    if disturbance == "forced":
        request = SimpleNamespace(request_id="s", prompt_token_ids=(5,))
        speculator.follow(DraftedSequence(SequenceId(1), request, 0, [5, 6], Sampling((9,), (9,)), None))
        speculator.forced.num_available(SequenceId(1), Sampling((9,), (9,)))
        slots[SequenceId(1)] = 1
    step = plan(1, slots, num_prompt_tokens=64 if disturbance == "prompt" else 1)
    speculator.begin(step)
    controller.is_trial = True
    assert speculator.propose(step) == ({} if disturbance == "prompt" else {SequenceId(1): Draft.chain((9,))})
    assert not controller.is_trial
    speculator.end(step, {SequenceId(0): ()} | ({SequenceId(1): (0,)} if disturbance == "forced" else {}))
    speculator.begin(plan(2, wishes))
    controller.is_trial = True
    assert speculator.propose(plan(2, wishes)) == {SequenceId(0): Draft.chain((1, 2, 3))}
    assert controller.is_trial


def test_nothing_is_left_of_a_sequence_when_the_speculator_leaves():
    speculator, controller = start(Sampling((9,), (9,)))
    wishes = speculator.end(plan(0), {SequenceId(0): ()})
    speculator.begin(plan(1, wishes))
    assert speculator.propose(plan(1, wishes))
    speculator.end(plan(1), {SequenceId(0): (0,)})
    speculator.leave()
    assert speculator.forced.of(SequenceId(0)) == ()
    assert not any((speculator.drafted, speculator.followed, speculator.wants_logits))
    speculator.begin(plan(2))
    assert (controller.steps, controller.passed) == ([(1, 0)], [3])


def asleep(num_steps):
    """Return a speculator that sleeps for long, and its controller."""
    speculator, controller = start(Sampling(is_constrained=False), PausedController(3))
    speculator.end(plan(0), {SequenceId(0): ()})
    controller.disabled_left = num_steps
    return speculator, controller


def run(speculator, step):
    """Run a step; return whether it was skipped through."""
    if speculator.skips(step):
        return True
    speculator.begin(step)
    assert speculator.propose(step) == {}
    assert speculator.end(step, {SequenceId(0): ()}) == {}
    return False


def test_most_steps_of_a_long_sleep_are_skipped_and_all_are_counted():
    speculator, controller = asleep(1001)
    skipped = [run(speculator, plan(step)) for step in range(1, 961)]
    assert sum(skipped[:800]) > 0.9 * 800
    assert not any(skipped[-8:])  # before it wakes it looks how fast the machine is
    assert 0 <= 1001 - controller.disabled_left - 960 <= 1  # the last step may be told of only when the next begins


@pytest.mark.parametrize(
    "change",
    [
        {"num_scheduled_tokens": {SequenceId(0): 1, SequenceId(1): 8}},
        {"ended": (SequenceId(7),)},
        {"num_draft_slots": {SequenceId(0): 1}},
        {"starts": ("a start",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_skipping_ends_when_more_happens_than_decoding(change):
    speculator, controller = asleep(1024)
    skipped = [run(speculator, plan(step)) for step in range(1, 11)]
    assert skipped == [False, *[True] * 9]
    left = controller.disabled_left
    step = replace(plan(11), **change)
    assert not speculator.skips(step)
    speculator.begin(step)
    assert controller.disabled_left == left - sum(skipped)
    assert not speculator.skips(plan(12))


def test_what_keeps_something_in_blocks_is_told_of_new_ones_when_it_skips_a_step():
    speculator, _ = asleep(1024)
    told = []
    speculator.proposer.apply = told.append
    steps = [plan(1), plan(2), plan(3), replace(plan(4), new_block_ids={SequenceId(0): (9,)}), plan(5)]
    skipped = [run(speculator, step) for step in steps]
    assert skipped[-2:] == [True, True]
    assert [step.step_id for step in told] == [4]


def test_nothing_is_asked_for_when_nothing_could_be_drafted():
    speculator = Speculator(None, None, 300)
    assert speculator.skips(plan(1))
    assert not speculator.skips(replace(plan(2), starts=("a start",)))
    request = SimpleNamespace(request_id="r", prompt_token_ids=(5,))
    speculator.follow(DraftedSequence(SequenceId(0), request, 0, [5, 6], Sampling((9,), (9,)), None))
    assert not speculator.skips(plan(3))


def test_what_a_device_waited_for_is_no_part_of_a_plain_step_while_drafts_sleep(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(speculator_module.time, "perf_counter", lambda: now[0])
    speculator, controller = start(Sampling(is_constrained=False))
    durations = []
    speculator.end(plan(0), {SequenceId(0): ()})
    controller.note_step = lambda num_sequences, num_drafts, duration_s, _: durations.append(duration_s)
    controller.is_disabled = True
    for step_id, (idle_s, took_s, is_disabled) in enumerate(
        [(3.0, 10.0, True), (7.0, 10.0, True), (3.0, 10.0, False)], start=1
    ):
        speculator.begin(plan(step_id))
        controller.is_disabled = is_disabled
        speculator.propose(plan(step_id))
        speculator.note_idle(idle_s)
        now[0] += took_s
        speculator.end(plan(step_id), {SequenceId(0): ()})
    speculator.begin(plan(4))
    durations = durations[1:]  # of the step that started it
    # With the next step planned meanwhile a step takes as long as the device does, or as long as planning.
    assert durations == [7.0, 7.0, 10.0]


def test_the_next_step_may_begin_early_only_where_nothing_is_drafted_or_learnt():
    nothing = Speculator(None, None, 300)
    nothing.begin(plan(0))
    assert nothing.lets_next_begin
    for is_constrained in (False, True):
        sampling = Sampling((), (), is_constrained=is_constrained)
        request = SimpleNamespace(request_id="r", prompt_token_ids=(5,))
        nothing.follow(DraftedSequence(SequenceId(0), request, 0, [5, 6], sampling, None))
        assert nothing.lets_next_begin is not is_constrained
    speculator, _ = start(Sampling(is_constrained=False))
    assert not speculator.lets_next_begin


def test_drafts_of_a_step_are_shared_evenly_when_there_are_too_many():
    assert share_drafts({0: 4, 1: 0, 2: 1, 3: 4}, 9) == {0: 4, 2: 1, 3: 4}
    assert share_drafts({0: 4, 1: 0, 2: 1, 3: 5}, 8) == {0: 4, 2: 1, 3: 3}
    assert share_drafts({0: 9, 1: 9, 2: 9}, 2) == {0: 1, 1: 1}
    assert share_drafts({0: 9, 1: 9, 2: 9}, 2, turn=1) == {2: 1, 0: 1}
    rng = random.Random(0)
    for _ in range(200):
        wanted = {key: rng.randint(0, 6) for key in range(rng.randint(1, 9))}
        limit = rng.randint(0, 20)
        granted = share_drafts(wanted, limit, turn=rng.randint(0, 5))
        assert sum(granted.values()) == min(limit, sum(wanted.values()))
        assert all(0 < granted[key] <= wanted[key] for key in granted)
        cut = [granted.get(key, 0) for key, count in wanted.items() if granted.get(key, 0) < count]
        assert not cut or max(granted.values(), default=0) <= min(cut) + 1


@pytest.mark.parametrize("wanted", [{0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, {0: 1, 1: 6, 2: 6, 3: 6, 4: 1}])
def test_all_get_drafts_in_turn_when_there_are_fewer_than_sequences(wanted):
    total = dict.fromkeys(wanted, 0)
    for turn in range(5):
        for key, count in share_drafts(wanted, 3, turn).items():
            total[key] += count
    assert total == dict.fromkeys(wanted, 3)


def test_no_sequence_goes_without_drafts_when_others_could_take_all():
    speculator = Speculator(SpeculativeConfig(method="ngram", num_speculative_tokens=3), Guess(3), 300, max_drafts=4)
    speculator.controller = None
    plans = [StepPlan(step, {SequenceId(key): 1 for key in range(2)}, ()) for step in range(2)]
    speculator.begin(plans[0])
    for key in range(2):
        request = SimpleNamespace(request_id=str(key), prompt_token_ids=(5,))
        speculator.follow(DraftedSequence(SequenceId(key), request, 0, [5, 6], Sampling((), (1, 2, 3)), None))
    assert speculator.propose(plans[0]) == {}
    assert speculator.end(plans[0], {SequenceId(key): () for key in range(2)}) == {SequenceId(0): 2, SequenceId(1): 2}
