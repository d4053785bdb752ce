"""TmaTensor: an argument that a kernel gets as a TMA descriptor. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class HasAddress(Protocol):
    """A tensor, or what stands for one where none is needed."""

    @property
    def dtype(self) -> object:
        """Torch's type of the elements, or its name."""
        ...

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        ...


@dataclass(frozen=True, slots=True)
class TmaTensor:
    """A contiguous tensor of 16-bit elements, seen as a matrix of which a kernel copies one box after the other.

    tensor       at an address that is a multiple of 16
    shape        of the matrix, (rows, columns); a row has a multiple of 16 bytes
    box          rows of a box, and its columns: 8, 16, 32 or 64
    """

    tensor: HasAddress
    shape: tuple[int, int]
    box: tuple[int, int]

    @property
    def layout(self) -> NVMMASharedLayout:
        """The layout of a box in shared memory: its rows are swizzled, but not those of 16 bytes."""
        width = 2 * self.box[1]
        return NVMMASharedLayout(swizzle_byte_width=width if width > 16 else 0, element_bitwidth=16)

    def descriptor(self) -> TensorDescriptor:
        """Return the descriptor, as Triton's launcher takes it."""
        return TensorDescriptor(self.tensor, list(self.shape), [self.shape[1], 1], list(self.box), self.layout)


def with_descriptors(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return arguments as Triton takes them."""
    return {name: value.descriptor() if isinstance(value, TmaTensor) else value for name, value in arguments.items()}
