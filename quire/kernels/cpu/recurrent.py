"""Recurrent states by the native kernels, where they are built; else by torch."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from quire.kernels.native import load_native
from quire.kernels.reference import recurrent as reference
from quire.kernels.reference.recurrent import Recurrence, StateRows

_HEAD, _ROW, _CHANNEL = 0, 1, 2


def recur(inputs: Recurrence, pool: Tensor, starts: list[int], rows: StateRows) -> Tensor:
    """Return what `reference.recur` returns, up to the rounding of sums, and leave the same states in the pool.

    The bits do not depend on where runs are cut, nor on the other sequences.
    """
    native = load_native()
    if native is None or inputs.k.shape[2] > native.MAX_STATE_ROWS:
        return reference.recur(inputs, pool, starts, rows)
    return recur_native(native, inputs, pool, starts, rows, num_threads=torch.get_num_threads())


def recur_native(
    native: ModuleType, inputs: Recurrence, pool: Tensor, starts: list[int], rows: StateRows, *, num_threads: int, isa: str = ""
) -> Tensor:
    """Return what `reference.recur` returns, by the kernels of an instruction set; "": the best one."""
    parts = (inputs.q, inputs.k, inputs.v, inputs.decay, inputs.rates, inputs.beta)
    tensors = [None if part is None else part.contiguous() for part in parts]
    out = torch.empty(inputs.v.shape, dtype=torch.float32)
    sources, copies = _sources(pool, rows)
    size, first = pool.stride(0) * pool.element_size(), pool.data_ptr()
    saves = [sorted((count, first + row * size) for count, row in saved) for saved in rows.saves]
    kind = _CHANNEL if inputs.rates is not None else _HEAD if inputs.decay.ndim == 2 else _ROW
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, out)]
    native.recur(addresses, (inputs.k.shape[1], *inputs.state_shape), kind, starts, sources, saves, num_threads, isa)
    del copies  # they live until here
    return out


def _sources(pool: Tensor, rows: StateRows) -> tuple[list[int], list[Tensor]]:
    """Return where the state lies that each run starts from, 0 for zeros, and copies of those that other runs overwrite."""
    writer = {row: index for index, saved in enumerate(rows.saves) for _, row in saved}
    size, first, copies, found = pool.stride(0) * pool.element_size(), pool.data_ptr(), [], []
    for index, row in enumerate(rows.sources):
        if row >= 0 and writer.get(row, index) != index:
            copies.append(pool[row].clone())
            found.append(copies[-1].data_ptr())
        else:
            found.append(0 if row < 0 else first + row * size)
    return found, copies
