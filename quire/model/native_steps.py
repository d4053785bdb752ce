"""Several consecutive steps of the native decoder, with their shared arguments made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
    """Compute runs of tokens; return the most likely tokens after the last one of every sequence s: counts[s] >= 1 of them, or
    fewer if their joint probability falls below least_share.

    The block tables have room for counts[s] - 1 tokens more.
    """
    decoder.prepare(kv, max(runs.ends) + max(counts))
    origins = [0] * len(counts)
    return decoder.plan.draft(
        runs.token_ids, runs.starts, runs.ends, origins, runs.addresses, len(runs.tables[0]), 0, 0, counts, 0, least_share
    )


class OneTokenCall(NamedTuple):
    """One token of each of S sequences through some layers; the message to every rank of a tensor-parallel group.

    token_ids, positions, slots  [S] i64; positions are rows of the table of angles
    lengths                      [S] i32, tokens in the cache once this one is stored
    block_tables                 [S, max_blocks] i32
    layers                       those that are run, in order; None: all
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    lengths: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    layers: NDArray[np.int32] | None


class OneTokenSteps:
    """Computes consecutive tokens of S sequences; after the construction only the token ids are needed.

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
        self._decoder = decoder
        self._tables = np.ascontiguousarray(tables[:, : -(-(int(first.max()) + num_steps) // size)], dtype=np.int32)
        self._positions = first + np.arange(num_steps, dtype=np.int64)[:, None]
        blocks, offsets = np.divmod(self._positions, size)
        self._slots = self._tables[np.arange(num_rows), blocks].astype(np.int64) * size + offsets
        self._lengths = (self._positions + 1).astype(np.int32)
        if short_ropes is not None and any(short_ropes):
            self._positions = self._positions + np.array(short_ropes) * decoder.num_angles
        self._tokens = np.zeros(num_rows, dtype=np.int64)
        self._layers = None if layers is None else np.array(layers, dtype=np.int32)
        self._index = 0
        self.logits: Tensor = torch.empty(num_rows, decoder.spec.vocab_size)
        self._call = _OneTokenAddresses(self._tokens, self._tables, self._layers, self.logits.data_ptr())
        self._addresses = [array.ctypes.data for array in (self._positions, self._slots, self._lengths)]

    def run(self, token_ids: Sequence[int]) -> Tensor:
        """Compute the next token of each sequence; return the logits [S, V] f32 after them, which the next call overwrites."""
        self._tokens[:] = token_ids
        index, offset = self._index, self._index * len(self._tokens)
        positions, slots, lengths = self._addresses
        plan, mirror = self._decoder.plan, self._decoder.mirror
        self._index += 1
        if mirror is None:
            self._call.run(plan, positions + 8 * offset, slots + 8 * offset, lengths + 4 * offset)
            return self.logits
        call = OneTokenCall(
            self._tokens, self._positions[index], self._slots[index], self._lengths[index], self._tables, self._layers
        )
        mirror.call_one_token(
            call, lambda: self._call.run(plan, positions + 8 * offset, slots + 8 * offset, lengths + 4 * offset)
        )
        return self.logits

    @staticmethod
    def run_call(decoder: NativeDecoder, kv: KvPool, call: OneTokenCall) -> None:
        """Do what rank 0 of a group does in `run`, on another rank, which gets no logits."""
        decoder.prepare(kv, int(call.lengths.max()))
        arrays = call.positions, call.slots, call.lengths
        _OneTokenAddresses(call.token_ids, call.block_tables, call.layers, 0).run(
            decoder.plan, *(array.ctypes.data for array in arrays)
        )


class _OneTokenAddresses:
    """The constant arguments of a native step of one token per sequence; the arrays must outlive it."""

    def __init__(
        self, tokens: NDArray[np.int64], tables: NDArray[np.int32], layers: NDArray[np.int32] | None, logits_address: int
    ) -> None:
        num_rows = len(tokens)
        self._starts = np.arange(num_rows + 1, dtype=np.int32)
        starts = self._starts.ctypes.data
        self._num_rows, self._tokens = num_rows, tokens.ctypes.data
        # Logits of all rows: 0, 1, ...
        self._end = (starts, num_rows, num_rows, False, logits_address, 0, 0)
        self._tables = (tables.ctypes.data, tables.shape[1])
        self._layers = (0, 0) if layers is None else (layers.ctypes.data, len(layers))

    def run(self, plan: Any, positions: int, slots: int, lengths: int) -> None:
        """Run the step of the tokens at these addresses."""
        count, starts = self._num_rows, self._starts.ctypes.data
        plan.step(self._tokens, positions, slots, count, count, starts, lengths, *self._tables, *self._end, *self._layers)
