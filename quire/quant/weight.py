"""QuantizedWeight: the common form of all stored formats, from which every kernel's layout is packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.quant.float8 import Float8Weight


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A linear weight [O, K] as integers with a scale, and optionally an offset, per row and group of columns.

    The weight is scale[o, g] * codes[o, j] + offset[o, g], g = j // group_size. Stored column j multiplies input
    columns[j] (j itself without `columns`): formats that order inputs by group (GPTQ's desc_act) become regular this way.

    codes       [O, K] int8
    scale       [O, G] f32, G = K / group_size; G = 1: a scale per row
    offset      [O, G] f32 or None: minus scale * zero point, or a format's own minimum
    levels      ascending integers, at most 16, that include every code; None if a code needs a byte
    columns     [K] int64, a permutation, or None
    is_token_quantized  the checkpoint declares inputs quantised to int8 with one scale per token
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None
    levels: tuple[int, ...] | None = None
    columns: Tensor | None = None
    is_token_quantized: bool = False

    def __post_init__(self) -> None:
        num_rows, num_columns = self.codes.shape
        num_groups = self.scale.shape[1] if self.scale.ndim == 2 else 0
        fits = (
            self.codes.dtype == torch.int8
            and self.scale.shape[0] == num_rows
            and num_groups > 0
            and num_columns % num_groups == 0
            and (self.offset is None or self.offset.shape == self.scale.shape)
            and (self.columns is None or self.columns.shape == (num_columns,))
            and (self.levels is None or (len(self.levels) <= 16 and list(self.levels) == sorted(set(self.levels))))
        )
        if not fits:
            raise InvariantError(f"codes {tuple(self.codes.shape)} and scales {tuple(self.scale.shape)} do not form a weight")

    @property
    def shape(self) -> tuple[int, int]:
        """[O, K]."""
        return (self.codes.shape[0], self.codes.shape[1])

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def rows(self, start: int, stop: int, step: int = 1) -> QuantizedWeight:
        """Return every step-th of the output rows [start, stop)."""
        rows = slice(start, stop, step)
        offset = None if self.offset is None else self.offset[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], offset=offset)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [O, K] with its columns in input order, computed in f32."""
        num_rows, num_columns = self.codes.shape
        weight = self.codes.view(num_rows, -1, self.group_size).float() * self.scale[:, :, None]
        if self.offset is not None:
            weight += self.offset[:, :, None]
        weight = weight.view(num_rows, num_columns)
        if self.columns is not None:
            natural = torch.empty_like(weight)
            natural[:, self.columns] = weight
            weight = natural
        return weight.to(dtype)


@dataclass(frozen=True, slots=True)
class CodeForm:
    """Properties of a weight's codes that are known before it is unpacked.

    kind        "nibbles": at most 16 levels; "bytes"; "float8"
    group_size  columns that share a scale
    has_offset  there may be an offset with every scale
    has_order   the columns may have an order of their own
    is_token_quantized  as in QuantizedWeight
    """

    kind: Literal["nibbles", "bytes", "float8"]
    group_size: int
    has_offset: bool = False
    has_order: bool = False
    is_token_quantized: bool = False

    @staticmethod
    def of(bits: int, group_size: int, has_offset: bool = False, has_order: bool = False, is_token: bool = False) -> CodeForm:
        """Return the form of integer codes with this number of bits."""
        return CodeForm("nibbles" if bits <= 4 else "bytes", group_size, has_offset, has_order, is_token)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight of a checkpoint that is unpacked on demand, so that only one is unpacked at a time.

    shape       [O, K]
    load        returns the quantised weight, or a plain float tensor if the format has no integer form
    tensors     the stored tensors, still in the file
    is_integer  load returns a QuantizedWeight
    load_float8 returns the weight with its float8 values as they are stored; None: it has another format
    codes       its form as codes; None: it becomes a float tensor, or the file's own format defines it
    form        what the dtypes and shapes of the tensors do not determine, such as the name of the format
    """

    shape: tuple[int, int]
    load: Callable[[], QuantizedWeight | Tensor]
    tensors: tuple[Tensor, ...]
    is_integer: bool = True
    load_float8: Callable[[], Float8Weight] | None = None
    form: str = ""
    codes: CodeForm | None = None


def concatenate_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Return weights over one input, concatenated by rows, or None if their groups, levels or columns differ.

    If some have offsets, the offsets of the others are zeros.
    """
    first = parts[0]
    for part in parts[1:]:
        same_columns = (part.columns is None) == (first.columns is None) and (
            part.columns is None or first.columns is None or torch.equal(part.columns, first.columns)
        )
        same = (part.group_size, part.levels, part.is_token_quantized, part.shape[1]) == (
            first.group_size,
            first.levels,
            first.is_token_quantized,
            first.shape[1],
        )
        if not (same and same_columns):
            return None
    if len(parts) == 1:
        return first
    has_offset = any(part.offset is not None for part in parts)
    offsets = [torch.zeros_like(part.scale) if part.offset is None else part.offset for part in parts]
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        offset=torch.cat(offsets) if has_offset else None,
    )
