"""BlockTableUpdates: what changes on the device before a step, as arrays that are sent with those of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.worker.device.row_processors import ProcessorUpdates, processor_parts
from quire.worker.device.staging import Part, Staged
from quire.worker.step_executor import Moves, TableEntry


@dataclass(frozen=True, slots=True)
class BlockTableUpdates:
    """Changes of the block tables, KV blocks to copy, as (source, target), the KV of accepted drafts to move, which comes
    first, and recurrent states to copy, as (source, target).

    window_copies, window_moves  the same in the window group, by its blocks and slots; as many moves, of the same sequences
    processors                   tables of logits processors; a message that has these has nothing else
    """

    entries: Sequence[TableEntry]
    block_copies: Sequence[tuple[int, int]] = ()
    moves: Moves | None = None
    state_copies: Sequence[tuple[int, int]] = ()
    window_copies: Sequence[tuple[int, int]] = ()
    window_moves: Moves | None = None
    processors: ProcessorUpdates | None = None

    @classmethod
    def split(
        cls,
        entries: Sequence[TableEntry],
        block_copies: Sequence[tuple[int, int]],
        moves: Moves | None,
        state_copies: Sequence[tuple[int, int]],
        first_window_block: int | None,
        block_size: int,
    ) -> BlockTableUpdates:
        """Return changes whose copies and moves name blocks of both groups together; see StepExecutor.first_window_block."""
        first = first_window_block
        if first is None:
            return cls(entries, block_copies, moves, state_copies)
        full = [pair for pair in block_copies if pair[0] < first]
        windows = [(source - first, target - first) for source, target in block_copies if source >= first]
        if moves is None:
            return cls(entries, full, None, state_copies, windows)
        # The slots of a token are next to each other: in the full group, and in the window group.
        starts, shift = [start // 2 for start in moves.starts], first * block_size
        window_moves = Moves([s - shift for s in moves.sources[1::2]], [t - shift for t in moves.targets[1::2]], starts)
        return cls(entries, full, Moves(moves.sources[::2], moves.targets[::2], starts), state_copies, windows, window_moves)

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        changes = self.entries or self.block_copies or self.state_copies or self.window_copies
        return self.moves is None and self.processors is None and not changes

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of `change_parts`."""
        moves, num_windows = self.moves, 0 if self.window_moves is None else len(self.window_moves.sources)
        num_moves, num_moved = (0, 0) if moves is None else (len(moves.sources), len(moves.starts) - 1)
        num_entries = sum(len(blocks) for _, _, blocks in self.entries)
        copies = len(self.block_copies), len(self.state_copies), len(self.window_copies)
        processors = (0, 0, 0) if self.processors is None else self.processors.counts
        return num_entries, copies[0], num_moves, num_moved, *copies[1:], num_windows, *processors

    def parts(self) -> list[Part]:
        """Return the arrays of these changes."""
        return change_parts(*self.counts)

    def fill(self, staged: Staged, width: int) -> None:
        """Write the arrays of `parts`; width: entries of a block table."""
        host = staged.host
        if self.processors is not None:
            self.processors.fill(host)
        if self.entries:
            host["places"][:], host["blocks"][:] = _entries(self, width)
        if self.block_copies:
            host["sources"][:], host["targets"][:] = zip(*self.block_copies, strict=True)
        if self.state_copies:
            host["state_starts"][:], host["state_targets"][:] = zip(*self.state_copies, strict=True)
        if self.window_copies:
            host["window_sources"][:], host["window_targets"][:] = zip(*self.window_copies, strict=True)
        if self.window_moves is not None:
            host["window_move_sources"][:], host["window_move_targets"][:] = self.window_moves[:2]
        if self.moves is not None:
            host["move_sources"][:], host["move_targets"][:], host["move_starts"][:] = self.moves


def change_parts(
    num_entries: int,
    num_copies: int,
    num_moves: int = 0,
    num_moved: int = 0,
    num_state_copies: int = 0,
    num_window_copies: int = 0,
    num_window_moves: int = 0,
    num_processor_rows: int = 0,
    num_processor_words: int = 0,
    num_processor_biases: int = 0,
) -> list[Part]:
    """Return the arrays of changes; num_moves of num_moved sequences."""
    processors = num_processor_rows, num_processor_words, num_processor_biases
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
        Part("window_sources", torch.int64, num_window_copies),
        Part("window_targets", torch.int64, num_window_copies),
        Part("window_move_sources", torch.int64, num_window_moves),
        Part("window_move_targets", torch.int64, num_window_moves),
        *(processor_parts(*processors) if any(processors) else ()),
    ]


def _entries(changes: BlockTableUpdates, width: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    places = [np.arange(len(blocks)) + batch_slot * width + index for batch_slot, index, blocks in changes.entries]
    return np.concatenate(places), np.array([block for _, _, blocks in changes.entries for block in blocks], np.int32)
