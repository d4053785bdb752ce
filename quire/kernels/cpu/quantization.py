"""Quantise rows of float weights with the native kernels; quire/quant/quantize.py defines the computation."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu.pages import is_file_view


class NativeQuantizer:
    """Finds the scales of rows, then the codes, for one scheme. Rows are bf16 or f32; other dtypes and strides are copied.

    native      the extension module
    kind        "int8", "linear", "nonlinear" or "affine"
    group_size  columns that share a scale; ignored by int8
    clips       [num_clips] f32: fractions of the range that are tried; for affine: fractions of a step
    lowest      the level with the largest magnitude
    table       [512] f32, the level nearest to y at index ceil(2 * y) + 256; only for nonlinear
    isa         an instruction set, or "" for the best
    """

    def __init__(
        self, native: ModuleType, kind: str, group_size: int, clips: Tensor, lowest: int, table: Tensor | None, isa: str = ""
    ) -> None:
        self._native, self._kind, self._group_size, self._isa = native, kind, group_size, isa
        # References are kept because the kernels hold the addresses.
        self._clips, self._lowest, self._table = clips, lowest, table

    def search(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the scales [O, G] f32 of rows [O, K] before rounding and, if affine, the offsets."""
        weight = _readable(weight)
        num_groups = weight.shape[1] // self._size(weight)
        found = [torch.empty(len(weight), num_groups) for _ in range(2 if self._kind == "affine" else 1)]
        offset = found[1].data_ptr() if len(found) > 1 else 0
        self._native.quantize_search(
            self._rows(weight), found[0].data_ptr(), offset, num_threads=torch.get_num_threads(), isa=self._isa
        )
        return tuple(found)

    def encode(self, weight: Tensor, scale: Tensor, offset: Tensor | None, codes: Tensor, is_forgotten: bool = False) -> None:
        """Write the codes [O, K] of rows from scales and offsets [O, G] f32, all contiguous.

        is_forgotten  release the pages of a weight that is a view of a mapped file; only for tensors that a loader mapped:
                      other memory that torch did not allocate, such as numpy's, cannot be told apart and would be lost
        """
        rows = _readable(weight)
        self._native.quantize_encode(
            self._rows(rows),
            scale.data_ptr(),
            0 if offset is None else offset.data_ptr(),
            codes.data_ptr(),
            is_mapped=is_forgotten and is_file_view(rows),
            num_threads=torch.get_num_threads(),
            isa=self._isa,
        )

    def _size(self, weight: Tensor) -> int:
        return weight.shape[1] if self._kind == "int8" else self._group_size

    def _rows(self, weight: Tensor) -> Any:
        is_bf16, stride = weight.dtype == torch.bfloat16, weight.stride(0)
        rows = self._native.QuantizeRows(
            self._kind, is_bf16, weight.data_ptr(), stride, len(weight), weight.shape[1], self._size(weight)
        )
        table = 0 if self._table is None else self._table.data_ptr()
        rows.set_levels(self._clips.data_ptr(), len(self._clips), self._lowest, table)
        return rows


def _readable(weight: Tensor) -> Tensor:
    """Return the rows as the kernels read them: bf16 or f32, with contiguous columns."""
    if weight.dtype not in (torch.bfloat16, torch.float32):
        weight = weight.float()
    return weight if weight.stride(1) == 1 else weight.contiguous()
