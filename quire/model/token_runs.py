"""TokenRuns: the tokens of a step, and the block tables of their sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.reference.attention import AttentionMetadata, TreeInput
from quire.kernels.reference.recurrent import StateRows
from quire.kernels.reference.run_skips import RunSkips

BlockTable = NDArray[np.int64]


def address_of(table: BlockTable) -> int:
    """Return the address of a block table. Call once and cache the result: it takes longer than a native call."""
    return table.ctypes.data


def run_places(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each token [T] in its sequence, given `starts` and `ends` of TokenRuns."""
    counts = np.diff(starts)
    return np.repeat(ends - counts, counts) + np.arange(starts[-1]) - np.repeat(starts[:-1], counts)


def short_rope_tokens(starts: list[int], short_ropes: list[bool] | None) -> NDArray[np.bool_] | None:
    """Return which tokens [T] take the short variant of the rope, given the sequences' flags; None where none does."""
    if short_ropes is None or not any(short_ropes):
        return None
    return np.repeat(short_ropes, np.diff(starts))


def adapter_rows(keys: list[str] | None, starts: list[int]) -> dict[str, Tensor] | None:
    """Return key -> indices of the tokens that use the adapter; None where all use the base model.

    keys    of the adapters of S sequences; "": the base model
    starts  S + 1 offsets: sequence s has the tokens [starts[s], starts[s + 1])
    """
    if keys is None or not any(keys):
        return None
    found: dict[str, list[NDArray[np.int64]]] = {}
    for index, key in enumerate(keys):
        if key:
            found.setdefault(key, []).append(np.arange(starts[index], starts[index + 1]))
    return {key: torch.from_numpy(np.concatenate(parts)) for key, parts in found.items()}


@dataclass(frozen=True, slots=True)
class TreePlaces:
    """The draft trees among a step's tokens; their cache slots are consecutive, independent of their positions.

    positions   [T] i64 of all tokens
    num_drafts  [S] i32, and ancestors [T] u64: see TreeInput
    """

    positions: NDArray[np.int64]
    num_drafts: NDArray[np.int32]
    ancestors: NDArray[np.uint64]


class BoundsRequest(NamedTuple):
    """Which of S sequences skip runs of keys by bounds of their scores; see kernels/reference/run_skips.py.

    keys    of each sequence a number that no other one has had, under which the bounds of its keys are kept; 0: it reads all
    firsts  positions from which on its tokens skip runs
    gaps    see RunSkips
    ended   keys whose bounds are not needed any more
    """

    keys: list[int]
    firsts: list[int]
    gaps: list[float]
    ended: list[int]

    def skips(self, counts: NDArray[np.int64], positions: NDArray[np.int64]) -> RunSkips:
        """Return which of the tokens at some positions [T] skip runs; counts: of the tokens of each sequence."""
        skips = (positions >= np.repeat(self.firsts, counts)) & (np.repeat(self.keys, counts) != 0)
        return RunSkips(torch.from_numpy(np.where(skips, np.repeat(self.gaps, counts), np.inf).astype(np.float32)))


class TokenRuns(NamedTuple):
    """Runs of tokens of S sequences, one run after the other. Plain lists: the native kernels take them as they are.

    starts     S + 1 offsets: sequence s owns token_ids [starts[s], starts[s + 1]), at least one
    ends       S positions, each one after the last token of its run
    tables     S block tables [max_blocks], which hold these positions, and `addresses` their addresses. Where the cache has a
               window group, the second half of each is the table of that group
    trees      None: there are none
    short_ropes  S flags: the sequence takes the short variant of the rope, see ModelSpec.rope_switch_len; None: none does
    states     rows of recurrent states; None: the model has none
    adapters   keys of the S sequences' LoRA adapters, "": none; None: no sequence has one
    num_dropped  S numbers of tokens that the cache has no longer: `ends` are places in the cache, and positions minus these.
               None: all are 0
    bounds     None: no sequence skips runs
    """

    token_ids: list[int]
    starts: list[int]
    ends: list[int]
    tables: list[BlockTable]
    addresses: list[int]
    trees: TreePlaces | None = None
    short_ropes: list[bool] | None = None
    states: StateRows | None = None
    adapters: list[str] | None = None
    num_dropped: list[int] | None = None
    bounds: BoundsRequest | None = None

    def positions(self) -> NDArray[np.int64]:
        """Return the positions [T] of the tokens; those of a tree by their depths."""
        if self.trees is not None:
            return self.trees.positions
        return run_places(np.array(self.starts), np.array(self.position_ends))

    @property
    def position_ends(self) -> list[int]:
        """The position after the last token of each run."""
        if self.num_dropped is None:
            return self.ends
        return [end + dropped for end, dropped in zip(self.ends, self.num_dropped, strict=True)]

    def short_rope_tokens(self) -> NDArray[np.bool_] | None:
        """Return which tokens [T] take the short variant of the rope; None where none does."""
        return short_rope_tokens(self.starts, self.short_ropes)

    def tensors(
        self,
        block_size: int,
        origins: list[int] | None = None,
        room: list[int] | None = None,
        has_windows: bool = False,
    ) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Return token ids and positions [T] i64, and what attention reads.

        origins  positions (starts of blocks) from which on a sequence is attended to; None: from its start
        room     positions after the end of each run that its table must hold; None: none
        has_windows  there is a window group: fill AttentionMetadata.window
        """
        counts = np.diff(self.starts)
        ends, first_seen = np.array(self.ends), np.zeros(len(counts), np.int64) if origins is None else np.array(origins)
        places = run_places(np.array(self.starts), ends)
        firsts, lasts = first_seen // block_size, -(-(ends + (0 if room is None else np.array(room))) // block_size)
        row_of = np.repeat(np.arange(len(counts)), counts)

        def place(offset: int) -> tuple[Tensor, Tensor]:
            tables = np.zeros((len(counts), int((lasts - firsts).max())), dtype=np.int64)
            for row, (table, first, last) in enumerate(zip(self.tables, firsts, lasts, strict=True)):
                tables[row, : last - first] = table[offset + first : offset + last]
            slots = tables[row_of, places // block_size - firsts[row_of]] * block_size + places % block_size
            return torch.from_numpy(slots), torch.from_numpy(tables)

        slots, tables = place(0)
        window_slots, window_tables = place(len(self.tables[0]) // 2) if has_windows else (slots, tables)
        trees = None
        if self.trees is not None:
            ancestors = torch.from_numpy(self.trees.ancestors.view(np.int64))
            trees = TreeInput(torch.from_numpy(self.trees.num_drafts), ancestors)
        positions = places if self.trees is None and self.num_dropped is None else self.positions()
        lengths = (ends - first_seen).tolist()
        short = self.short_rope_tokens()
        attention = AttentionMetadata(
            slots,
            self.starts,
            lengths,
            tables,
            trees,
            short_ropes=None if short is None else torch.from_numpy(short),
            states=self.states,
            adapters=adapter_rows(self.adapters, self.starts),
            skips=None if self.bounds is None else self.bounds.skips(counts, positions),
        )
        if has_windows:
            window = replace(attention, slots=window_slots, block_tables=window_tables, decode_groups={})
            attention = replace(attention, window=window)
        return torch.tensor(self.token_ids, dtype=torch.int64), torch.from_numpy(positions), attention
