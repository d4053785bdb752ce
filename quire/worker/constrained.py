"""ConstrainedRows: the masks of the worker's constrained sequences, of which none waits for that of another for long.

Masks are filled while the model runs. Where one is not there behind it, and somebody else can go on, the sequence is late: it
gets no token in this step, and is left out of those that follow until its mask is there.
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

LATE_WAIT_S = 0.005
"""How long a step waits for late masks where it has nothing else to do; who calls it may have commands to look after."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a step waits for masks that take longer than the model.

    share         of what the model has taken
    least_s       and at least; most_s: at most
    alone_s       at least, where nobody in the step can go on
    """

    share: float = 0.5
    least_s: float = 1e-3
    most_s: float = 2e-2
    alone_s: float = 2e-2

    def of_step(self, model_s: float) -> float:
        """Return how long others wait, once for whole masks, and once more for those of what comes next."""
        return min(max(self.share * model_s, self.least_s), self.most_s)


class ConstrainedRows:
    """Has the masks of constrained rows filled, step by step, and knows those that are late.

    patience  None: steps wait for every mask, which is what the others are compared with
    """

    def __init__(self, filler: MaskFiller | None = None) -> None:
        self.filler = MaskFiller() if filler is None else filler
        self.patience: Patience | None = Patience()
        self._costs: dict[SequenceId, MaskCost] = {}
        self._late: dict[SequenceId, MaskFill] = {}
        self._caught_up: dict[SequenceId, MaskFill] = {}  # of those that were late, and are to come back now
        self._model_s = 0.0  # what it took in the last step with such rows

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Forget sequences that ended, or were preempted; a thread may fill the mask of one for some time yet."""
        if not self._costs:
            return
        for sequence_id in sequence_ids:
            self._costs.pop(sequence_id, None)
            self._caught_up.pop(sequence_id, None)
            fill = self._late.pop(sequence_id, None)
            if fill is not None:
                fill.drop()

    def start(self, rows: Sequence[Row], drafts: Mapping[SequenceId, Draft], num_rows: int) -> StepMasks:
        """Begin to fill the masks of those of some rows that have a constraint, in a step of num_rows rows."""
        found: list[tuple[Row, MaskFill]] = []
        were_late: set[SequenceId] = set()
        new: list[MaskFill] = []
        for row in rows:
            if row.sampling.matcher is None or row.sampling.grammar_error is not None:
                continue
            sequence_id = row.start.sequence_id
            fill = self._caught_up.pop(sequence_id, None) or self._late.pop(sequence_id, None)
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
                were_late.add(sequence_id)
            found.append((row, fill))
        if new:
            self.filler.start(new, self._model_s, num_rows == 1)
        return StepMasks(self, found, were_late, num_rows - len(found))

    def note_step(self, model_s: float, late: Mapping[SequenceId, MaskFill]) -> None:
        """Take in how long the model ran beside masks, and which are late."""
        self._model_s = model_s
        self._late.update(late)

    def take_caught_up(self, timeout_s: float = 0.0) -> tuple[SequenceId, ...]:
        """Return those that were late and can go on now; wait for one until the time is over."""
        if not self._late:
            return ()
        if timeout_s > 0:
            self.filler.wait_for_any(tuple(self._late.values()), timeout_s)
        done = [sequence_id for sequence_id, fill in self._late.items() if fill.is_done]
        for sequence_id in done:
            self._caught_up[sequence_id] = self._late.pop(sequence_id)
        return tuple(done)

    def close(self) -> None:
        """End the threads."""
        for fill in self._late.values():
            fill.drop()
        self.filler.close()


class StepMasks:
    """The masks of one step.

    were_late   those whose masks were begun in an earlier step
    num_others  sequences of the step that need none
    """

    def __init__(
        self, owner: ConstrainedRows, fills: list[tuple[Row, MaskFill]], were_late: Set[SequenceId], num_others: int
    ) -> None:
        self._owner = owner
        self._fills = fills
        self._were_late = were_late
        self._num_others = num_others
        self._drafted: dict[SequenceId, list[Tensor | None]] = {}
        self._num_forced: dict[SequenceId, int] = {}
        self._begun_s = time.monotonic() if fills else 0.0

    def wait(self) -> frozenset[SequenceId]:
        """Set the rows' masks, and why a grammar cannot go on where that is so; return the rows that are late.

        To be called when the model has run, before anything is sampled.
        """
        if not self._fills:
            return frozenset()
        model_s = time.monotonic() - self._begun_s
        pending = [fill for _, fill in self._fills if not fill.is_done]
        if pending:
            self._wait_for(pending, model_s)
        late: dict[SequenceId, MaskFill] = {}
        for row, fill in self._fills:
            if fill.is_done:
                self._set(row, fill, row.start.sequence_id in self._were_late)
            else:
                late[row.start.sequence_id] = fill
        self._owner.note_step(model_s, late)
        return frozenset(late)

    def _wait_for(self, pending: Sequence[MaskFill], model_s: float) -> None:
        filler, patience = self._owner.filler, self._owner.patience
        if patience is None:
            filler.wait_for_all(pending, None)
            return
        if self._num_others == 0 and len(pending) == len(self._fills):
            filler.wait_for_any(pending, max(patience.alone_s, model_s))
        wait_s = patience.of_step(model_s)
        shared = [fill for fill in pending if not fill.is_slow]
        if not filler.wait_for_all(shared, wait_s):
            for fill in shared:
                fill.hurry()
            filler.wait_for_all(shared, wait_s)
            filler.start_again(shared)
        for fill in pending:
            fill.hurry()

    def _set(self, row: Row, fill: MaskFill, was_late: bool) -> None:
        words = torch.from_numpy(fill.words)
        if fill.error is None:
            row.sampling.token_mask = words[0]
        else:
            row.sampling.grammar_error = fill.error
        if fill.is_broken:
            row.sampling.restart_grammar()
        if fill.draft.tokens and not was_late:  # which has other drafts now
            behind = range(1, len(words))
            self._drafted[row.start.sequence_id] = [words[index] if fill.is_known[index] else None for index in behind]
            self._num_forced[row.start.sequence_id] = fill.num_forced

    def masks_of(self, row: Row) -> Sequence[Tensor | None]:
        """Return what may follow the draft tokens of a row; None where nothing can, or it is not known."""
        return self._drafted.get(row.start.sequence_id, ())

    def num_forced(self, row: Row) -> int:
        """Return how many of its draft tokens, the first ones, are all that its constraint lets come there."""
        return self._num_forced.get(row.start.sequence_id, 0)
