"""Parameters that are opened lazily from their checkpoint: pieces of stored tensors, opened one at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cpu.pages import SpentPages
from quire.model.families.sources import Piece, Source
from quire.model.mapped_files import MappedFiles
from quire.model.parameters import Shape
from quire.quant.float8 import Float8Weight, concatenate_float8
from quire.quant.parameters import DenseOrQuantized, Parameter, QuantizedStack, StoredParameter
from quire.quant.weight import QuantizedWeight, StoredWeight, concatenate_rows

Stored = Mapping[str, Tensor | StoredWeight]

_COMPARED_ROWS = _COMPUTED_ROWS = 4096


class StoredTensors:
    """The tensors of a checkpoint, shared by its parameters. An unpacked weight is kept while other parameters may be rows of
    it.

    files  that contain them, if mapped
    """

    def __init__(self, stored: Stored, files: MappedFiles) -> None:
        self._stored = stored
        self._files = files
        self.spent = SpentPages()
        self._last_name = ""
        self._last: DenseOrQuantized | None = None

    def is_integer(self, source: Source) -> bool:
        """Return whether all pieces of a parameter are stored as integers."""
        pieces = (self._stored[piece.name] for group in source.groups for piece in group)
        return all(isinstance(stored, StoredWeight) and stored.is_integer for stored in pieces)

    def is_quantized(self, source: Source) -> bool:
        """Return whether any piece of a parameter is stored quantised."""
        return any(isinstance(self._stored[piece.name], StoredWeight) for group in source.groups for piece in group)

    def layout(self, source: Source) -> tuple[object, ...]:
        """Return the stored pieces of a parameter, with repetitions listed once."""
        found = dict.fromkeys(
            (piece.rows, piece.step, _layout(self._stored[piece.name])) for group in source.groups for piece in group
        )
        return source.is_stacked, *found

    def rows(self, piece: Piece, keeps_float8: bool = False) -> DenseOrQuantized:
        """Return the rows of a piece, [out, in]; keeps_float8: as a Float8Weight if it is stored as one.

        Raises ModelFormatError if its file has become shorter.
        """
        whole = self._stored[piece.name]
        self._files.check(whole.tensors if isinstance(whole, StoredWeight) else (whole,))
        if isinstance(whole, StoredWeight):
            whole = self._unpack(piece, whole, keeps_float8)
        else:
            whole = _entry_of(whole, piece)
            whole = whole.t() if piece.is_transposed else whole
        if piece.rows is None:
            return whole
        start, stop = piece.rows
        if isinstance(whole, Float8Weight) and piece.step == 1:
            return whole.rows(start, stop)
        whole = whole.dequantize() if isinstance(whole, Float8Weight) else whole
        return whole[start : stop : piece.step] if isinstance(whole, Tensor) else whole.rows(start, stop, piece.step)

    def give_back(self, groups: tuple[tuple[Piece, ...], ...]) -> None:
        """Release the pages of pieces."""
        for piece in (piece for group in groups for piece in group):
            stored = self._stored[piece.name]
            stored = _entry_of(stored, piece) if isinstance(stored, Tensor) else stored
            self.spent.add(stored.tensors if isinstance(stored, StoredWeight) else (stored,))

    def _unpack(self, piece: Piece, weight: StoredWeight, keeps_float8: bool) -> DenseOrQuantized:
        is_kept = keeps_float8 and weight.load_float8 is not None
        if self._last is not None and self._last_name == piece.name and isinstance(self._last, Float8Weight) == is_kept:
            return self._last
        self._last = None
        unpacked = weight.load() if weight.load_float8 is None or not keeps_float8 else weight.load_float8()
        if piece.rows is not None:
            self._last_name, self._last = piece.name, unpacked
        return unpacked


def _entry_of(stored: Tensor, piece: Piece) -> Tensor:
    """Return the entry of a stack, or the whole tensor."""
    if piece.entry is None:
        return stored
    return (stored if piece.num_entries is None else stored.unflatten(0, (piece.num_entries, -1)))[piece.entry]


class CheckpointParameter(StoredParameter):
    """One parameter of a checkpoint.

    source    its pieces in `tensors`
    shape     as in parameter_shapes
    dtype     of the model
    is_dense  it becomes a tensor even if it is stored as integers
    """

    def __init__(self, tensors: StoredTensors, source: Source, shape: Shape, dtype: torch.dtype, is_dense: bool) -> None:
        self._tensors = tensors
        self._source = source
        self._shape = shape
        self._dtype = dtype
        self._is_integer = not is_dense and not source.is_computed and tensors.is_integer(source)

    @property
    def is_integer(self) -> bool:
        return self._is_integer

    @property
    def is_quantized(self) -> bool:
        return self._tensors.is_quantized(self._source)

    @property
    def layout(self) -> tuple[object, ...]:
        return self._tensors.layout(self._source)

    def open(self) -> Tensor | QuantizedWeight:
        return self._join(self._source.groups[0])

    def open_quantized(self, index: int | None = None) -> DenseOrQuantized:
        if index is not None and not self._source.is_stacked:
            return self.open_expert(index)
        keeps_float8 = not self._source.is_computed
        parts = [self._tensors.rows(piece, keeps_float8) for piece in self._source.groups[index or 0]]
        float8 = [part for part in parts if isinstance(part, Float8Weight)]
        joined = concatenate_float8(float8) if len(float8) == len(parts) else None
        if joined is not None:
            return joined
        return self._join_parts([part.dequantize() if isinstance(part, Float8Weight) else part for part in parts])

    def open_expert(self, index: int) -> Tensor | QuantizedWeight:
        if self._source.is_stacked:
            return self._join(self._source.groups[index])
        whole = self.open()
        return whole[index] if isinstance(whole, Tensor) else whole

    def load(self) -> Parameter:
        if not self._source.is_stacked:
            found = self.open()
            return found.to(self._dtype).contiguous() if isinstance(found, Tensor) else found
        stack = self._load_stack() if self._is_integer else None
        if stack is not None:
            return stack
        # Copied expert by expert into its place, so that the peak is one copy of the parameter.
        out = torch.empty(self._shape, dtype=self._dtype)
        for index in range(self._shape[0]):
            weight = self.open_expert(index)
            out[index] = weight if isinstance(weight, Tensor) else weight.dequantize(self._dtype)
            self.give_back(index)
        return out

    def give_back(self, index: int | None = None) -> None:
        if index is None:
            self._tensors.give_back(self._source.groups)
        elif self._source.is_stacked:
            self._tensors.give_back((self._source.groups[index],))
        elif isinstance(expert := self.open_expert(index), Tensor):
            self._tensors.spent.add((expert,))

    def is_equal(self, other: CheckpointParameter) -> bool:
        """Return whether two matrices (not stacks) are equal in the model's dtype."""
        if self._is_integer or other._is_integer:
            return False
        mine, its = self.open(), other.open()
        if not isinstance(mine, Tensor) or not isinstance(its, Tensor) or mine.shape != its.shape:
            return False
        starts = range(0, len(mine), _COMPARED_ROWS)
        parts = ((mine[first : first + _COMPARED_ROWS], its[first : first + _COMPARED_ROWS]) for first in starts)
        is_equal = all(torch.equal(a.to(self._dtype), b.to(self._dtype)) for a, b in parts)
        self.give_back()
        other.give_back()
        return is_equal

    def _load_stack(self) -> QuantizedStack | None:
        weights: list[QuantizedWeight] = []
        for group in self._source.groups:
            weight = self._join(group)
            if isinstance(weight, Tensor):
                return None
            weights.append(weight)
        return QuantizedStack(tuple(weights))

    def _join(self, group: tuple[Piece, ...]) -> Tensor | QuantizedWeight:
        parts = [self._tensors.rows(piece) for piece in group]
        return self._join_parts([part.dequantize() if isinstance(part, Float8Weight) else part for part in parts])

    def _join_parts(self, parts: list[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
        """Return parts joined along their rows: as integers if they are stored so and can be joined."""
        quantized = [part for part in parts if isinstance(part, QuantizedWeight)] if self._is_integer else []
        joined = concatenate_rows(quantized) if len(quantized) == len(parts) else None
        if joined is not None:
            return joined
        dense = [part if isinstance(part, Tensor) else part.dequantize(self._dtype) for part in parts]
        joined = dense[0] if len(dense) == 1 else torch.cat([part.to(self._dtype) for part in dense])
        return self._compute(joined) if self._source.is_computed else joined

    def _compute(self, stored: Tensor) -> Tensor:
        """Return the rows that a source makes of stored ones, computed in f32."""
        factor = None
        if self._source.factor is not None:
            rows = self._tensors.rows(self._source.factor)
            factor = (rows if isinstance(rows, Tensor) else rows.dequantize()).float()
        out = torch.empty(self._shape, dtype=self._dtype)
        for first in range(0, len(out), _COMPUTED_ROWS):
            rows = stored[first : first + _COMPUTED_ROWS].float()
            rows = rows if factor is None else rows @ factor
            out[first : first + _COMPUTED_ROWS] = F.normalize(rows) if self._source.is_unit else rows
        return out


def _layout(stored: Tensor | StoredWeight) -> tuple[object, ...]:
    if isinstance(stored, Tensor):
        return (str(stored.dtype),)
    parts = ((str(tensor.dtype), tuple(tensor.shape)) for tensor in stored.tensors)
    return stored.form, stored.is_integer, stored.load_float8 is not None, *parts
