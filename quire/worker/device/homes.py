"""Steps of sequences that have homes on the ranks of a model: their order, and what of them one rank attends to.

All ranks get the same arrays, in which the sequences of a home follow each other, in the order of ranks. A home without
sequences has one of padding, so that all ranks launch the same kernels and collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.triton.step import AttentionLibrary, DeviceAttentionMetadata, HomeRows
from quire.model.device_decoder import DeviceDecoder
from quire.model.heads.device_head import DeviceHead
from quire.model.token_runs import TreePlaces
from quire.worker.device.host_step import HostStep
from quire.worker.device.mixed_step import StepShape
from quire.worker.device.staged_call import ChangeCounts
from quire.worker.device.staging import Staged

_Number = TypeVar("_Number", bound=np.generic)


class Homes(NamedTuple):
    """The homes of a model, one for each rank, as one of them sees them.

    rank   this one
    size   homes; 1: sequences have no homes
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, decoder: DeviceDecoder | DeviceHead) -> Homes:
        """Return those of the ranks of a model; a draft head runs on one rank."""
        ranks = decoder.ranks
        return cls(ranks.shard.rank, len(ranks.shard.ranks)) if ranks is not None and ranks.shard.has_homes else cls()

    def placed(self, step: HostStep, first_blocks: NDArray[np.int64], pool: tuple[int, int]) -> HostStep:
        """Return a step with the home of each sequence, given its first block, and with slots of the pool there.

        pool  blocks of each rank, and tokens of a block
        """
        num_blocks, block_size = pool
        return replace(step, homes=first_blocks // num_blocks, slots=step.slots % (num_blocks * block_size))

    def homes_of(self, step: HostStep) -> NDArray[np.int64]:
        """Return the home of each sequence [S]; in a step of padding all are at the first one, for most memory."""
        return np.zeros(len(step.counts), np.int64) if step.homes is None else step.homes

    def own_changes(
        self, staged: Staged, counts: ChangeCounts, pool: tuple[int, int]
    ) -> tuple[ChangeCounts, Mapping[str, Tensor]]:
        """Keep, on the host, the changes of this rank's blocks, with their numbers here.

        pool  blocks of each rank, and tokens of a block
        Returns the counts of that, and its arrays on the device, to be sent
        """
        num_blocks, block_size = pool
        host, arrays = staged.host, dict(staged.device)
        blocks = _integers(host["blocks"])
        blocks[:] = blocks % num_blocks  # tables of sequences of other homes are not read here
        is_copied = self._keep_own(host, arrays, ("sources", "targets"), num_blocks)
        counts = counts._replace(num_copies=int(is_copied.sum()))
        if counts.num_moved:
            is_moved = self._keep_own(host, arrays, ("move_sources", "move_targets"), num_blocks * block_size)
            num_moves = int(is_moved.sum())
            # The moves of a sequence are all at one home: others have none here.
            starts = _integers(host["move_starts"])
            starts[:] = np.concatenate(([0], np.cumsum(is_moved)))[starts]
            counts = counts._replace(num_moves=num_moves, num_moved=counts.num_moved if num_moves else 0)
        return counts, arrays

    def _keep_own(
        self, host: Mapping[str, NDArray[np.generic]], arrays: dict[str, Tensor], names: tuple[str, str], size: int
    ) -> NDArray[np.bool_]:
        """Keep pairs of blocks, or of slots, of this rank's; return which these were. size: blocks, or slots, of each rank."""
        is_own = _integers(host[names[0]]) // size == self.rank
        for name in names:
            values = _integers(host[name])
            own = values[is_own] - self.rank * size
            values[: len(own)], arrays[name] = own, arrays[name][: len(own)]
        return is_own


class HomeOrder(NamedTuple):
    """How the sequences of a step are arranged by their homes.

    sequences  of each home, those of padding included
    places     [T] i64, where each of the step's tokens has gone
    """

    sequences: tuple[int, ...]
    places: NDArray[np.int64]

    def fill(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Write the places; the array may be longer."""
        places = _integers(arrays["home_places"])
        places[: len(self.places)] = self.places
        places[len(self.places) :] = 0


def by_home(step: HostStep, homes: Homes, padding_row: int, num_rows: int | None = None) -> tuple[HostStep, HomeOrder]:
    """Return a step with its sequences in the order of their homes, and what has changed.

    num_rows  sequences of each home, with padding; None: as many as it has, at least one. A sequence of padding has one token,
              no context, and the batch slot padding_row
    What says which tokens get a next one is as it was, counted by the tokens in the old order.
    """
    counts, at = np.array(step.counts, np.int64), homes.homes_of(step)
    order, there = np.argsort(at, kind="stable"), np.bincount(at, minlength=homes.size)
    sizes = np.maximum(there, 1) if num_rows is None else np.full(homes.size, num_rows)
    sequences = np.full(sizes.sum(), -1)
    sequences[np.arange(len(order)) + np.repeat(np.cumsum(sizes - there) - (sizes - there), there)] = order

    new_counts = _taken(counts, sequences, 1)
    starts = _taken(np.cumsum(counts) - counts, sequences, -1)
    offsets = np.arange(int(new_counts.sum())) - np.repeat(np.cumsum(new_counts) - new_counts, new_counts)
    tokens = np.repeat(starts, new_counts) + offsets
    is_real = np.repeat(sequences >= 0, new_counts)
    places = np.empty(len(step.given_ids), np.int64)
    places[tokens[is_real]] = np.flatnonzero(is_real)
    trees = step.trees
    if trees is not None:
        positions, ancestors = _taken(trees.positions, tokens, 0), _taken(trees.ancestors, tokens, 0)
        trees = TreePlaces(positions, _taken(trees.num_drafts, sequences, 0), ancestors)
    arranged = replace(
        step,
        counts=tuple(new_counts.tolist()),
        rows=_taken(step.rows, sequences, padding_row),
        context_lens=_taken(step.context_lens, sequences, 0),
        given_ids=_taken(step.given_ids, tokens, 0),
        positions=_taken(step.positions, tokens, 0),
        slots=_taken(step.slots, tokens, -1),
        trees=trees,
        homes=None,
    )
    return arranged, HomeOrder(tuple(sizes.tolist()), places)


def _taken(values: NDArray[_Number], indices: NDArray[np.int64], padding: int) -> NDArray[_Number]:
    """Return values at indices, and a number where an index is negative."""
    found = np.full(len(indices), padding, values.dtype)
    found[indices >= 0] = values[indices[indices >= 0]]
    return found


def decode_at_home(step: DeviceAttentionMetadata, places: Tensor, homes: Homes) -> DeviceAttentionMetadata:
    """Return what a rank attends to of a decode step, in which all homes have as many sequences; places: see HomeRows."""
    count = len(step.context_lens) // homes.size
    own = slice(homes.rank * count, (homes.rank + 1) * count)
    numbers = step.slots, step.context_lens, step.block_tables
    slots, lengths, tables = (each[own].clone() for each in numbers)  # at addresses for which kernels are compiled
    rows = HomeRows((count,) * homes.size, step.slots, places)
    starts = step.query_starts[: count + 1]
    return DeviceAttentionMetadata.of_decode(slots, starts, lengths, tables, step.max_context_len, homes=rows)


def step_at_home(
    shape: StepShape, arrays: Mapping[str, Tensor], tables: Tensor, homes: Homes, library: AttentionLibrary | None
) -> DeviceAttentionMetadata:
    """Return what a rank attends to in a step that is launched one by one; its work lists are made when they are needed."""
    last = np.cumsum(shape.home_sequences)[homes.rank]
    own = slice(int(last) - shape.home_sequences[homes.rank], int(last))
    ends = np.cumsum((0, *shape.counts))
    first_token = int(ends[own.start])
    tokens = slice(first_token, int(ends[own.stop]))
    counts, lengths = shape.counts[own], shape.context_lens[own]
    home_ends = ends[np.cumsum(shape.home_sequences)]
    rows = HomeRows(tuple(np.diff(home_ends, prepend=0).tolist()), arrays["slots"], arrays["home_places"])
    starts = arrays["query_starts"][own.start : own.stop + 1] - first_token
    drafts: tuple[Tensor | None, Tensor | None, Tensor | None] = None, None, None
    if "ancestors" in arrays:
        of_tokens = arrays["ancestors"][tokens].clone(), arrays["tree_positions"][tokens].clone()
        drafts = arrays["num_drafts"][own].clone(), *of_tokens
    return DeviceAttentionMetadata(
        arrays["slots"][tokens].clone(),
        starts,
        arrays["context_lens"][own].clone(),
        tables[own].clone(),
        *drafts,
        counts,
        max(1, *lengths),
        False,
        lengths,
        library if min(lengths) > 0 else None,
        homes=rows,
    )


def _integers(array: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return an array of integers of any width, as its type."""
    return array  # pyright: ignore[reportReturnType]
