"""GrammarMasks: fills the token masks of constrained sequences while the model runs.

A slow mask does not hold up the other sequences. If a mask is not filled shortly after the model has run, and another sequence
can go on, the mask is pending: its sequence gets no token in this step, and is left out of plans until the mask is filled.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.ids import SequenceId
from quire.grammar.mask_filler import MaskFiller
from quire.grammar.masks import NO_DRAFT, DraftedTokens, MaskCost, MaskFill
from quire.speculate.draft import Draft
from quire.worker.input_batch import Row

PENDING_WAIT_S = 0.005
"""How long a step without tokens waits for a pending mask. It is short, so that the engine can handle commands in between."""

MOST_EXPECTED_S = 0.25
"""How long a model is expected to run at most, whatever the step before took: kernels may have been compiled in it."""

_SAMPLING_S = 0.002
"""If a step ends this soon after its wait for masks, the model ended before or during the wait, and its time is not known."""


@dataclass(frozen=True, slots=True)
class MaskWaitPolicy:
    """How long a step waits for masks that are not filled when the model has run.

    share            share of the time that the model took
    least_s, most_s  bounds of that time
    alone_s          least time if no sequence of the step has its mask
    """

    share: float = 0.5
    least_s: float = 1e-3
    most_s: float = 2e-2
    alone_s: float = 2e-2

    def of_step(self, model_s: float) -> float:
        """Return how long to wait: once for whole masks, and once more for only the mask of the next token."""
        return min(max(self.share * model_s, self.least_s), self.most_s)


class GrammarMasks:
    """Starts the masks of each step, and keeps those that are still being filled after it.

    wait_policy  None: steps wait for every mask; tests compare with that
    """

    def __init__(self, filler: MaskFiller | None = None) -> None:
        self.filler = MaskFiller() if filler is None else filler
        self.wait_policy: MaskWaitPolicy | None = MaskWaitPolicy()
        self._costs: dict[SequenceId, MaskCost] = {}
        self.pending: dict[SequenceId, MaskFill] = {}
        self._ready: dict[SequenceId, MaskFill] = {}  # were pending, and their sequences are to be planned again
        self._model_s = 0.0  # how long the model ran in the last step with masks

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Forget sequences that ended or were preempted. A thread may go on filling the mask of one for some time."""
        if not self._costs:
            return
        for sequence_id in sequence_ids:
            self._costs.pop(sequence_id, None)
            self._ready.pop(sequence_id, None)
            fill = self.pending.pop(sequence_id, None)
            if fill is not None:
                fill.drop()

    def start(self, rows: Sequence[Row], drafts: Mapping[SequenceId, Draft], num_rows: int) -> StepMasks:
        """Start filling the masks of the constrained rows of a step of num_rows rows."""
        found: list[tuple[Row, MaskFill]] = []
        were_pending: set[SequenceId] = set()
        new: list[MaskFill] = []
        for row in rows:
            if row.sampling.matcher is None or row.sampling.grammar_error is not None:
                continue
            sequence_id = row.start.sequence_id
            fill = self._ready.pop(sequence_id, None) or self.pending.pop(sequence_id, None)
            if fill is None:
                draft = drafts.get(sequence_id) if drafts else None
                fill = MaskFill(
                    row.sampling.matcher,
                    row.sampling.grammar_ending_ids,
                    NO_DRAFT if draft is None else DraftedTokens(draft.tokens, draft.parents),
                    self._costs.get(sequence_id),
                )
                self._costs[sequence_id] = fill.cost
                new.append(fill)
            else:
                were_pending.add(sequence_id)
            found.append((row, fill))
        if new:
            self.filler.start(new, self._model_s, num_rows == 1)
        return StepMasks(self, found, were_pending, num_rows - len(found))

    @property
    def model_s(self) -> float:
        """How long the model ran in the last step with masks."""
        return self._model_s

    def note_model_time(self, model_s: float) -> None:
        """Record how long the model ran while masks were filled."""
        self._model_s = model_s

    def keep_pending(self, pending: Mapping[SequenceId, MaskFill]) -> None:
        """Keep masks that are not filled for later steps."""
        self.pending.update(pending)

    def take_ready(self, timeout_s: float = 0.0) -> tuple[SequenceId, ...]:
        """Return the sequences whose pending masks are filled now; wait up to timeout_s for one."""
        if not self.pending:
            return ()
        if timeout_s > 0:
            self.filler.wait_for_any(tuple(self.pending.values()), timeout_s)
        done = [sequence_id for sequence_id, fill in self.pending.items() if fill.is_done]
        for sequence_id in done:
            self._ready[sequence_id] = self.pending.pop(sequence_id)
        return tuple(done)

    def close(self) -> None:
        """End the threads."""
        for fill in self.pending.values():
            fill.drop()
        self.filler.close()


class StepMasks:
    """The masks of one step.

    were_pending  sequences whose masks were started in an earlier step
    num_others    sequences of the step that need no mask
    """

    def __init__(
        self, owner: GrammarMasks, fills: list[tuple[Row, MaskFill]], were_pending: Set[SequenceId], num_others: int
    ) -> None:
        self._owner = owner
        self._fills = fills
        self._were_pending = were_pending
        self._num_others = num_others
        self._drafted: dict[SequenceId, list[Tensor | None]] = {}
        self._num_forced: dict[SequenceId, int] = {}
        self._begun_s = time.monotonic() if fills else 0.0
        self._late_s: float | None = None  # when `wait` has given up a mask while the model ran

    def note_end(self) -> None:
        """Record that the model has run, where `wait` was called before that."""
        if not self._fills:
            return
        now = time.monotonic()
        model_s = now - self._begun_s
        if self._late_s is not None and now - self._late_s < _SAMPLING_S:
            model_s = min(model_s, self._owner.model_s)  # else late masks would make each wait longer than the one before
        self._owner.note_model_time(model_s)

    def wait(self, is_running: bool = False) -> frozenset[SequenceId]:
        """Set the masks, or the grammar errors, of the rows; return the sequences whose masks are pending.

        To be called before anything is sampled, and after the model has run; or while it runs (is_running): then no mask is
        late before the model took as long as in the step before, and `note_end` is to be called once it has run.
        """
        if not self._fills:
            return frozenset()
        model_s = time.monotonic() - self._begun_s
        unfilled = [fill for _, fill in self._fills if not fill.is_done]
        if is_running:
            expected_s = max(model_s, min(self._owner.model_s, MOST_EXPECTED_S))
            self._owner.filler.wait_for_all(unfilled, expected_s - model_s)
            unfilled = [fill for fill in unfilled if not fill.is_done]
            model_s = expected_s
        else:
            self._owner.note_model_time(model_s)
        if unfilled:
            self._wait_for(unfilled, model_s)
            self._late_s = time.monotonic() if is_running else None
        pending: dict[SequenceId, MaskFill] = {}
        for row, fill in self._fills:
            if fill.is_done:
                self._set(row, fill, row.start.sequence_id in self._were_pending)
            else:
                pending[row.start.sequence_id] = fill
        self._owner.keep_pending(pending)
        return frozenset(pending)

    def _wait_for(self, unfilled: Sequence[MaskFill], model_s: float) -> None:
        filler, policy = self._owner.filler, self._owner.wait_policy
        if policy is None:
            filler.wait_for_all(unfilled, None)
            return
        if self._num_others == 0 and len(unfilled) == len(self._fills):
            filler.wait_for_any(unfilled, max(policy.alone_s, model_s))
        wait_s = policy.of_step(model_s)
        shared = [fill for fill in unfilled if not fill.is_slow]
        if not filler.wait_for_all(shared, wait_s):
            for fill in shared:
                fill.hurry()
            filler.wait_for_all(shared, wait_s)
            filler.start_again(shared)
        for fill in unfilled:
            fill.hurry()

    def _set(self, row: Row, fill: MaskFill, was_pending: bool) -> None:
        words = torch.from_numpy(fill.words)
        if fill.error is None:
            row.sampling.token_mask = words[0]
        else:
            row.sampling.grammar_error = fill.error
        if fill.is_broken:
            row.sampling.restart_grammar()
        if fill.draft.tokens and not was_pending:  # a sequence whose mask was pending has other drafts now
            places = range(1, len(words))
            self._drafted[row.start.sequence_id] = [words[index] if fill.is_known[index] else None for index in places]
            self._num_forced[row.start.sequence_id] = fill.num_forced

    def masks_of(self, row: Row) -> Sequence[Tensor | None]:
        """Return the masks after each draft token of a row; None where nothing can follow, or the mask is not known."""
        return self._drafted.get(row.start.sequence_id, ())

    def num_forced(self, row: Row) -> int:
        """Return how many of its first draft tokens are the only ones that its constraint allows."""
        return self._num_forced.get(row.start.sequence_id, 0)
