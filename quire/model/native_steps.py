"""Several steps of the native decoder one after the other, with what they share made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kv.pool import KvPool
from quire.model.native_decoder import NativeDecoder
from quire.model.token_runs import TokenRuns


def draft_greedily(
    decoder: NativeDecoder, kv: KvPool, runs: TokenRuns, counts: list[int], least_share: float = 0.0
) -> list[list[int]]:
    """Compute runs of tokens; return the most likely ones behind the last one of every sequence s, counts[s] >= 1 of them, or
    those before the first with which all together are less likely than least_share.

    The block tables have room for counts[s] - 1 tokens more.
    """
    decoder.prepare(kv, max(runs.ends) + max(counts))
    origins = [0] * len(counts)
    return decoder.plan.draft(
        runs.token_ids, runs.starts, runs.ends, origins, runs.addresses, len(runs.tables[0]), 0, 0, counts, 0, least_share
    )


class OneTokenSteps:
    """Computes the tokens of S sequences, each behind the one before, of which only the tokens have to be given.

    positions  [S] of the first tokens
    tables     [S, max_blocks] i64 the block tables; they hold the positions of all steps
    layers     those that are run, in order; None: all
    short_ropes  [S] as in TokenRuns
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        kv: KvPool,
        positions: Sequence[int],
        tables: NDArray[np.int64],
        num_steps: int,
        layers: Sequence[int] | None = None,
        short_ropes: Sequence[bool] | None = None,
    ) -> None:
        first = np.array(positions, dtype=np.int64)
        num_rows, size = len(first), kv.spec.block_size
        decoder.prepare(kv, int(first.max()) + num_steps)
        self._tables = np.ascontiguousarray(tables[:, : -(-(int(first.max()) + num_steps) // size)], dtype=np.int32)
        self._positions = first + np.arange(num_steps, dtype=np.int64)[:, None]
        blocks, offsets = np.divmod(self._positions, size)
        self._slots = self._tables[np.arange(num_rows), blocks].astype(np.int64) * size + offsets
        self._lengths = (self._positions + 1).astype(np.int32)
        if short_ropes is not None and any(short_ropes):
            self._positions = self._positions + np.array(short_ropes) * decoder.num_angles
        self._tokens = np.zeros(num_rows, dtype=np.int64)
        self._starts = np.arange(num_rows + 1, dtype=np.int32)
        self._plan: Any = decoder.plan
        self._layers = None if layers is None else np.array(layers, dtype=np.int32)
        self._index = 0
        self.logits: Tensor = torch.empty(num_rows, decoder.spec.vocab_size)
        self._addresses = [array.ctypes.data for array in (self._positions, self._slots, self._lengths)]
        self._fixed = [array.ctypes.data for array in (self._tokens, self._starts, self._tables)]
        self._logits_address = self.logits.data_ptr()

    def run(self, token_ids: Sequence[int]) -> Tensor:
        """Compute the next token of each sequence; return the logits [S, V] f32 behind them, which the next call overwrites."""
        num_rows = len(self._tokens)
        self._tokens[:] = token_ids
        positions, slots, lengths = self._addresses
        tokens, starts, tables = self._fixed
        offset = self._index * num_rows
        self._plan.step(
            tokens,
            positions + 8 * offset,
            slots + 8 * offset,
            num_rows,
            num_rows,
            starts,
            lengths + 4 * offset,
            tables,
            self._tables.shape[1],
            starts,  # rows 0, 1, ...: the logits of all
            num_rows,
            num_rows,
            False,
            self._logits_address,
            0,
            0,
            0 if self._layers is None else self._layers.ctypes.data,
            0 if self._layers is None else len(self._layers),
        )
        self._index += 1
        return self.logits
