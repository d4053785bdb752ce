"""DeviceChains: a draft model, or a head, drafts chains on the device, a CUDA graph for each token of all sequences.

A draft step is a step of a GpuStepExecutor with its own decoder and pool: first the known tokens that it has not read, then one
token a step, which stays on the device for the next one. The host only reads the tokens as they come.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.kv_spec import KvSpec
from quire.kernels.reference.attention import AttentionMetadata, TreeInput
from quire.kernels.triton.step import DeviceAttentionMetadata, send_together
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.heads.device_head import DeviceHead
from quire.sampling.row_state import SamplingRow
from quire.speculate.chain_drafter import BlockCache, ChainOrder
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.host_step import HostStep
from quire.worker.device.launched_step import Kept, Launched, StepSizes
from quire.worker.device.staging import NUM_READBACKS
from quire.worker.step_executor import SlotSampling

_SHARPNESS = 4.0
"""Logits are multiplied with it before it is asked how likely drafts are; DRAFT_SHARPNESS of reference_head.py."""

_NOTHING = BlockTableUpdates([])


class DraftCache:
    """The pool of what drafts, as quire.speculate.chain_drafter.BlockCache."""

    def __init__(self, pool: DeviceKvPool) -> None:
        self.pool = pool

    @property
    def spec(self) -> KvSpec:
        """See BlockCache."""
        return self.pool.spec

    @property
    def num_blocks(self) -> int:
        """See BlockCache."""
        return self.pool.num_blocks

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """See BlockCache."""
        pairs = torch.tensor(copies, dtype=torch.int64).to(self.pool.device)
        self.pool.copy_blocks(pairs[:, 0], pairs[:, 1])


class DeviceChains:
    """Implements quire.speculate.chain_drafter.ChainDrafter for a draft model. To be called on the device, in inference mode.

    executor of the decoder, over the pool of the cache; its batch slots are the sequences of a call, in their order
    sizes    those of the executor
    """

    def __init__(
        self, decoder: DeviceDecoder | DeviceHead, executor: GpuStepExecutor, kv: DraftCache, sizes: StepSizes
    ) -> None:
        self.decoder, self.executor, self.sizes, self.kv = decoder, executor, sizes, kv
        width = -(-sizes.max_model_len // kv.spec.block_size)
        self._tables = np.full((sizes.max_num_seqs, width), -1, np.int64)  # as they stand on the device
        self._rows: list[SamplingRow | None] = [None] * sizes.max_num_seqs

    def draft_chains(self, order: ChainOrder, features: Tensor | None = None) -> list[list[int]]:
        """See ChainDrafter."""
        found: list[list[int]] = []
        for first, last in self._groups(order.runs.starts):
            starts = order.runs.starts[first], order.runs.starts[last]
            if isinstance(self.decoder, DeviceHead):
                if features is None:
                    raise InvariantError("a head drafts from features, and got none")
                self.decoder.inputs[: starts[1] - starts[0]].copy_(features[starts[0] : starts[1]])
            found += self._draft_group(_Group(order, first, last, self.kv.spec.block_size), order.least_share)
        return found

    def _groups(self, starts: list[int]) -> Iterator[tuple[int, int]]:
        """Yield runs of sequences that one step can hold, one after the other; mostly all at once."""
        first, (most_sequences, most_tokens) = 0, self.sizes[:2]
        for index in range(1, len(starts)):
            if index - first > most_sequences or starts[index] - starts[first] > most_tokens:
                yield first, index - 1
                first = index - 1
        yield first, len(starts) - 1

    def _draft_group(self, group: _Group, least_share: float) -> list[list[int]]:
        """Launch the known tokens and then level by level, with at most NUM_READBACKS levels not read by the host."""
        executor, count = self.executor, len(group.counts)
        for slot, row in enumerate(group.rows):
            if self._rows[slot] is not row:
                executor.sampling_table.set(slot, SlotSampling.of(row))
                self._rows[slot] = row
        sampling = executor.sampling_table.sampling_of(np.arange(count, dtype=np.int32))
        is_doubted = least_share > 0 and all(row.is_greedy for row in group.rows)
        changes, levels, shares = self._changes(group), list[list[int]](), list[Tensor]()
        waiting: list[Launched] = []
        for level in range(max(1, *group.counts)):
            if len(waiting) == NUM_READBACKS:
                levels.append(executor.read_sampled(waiting.pop(0))[0])
            launched = executor.launch(group.step(level), sampling, changes, Kept(logits=is_doubted))
            if is_doubted and launched.logits is not None:
                shares.append(best_shares(launched.logits))
            waiting.append(launched)
            changes = _NOTHING
        levels += [executor.read_sampled(launched)[0] for launched in waiting]
        kept = _likely_counts(shares, least_share, group.counts) if is_doubted else group.counts
        # Where nothing can be drawn any token does as a draft.
        return [[max(tokens[slot], 0) for tokens in levels[: kept[slot]]] for slot in range(count)]

    def _changes(self, group: _Group) -> BlockTableUpdates:
        """Return what of the block tables on the device is another one."""
        entries: list[tuple[int, int, tuple[int, ...]]] = []
        for slot, blocks in enumerate(group.blocks):
            own = self._tables[slot, : len(blocks)]
            others = np.flatnonzero(own != blocks)
            if len(others):
                first = int(others[0])
                entries.append((slot, first, tuple(blocks[first:].tolist())))
                own[:] = blocks
        return BlockTableUpdates(entries)


class HeadChains(DeviceChains):
    """Implements quire.speculate.chain_drafter.HeadDrafter."""

    def __init__(self, head: DeviceHead, executor: GpuStepExecutor, kv: DraftCache, sizes: StepSizes) -> None:
        super().__init__(head, executor, kv, sizes)
        self._head = head

    def fuse_features(self, features: Tensor) -> Tensor:
        """See HeadDrafter."""
        return self._head.fuse_features(features)

    def enter(
        self, token_ids: Tensor, positions: Tensor, step: AttentionMetadata, kv: BlockCache, features: Tensor, rows: list[int]
    ) -> Tensor:
        """See HeadDrafter; kv is its own."""
        head, device = self._head, self._head.device
        # As wide as in the steps of the executor, for which kernels are compiled ahead.
        missing = self._tables.shape[1] - step.block_tables.shape[1]
        step = replace(step, block_tables=torch.nn.functional.pad(step.block_tables, (0, missing)))
        parts: list[Tensor] = []
        for first, last in self._groups(step.query_starts):
            begin, end = step.query_starts[first], step.query_starts[last]
            head.inputs[: end - begin].copy_(features[begin:end])
            places = DeviceAttentionMetadata.of(_part(step, first, last), device)
            own = torch.tensor([row - begin for row in rows if begin <= row < end], dtype=torch.int64)
            own_ids, own_positions, own = send_together([token_ids[begin:end], positions[begin:end], own], device)
            hidden = head.forward(own_ids, own_positions, places, self.kv.pool)
            parts.append(hidden.index_select(0, own))
        return head.logits(parts[0] if len(parts) == 1 else torch.cat(parts))

    def recycled(self, count: int) -> Tensor:
        """See HeadDrafter."""
        return self._head.inputs[:count]


class _Group:
    """Some sequences of an order, as arrays.

    blocks  of each sequence those that it is seen with, from its origin to its last draft but one
    """

    def __init__(self, order: ChainOrder, first: int, last: int, block_size: int) -> None:
        runs, own = order.runs, slice(first, last)
        starts = np.array(runs.starts[first : last + 1])
        self.counts, self.rows = order.counts[own], order.rows[own]
        self._token_ids = np.array(runs.token_ids[starts[0] : starts[-1]], np.int64)
        self._num_known = np.diff(starts)
        self._ends, self._origins = np.array(runs.ends[own]), np.array(order.origins[own])
        self._first_drawn, self._size = np.array(order.positions[own]), block_size
        self._tables: NDArray[np.int64] = np.stack(runs.tables[own])
        lasts = -(-(self._ends + np.maximum(np.array(self.counts) - 1, 0)) // block_size)
        firsts = self._origins // block_size
        self.blocks = [table[a:b] for table, a, b in zip(self._tables, firsts, lasts, strict=True)]

    def step(self, level: int) -> HostStep:
        """Return the step of the known tokens (level 0), or of the drafts of a level, of all sequences that have one more."""
        batch_slots = np.arange(len(self.counts), dtype=np.int32)
        drawn = self._first_drawn + level
        if level == 0:
            known, ends = self._num_known, self._ends
            row_of = np.repeat(batch_slots, known)
            positions = np.repeat(ends - known, known) + np.arange(len(row_of)) - np.repeat(np.cumsum(known) - known, known)
            slots = self._slots(row_of, positions)
            lengths, rows = (ends - self._origins).astype(np.int32), np.cumsum(known) - 1
            return HostStep(
                tuple(known.tolist()), batch_slots, lengths, self._token_ids, positions, slots, rows, batch_slots, drawn
            )
        goes_on = np.array(self.counts) > level
        positions = np.where(goes_on, self._ends - 1 + level, 0)
        # One that has its drafts stands by, so that the others keep their rows: it sees and stores nothing.
        slots = np.where(goes_on, self._slots(batch_slots, positions), -1)
        lengths = np.where(goes_on, self._ends - self._origins + level, 0).astype(np.int32)
        given, rows = np.full(len(batch_slots), -1, np.int64), batch_slots.astype(np.int64)
        return HostStep((1,) * len(batch_slots), batch_slots, lengths, given, positions, slots, rows, batch_slots, drawn)

    def _slots(self, rows: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._tables[rows, positions // self._size] * self._size + positions % self._size


def _part(step: AttentionMetadata, first: int, last: int) -> AttentionMetadata:
    """Return the sequences [first, last) of a step as if they were all."""
    begin, end = step.query_starts[first], step.query_starts[last]
    starts = [start - begin for start in step.query_starts[first : last + 1]]
    trees = step.trees
    if trees is not None:
        trees = TreeInput(trees.num_drafts[first:last], trees.ancestors[begin:end])
    return AttentionMetadata(step.slots[begin:end], starts, step.context_lens[first:last], step.block_tables[first:last], trees)


def best_shares(logits: Tensor) -> Tensor:
    """Return how likely the best token of each row of logits [S, V] is, [S] f32."""
    scaled = logits.float() * _SHARPNESS
    return (scaled.amax(1) - scaled.logsumexp(1)).exp()


def _likely_counts(shares: list[Tensor], least_share: float, counts: list[int]) -> list[int]:
    """Return how many drafts of each sequence are kept; shares: of each level [S]."""
    ways = itertools.accumulate(torch.stack(shares).cpu(), torch.mul)
    is_likely = torch.stack([way >= least_share for way in ways]).long()
    likely = is_likely.cumprod(0).sum(0).tolist()
    return [min(count, num_likely) for count, num_likely in zip(counts, likely, strict=True)]
