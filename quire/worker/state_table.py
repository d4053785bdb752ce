"""StateTable: which row of a pool of recurrent states holds which state of which sequence.

A sequence may have to go back: drafts are rejected, or its last known token is computed again because the mask of its
constraint came late. Nothing tells the table so. It keeps the state after each of the last tokens of a step, by position, and
the next step starts from the one at its first position.
"""

from __future__ import annotations

from quire.base.errors import InvariantError
from quire.kernels.reference.recurrent import StateRows
from quire.worker.step_executor import StepTokens

_ZEROS = -1


def num_state_rows(num_batch_slots: int, num_checkpoints: int, max_num_drafts: int) -> int:
    """Return how many states a worker holds: of each batch slot those before and after the last token and each of its drafts;
    and the checkpoints."""
    return num_batch_slots * (2 + max_num_drafts) + num_checkpoints


class StateTable:
    """Gives each batch slot 2 + max_num_drafts rows, and has the checkpoints after those of all of them."""

    def __init__(self, num_batch_slots: int, num_rows: int, num_checkpoints: int, *, copies_starts: bool = False) -> None:
        """Make the table; copies_starts: checkpoints are copied to own rows before a step, see take_copies."""
        self._copies_starts = copies_starts
        self._copies: list[tuple[int, int]] = []
        self._num_own = (num_rows - num_checkpoints) // num_batch_slots
        self._first_checkpoint = num_rows - num_checkpoints
        self._row_at: list[dict[int, int]] = [{} for _ in range(num_batch_slots)]  # position -> row, of each batch slot

    def place(self, tokens: StepTokens) -> StateRows:
        """Return the rows that a step reads and writes, and take in that it does."""
        change = tokens.states
        if change is None:
            raise InvariantError("a step of a model with a recurrent state does not say what becomes of the states")
        if tokens.trees is not None:
            raise InvariantError("a recurrent state has no branches: drafts must be chains")
        self._copies.clear()  # of a step that failed before they were taken
        for batch_slot, position, checkpoint in change.starts:
            row = _ZEROS if checkpoint is None else self._first_checkpoint + checkpoint
            if self._copies_starts and row != _ZEROS:
                own = batch_slot * self._num_own
                self._copies.append((row, own))
                row = own
            self._row_at[batch_slot] = {position: row}
        sources: list[int] = []
        saves: list[list[tuple[int, int]]] = []
        for index, batch_slot in enumerate(tokens.batch_slots):
            first = tokens.ends[index] - (tokens.starts[index + 1] - tokens.starts[index])
            source = self._row_at[batch_slot].get(first)
            if source is None:
                raise InvariantError(f"batch slot {batch_slot} has no state after {first} tokens")
            kept = self._keep(batch_slot, source, first, tokens.ends[index], change.num_drafts[index])
            own = [(position - first, row) for position, row in kept]
            made = [(position - first, self._first_checkpoint + slot) for position, slot in change.saves.get(index, ())]
            sources.append(source)
            saves.append(own + made)
        return StateRows(sources, saves)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the rows to be copied before the step, (source, target): programs of a step run concurrently; none may read
        a checkpoint that another writes."""
        copies, self._copies = self._copies, []
        return copies

    def _keep(self, batch_slot: int, source: int, first: int, end: int, num_drafts: int) -> list[tuple[int, int]]:
        """Return the (position, row) to write of a run [first, end), whose last num_drafts tokens are drafts."""
        begin = batch_slot * self._num_own
        own = range(begin, begin + self._num_own)
        low = max(first, end - num_drafts - 1)
        row_at = {first: source} if low == first and (source in own or source == _ZEROS) else {}
        positions = [position for position in range(low, end + 1) if position not in row_at]
        free = [row for row in own if row not in row_at.values()]
        if len(positions) > len(free):
            raise InvariantError(f"{num_drafts} drafts need {len(positions)} states, a sequence has {len(free)}")
        kept = list(zip(positions, free, strict=False))
        self._row_at[batch_slot] = row_at | dict(kept)
        return kept
