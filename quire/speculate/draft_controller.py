"""DraftController: chooses how many tokens to draft in each step, from the gain and cost of previous drafts.

Drafts are ranked by the probability that they are accepted (`AcceptanceRecord`). The controller takes the number that yields
most tokens per second, given measured step times (`StepCosts`). A `SpeedupBudget` bounds the loss whatever the estimates are:
drafts that do not pay are disabled, and retried rarely. The controller reads no clock, and it changes no token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.speculate.acceptance import ALL_FADING, AcceptanceRecord
from quire.speculate.step_costs import StepCosts

_SETTLING_PLAIN_STEPS, _SETTLING_DRAFT_STEPS = 10, 2
"""Steps after a change that are not measured, because the CPU caches still hold data of the steps before."""
_PLAIN_STEPS, _PROBE_STEPS = _SETTLING_PLAIN_STEPS + 9, _SETTLING_DRAFT_STEPS + 3
"""Length of a pause in which plain steps are measured, and of a probe of another number of drafts."""
_WARM_UP_STEPS, _SHORT_WARM_UP_STEPS = 32, 2
"""Steps before drafts are retried in which the proposer already reads hidden states; the same in a pause."""
_TRIAL_STEPS, _DECISION_STEPS, _CONTRAST_STEPS = 6, 8, 12
_TOLD_EVERY, _TOLD_AT_END = 32, 96
"""While drafts are disabled, one step in _TOLD_EVERY is reported, and each of the last _TOLD_AT_END."""
_PROBE_SHARE = 0.004
"""Share of the time that each kind of probe may cost."""
_MIN_GAIN = 1.02
"""Minimum ratio of gain to cost. A smaller gain cannot be measured."""
_SPREAD, _COLD_COST = 1.3, 3.0
"""Maximum charge for a step: times the usual time; in plain steps, while its time is not settled."""
_TRIAL_LOSS, _MAX_BALANCE, _LOSS_SHARE = 16.0, 32.0, 0.02
"""In plain steps: the loss after which a trial ends, and the maximum balance; the share of the time that trials may lose."""
_MAX_DISABLED_STEPS, _MAX_DEBT = 4096, 32.0


@dataclass(slots=True)
class SpeedupBudget:
    """Gain of drafts over plain decoding, in units of a plain step. Drafts are disabled when the budget is used up.

    debt  cost of the proposer's catching up with prompts and plain steps; gains pay for it first
    """

    balance: float = _TRIAL_LOSS
    disabled_left: int = 0
    num_failures: int = 0
    debt: float = 0.0
    initial_debt: float = 0.0
    num_steps: int = 0
    gained: float = 0.0
    took: float = 0.0
    balance_before: float = _TRIAL_LOSS

    def charge(self, took: float) -> None:
        """Add debt. Debt from the first steps does not disable drafts, because nothing is known about them yet."""
        self.debt += took
        if self.num_steps < 3 * _TRIAL_LOSS:
            self.initial_debt += took

    def credit(self, gained: float, took: float) -> bool:
        """Record a step with drafts: `gained` tokens per sequence in `took` plain steps. Return whether drafts are disabled."""
        self.balance += gained - took
        self.gained, self.took, self.num_steps = self.gained + gained, self.took + took, self.num_steps + 1
        if self.debt > 0 and self.balance > _TRIAL_LOSS:
            paid = min(self.debt, self.balance - _TRIAL_LOSS)
            self.balance, self.debt = self.balance - paid, self.debt - paid
            self.initial_debt = min(self.initial_debt, self.debt)
        if self.balance >= _MAX_BALANCE:
            self.balance, self.num_failures = _MAX_BALANCE, -1
        if self.disabled_left > 0 or (self.balance > 0 and self.debt <= self.initial_debt + _MAX_DEBT):
            return False
        self.num_failures = min(3, self.num_failures + 1)
        missing = (_TRIAL_LOSS - self.balance) * 2 ** max(0, self.num_failures - 1)
        self.disabled_left = min(_MAX_DISABLED_STEPS, round(missing / _LOSS_SHARE)) + round(self.debt / _LOSS_SHARE)
        self.balance, self.debt, self.initial_debt, self.num_steps = _TRIAL_LOSS, 0.0, 0.0, 0
        self.revise(1.0)
        return True

    def revise(self, slower: float) -> None:
        """Correct the balance after plain steps were measured to take `slower` times the assumed time; the assumption is taken
        to have drifted evenly since the last revision."""
        if slower < 1.0:
            self.balance = min(self.balance, self.balance_before + self.gained - self.took * (1.0 + 1.0 / slower) / 2)
        self.gained, self.took, self.balance_before = 0.0, 0.0, self.balance


@dataclass(slots=True)
class _ProbeTimer:
    """Schedules probes so that they cost at most _PROBE_SHARE of the time; the first ones come sooner."""

    first: float
    since: float = 0.0
    num_probes: int = 0

    def is_due(self, cost: float) -> bool:
        if self.since < min(cost / _PROBE_SHARE, self.first * 2.0 ** min(self.num_probes, 16)):
            return False
        self.since, self.num_probes = 0.0, self.num_probes + 1
        return True


class DraftController:
    """Chooses the number of drafts of every sequence in the next step.

    The drafts of a step are chosen (`choose`) before the time of the previous step is known (`note_step`).
    """

    def __init__(self, max_tokens: int, record: type[AcceptanceRecord] = AcceptanceRecord) -> None:
        self._max_tokens = max_tokens
        self._all = record(max_tokens, ALL_FADING)
        self.costs = StepCosts()
        self._budgets: dict[int, SpeedupBudget] = {}  # by the bit length of the number of sequences
        self.budget, self._request_budget = SpeedupBudget(), SpeedupBudget()  # the latter for a single decoding sequence
        self._bit_length = 0
        self._plain_left = 0  # steps left of a pause in which plain steps are measured
        self._level_before = 0.0
        self._begin_trial()
        self._num_accepted = 0  # in the current step
        self._is_active, self._num_alike = True, 0  # whether drafting was enabled, and for how many steps
        self._gained, self._took = 1.0, 1.0  # moving averages while active
        self._is_trial = False  # whether the step that was chosen last is a trial
        self._probes, self._probe, self._next_probe = 0, 0, 0  # probing steps left; index of this and the next one, from 1
        self._num_sequences = self._num_offered = self._best = 0  # at the last decision
        self._floor = 2.0

    def _begin_trial(self) -> None:
        self._trials_left, self._best, self._probes, self._steps_to_decision = _TRIAL_STEPS, 0, 0, 0
        self._plain_timer, self._length_timer, self._num_length_probes = _ProbeTimer(96.0), _ProbeTimer(24.0), 0

    @property
    def disabled_left(self) -> int:
        """Estimated number of steps until drafts are retried; 0 while they are enabled."""
        return max(self.budget.disabled_left, self._request_budget.disabled_left)

    @property
    def is_disabled(self) -> bool:
        """Whether the next step has no drafts."""
        return self.disabled_left > 0 or self._plain_left > 0

    @property
    def is_reading(self) -> bool:
        """Whether a proposer has to read the model's hidden states in the step that begins."""
        return self.disabled_left <= _WARM_UP_STEPS and self._plain_left <= _SHORT_WARM_UP_STEPS

    @property
    def is_trial(self) -> bool:
        """Whether the step that was chosen last is a trial."""
        return self._is_trial

    @property
    def num_skippable(self) -> int:
        """Number of steps that need not be reported one by one; report them with `skip_steps`."""
        left = self.disabled_left
        return left % _TOLD_EVERY if left > _TOLD_AT_END else 0

    def skip_steps(self, num_steps: int) -> None:
        """Record steps without drafts, with the same number of sequences as before."""
        self._num_alike += num_steps
        self.budget.disabled_left = max(0, self.budget.disabled_left - num_steps)
        self._request_budget.disabled_left = max(0, self._request_budget.disabled_left - num_steps)

    def cancel_trial(self) -> None:
        """Postpone the trial that was chosen, because its step would yield no measurement."""
        self._is_trial, self._trials_left = False, min(_TRIAL_STEPS, self._trials_left + 1)

    def note_start(self) -> None:
        """Record that a sequence starts."""
        self._request_budget, self._steps_to_decision = SpeedupBudget(), 0

    def note_verified(self, record: AcceptanceRecord, num_drafts: int, path: Sequence[int]) -> None:
        """Record the indices of the accepted drafts of a sequence, out of num_drafts requested ones."""
        self._num_accepted += len(path)
        record.note(num_drafts, path)
        self._all.note(num_drafts, path)

    def note_step(self, num_sequences: int, num_drafts: int, duration_s: float, num_caught_up: int = 0) -> None:
        """Record a step in which num_sequences decoded and nothing else ran, timed up to the start of the next step.

        num_drafts     requested drafts
        num_caught_up  tokens that the proposer had to compute first; their time is charged to the budget, not to the step
        """
        self._turn_to(num_sequences)
        is_active = num_drafts > 0 or not self.is_disabled
        self._num_alike = self._num_alike + 1 if is_active == self._is_active else 0
        self._is_active = is_active
        if is_active and self.costs.plain_s(num_sequences) is not None:
            self._note_active(num_sequences, num_drafts, duration_s, num_caught_up)
        elif not is_active and not self.is_reading and self._num_alike >= _SETTLING_PLAIN_STEPS:
            self.costs.note_plain(num_sequences, duration_s)
        self._end_step()

    def _note_active(self, num_sequences: int, num_drafts: int, duration_s: float, num_caught_up: int) -> None:
        costs, plain_s = self.costs, self.costs.plain_s(num_sequences) or 1.0
        is_settled = self._num_alike >= _SETTLING_DRAFT_STEPS
        took, usual = duration_s / plain_s, costs.usual(num_sequences, num_drafts)
        if num_caught_up > 0:
            took = min(took, costs.ratio(num_sequences, num_drafts))
            self.budget.charge(costs.note_catch_up(num_sequences, duration_s - took * plain_s, num_caught_up))
        elif is_settled and not 0 < self._probe <= _SETTLING_DRAFT_STEPS:
            measures = self._probe > 0 or self._num_alike < _CONTRAST_STEPS
            costs.note(num_sequences, num_drafts, duration_s, measures=measures)
        if usual is not None:
            took = min(max(took, usual / _SPREAD), usual * _SPREAD)
        elif not is_settled:
            took = min(took, _COLD_COST)
        self._credit(1.0 + self._num_accepted / num_sequences, took, num_drafts > 0)

    def pass_step(self, num_drafts: int, num_caught_up: int = 0) -> None:
        """Record a step without a meaningful duration; it is charged the usual time."""
        if num_drafts > 0 and self._num_sequences > 0:
            self.budget.charge(self.costs.catch_up(self._num_sequences, num_caught_up))
            took = self.costs.ratio(self._num_sequences, num_drafts)
            self._credit(1.0 + self._num_accepted / self._num_sequences, took, True)
        self._num_alike = 0
        self._end_step()

    def _credit(self, gained: float, took: float, is_drafted: bool) -> None:
        self._gained, self._took = 0.99 * self._gained + gained, 0.99 * self._took + took
        self._plain_timer.since += took
        self._length_timer.since += took
        charged = took * _MIN_GAIN if is_drafted else took
        if self._bit_length == 1:
            self._request_budget.credit(gained, charged)
        if self.budget.credit(gained, charged):
            self._begin_trial()

    def _end_step(self) -> None:
        self._num_accepted, self._probe, self._next_probe = 0, self._next_probe, 0
        if self._plain_left > 0:
            self._plain_left -= 1
            if self._plain_left == 0 and self._bit_length > 1:
                change = self.costs.level - self._level_before
                self.budget.revise(math.exp(max(change, -0.25)))
                self._plain_timer.num_probes = 0 if abs(change) > 0.15 else self._plain_timer.num_probes
        self.skip_steps(1)
        self._num_alike -= 1

    def _turn_to(self, num_sequences: int) -> None:
        if num_sequences.bit_length() != self._bit_length:
            self._bit_length = num_sequences.bit_length()
            self.budget = self._budgets.setdefault(self._bit_length, SpeedupBudget())
            self._request_budget = SpeedupBudget()

    def choose(self, offers: Sequence[tuple[AcceptanceRecord, int]]) -> list[int]:
        """Return how many drafts to request for each sequence, given its record and the number available."""
        num_sequences = len(offers)
        self._turn_to(num_sequences)
        self._is_trial = False
        if self.is_disabled or self.costs.plain_s(num_sequences) is None:
            return self._pause(num_sequences) if self.disabled_left == 0 else [0] * num_sequences
        self._steps_to_decision -= 1
        is_due = self._steps_to_decision < 0 or num_sequences != self._num_sequences
        is_open = self._trials_left > 0 or self._probes > 0
        if num_sequences == 1 and not is_due and not is_open and offers[0][1] <= self._num_offered:
            return [min(offers[0][1], self._best)]
        prior = self._all.rates()
        shares = [record.shares(prior)[:count] for record, count in offers]
        if self._trials_left > 0:
            return self._try(shares)
        ranked = sorted([share for one in shares for share in one], reverse=True)
        if ranked and (is_due or len(ranked) > self._num_offered) and self._probes == 0:
            self._decide(num_sequences, ranked)
            if self._is_plain_due():
                return self._pause(num_sequences)
        floor = self._floor
        if self._probes > 0 and ranked:
            floor = ranked[min(self._probed_count(len(ranked)), len(ranked)) - 1]
            self._next_probe = 1 + _PROBE_STEPS - self._probes
            self._probes -= 1
            self._num_length_probes += self._probes == 0
        elif num_sequences == 1:
            return [min(offers[0][1], self._best)]
        return [sum([share >= floor for share in one]) for one in shares]

    def _pause(self, num_sequences: int) -> list[int]:
        """Draft nothing for some steps, so that plain steps are measured."""
        if self._plain_left == 0:
            self._plain_left, self._level_before = 1 + _PLAIN_STEPS, self.costs.level
        return [0] * num_sequences

    def _is_plain_due(self) -> bool:
        return self._plain_timer.is_due(1.0 + _PLAIN_STEPS * max(0.0, 1.0 - self._took / self._gained))

    def _try(self, shares: list[list[float]]) -> list[int]:
        """Draft for some of the sequences to measure the cost: every third step all available drafts, else half of them."""
        limit = self._max_tokens if self._trials_left % 3 == 0 else max(1, self._max_tokens // 2)
        num_tried = max(2, len(shares) // 4)
        chosen = [min(len(one), limit) if index < num_tried else 0 for index, one in enumerate(shares)]
        if sum(chosen) > 0:
            self._trials_left -= 1
            self._is_trial, self._num_sequences, self._steps_to_decision = True, len(shares), 0
        return chosen

    def _decide(self, num_sequences: int, ranked: list[float]) -> None:
        """Decide which number of drafts gives most tokens per second, and whether to probe another number."""
        kept = self._best if num_sequences == self._num_sequences else 0
        self._num_sequences, self._num_offered, self._steps_to_decision = num_sequences, len(ranked), _DECISION_STEPS
        self._best, rate = best_count(num_sequences, ranked, lambda count: self.costs.ratio(num_sequences, count), kept)
        self._floor = 0.9 * ranked[self._best - 1]  # acceptance estimates change a little until the next decision
        count = self._probed_count(len(ranked))
        probed = (1.0 + sum(ranked[:count]) / num_sequences) / self.costs.ratio(num_sequences, count)
        if self._length_timer.is_due(0.5 + _PROBE_STEPS * max(0.0, 1.0 - probed / rate)):
            self._probes = _PROBE_STEPS

    def _probed_count(self, most: int) -> int:
        """Return the next number of drafts to probe, in turn: fewer, more, fewer, the maximum."""
        some = max(1, self._best // 4)
        return max(1, min(most, (self._best - some, self._best + some, self._best - some, most)[self._num_length_probes % 4]))


def best_count(num_sequences: int, ranked: Sequence[float], ratio: Callable[[int], float], kept: int) -> tuple[int, float]:
    """Return the total number of drafts that gives most tokens per second, and the rate; `kept` unless another is 1 % better.

    ranked  the probability that each draft is accepted, in descending order
    ratio   duration of a step with so many drafts, in plain steps
    """
    best, best_rate, kept_rate, gained, step = 1, 0.0, 0.0, 0.0, 1
    for count, share in enumerate(ranked, start=1):
        gained += share
        if count not in (step, len(ranked), kept):
            continue
        step = max(count + 1, count * 5 // 4)
        rate = (1.0 + gained / num_sequences) / ratio(count)
        kept_rate = rate if count == kept else kept_rate
        if rate > best_rate:
            best, best_rate = count, rate
    return (kept, kept_rate) if kept_rate * 1.01 >= best_rate else (best, best_rate)
