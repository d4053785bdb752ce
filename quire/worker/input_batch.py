"""InputBatch: the worker's row per sequence, and the tensors of a step made from a plan without padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvariantError
from quire.base.ids import SequenceId
from quire.contracts.step import SequenceStart, StepPlan
from quire.kernels.reference.attention import AttentionInput, TreeInput
from quire.sampling.row_state import SamplingRow
from quire.speculate.draft import Draft
from quire.worker.pooling import Pooler

_NONE = Draft()
NO_DRAFTS: Mapping[SequenceId, Draft] = {}


@dataclass(slots=True)
class Row:
    """One sequence as the worker knows it; `table` is its line of the batch's block tables.

    pooler  of a request that asks for a pooled hidden state: nothing is sampled then
    """

    start: SequenceStart
    token_ids: list[int]
    num_computed_tokens: int
    num_blocks: int
    table: int
    sampling: SamplingRow
    pooler: Pooler | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the request's prompt."""
        return len(self.start.request.prompt_token_ids)

    @property
    def wants_prompt(self) -> bool:
        """Whether more is asked for than the next token: something about the prompt's own."""
        return self.pooler is not None or self.num_prompt_logprobs is not None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Log probabilities to return at each prompt position; None: none at all, as for every choice but the first."""
        return self.start.request.params.prompt_logprobs if self.start.choice == 0 else None


@dataclass(frozen=True, slots=True)
class PooledRun:
    """Tokens [first, last) of a step, all of one sequence, whose hidden states are pooled; is_complete: they end its prompt."""

    row: Row
    pooler: Pooler
    first: int
    last: int
    is_complete: bool


@dataclass(frozen=True, slots=True)
class StepInput:
    """The tensors of one step; they live in buffers that the next step overwrites.

    token_ids, positions  [T] i64
    rows                  the sequences of the step, in batch order
    drafts                of those that have some; their tokens come after the known ones
    wants_prompt          whether one of them may ask for something about its prompt: else there is nothing but ready_rows
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInput
    rows: list[Row]
    drafts: Mapping[SequenceId, Draft]
    wants_prompt: bool

    def ready_rows(self) -> list[tuple[Row, int]]:
        """Return the sequences that get a token after this step, each with the index of its last known one."""
        return [(row, end - 1) for row, _, end, is_complete in self._runs() if is_complete and row.pooler is None]

    def pooled_rows(self) -> list[PooledRun]:
        """Return the tokens of the step whose hidden states are pooled."""
        found: list[PooledRun] = []
        for row, start, end, is_complete in self._runs():
            if row.pooler is None:
                continue
            if row.pooler.params.needs_every_token:
                found.append(PooledRun(row, row.pooler, start, end, is_complete))
            elif is_complete:
                found.append(PooledRun(row, row.pooler, end - 1, end, is_complete))
        return found

    def _runs(self) -> Iterator[tuple[Row, int, int, bool]]:
        """Yield every sequence, its tokens [start, end) of the step, drafts left out, and whether those are all it knows."""
        starts, drafts = self.attention.query_starts, self.drafts
        for index, row in enumerate(self.rows):
            num_drafts = len(drafts[row.start.sequence_id].tokens) if row.start.sequence_id in drafts else 0
            is_complete = self.attention.context_lens[index] - num_drafts == len(row.token_ids)
            yield row, starts[index], starts[index + 1] - num_drafts, is_complete


class InputBatch:
    """Keeps the rows in step with the scheduler's plans.

    Its buffers are made once: max_num_tokens tokens in a step, max_num_seqs sequences of max_blocks blocks.
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int, max_blocks: int, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._rows: dict[SequenceId, Row] = {}
        self._prompt_rows: set[SequenceId] = set()  # those that ask for something about their prompt
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self._free_tables = list(range(max_num_seqs - 1, -1, -1))
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int64)
        self._positions = np.zeros(max_num_tokens, dtype=np.int64)
        self._slots = np.zeros(max_num_tokens, dtype=np.int64)
        self._sources: list[int] = []
        self._targets: list[int] = []

    def apply(self, plan: StepPlan) -> None:
        """Take over what the plan changes: sequences that ended or start, and their block tables."""
        for sequence_id in plan.ended:
            # A step that failed while its plan was applied may have left some of its sequences without a row.
            row = self._rows.pop(sequence_id, None)
            if row is not None:
                self._free_tables.append(row.table)
                self._prompt_rows.discard(sequence_id)
        for start in plan.starts:
            self._start(start)
        for sequence_id, block_ids in (plan.new_block_ids or {}).items():
            self._append_blocks(self._rows[sequence_id], block_ids)
        for sequence_id, replaced in (plan.replaced_blocks or {}).items():
            for index, block_id in replaced:
                self._tables[self._rows[sequence_id].table, index] = block_id

    def _start(self, start: SequenceStart) -> None:
        if start.sequence_id in self._rows:
            raise InvariantError(f"sequence {start.sequence_id} is started twice")
        sampling = SamplingRow(start.request, start.choice, start.token_ids, self._vocab_size)
        table = self._free_tables.pop()
        pooling = start.request.pooling
        pooler = None if pooling is None else Pooler(pooling)
        row = Row(start, list(start.token_ids), start.num_computed_tokens, 0, table, sampling, pooler)
        self._rows[start.sequence_id] = row
        if row.wants_prompt:
            self._prompt_rows.add(start.sequence_id)
        self._append_blocks(row, start.block_ids)

    def _append_blocks(self, row: Row, block_ids: tuple[int, ...]) -> None:
        self._tables[row.table, row.num_blocks : row.num_blocks + len(block_ids)] = block_ids
        row.num_blocks += len(block_ids)

    def row(self, sequence_id: SequenceId) -> Row:
        """Return the row of a sequence that the plans have started."""
        return self._rows[sequence_id]

    def block_table(self, row: Row) -> NDArray[np.int64]:
        """Return the block table of a row [max_blocks] i64, of which the first num_blocks hold; it follows the plans."""
        return self._tables[row.table]

    def build(self, plan: StepPlan, drafts: Mapping[SequenceId, Draft] = NO_DRAFTS) -> StepInput:
        """Return the tensors of the step; drafts stand in the slots behind the last known token, in order."""
        rows = [self._rows[sequence_id] for sequence_id in plan.num_scheduled_tokens]
        counts = list(plan.num_scheduled_tokens.values())
        num_known = counts
        if drafts:
            counts = [count + len(drafts.get(key, _NONE)) for key, count in plan.num_scheduled_tokens.items()]
        token_ids: list[int] = []
        starts = [0]
        for row, count, known in zip(rows, counts, num_known, strict=True):
            token_ids += row.token_ids[row.num_computed_tokens : row.num_computed_tokens + known]
            if count > known:
                token_ids += drafts[row.start.sequence_id].tokens
            starts.append(starts[-1] + count)
        if len(token_ids) != starts[-1]:
            raise InvariantError(f"the plan schedules {starts[-1]} tokens, the rows know {len(token_ids)} of them")
        num_tokens = starts[-1]
        positions, slots = self._positions[:num_tokens], self._slots[:num_tokens]
        index = np.arange(len(rows))
        positions_of_first = [row.num_computed_tokens for row in rows]
        if num_tokens == len(rows):  # all of them decode
            positions[:] = positions_of_first
        else:
            index = np.repeat(index, counts)
            positions[:] = np.arange(num_tokens) + (np.array(positions_of_first) - np.array(starts[:-1]))[index]
        tables = self._tables[[row.table for row in rows], : max([row.num_blocks for row in rows])]
        block_index, offset = np.divmod(positions, self._block_size)
        slots[:] = tables[index, block_index] * self._block_size + offset
        trees = self._place_trees(rows, starts, drafts, positions) if drafts else None
        self._token_ids[:num_tokens] = token_ids
        context_lens = [first + count for first, count in zip(positions_of_first, counts, strict=True)]
        attention = AttentionInput(torch.from_numpy(slots), starts, context_lens, torch.from_numpy(tables), trees)
        token_tensor, position_tensor = torch.from_numpy(self._token_ids[:num_tokens]), torch.from_numpy(positions)
        return StepInput(token_tensor, position_tensor, attention, rows, drafts, bool(self._prompt_rows))

    def _place_trees(
        self, rows: list[Row], starts: list[int], drafts: Mapping[SequenceId, Draft], positions: NDArray[np.int64]
    ) -> TreeInput | None:
        """Say what the tokens of drafts with branches see, and set their positions, which slots must not follow."""
        if all(draft.is_chain for draft in drafts.values()):
            return None
        num_drafts = np.zeros(len(rows), dtype=np.int32)
        ancestors = np.zeros(starts[-1], dtype=np.uint64)
        for index, row in enumerate(rows):
            draft = drafts.get(row.start.sequence_id, _NONE)
            if draft.is_chain:
                continue
            end = starts[index + 1]
            first = end - len(draft)
            num_drafts[index] = len(draft)
            ancestors[first:end] = np.array(draft.ancestors(), dtype=np.uint64)
            positions[first:end] = positions[first - 1] + np.array(draft.depths())
        return TreeInput(torch.from_numpy(num_drafts), torch.from_numpy(ancestors.view(np.int64)))

    def accept(self, row: Row, path: Sequence[int]) -> None:
        """Count drafts as computed, those with the indices `path`, in rising order: what take_moves returns must follow."""
        for place, index in enumerate(path):
            if place != index:
                self._sources.append(self._slot(row, row.num_computed_tokens + index))
                self._targets.append(self._slot(row, row.num_computed_tokens + place))
        row.num_computed_tokens += len(path)

    def _slot(self, row: Row, position: int) -> int:
        return int(self._tables[row.table, position // self._block_size]) * self._block_size + position % self._block_size

    def take_moves(self) -> tuple[Tensor, Tensor] | None:
        """Return the slots [N] i64 whose KV is to be moved, and where to, so that what was accepted stands in one row.

        In order, no source is written before it is read: a target is never behind its source, nor behind the one before.
        """
        if not self._sources:
            return None
        moves = torch.tensor(self._sources), torch.tensor(self._targets)
        self._sources, self._targets = [], []
        return moves

    def advance(self, step: StepInput) -> None:
        """Count the known tokens of the step as computed; whoever accepts drafts counts them."""
        for row, context_len in zip(step.rows, step.attention.context_lens, strict=True):
            row.num_computed_tokens = context_len
        for sequence_id, draft in step.drafts.items():
            self._rows[sequence_id].num_computed_tokens -= len(draft.tokens)
