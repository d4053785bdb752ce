"""BlockTableUpdates: what changes on the device before a step, as arrays that are sent with those of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.worker.device.staging import Part, Staged
from quire.worker.step_executor import Moves, TableEntry


@dataclass(frozen=True, slots=True)
class BlockTableUpdates:
    """Changes of the block tables, KV blocks to copy, as (source, target), the KV of accepted drafts to move, which comes
    first, and recurrent states to copy, as (source, target)."""

    entries: Sequence[TableEntry]
    block_copies: Sequence[tuple[int, int]] = ()
    moves: Moves | None = None
    state_copies: Sequence[tuple[int, int]] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not self.entries and not self.block_copies and self.moves is None and not self.state_copies

    def parts(self) -> list[Part]:
        """Return the arrays of these changes."""
        num_entries = sum(len(blocks) for _, _, blocks in self.entries)
        num_moves, num_moved = (0, 0) if self.moves is None else (len(self.moves.sources), len(self.moves.starts) - 1)
        return change_parts(num_entries, len(self.block_copies), num_moves, num_moved, len(self.state_copies))

    def fill(self, staged: Staged, width: int) -> None:
        """Write the arrays of `parts`; width: entries of a block table."""
        host = staged.host
        if self.entries:
            host["places"][:], host["blocks"][:] = _entries(self, width)
        if self.block_copies:
            host["sources"][:], host["targets"][:] = zip(*self.block_copies, strict=True)
        if self.state_copies:
            host["state_starts"][:], host["state_targets"][:] = zip(*self.state_copies, strict=True)
        if self.moves is not None:
            host["move_sources"][:], host["move_targets"][:], host["move_starts"][:] = self.moves


def change_parts(
    num_entries: int, num_copies: int, num_moves: int = 0, num_moved: int = 0, num_state_copies: int = 0
) -> list[Part]:
    """Return the arrays of changes; num_moves of num_moved sequences."""
    return [
        Part("places", torch.int64, num_entries),
        Part("blocks", torch.int32, num_entries),
        Part("sources", torch.int64, num_copies),
        Part("targets", torch.int64, num_copies),
        Part("move_sources", torch.int64, num_moves),
        Part("move_targets", torch.int64, num_moves),
        Part("move_starts", torch.int32, num_moved + 1),
        Part("state_starts", torch.int64, num_state_copies),
        Part("state_targets", torch.int64, num_state_copies),
    ]


def _entries(changes: BlockTableUpdates, width: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    places = [np.arange(len(blocks)) + batch_slot * width + index for batch_slot, index, blocks in changes.entries]
    return np.concatenate(places), np.array([block for _, _, blocks in changes.entries for block in blocks], np.int32)
