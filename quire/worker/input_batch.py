"""InputBatch: the worker's row per sequence, and the tokens of a step made from a plan without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvariantError
from quire.base.ids import SequenceId
from quire.contracts.step import SequenceStart, StepPlan
from quire.model.token_runs import BlockTable, TokenRuns, TreePlaces, address_of
from quire.sampling.row_state import SamplingRow
from quire.speculate.draft import NO_DRAFT, Draft
from quire.worker.pooling import Pooler

NO_DRAFTS: Mapping[SequenceId, Draft] = {}
NONE_UNASKED: Mapping[SequenceId, int] = {}
UNKNOWN = -1
"""In place of a token that is not on the host yet."""


@dataclass(slots=True)
class Row:
    """One sequence as the worker knows it.

    token_ids    all known tokens; UNKNOWN stands for one that a step on its way samples
    table        its line of the batch's block tables; block_table [max_blocks] i64 is that line, of which the first num_blocks
                 hold, and address where it lies
    pooler       of a request that asks for a pooled hidden state: nothing is sampled then
    """

    start: SequenceStart
    token_ids: list[int]
    num_computed_tokens: int
    num_blocks: int
    table: int
    block_table: BlockTable
    address: int
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


class StepInput(NamedTuple):
    """The tokens of one step.

    rows          the sequences of the step, in batch order
    drafts        of those that have some; their tokens come after the known ones
    ready         the sequences that get a token after this step
    logit_rows    indices of the tokens whose logits are wanted: the last known one of each of `ready`, and then their drafts,
                  but for the first num_unasked[sequence] ones
    wants_prompt  whether one of them may ask for something about its prompt
    """

    runs: TokenRuns
    rows: list[Row]
    drafts: Mapping[SequenceId, Draft]
    ready: list[Row]
    logit_rows: list[int]
    wants_prompt: bool
    num_unasked: Mapping[SequenceId, int] = NONE_UNASKED

    def num_asked(self, sequence_id: SequenceId) -> int:
        """Return how many of a sequence's drafts have logits."""
        return len(self.drafts.get(sequence_id, NO_DRAFT)) - self.num_unasked.get(sequence_id, 0)

    def pooled_rows(self) -> list[PooledRun]:
        """Return the tokens of the step whose hidden states are pooled; such sequences have no drafts."""
        found: list[PooledRun] = []
        for index, row in enumerate(self.rows):
            if row.pooler is None:
                continue
            start, end = self.runs.starts[index], self.runs.starts[index + 1]
            is_complete = self.runs.ends[index] == len(row.token_ids)
            if row.pooler.params.needs_every_token:
                found.append(PooledRun(row, row.pooler, start, end, is_complete))
            elif is_complete:
                found.append(PooledRun(row, row.pooler, end - 1, end, is_complete))
        return found


class Moves(NamedTuple):
    """Slots whose KV is to be moved, and where to; of each sequence starts[i] is its first, and one more is their number."""

    sources: list[int]
    targets: list[int]
    starts: list[int]


class InputBatch:
    """Keeps the rows in step with the scheduler's plans.

    Its block tables are made once: max_num_seqs sequences of max_blocks blocks.

    has_rope_variants  sequences take one of two variants of the rope, see ModelSpec.rope_switch_len
    """

    def __init__(
        self, max_num_seqs: int, max_blocks: int, block_size: int, vocab_size: int, has_rope_variants: bool = False
    ) -> None:
        self._block_size = block_size
        self._has_rope_variants = has_rope_variants
        self._vocab_size = vocab_size
        self._rows: dict[SequenceId, Row] = {}
        self._prompt_rows: set[SequenceId] = set()  # those that ask for something about their prompt
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self._free_tables = list(range(max_num_seqs - 1, -1, -1))
        self._sources: list[int] = []
        self._targets: list[int] = []
        self._move_starts: list[int] = []  # of each sequence's first one

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
                self._rows[sequence_id].block_table[index] = block_id

    def _start(self, start: SequenceStart) -> None:
        if start.sequence_id in self._rows:
            raise InvariantError(f"sequence {start.sequence_id} is started twice")
        sampling = SamplingRow(start.request, start.choice, start.token_ids, self._vocab_size)
        table = self._free_tables.pop()
        pooling = start.request.pooling
        pooler = None if pooling is None else Pooler(pooling)
        line = self._tables[table]
        row = Row(start, list(start.token_ids), start.num_computed_tokens, 0, table, line, address_of(line), sampling, pooler)
        self._rows[start.sequence_id] = row
        if row.wants_prompt:
            self._prompt_rows.add(start.sequence_id)
        self._append_blocks(row, start.block_ids)

    def _append_blocks(self, row: Row, block_ids: tuple[int, ...]) -> None:
        row.block_table[row.num_blocks : row.num_blocks + len(block_ids)] = block_ids
        row.num_blocks += len(block_ids)

    @property
    def tables(self) -> NDArray[np.int64]:
        """The block tables [max_num_seqs, max_blocks] i64 of all lines; what a line holds past its blocks means nothing."""
        return self._tables

    def row(self, sequence_id: SequenceId) -> Row:
        """Return the row of a sequence that the plans have started."""
        return self._rows[sequence_id]

    def build(
        self,
        plan: StepPlan,
        drafts: Mapping[SequenceId, Draft] = NO_DRAFTS,
        num_unasked: Mapping[SequenceId, int] = NONE_UNASKED,
    ) -> StepInput:
        """Return the tokens of the step; drafts stand in the slots behind the last known token, in order."""
        rows: list[Row] = []
        token_ids: list[int] = []
        starts, ends = [0], []
        ready: list[Row] = []
        logit_rows: list[int] = []
        draft_rows: list[int] = []
        has_trees = False
        for sequence_id, num_known in plan.num_scheduled_tokens.items():
            row = self._rows[sequence_id]
            rows.append(row)
            end = row.num_computed_tokens + num_known
            known = row.token_ids[row.num_computed_tokens : end]
            if len(known) != num_known:
                raise InvariantError(f"the plan schedules {num_known} tokens of {sequence_id}, its row has {len(known)}")
            token_ids += known
            if end == len(row.token_ids) and row.pooler is None:
                ready.append(row)
                logit_rows.append(len(token_ids) - 1)
            draft = drafts.get(sequence_id) if drafts else None
            if draft is not None:
                first_asked = len(token_ids) + num_unasked.get(sequence_id, 0)
                token_ids += draft.tokens
                draft_rows += range(first_asked, len(token_ids))
                end += len(draft.tokens)
                has_trees = has_trees or not draft.is_chain
            starts.append(len(token_ids))
            ends.append(end)
        trees = self._place_trees(rows, starts, ends, drafts) if has_trees else None
        short = [row.start.uses_short_rope for row in rows] if self._has_rope_variants else None
        tables, addresses = [row.block_table for row in rows], [row.address for row in rows]
        runs = TokenRuns(token_ids, starts, ends, tables, addresses, trees, short)
        return StepInput(runs, rows, drafts, ready, logit_rows + draft_rows, bool(self._prompt_rows), num_unasked)

    def _place_trees(
        self, rows: list[Row], starts: list[int], ends: list[int], drafts: Mapping[SequenceId, Draft]
    ) -> TreePlaces:
        """Say what the tokens of drafts with branches see, and the positions of all, which slots must not follow."""
        num_drafts = np.zeros(len(rows), dtype=np.int32)
        ancestors = np.zeros(starts[-1], dtype=np.uint64)
        positions = np.zeros(starts[-1], dtype=np.int64)
        for index, row in enumerate(rows):
            begin, end = starts[index], starts[index + 1]
            positions[begin:end] = np.arange(ends[index] - (end - begin), ends[index])
            draft = drafts.get(row.start.sequence_id, NO_DRAFT)
            if draft.is_chain:
                continue
            first = end - len(draft)
            num_drafts[index] = len(draft)
            ancestors[first:end] = np.array(draft.ancestors(), dtype=np.uint64)
            positions[first:end] = positions[first - 1] + np.array(draft.depths())
        return TreePlaces(positions, num_drafts, ancestors)

    def accept(self, row: Row, path: Sequence[int]) -> None:
        """Count drafts as computed, those with the indices `path`, in rising order: what take_moves returns must follow."""
        first = len(self._sources)
        for place, index in enumerate(path):
            if place != index:
                self._sources.append(self._slot(row, row.num_computed_tokens + index))
                self._targets.append(self._slot(row, row.num_computed_tokens + place))
        if len(self._sources) > first:
            self._move_starts.append(first)
        row.num_computed_tokens += len(path)

    def _slot(self, row: Row, position: int) -> int:
        return int(self._tables[row.table, position // self._block_size]) * self._block_size + position % self._block_size

    def take_moves(self) -> tuple[Tensor, Tensor] | None:
        """Return the slots [N] i64 whose KV is to be moved, and where to, so that what was accepted stands in one row.

        In order, no source is written before it is read: a target is never behind its source, nor behind the one before.
        """
        moves = self.take_move_lists()
        return None if moves is None else (torch.tensor(moves.sources), torch.tensor(moves.targets))

    def take_move_lists(self) -> Moves | None:
        """Return what take_moves does, sequence by sequence."""
        if not self._sources:
            return None
        moves = Moves(self._sources, self._targets, [*self._move_starts, len(self._sources)])
        self._sources, self._targets, self._move_starts = [], [], []
        return moves

    def leave_out(self, step: StepInput, late: Set[SequenceId]) -> tuple[list[Row], list[int]]:
        """Count the last known tokens of late sequences as not computed, behind `advance`.

        Returns the other rows that get a token, and which of the step's logits are theirs: those behind drafts come last.
        """
        rows: list[Row] = []
        kept: list[int] = []
        drafted: list[int] = []
        next_draft = len(step.ready)
        for index, row in enumerate(step.ready):
            behind = range(next_draft, next_draft + step.num_asked(row.start.sequence_id))
            next_draft = behind.stop
            if row.start.sequence_id in late:
                row.num_computed_tokens -= 1
                continue
            rows.append(row)
            kept.append(index)
            drafted += behind
        return rows, kept + drafted

    def advance(self, step: StepInput) -> None:
        """Count the known tokens of the step as computed; whoever accepts drafts counts them."""
        for row, end in zip(step.rows, step.runs.ends, strict=True):
            row.num_computed_tokens = end
        for sequence_id, draft in step.drafts.items():
            self._rows[sequence_id].num_computed_tokens -= len(draft.tokens)
