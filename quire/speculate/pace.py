"""Pace: how many tokens to draft, from what drafts have cost and gained so far.

A step of T tokens takes t(T). A sequence that decodes gains one token in it, and with drafts also those that are accepted.
Drafts are ranked by the probability that they are accepted, and as many are taken as make tokens per second highest. Whether
any are, says an account of what they gained in all (account.py): no estimate of a moment ends them. A sequence that decodes
alone has an account of its own beside it: it is spared drafts that others gain by. What is spent to learn what other numbers of
drafts would take, and none, is a hundredth of the time. Nothing here changes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from quire.speculate.account import SHARE, Account, account_for, lone_account
from quire.speculate.best_count import best_count
from quire.speculate.acceptance import EVER_FADING, AcceptanceRecord
from quire.speculate.step_costs import StepCosts

_Exploring = Literal["probe", "trial"] | None
_Probe = Literal["fewer", "more", "most", "none"]

_FEW_PLAIN = 4
_FED_BEFORE_WAKING = 32
"""Steps before drafts are tried again in which a proposer is fed, so that it knows some of what it is to go on with."""
_STEPS_BETWEEN_DECISIONS, _STEPS_IN_LONG_CALM = 8, 16
_CALM_BALANCE, _LONG_CALM_BALANCE = 12.0, 24.0
"""Of accounts, so that drafts will hardly end before the next decision. A decision costs a tenth of a small model's step."""
_FLOOR_SLACK = 0.9
_PROBING_SHARE, _PLAIN_PROBING_SHARE, _PLAIN_PROBING_SHARE_OF_SEVERAL = 0.003, 0.003, 0.006
_PROBES: tuple[_Probe, ...] = ("fewer", "more", "fewer", "most")
"""Numbers of drafts probed in turn: were they only near the best, what once seemed dear would never be seen again."""
_MOST_SAVED, _LONE_CREDIT = 16.0, 4.0
"""Time for probes, in plain steps, that is saved at most, and lent to a sequence that decodes alone."""
_PROBE_COST, _MOST_PROBE_COST, _PLAIN_PROBE_COST, _PLAIN_PROBE_COST_OF_SEVERAL = 0.5, 2.0, 2.0, 1.0
"""What one of other numbers costs at least and at most, as far as is known, which may be wrong; one of none beside what is
missed: what drafts of several sequences hardly gain is worth a look the more often."""
_FADING = 0.99
_STEPS_TO_SETTLE, STEPS_TO_SETTLE_AWAKE = 10, 3
"""Caches hold what drafts read: a step without any takes up to a third longer just behind some, and behind a prompt."""
_FED_STEPS = 2
"""Steps in which the proposer is fed, before it is asked again: what it needs of the others it guesses."""
_DEAF_STEPS, _PROBE_STEPS = _STEPS_TO_SETTLE + 6 + _FED_STEPS, 4
_FIRST_CONTRAST, _LAST_CONTRAST = 48, 768
"""Steps of several sequences with drafts after which some without are taken, and how much longer it is to the next, each time
that what was believed of plain ones proves true: drafts may have made it go astray, and nothing else would tell."""
_MOST_STRAY = 0.15
_STEPS_BETWEEN_NOTES = 4
"""While asleep: what a step takes is then noted less often, for that costs time too."""
_STEPS_OF_NAP, _NAPS_END = 32, 96
"""In a long sleep it is told of one step in so many: a few calls in Python, behind a step that has filled the caches, take a
fiftieth of it. Before it wakes it learns anew how fast the machine is."""
_STEPS_TO_FORGET = 4
"""Steps without drafts after which the next one with some has to compute first what was slept through: it tells nothing."""
_MARGIN_OF_SEVERAL = 1.04
"""Times of what they take that steps of several sequences with drafts are charged: how long plain ones would take is known less
well there, so that what gains less than this may as well lose."""
_MOST_TRIED_ROWS = 64
_TRIED_PART, _FEW_TRIED = 4, 2
"""A trial drafts for a fourth of the sequences, of few for two: a proposer has to catch up with all that it drafts for."""


class Pace:
    """Chooses the number of drafts of every sequence in the next step."""

    def __init__(self, max_tokens: int, record: type[AcceptanceRecord] = AcceptanceRecord) -> None:
        self._max_tokens = max_tokens
        self._costs = StepCosts(max_tokens)
        self._ever = record(max_tokens, EVER_FADING)
        # How often a draft that was asked for is made: what drafts may stop when it doubts.
        self._made = AcceptanceRecord(max_tokens, EVER_FADING)
        self._num_trials = record.num_trials
        self._accounts: dict[int, Account] = {}  # by the binary magnitude of the number of sequences
        self._magnitude: int = 0  # that of the last step
        self._account = Account()
        self._lone = lone_account()  # of the sequence that decodes alone
        self._trials_left = self._num_trials
        self._saved, self._saved_for_none = 0.0, 0.0  # time that probes may take: of other numbers, of no drafts
        self._awake_tokens, self._awake_took = 1.0, 1.0  # while awake, in steps without drafts; the past fades
        # Of the step that is noted next, and of the one after it: that one is chosen before.
        self._exploring: _Exploring = None
        self._will_explore: _Exploring = None
        self._probes_left, self._num_probes = 0, 0
        self._probe: _Probe = _PROBES[0]  # the one that goes on
        # Of steps of several sequences with drafts since some without were noted: the balance before, and what it was made of.
        self._balance_then = self._gained = self._charged = 0.0
        self._contrast_due = _FIRST_CONTRAST  # after so many steps of several sequences with drafts
        self._deaf_left = 0  # steps of a probe without drafts
        self._num_accepted = self._num_caught_up = 0  # in the step that is computed
        self._num_undrafted = _STEPS_TO_FORGET  # steps since one had drafts
        self._was_awake, self._num_alike = True, 0  # whether drafts were sought then, and for how many steps
        self._last_drafts, self._num_equal = 0, 0  # drafts in the last step, and before how many like it
        self._num_sequences, self._num_offered = 0, 0  # at the last decision
        self._best = 0  # drafts in all
        self._has_kept_best = False  # at the last decision
        self._floor = 2.0  # the least share for which a draft is taken
        self._steps_to_decision = 0

    @property
    def sleep_left(self) -> int:
        """Steps until drafts are tried again, as far as can be told; 0 while they are."""
        return max(self._account.sleep_left, self._lone.sleep_left)

    @property
    def is_asleep(self) -> bool:
        """Whether the next step has no drafts whatever could be drafted."""
        return self.sleep_left > 0 or self._deaf_left > 0

    @property
    def is_feeding(self) -> bool:
        """Whether a proposer is to be fed in the step that begins; to be asked once the one before was noted or passed."""
        return self.sleep_left <= _FED_BEFORE_WAKING and self._deaf_left <= _FED_STEPS

    @property
    def is_trying(self) -> bool:
        """Whether the step that begins is a trial; to be asked once the one before was noted or passed."""
        return self._exploring == "trial"

    def note_start(self) -> None:
        """Take in that a sequence starts, which has lost nothing by drafts; called before the step in which it does."""
        self._lone = lone_account()
        self._steps_to_decision = 0

    def note_catch_up(self, num_tokens: int) -> None:
        """Take in with how many tokens the proposer caught up in the step that is told of next: what that took is owed."""
        self._num_caught_up = num_tokens

    def note_step(
        self, num_sequences: int, num_drafts: int, duration_s: float, num_made: int | None = None, deciding_s: float = 0.0
    ) -> None:
        """Take in a step in which num_sequences decoded and nothing else happened, from its start to that of the next, whose
        drafts were chosen before that. Of the drafts that were asked for num_made were made; None: all. Of its time the pace
        itself took deciding_s, which is charged to drafts, but not to how many they are: it takes more in a probe."""
        self._turn_to(num_sequences)
        is_awake = num_drafts > 0 or not self.is_asleep
        self._num_alike = self._num_alike + 1 if is_awake == self._was_awake else 0
        self._was_awake = is_awake
        self._num_equal = self._num_equal + 1 if num_drafts == self._last_drafts else 0
        self._last_drafts = num_drafts
        if is_awake or not self.is_feeding:
            self._note(num_sequences, num_drafts, duration_s, num_drafts if num_made is None else num_made, deciding_s)
        self._go_on(num_drafts)

    def _note(self, num_sequences: int, num_drafts: int, duration_s: float, num_made: int, deciding_s: float) -> None:
        if num_drafts > 0 and num_sequences > 1:
            self._judge_again(self._costs.pin())
        # While awake every step ends with a look for what could be drafted, which plain decoding would not need.
        kind = self._costs.kind(num_sequences, num_drafts, num_made, looks=self._was_awake)
        took = self._costs.took(num_sequences, num_drafts, kind, duration_s)
        is_settled = self._num_alike >= (STEPS_TO_SETTLE_AWAKE if self._was_awake else _STEPS_TO_SETTLE)
        if self._num_caught_up > 0 and took is not None:
            took = min(took, self._usual_ratio(num_sequences)(num_drafts))
            self._account.owe(self._costs.note_catch_up(num_sequences, duration_s, took, self._num_caught_up))
        elif is_settled and (num_drafts == 0 or self._num_undrafted < _STEPS_TO_FORGET):
            # Of several sequences it takes as long whatever is drafted, if anything is.
            noted_s = duration_s - (deciding_s if num_sequences == 1 else 0.0)
            self._costs.note(num_sequences, num_drafts, kind, noted_s, self._num_equal)
        if self._was_awake and took is not None:
            charged = _MARGIN_OF_SEVERAL * took if num_sequences > 1 and num_drafts > 0 else took
            self._earn(1.0 + self._num_accepted / num_sequences, charged)
            if num_drafts > 0:
                self._gained += 1.0 + self._num_accepted / num_sequences
                self._charged += charged

    def _judge_again(self, slower: float | None) -> None:
        """Judge steps of several sequences with drafts, which were told beside plain ones, now that such a plain one takes so
        many times as long as was believed: little by little that went astray, as nothing contradicted it. None: go on."""
        if slower is None:
            return
        if slower < 1.0:
            took = self._charged * (1.0 + 1.0 / slower) / 2
            self._account.fall_to(self._balance_then + self._gained - took + SHARE * took)
        due = self._contrast_due // 2 if abs(slower - 1.0) > _MOST_STRAY else self._contrast_due * 2
        self._contrast_due = min(max(due, _FIRST_CONTRAST), _LAST_CONTRAST)
        self._begin_period()

    def _begin_period(self) -> None:
        self._balance_then, self._gained, self._charged = self._account.balance, 0.0, 0.0

    def doze(self, num_sequences: int) -> bool:
        """Take in the step that ends, if it need not be noted and nothing is to be chosen; return whether that is so."""
        is_deep = self.sleep_left % _STEPS_BETWEEN_NOTES > 0 and not self._was_awake
        if not is_deep or num_sequences.bit_length() != self._magnitude:
            return False
        self.sleep_through(1)
        return True

    @property
    def nap_left(self) -> int:
        """Steps like the one that `doze` took in that need not be told one by one: sleep_through tells of them."""
        left = self.sleep_left
        return left % _STEPS_OF_NAP if left > _NAPS_END else 0

    def sleep_through(self, num_steps: int) -> None:
        """Take in so many steps that were slept through, of as many sequences as in those before."""
        self._sleep(num_steps)
        self._num_alike += num_steps
        self._num_undrafted += num_steps

    def pass_step(self, num_drafts: int) -> None:
        """Take in a step that tells nothing, as more happened in it than decoding; called in place of note_step."""
        if num_drafts > 0 and self._num_sequences > 0:
            # What is not measured is charged as it usually is.
            self._account.owe(self._costs.usual_catch_up(self._num_sequences, self._num_caught_up))
            usual = self._usual_ratio(self._num_sequences)(num_drafts)
            self._earn(1.0 + self._num_accepted / self._num_sequences, usual)
        self._num_alike = 0
        self._go_on(num_drafts)

    def _turn_to(self, num_sequences: int) -> None:
        magnitude = num_sequences.bit_length()
        if magnitude != self._magnitude:
            self._magnitude, self._account = magnitude, self._accounts.setdefault(magnitude, account_for(num_sequences))
            self._lone = lone_account()
            self._begin_period()

    def _go_on(self, num_drafts: int, num_steps: int = 1) -> None:
        """Turn to the next step, behind one or several like it."""
        self._num_undrafted = 0 if num_drafts > 0 else self._num_undrafted + 1
        self._exploring, self._will_explore, self._num_accepted, self._num_caught_up = self._will_explore, None, 0, 0
        self._deaf_left = max(0, self._deaf_left - num_steps)
        self._sleep(num_steps)

    def _sleep(self, num_steps: int) -> None:
        self._account.sleep(num_steps)
        self._lone.sleep(num_steps)

    def _earn(self, gained: float, took: float, num_steps: int = 1) -> None:
        self._saved = min(_MOST_SAVED, self._saved + _PROBING_SHARE * took)
        share = _PLAIN_PROBING_SHARE if self._magnitude == 1 else _PLAIN_PROBING_SHARE_OF_SEVERAL
        self._saved_for_none = min(_MOST_SAVED, self._saved_for_none + share * took)
        fading = _FADING**num_steps
        self._awake_tokens = fading * self._awake_tokens + gained
        self._awake_took = fading * self._awake_took + took
        if self._magnitude == 1:
            self._lone.earn(gained, took)
        if self._account.earn(gained, took, num_steps):
            self._best = self._probes_left = 0
            self._trials_left = self._num_trials
            self._contrast_due = _FIRST_CONTRAST
            self._begin_period()

    def note_verified(
        self, record: AcceptanceRecord, num_drafts: int, path: Sequence[int], num_made: int | None = None
    ) -> None:
        """Take in how the draft of a sequence fared: the indices of what was accepted. Of the drafts that were asked for
        num_made were made; None: all. What was not made was not accepted."""
        self._num_accepted += len(path)
        record.note(num_drafts, path)
        self._ever.note(num_drafts, path)
        self._made.note(num_drafts, range(num_drafts if num_made is None else num_made))

    def take_back_trial(self) -> None:
        """Put off the trial that was to be in the step that begins: nothing is drafted in it."""
        self._exploring = None
        self._trials_left = min(self._num_trials, self._trials_left + 1)

    def choose(self, offers: Sequence[tuple[AcceptanceRecord, int]]) -> list[int]:
        """Return how many drafts to take of each sequence, given its record and how many it could have."""
        num_sequences = len(offers)
        self._turn_to(num_sequences)
        if self.sleep_left > 0:
            return [0] * num_sequences
        if self._costs.num_plain(num_sequences) < _FEW_PLAIN:
            self._deaf_left = 1 + _DEAF_STEPS
            return [0] * num_sequences
        self._steps_to_decision -= 1
        is_due = (
            self._steps_to_decision < 0 or num_sequences != self._num_sequences or self._trials_left + self._probes_left > 0
        )
        if num_sequences == 1 and not is_due and offers[0][1] <= self._num_offered:
            # Nobody to compare with: what its shares are in this very step says little.
            return [min(offers[0][1], self._best)]
        if num_sequences > 1 and self._costs.num_drafted >= self._contrast_due:
            self._deaf_left = 1 + _DEAF_STEPS
            return [0] * num_sequences
        prior = self._ever.rates()
        shares = [record.shares(prior)[:count] for record, count in offers]
        if self._trials_left > 0:
            return self._try(shares)
        has_more = num_sequences == 1 and len(shares[0]) > self._num_offered
        if self._steps_to_decision < 0 or num_sequences != self._num_sequences or has_more:
            self._decide(num_sequences, shares)
        if self._probes_left > 0:
            self._probes_left -= 1
            self._will_explore = "probe"
            self._steps_to_decision = min(self._steps_to_decision, self._probes_left)
            floor = self._probed_floor(shares)
            if floor > 1.0:  # without drafts, and without a look for them
                self._deaf_left, self._probes_left = 1 + _DEAF_STEPS, 0
        elif num_sequences == 1:
            return [min(len(shares[0]), self._best)]
        else:
            floor = self._floor
        return [sum([share >= floor for share in one]) for one in shares]

    def _begin_calm(self) -> int:
        """Return for how many steps of one sequence what is told changes nothing; then a decision is due."""
        is_open = self._trials_left + self._probes_left + self._deaf_left + self.sleep_left > 0 or self._will_explore
        if is_open or self._best == 0 or min(self._account.balance, self._lone.balance) < _CALM_BALANCE:
            return 0
        num_steps, self._steps_to_decision = self._steps_to_decision, 0
        if num_steps == _STEPS_BETWEEN_DECISIONS and self._has_kept_best:
            is_long = min(self._account.balance, self._lone.balance) >= _LONG_CALM_BALANCE
            return _STEPS_IN_LONG_CALM if is_long else num_steps
        return max(0, num_steps)

    def _try(self, shares: list[list[float]]) -> list[int]:
        """Spread a few drafts over the sequences, to see what they cost and gain."""
        # Few, and sometimes many: what a pass costs, and what a row. Many alone could lose where fewer gain.
        is_wide = self._trials_left % 3 == 0
        num_tried = min(len(shares), max(_FEW_TRIED, len(shares) // _TRIED_PART))
        left = max(_MOST_TRIED_ROWS, num_tried) if is_wide else max(self._max_tokens // 2, len(shares) // 2, 1)
        most = max(1, _MOST_TRIED_ROWS // num_tried) if is_wide else self._max_tokens
        chosen = [0] * len(shares)
        for index, one in enumerate(shares[:num_tried]):
            chosen[index] = min(len(one), left, most)
            left -= chosen[index]
        if sum(chosen) > 0:
            self._trials_left -= 1
            self._will_explore = "trial"
            self._num_sequences = len(shares)
            self._best = self._steps_to_decision = 0
        return chosen

    def _decide(self, num_sequences: int, shares: list[list[float]]) -> None:
        """Decide how many drafts are worth their cost, at least one; and whether to look what another number would cost."""
        ranked = sorted([share for one in shares for share in one], reverse=True)
        if num_sequences != self._num_sequences:
            self._num_sequences, self._best = num_sequences, 0
        if not ranked:
            self._floor, self._steps_to_decision = 2.0, 0  # nothing could be drafted: decide when something can
            return
        self._steps_to_decision, self._num_offered = _STEPS_BETWEEN_DECISIONS, len(ranked)
        ratio = self._usual_ratio(num_sequences)
        best = best_count(num_sequences, ranked, ratio, self._best)
        self._has_kept_best, self._best = best == self._best, best
        # Shares move a little until the next decision.
        self._floor = _FLOOR_SLACK * ranked[self._best - 1]
        self._plan_probe(num_sequences, ranked, ratio)

    def _plan_probe(self, num_sequences: int, ranked: list[float], ratio: Callable[[int], float]) -> None:
        """Probe another number of drafts, or none, when that has been earned."""
        if self._num_undrafted >= _STEPS_TO_FORGET:
            return
        # What is gained all in all, not by the estimate of this moment: else probes would fall into the worst moments.
        took_by_token = min(1.0, self._awake_took / self._awake_tokens)
        least = _PLAIN_PROBE_COST if num_sequences == 1 else _PLAIN_PROBE_COST_OF_SEVERAL
        cost = min(_MOST_SAVED, least + _DEAF_STEPS * (1.0 - took_by_token))
        if self._saved_for_none >= cost:
            self._saved_for_none -= cost
            self._probe, self._probes_left = "none", _PROBE_STEPS
            return
        probe = _PROBES[self._num_probes % len(_PROBES)]
        if probe == "most" and num_sequences > 1:
            probe = "more"  # what all would cost is on the line through what others did
        count = self._probed_count(probe, len(ranked))
        missed = ratio(count) - (1.0 + sum(ranked[:count]) / num_sequences) * took_by_token
        cost = min(_MOST_PROBE_COST, max(_PROBE_COST, _PROBE_STEPS * missed))
        if self._saved + (_LONE_CREDIT if num_sequences == 1 else 0.0) >= cost:
            self._saved -= cost
            self._probe, self._probes_left, self._num_probes = probe, _PROBE_STEPS, self._num_probes + 1

    def _probed_count(self, probe: _Probe, most: int) -> int:
        """Return how many drafts there are in all in a probe, of those that there could be."""
        some = max(1, self._best // 4)
        count = {"none": 0, "fewer": self._best - some, "more": self._best + some, "most": most}[probe]
        return min(most, count)

    def _probed_floor(self, shares: list[list[float]]) -> float:
        """Return the least share in a probe; over 1 where none is to be taken."""
        ranked = sorted([share for one in shares for share in one], reverse=True)
        if not ranked:
            return 2.0 if self._probe == "none" else 1.0
        count = self._probed_count(self._probe, len(ranked))
        return ranked[count - 1] if count > 0 else 2.0

    def _usual_ratio(self, num_sequences: int) -> Callable[[int], float]:
        """Return how many times as long as without a step takes, by the number of drafts that are asked for."""
        return self._costs.ratio(num_sequences, self._made.rates())
