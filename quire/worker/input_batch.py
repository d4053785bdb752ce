"""InputBatch: a row for each sequence that the worker knows, and the tokens of a step, which it makes from a plan."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvariantError
from quire.base.ids import SequenceId
from quire.contracts.step import SequenceStart, StepPlan, TableRun
from quire.model.token_runs import BlockTable, BoundsRequest, TreePlaces
from quire.sampling.row_state import SamplingRow
from quire.speculate.draft import NO_DRAFT, Draft
from quire.worker.pooling import Pooler
from quire.worker.pooling_head import PoolingHead
from quire.worker.step_executor import Moves, RowProcessor, StateChange, StepTokens, TableEntry, needs_host_sampling

NO_DRAFTS: Mapping[SequenceId, Draft] = {}
NONE_UNASKED: Mapping[SequenceId, int] = {}
_NO_ENTRIES: Sequence[TableEntry] = ()


@dataclass(slots=True)
class Row:
    """One sequence as the worker knows it.

    token_ids        all known tokens; UNKNOWN stands for one that a running step samples
    batch_slot       its row of the block tables, from its start to its end; block_table [max_blocks] i64 is that row, of which
                     the first num_blocks entries are valid
    is_host_sampled  the driver samples its tokens, not the executor
    num_dropped_tokens  tokens that its KV compression has evicted: the place of a token in the cache is its position minus this
    is_deferrable    the executor can sample them, though, once it gets a token mask: see RowProcessor.sample_deferred
    observed         position -> attention that the token there pays to each block; of a KV compression that observes it
    pooler           of a request that asks for a pooled hidden state: nothing is sampled then
    """

    start: SequenceStart
    token_ids: list[int]
    num_computed_tokens: int
    num_blocks: int
    batch_slot: int
    block_table: BlockTable
    sampling: SamplingRow
    is_host_sampled: bool
    pooler: Pooler | None = None
    num_dropped_tokens: int = 0
    is_deferrable: bool = False
    observed: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

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
    """The tokens of one step, and the sequences that they belong to.

    tokens        what the executor gets
    rows          the sequences of the step, in batch order
    drafts        of the sequences that have some; their tokens come after the known ones
    ready         the sequences that get a token in this step. The first logit_rows of `tokens` are theirs; then come those of
                  their drafts, without the first num_unasked[sequence] drafts
    wants_prompt  whether one of them may ask for something about its prompt
    """

    tokens: StepTokens
    rows: list[Row]
    drafts: Mapping[SequenceId, Draft]
    ready: list[Row]
    wants_prompt: bool
    num_unasked: Mapping[SequenceId, int] = NONE_UNASKED

    def pooled_rows(self) -> list[PooledRun]:
        """Return the tokens of the step whose hidden states are pooled; such sequences have no drafts."""
        found: list[PooledRun] = []
        for index, row in enumerate(self.rows):
            if row.pooler is None:
                continue
            start, end = self.tokens.starts[index], self.tokens.starts[index + 1]
            is_complete = self.tokens.ends[index] == len(row.token_ids)
            if row.pooler.params.pooling == "cls":  # of models that compute prompts whole
                found.append(PooledRun(row, row.pooler, start, start + 1, is_complete))
            elif row.pooler.params.needs_every_token:
                found.append(PooledRun(row, row.pooler, start, end, is_complete))
            elif is_complete:
                found.append(PooledRun(row, row.pooler, end - 1, end, is_complete))
        return found


class InputBatch:
    """Keeps the rows in step with the scheduler's plans.

    block_tables  [max_num_seqs, max_blocks] i64 of the executor; only the batch writes them
    has_sampler   whether the executor samples with noise, see StepExecutor
    has_rope_variants, has_states, first_window_block  see StepExecutor
    has_adapters  whether sequences may have LoRA adapters
    row_processor  the executor, where it may sample rows with processors and log probabilities, see RowProcessor
    """

    def __init__(
        self,
        block_tables: NDArray[np.int64],
        block_size: int,
        vocab_size: int,
        has_sampler: bool = False,
        has_rope_variants: bool = False,
        has_states: bool = False,
        first_window_block: int | None = None,
        has_adapters: bool = False,
    ) -> None:
        self._first_window_block = first_window_block
        self._window_offset = block_tables.shape[1] // 2  # of the window group's table in a row
        self._has_states, self._has_adapters = has_states, has_adapters
        self._block_size = block_size
        self._has_rope_variants = has_rope_variants
        self._vocab_size = vocab_size
        self._has_sampler = has_sampler
        self._rows: dict[SequenceId, Row] = {}
        self._prompt_rows: set[SequenceId] = set()  # those that ask for something about their prompt
        self._host_sampled: set[SequenceId] = set()
        self._constrained: set[SequenceId] = set()  # those with a grammar
        self._evicted: set[SequenceId] = set()  # those that have lost blocks
        self._observers: set[SequenceId] = set()  # those with a KV compression that observes attention
        self._bounds: dict[SequenceId, tuple[int, int, float]] = {}  # key, first position and gap of those that skip runs
        self._bound_keys, self._ended_bounds = itertools.count(1), list[int]()
        self.block_tables = block_tables
        self._free_slots = list(range(len(block_tables) - 1, -1, -1))
        self.pooling_head: PoolingHead | None = None
        self.row_processor: RowProcessor | None = None
        self._sources: list[int] = []
        self._targets: list[int] = []
        self._move_starts: list[int] = []  # of each sequence's first one

    def apply(self, plan: StepPlan) -> Sequence[TableEntry]:
        """Apply what the plan changes: sequences that ended or start, and block tables. Return what changed in these."""
        for sequence_id in plan.ended:
            # A step that failed while its plan was applied may have left some of its sequences without a row.
            row = self._rows.pop(sequence_id, None)
            if row is not None:
                self._free_slots.append(row.batch_slot)
                self._prompt_rows.discard(sequence_id)
                self._host_sampled.discard(sequence_id)
                self._constrained.discard(sequence_id)
                self._evicted.discard(sequence_id)
                self._observers.discard(sequence_id)
                if sequence_id in self._bounds:
                    self._ended_bounds.append(self._bounds.pop(sequence_id)[0])
        if not (plan.starts or plan.new_block_ids or plan.replaced_blocks or plan.window_blocks or plan.evicted_blocks):
            return _NO_ENTRIES
        entries = [self._evict_blocks(*item) for item in (plan.evicted_blocks or {}).items()]
        for start in plan.starts:
            row = self._start(start)
            entries.append(self.append_blocks(row, start.block_ids))
            entries += [self._set_window_blocks(row, run) for run in start.window_blocks]
        for sequence_id, block_ids in (plan.new_block_ids or {}).items():
            entries.append(self.append_blocks(self._rows[sequence_id], block_ids))
        for sequence_id, replaced in (plan.replaced_blocks or {}).items():
            row = self._rows[sequence_id]
            for index, block_id in replaced:
                row.block_table[index] = block_id
                entries.append((row.batch_slot, index, (block_id,)))
        for sequence_id, runs in (plan.window_blocks or {}).items():
            entries += [self._set_window_blocks(self._rows[sequence_id], run) for run in runs]
        return entries

    def block_copies(self, plan: StepPlan) -> Sequence[tuple[int, int]]:
        """Return the blocks of both groups that a plan copies, as KvPool names them."""
        first = self._first_window_block
        if first is None or not plan.window_copies:
            return plan.block_copies
        return (*plan.block_copies, *((first + source, first + target) for source, target in plan.window_copies))

    def _evict_blocks(self, sequence_id: SequenceId, indices: tuple[int, ...]) -> TableEntry:
        row = self._rows[sequence_id]
        kept = np.delete(row.block_table[: row.num_blocks], indices)
        row.block_table[: len(kept)] = kept
        row.num_blocks = len(kept)
        row.num_dropped_tokens += len(indices) * self._block_size
        self._evicted.add(sequence_id)
        return row.batch_slot, indices[0], tuple(kept[indices[0] :].tolist())

    def _set_window_blocks(self, row: Row, run: TableRun) -> TableEntry:
        first, block_ids = self._window_offset + run[0], run[1]
        row.block_table[first : first + len(block_ids)] = block_ids
        return row.batch_slot, first, block_ids

    def _start(self, start: SequenceStart) -> Row:
        if start.sequence_id in self._rows:
            raise InvariantError(f"sequence {start.sequence_id} is started twice")
        sampling = SamplingRow(start.request, start.choice, start.token_ids, self._vocab_size)
        is_host_sampled = needs_host_sampling(sampling, self._has_sampler, self.row_processor)
        batch_slot = self._free_slots.pop()
        pooling = start.request.pooling
        row = Row(
            start,
            list(start.token_ids),
            start.num_computed_tokens,
            0,
            batch_slot,
            self.block_tables[batch_slot],
            sampling,
            is_host_sampled,
            None if pooling is None else Pooler(pooling, self.pooling_head),
            is_deferrable=self.row_processor is not None and self.row_processor.takes_masked(sampling),
        )
        self._rows[start.sequence_id] = row
        if row.wants_prompt:
            self._prompt_rows.add(start.sequence_id)
        if is_host_sampled and pooling is None:
            self._host_sampled.add(start.sequence_id)
        compression = start.request.params.kv_compression
        if compression is not None and compression.observes_attention:
            self._observers.add(start.sequence_id)
        if compression is not None and compression.gap is not None:
            first = compression.first_len(row.num_prompt_tokens)
            self._bounds[start.sequence_id] = next(self._bound_keys), first, compression.gap
        if sampling.matcher is not None:
            self._constrained.add(start.sequence_id)
        return row

    def append_blocks(self, row: Row, block_ids: tuple[int, ...]) -> TableEntry:
        """Append blocks to the table of a row; return the change."""
        first = row.num_blocks
        row.num_blocks = first + len(block_ids)
        row.block_table[first : row.num_blocks] = block_ids
        return row.batch_slot, first, block_ids

    @property
    def has_observers(self) -> bool:
        """Whether some sequence has a KV compression that observes attention."""
        return bool(self._observers)

    @property
    def has_constraints(self) -> bool:
        """Whether the output of some sequence has a grammar."""
        return bool(self._constrained)

    def host_sampled(self, ready: Sequence[Row]) -> Sequence[int]:
        """Return which of some rows, by index, are sampled by the driver."""
        return [index for index, row in enumerate(ready) if row.is_host_sampled] if self._host_sampled else ()

    def row(self, sequence_id: SequenceId) -> Row:
        """Return the row of a sequence that the plans have started."""
        return self._rows[sequence_id]

    def build(
        self,
        plan: StepPlan,
        drafts: Mapping[SequenceId, Draft] = NO_DRAFTS,
        num_unasked: Mapping[SequenceId, int] = NONE_UNASKED,
    ) -> StepInput:
        """Return the tokens of the step; drafts take the cache slots after the last known token, in order."""
        rows: list[Row] = []
        batch_slots: list[int] = []
        token_ids: list[int] = []
        starts: list[int] = [0]
        ends: list[int] = []
        ready: list[Row] = []
        logit_rows: list[int] = []
        draft_rows: list[int] = []
        has_trees = False
        for sequence_id, num_known in plan.num_scheduled_tokens.items():
            row = self._rows[sequence_id]
            rows.append(row)
            batch_slots.append(row.batch_slot)
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
        tokens = StepTokens(token_ids, starts, ends, batch_slots, logit_rows + draft_rows, len(ready), trees, short)
        if self._has_states:
            tokens = tokens._replace(states=self._state_change(plan, drafts))
        if self._evicted:
            tokens = tokens._replace(num_dropped=[row.num_dropped_tokens for row in rows])
        if self._has_adapters:
            tokens = tokens._replace(adapters=[row.start.request.adapter_key for row in rows])
        if self._bounds or self._ended_bounds:
            found = [self._bounds.get(row.start.sequence_id, (0, 0, 0.0)) for row in rows]
            keys, firsts, gaps = (list(values) for values in zip(*found, strict=True))
            tokens = tokens._replace(bounds=BoundsRequest(keys, firsts, gaps, self._ended_bounds))
            self._ended_bounds = []
        return StepInput(tokens, rows, drafts, ready, bool(self._prompt_rows), num_unasked)

    def _state_change(self, plan: StepPlan, drafts: Mapping[SequenceId, Draft]) -> StateChange:
        starts = [(self._rows[one.sequence_id].batch_slot, one.num_computed_tokens, one.state_slot) for one in plan.starts]
        saves = plan.state_saves or {}
        return StateChange(
            starts,
            {index: saves[key] for index, key in enumerate(plan.num_scheduled_tokens) if key in saves},
            [len(drafts.get(sequence_id, NO_DRAFT)) for sequence_id in plan.num_scheduled_tokens],
        )

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
        """Count drafts as computed, those with the indices `path`, in rising order; take_moves says what to move then."""
        first = len(self._sources)
        for place, index in enumerate(path):
            if place != index:
                self._sources += self._slots(row, row.num_computed_tokens + index)
                self._targets += self._slots(row, row.num_computed_tokens + place)
        if len(self._sources) > first:
            self._move_starts.append(first)
        row.num_computed_tokens += len(path)

    def _slots(self, row: Row, position: int) -> list[int]:
        """Return the slot of a position in each group."""
        block, offset = divmod(position - row.num_dropped_tokens, self._block_size)
        block_ids = [int(row.block_table[block])]
        if self._first_window_block is not None:
            block_ids.append(self._first_window_block + int(row.block_table[self._window_offset + block]))
        return [block_id * self._block_size + offset for block_id in block_ids]

    def take_moves(self) -> Moves | None:
        """Return how KV must be moved so that accepted drafts directly follow the known tokens; None: it need not be."""
        if not self._sources:
            return None
        moves = Moves(self._sources, self._targets, [*self._move_starts, len(self._sources)])
        self._sources, self._targets, self._move_starts = [], [], []
        return moves

    def leave_out(self, step: StepInput, pending: Set[SequenceId]) -> list[Row]:
        """Count the last known token of sequences with a pending mask as not computed, after `advance`.

        Returns the other rows that get a token.
        """
        rows: list[Row] = []
        for row in step.ready:
            if row.start.sequence_id in pending:
                row.num_computed_tokens -= 1
            else:
                rows.append(row)
        return rows

    def advance(self, step: StepInput) -> None:
        """Count the known tokens of the step as computed, without drafts; see accept."""
        for row, end in zip(step.rows, step.tokens.ends, strict=True):
            row.num_computed_tokens = end
        for sequence_id, draft in step.drafts.items():
            self._rows[sequence_id].num_computed_tokens -= len(draft.tokens)
