"""DeviceAttentionMetadata: AttentionMetadata as tensors on the device, with the work lists of its launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import AttentionSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.recurrent import StateRows, place_saves
from quire.kernels.triton.sizes import power_of_two

_ALIGNMENT = 16


class Tiles(NamedTuple):
    """Runs of queries of one sequence each; each run is processed by one program.

    sequences, offsets  [N] i32: the sequence, and the run's first query counted from the sequence's first; None: run i is the
                        only query of sequence i
    num_tiles           N
    num_queries         maximum length of a run
    """

    sequences: Tensor | None
    offsets: Tensor | None
    num_tiles: int
    num_queries: int

    def part(self, first: int, count: int) -> Tiles:
        """Return tiles [first, first + count), fewer at the end; all tiles if there are no lists."""
        if self.sequences is None or self.offsets is None:
            return self
        sequences, offsets = self.sequences[first : first + count], self.offsets[first : first + count]
        return Tiles(sequences, offsets, len(sequences), self.num_queries)


class ChunkPlan(NamedTuple):
    """Chunks of the keys of tiles, as split_kernels.plan_chunks writes them: starts [tiles + 1] i32, tiles [items] i32.

    chunks  [items] i32: which ones they are, where a rank has some of them; None: all, in order
    """

    starts: Tensor
    tiles: Tensor
    chunks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Where the keys of a step's sequences are, of which several ranks have some chunks.

    tables  [S, max_blocks] i32, of all ranks' blocks: those of rank r begin at r * blocks_per_rank
    firsts  [S] i64: the rank of each sequence's first chunk; the next ones are on the next ranks in turn
    plans   whatever layers with the same attention share, by its kind
    """

    tables: Tensor
    firsts: Tensor
    blocks_per_rank: int
    plans: dict[Hashable, object] = field(default_factory=dict)


class TileLists(NamedTuple):
    """Runs of queries as (sequence, offset), on the host; longest_short: maximum queries of a short sequence, at least 1."""

    short: list[tuple[int, int]]
    long: list[tuple[int, int]]
    longest_short: int


class AttentionLibrary(Protocol):
    """A library that computes attention instead of our kernels."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: DeviceAttentionMetadata, spec: AttentionSpec) -> Tensor:
        """Return [T, H, D]: every query over its sequence's cached keys, causally.

        q     [T, H, D], k and v [num_blocks, K, block_size, D], all of one dtype
        step  without trees or empty sequences, with host_context_lens
        """
        ...


class AddsAdapters(Protocol):
    """The rows of a step that have LoRA adapters.

    numbers  [T] i32 of the rows' adapters; -1: none
    """

    @property
    def numbers(self) -> Tensor: ...

    def add_to(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """Return the output y [T, O] of a linear layer with what the adapters add for its input x [T, K]; changes y.

        name  canonical name of the layer, without ".weight"
        """
        ...

    def add_to_keys(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """Return queries y [T, H, kv_rank] in the space of latent rows with what adapters of kv_b add for x [T, H, nope_dim];
        may change y."""
        ...

    def add_to_values(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """Return outputs y [T, H, value_dim] of latent attention with what the adapters of kv_b add for x [T, H, kv_rank]; may
        change y."""
        ...

    def of_experts(
        self, name: str, numbers: Tensor | None = None
    ) -> Callable[[Tensor], Callable[[str, Tensor, int], Tensor]] | None:
        """Return what the adapters add to the products of a mixture, see `ExpertExtras` of moe.py; None: nothing.

        name     of the experts of a layer, as layers.0.experts
        numbers  of the adapters of other rows, which the experts get in place of the step's
        """
        ...


class DeviceStateRows(NamedTuple):
    """Which rows of the state pools a step reads and writes, on the device; see StateRows.

    sources      [S] i32 rows from which sequences start; negative: from zeros
    saves        [T] i32 rows that get the state after a token; negative: none
    checkpoints  [T] i32 further rows that get it
    """

    sources: Tensor
    saves: Tensor
    checkpoints: Tensor

    @classmethod
    def of(cls, rows: StateRows, starts: list[int], device: torch.device) -> DeviceStateRows:
        """Return the rows on a device. Raises InvariantError for more than two rows after one token, or one before all."""
        return cls(*(torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in place_saves(rows, starts)))


class HomeRows(NamedTuple):
    """The rows of a step whose sequences have homes on the ranks; those of a home follow each other, in the order of ranks.

    sizes   of each home, padding included; at least 1
    slots   [sum(sizes)] i64, of all rows; negative: padding
    places  [T] i64, where each of the step's T tokens is among the rows
    """

    sizes: tuple[int, ...]
    slots: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class DeviceAttentionMetadata:
    """Positions and block tables of the tokens of one step, for all layers; a sequence of context length 0 is padding.

    slots            [T] i64, block * block_size + offset where token t's KV is stored; negative: not stored
    query_starts     [S + 1] i32
    context_lens     [S] i32
    block_tables     [S, max_blocks] i32; entries past the context are not read
    num_drafts       [S] i32, or None without trees; with the next two as in TreeInput
    ancestors        [T] i64
    positions        [T] i32, of a draft by its depth
    query_counts     queries of each sequence, on the host; None if they change with each replay of a CUDA graph
    max_context_len  upper bound of the context lengths
    has_cached_drafts
                     whether some drafts of a tree are cached, so that their positions are not among those above
    host_context_lens
                     context_lens on the host; None if they change with each replay of a CUDA graph
    library          computes attention of this step instead of our kernels; None: our kernels do
    states           rows of recurrent states; None: the model has none, or all sequences start and nothing is kept
    lora             the tokens that have adapters; None: there are none
    shared_keys      where the keys of several ranks are; slots and block_tables are of this rank's blocks. None: all are here
    exchange         gets a cache in which this rank has stored its tokens, and stores those of the others; None: there are none
    window           the same for layers of the window group, with its slots and block tables; None: there is no such group
    homes            where sequences have homes on ranks: all rows of the step; all else here is of those at home on this rank
    is_even          whether contexts are about as long, so that keys are not split where the sequences fill the device
    plans            (queries of a tile, window, maximum chunks) -> chunk plan that was launched in this step
    chosen           the keys that the last indexer of this step has chosen, see `choose_keys`
    """

    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    num_drafts: Tensor | None
    ancestors: Tensor | None
    positions: Tensor | None
    query_counts: tuple[int, ...] | None
    max_context_len: int
    has_cached_drafts: bool = False
    host_context_lens: tuple[int, ...] | None = None
    library: AttentionLibrary | None = None
    states: DeviceStateRows | None = None
    lora: AddsAdapters | None = None
    shared_keys: SharedKeys | None = None
    exchange: Callable[[Sequence[Tensor | None]], None] | None = None
    window: DeviceAttentionMetadata | None = None
    homes: HomeRows | None = None
    is_even: bool = False
    plans: dict[tuple[int, int, int], ChunkPlan] = field(default_factory=dict)
    chosen: list[DeviceAttentionMetadata] = field(default_factory=list)
    _tiles: dict[tuple[int, int], tuple[Tiles, Tiles]] = field(default_factory=dict)

    @classmethod
    def of(cls, step: AttentionMetadata, device: torch.device) -> DeviceAttentionMetadata:
        """Return the step on a device."""
        trees = step.trees
        counts = tuple(last - first for first, last in itertools.pairwise(step.query_starts))
        numbers: list[list[int] | Tensor] = [step.query_starts, step.context_lens, step.block_tables]
        if trees is not None:
            numbers += [trees.num_drafts, _tree_positions(step, counts)]
        parts = [torch.as_tensor(values, dtype=torch.int32) for values in numbers]
        wide = [step.slots.long(), *(() if trees is None else (trees.ancestors.long(),))]
        sent = send_together([*wide, *parts], device)
        slots, ancestors = sent[0], sent[1] if trees is not None else None
        starts, context_lens, block_tables, *of_trees = sent[len(wide) :]
        num_drafts, positions = of_trees or (None, None)
        return cls(
            slots,
            starts,
            context_lens,
            block_tables,
            num_drafts,
            ancestors,
            positions,
            counts,
            max(step.context_lens, default=0),
            trees is not None and any(drafts > count for drafts, count in zip(trees.num_drafts.tolist(), counts, strict=True)),
            tuple(step.context_lens),
            states=None if step.states is None else DeviceStateRows.of(step.states, step.query_starts, device),
        )

    @classmethod
    def of_decode(
        cls,
        slots: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        max_context_len: int,
        states: DeviceStateRows | None = None,
        homes: HomeRows | None = None,
        is_even: bool = False,
    ) -> DeviceAttentionMetadata:
        """Return a step with one token for each sequence, of tensors that are on the device."""
        counts = (1,) * len(context_lens)
        places = slots, query_starts, context_lens, block_tables
        return cls(*places, None, None, None, counts, max_context_len, states=states, homes=homes, is_even=is_even)

    def with_windows(self, slots: Tensor, block_tables: Tensor) -> DeviceAttentionMetadata:
        """Return the step with slots and block tables of the window group; all else is shared."""
        return replace(self, window=replace(self, slots=slots, block_tables=block_tables))

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token, and there are no trees."""
        counts = self.query_counts
        return self.num_drafts is None and counts is not None and all(count == 1 for count in counts)

    def place_tiles(self, num_queries: int, num_short: int, short: Tiles, long: Tiles) -> None:
        """Set the work lists, already on the device, that `tiles` would create for these arguments; see list_tiles."""
        self._tiles[num_queries, num_short] = short, long

    def tiles(self, num_queries: int, num_short: int) -> tuple[Tiles, Tiles]:
        """Return the work lists, created once per step and shared by the layers.

        num_queries  queries of a tile
        num_short    sequences with at most this many queries are short, at least 1

        Returns (tiles of short sequences, one each; tiles of the others, those of the longest contexts first)
        """
        key = (num_queries, num_short)
        if key not in self._tiles:
            self._tiles[key] = self._make_tiles(num_queries, num_short)
        return self._tiles[key]

    def _make_tiles(self, num_queries: int, num_short: int) -> tuple[Tiles, Tiles]:
        counts = self.query_counts
        if counts is None:
            raise InvariantError("work lists are made from the queries of each sequence, which a CUDA graph does not have")
        if self.is_decode:
            return Tiles(None, None, len(counts), 1), Tiles(None, None, 0, num_queries)
        lists = list_tiles(counts, num_queries, num_short, self.host_context_lens or counts)
        columns = [
            torch.tensor([pair[side] for pair in pairs], dtype=torch.int32)
            for pairs in (lists.short, lists.long)
            for side in (0, 1)
        ]
        short, short_offsets, long, long_offsets = send_together(columns, self.slots.device)
        return (
            Tiles(short, short_offsets, len(lists.short), lists.longest_short),
            Tiles(long, long_offsets, len(lists.long), num_queries),
        )


def send_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy CPU tensors to a device in one transfer. Each begins at an aligned address, for which kernels are precompiled."""
    places, end = list[slice](), 0
    for tensor in tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.numel() * tensor.element_size()
        places.append(slice(start, end))
    host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, place in zip(tensors, places, strict=True):
        host[place].view(tensor.dtype).copy_(tensor.reshape(-1))
    there = host.to(device, non_blocking=True)
    return [there[place].view(tensor.dtype).view(tensor.shape) for tensor, place in zip(tensors, places, strict=True)]


def list_tiles(counts: Sequence[int], num_queries: int, num_short: int, context_lens: Sequence[int]) -> TileLists:
    """Return the runs of queries of sequences with these counts and cached tokens; see DeviceAttentionMetadata.tiles."""
    short = [(index, 0) for index, count in enumerate(counts) if count <= num_short]
    long = [(i, offset) for i, count in enumerate(counts) if count > num_short for offset in range(0, count, num_queries)]
    # Tiles with most keys begin first, so that the last programs are short ones.
    long.sort(key=lambda tile: counts[tile[0]] - context_lens[tile[0]] - min(tile[1] + num_queries, counts[tile[0]]))
    longest = max((counts[index] for index, _ in short), default=1)
    # Kernels are compiled for the longest, so it is rounded up: few values, and few compilations in the middle of serving.
    return TileLists(short, long, min(power_of_two(longest), num_short))


def _tree_positions(step: AttentionMetadata, counts: tuple[int, ...]) -> Tensor:
    found = []
    for index, (count, length) in enumerate(zip(counts, step.context_lens, strict=True)):
        positions = torch.arange(length - count, length)
        num_drafts = 0 if step.trees is None else int(step.trees.num_drafts[index])
        num_rows = min(num_drafts, count)  # the first drafts may be cached
        if step.trees is not None and num_rows:
            masks = step.trees.ancestors[step.query_starts[index + 1] - num_rows : step.query_starts[index + 1]]
            depths = ((masks[:, None] >> torch.arange(num_drafts)) & 1).sum(1)
            positions[-num_rows:] = length - num_drafts - 1 + depths
        found.append(positions)
    return torch.cat(found)
