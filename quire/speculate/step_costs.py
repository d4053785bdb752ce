"""StepCosts: what steps take beside plain ones, as far as is known by now, for every number of sequences and of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from quire.speculate.draft_cost import DraftCost, size_class
from quire.speculate.step_times import FEW_NOTED, Kind, StepTimes, ratios_of_one

_SEQUENCES_BITS = 5
_STEPS_TO_WARM = 2
"""First steps of one sequence with another number of drafts, which read what has left the caches: they do not count."""
_STEPS_IN_CONTRAST = 12
_FEW_PINNING, _MOST_BELIEVED = 4, 1.3
"""Plain steps that say how long such ones take, and times that they may have taken more, or less, than was believed."""
_MOST_OFF = 1.3
"""Times that a step may have taken longer than others like it: more is another program's work."""
_COLD_STEPS, _COLD_TOOK = 2, 3.0
"""First steps with drafts, which read weights and code that nothing has used before, and what each is charged at most, in plain
steps: one that took eleven, and some bad luck, would end drafts for hundreds of steps."""
_CATCH_UP_GAIN = 0.2


class StepCosts:
    """Times of plain steps, and of those with drafts in plain steps.

    Kinds: steps without drafts and without a look for some, "plain"; with a look, "idle"; of one sequence, "drafts".
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._times = StepTimes()
        self._costs: dict[int, DraftCost] = {}  # by the number of sequences, several
        self._cold_left = _COLD_STEPS
        # Of several sequences: plain steps since there were drafts, how many decode in them, and what was believed of them.
        self._pinning: list[float] = []
        self._pinned_size, self._believed_s = 0, 0.0
        self._catch_up_s = 0.0  # of a token that a proposer had not kept up with
        self.num_drafted = 0  # steps of several sequences with drafts since one without was noted

    def num_plain(self, num_sequences: int) -> int:
        """Return how many plain steps of so many sequences were noted."""
        return self._times.count(_plain(num_sequences))

    def plain_s(self, num_sequences: int) -> float | None:
        """Return how long a plain step of so many sequences takes now; None: nothing is known."""
        return self._times.usual_s(_plain(num_sequences))

    def kind(self, num_sequences: int, num_drafts: int, num_made: int, *, looks: bool) -> Kind:
        """Return the kind of a step; drafts of several are told by DraftCost. looks: whether it ends with a look for drafts."""
        if num_drafts > 0:
            return "drafts", num_made if num_sequences == 1 else -num_sequences
        return "idle" if looks else "plain", size_class(num_sequences, _SEQUENCES_BITS)

    def took(self, num_sequences: int, num_drafts: int, kind: Kind, duration_s: float) -> float | None:
        """Return a step's time in plain steps, no longer than is usual where others disturbed it; None: nothing is known."""
        plain_s = self.plain_s(num_sequences)
        if plain_s is None:
            return None
        if num_drafts > 0 and num_sequences > 1:
            cost = self._cost(num_sequences)
            usual = cost.ratio(num_drafts) if cost.is_known(num_drafts) else None
        else:
            usual = self.usual_of(kind, plain_s)
        return self.fit(duration_s / plain_s, num_drafts, usual)

    def usual_of(self, kind: Kind, plain_s: float) -> float | None:
        """Return how many plain steps one of a kind takes, if enough were noted: something else may have run beside a few."""
        usual_s = self._times.usual_s(kind) if self._times.count(kind) >= FEW_NOTED else None
        return None if usual_s is None else usual_s / plain_s

    def fit(self, took: float, num_drafts: int, usual: float | None) -> float:
        """Return what a step took in plain steps without what others did beside it. usual: of steps like it, None: unknown."""
        if self._cold_left > 0 and num_drafts > 0:
            self._cold_left -= 1
            took = min(took, _COLD_TOOK)
        if usual is None:
            return min(took, 1.0 + num_drafts)
        return min(max(took, usual / _MOST_OFF), usual * _MOST_OFF)

    def note_catch_up(self, num_sequences: int, duration_s: float, took: float, num_tokens: int) -> float:
        """Take in a step of `took` plain ones, but for what the proposer caught up with; return what that took."""
        plain_s = self.plain_s(num_sequences) or duration_s
        beyond_s = max(0.0, duration_s - took * plain_s)
        self._catch_up_s += (beyond_s / num_tokens - self._catch_up_s) * (_CATCH_UP_GAIN if self._catch_up_s > 0 else 1.0)
        return beyond_s / plain_s

    def usual_catch_up(self, num_sequences: int, num_tokens: int) -> float:
        """Return how many plain steps it takes to catch up with so many tokens, as far as is known."""
        plain_s = self.plain_s(num_sequences)
        return 0.0 if plain_s is None else num_tokens * self._catch_up_s / plain_s

    def note(self, num_sequences: int, num_drafts: int, kind: Kind, duration_s: float, num_equal: int) -> None:
        """Take in a step, behind num_equal with as many drafts."""
        if num_drafts == 0 or num_sequences == 1:
            if num_drafts == 0 or num_equal >= _STEPS_TO_WARM or self._times.count(kind) < FEW_NOTED:
                self._times.note(kind, duration_s)
            self.num_drafted = 0
            self._note_pinning(num_sequences, duration_s if kind[0] == "plain" else None)
            return
        cost, plain_s = self._cost(num_sequences), self.plain_s(num_sequences)
        self._pinned_size, self._believed_s = num_sequences, plain_s or 0.0
        # Beside steps without it shows what drafts cost; later, when steps are alike, how fast the machine is.
        self.num_drafted += 1
        if plain_s is not None and (self.num_drafted <= _STEPS_IN_CONTRAST or not cost.is_known(num_drafts)):
            cost.note(num_drafts, duration_s / plain_s)
        elif plain_s is not None:
            self._times.follow(_plain(num_sequences), duration_s / cost.ratio(num_drafts))

    def _note_pinning(self, num_sequences: int, duration_s: float | None) -> None:
        if num_sequences != self._pinned_size or duration_s is None:
            self._pinning.clear()
        else:
            self._pinning.append(duration_s)

    def pin(self) -> float | None:
        """Take in what the plain steps say that were noted since the last step with drafts, which is over; return how many
        times as long as was believed before them such a step takes; None where there are too few to say."""
        if len(self._pinning) < _FEW_PINNING:
            self._pinning.clear()
            return None
        found_s = median(self._pinning)
        self._pinning.clear()
        self._times.pin(_plain(self._pinned_size), found_s)
        if self._believed_s <= 0:
            return 1.0
        return min(max(found_s / self._believed_s, 1 / _MOST_BELIEVED), _MOST_BELIEVED)

    def note_alike(self, kind: Kind, duration_s: float) -> None:
        """Take in a step of one sequence with as many drafts as those before."""
        self._times.note(kind, duration_s)

    def ratio(self, num_sequences: int, made_rates: Sequence[float]) -> Callable[[int], float]:
        """Return how many times as long as without a step takes, by the number of drafts that are asked for.

        made_rates  how often the draft at each depth is made, see ratios_of_one
        """
        if num_sequences > 1:
            return self._cost(num_sequences).ratio
        ratios = ratios_of_one(self._times, made_rates)
        return lambda count: ratios[min(count, self._max_tokens)]

    def _cost(self, num_sequences: int) -> DraftCost:
        return self._costs.setdefault(size_class(num_sequences, _SEQUENCES_BITS), DraftCost(num_sequences))


def _plain(num_sequences: int) -> Kind:
    return "plain", size_class(num_sequences, _SEQUENCES_BITS)
