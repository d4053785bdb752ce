"""Launch: one kernel with its arguments, constants and options, ready to run or to be compiled for another machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.base.errors import InvariantError
from quire.kernels.triton.arithmetic import INTERPRETED

ELEMENT_TYPES: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.int8: tl.int8,
}


class HasAddress(Protocol):
    """A tensor, or what stands for one where none is needed."""

    @property
    def dtype(self) -> torch.dtype: ...

    def data_ptr(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Boxes:
    """An argument that a kernel gets as a TMA descriptor: a contiguous tensor, seen as a matrix that is copied box by box.

    tensor       at an address that is a multiple of 16
    shape        of the matrix, (rows, columns)
    box          rows and columns of a box, in shared memory with a swizzle of 128 bytes, which is the length of its rows
    """

    tensor: HasAddress
    shape: tuple[int, int]
    box: tuple[int, int]

    @property
    def layout(self) -> NVMMASharedLayout:
        """The layout of a box in shared memory."""
        return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * self.tensor.dtype.itemsize)

    def descriptor(self) -> TensorDescriptor:
        """Return the descriptor, as Triton's launcher takes it."""
        return TensorDescriptor(self.tensor, list(self.shape), [self.shape[1], 1], list(self.box), self.layout)


Argument = Tensor | Boxes | int | float | None


def placed(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return arguments as Triton takes them."""
    return {name: value.descriptor() if isinstance(value, Boxes) else value for name, value in arguments.items()}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and its launch parameters.

    kernel     a function decorated with triton.jit
    grid       number of programs per axis
    arguments  by parameter name: values that change between launches. Kernels do not specialise numbers that may take any
               value: otherwise 1, multiples of 16 and other numbers would each be compiled, in the middle of serving
    constants  by parameter name: values for which the code is compiled
    num_warps  warps of 32 threads per program
    num_stages pipelined tiles of a loop
    is_fused   whether a multiply and an add may be fused; noise.py forbids it
    is_pdl     whether it begins before the previous launch has ended; its kernel waits, see pdl.py
    """

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    is_fused: bool = True
    is_pdl: bool = False

    def run(self) -> None:
        """Launch on the current stream; does nothing if the grid is empty."""
        if 0 in self.grid:
            return
        noted = _NOTED.get()
        if noted is None:
            settle_key(self.kernel)
            self.kernel[self.grid](**placed(self.arguments), **self.constants, **self.options)
        else:
            noted.append(self)

    @property
    def options(self) -> dict[str, int | bool]:
        """The compiler options."""
        told: dict[str, int | bool] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.is_fused,
        }
        return {**told, "launch_pdl": True} if self.is_pdl else told


_SETTLED: set[int] = set()


def settle_key(kernel: triton.JITFunction) -> None:
    """Make Triton hash a kernel after everything that it calls; call before it is launched or compiled.

    Triton 3.6 omits the constants of a function that is not hashed yet from the cache key of its caller. The key of the
    compiled code would then depend on which kernel was launched first, and could differ from that of the precompiled code.
    """
    if INTERPRETED.value or id(kernel) in _SETTLED:
        return
    _SETTLED.add(id(kernel))
    scope = kernel.fn.__globals__
    for name in kernel.fn.__code__.co_names:
        called = scope.get(name)
        if isinstance(called, triton.JITFunction):
            settle_key(called)
    _ = kernel.cache_key


_NOTED: ContextVar[list[Launch] | None] = ContextVar("noted launches", default=None)


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Collect launches in the list instead of running them, in this thread."""
    noted: list[Launch] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def run_all(launches: Iterable[Launch]) -> None:
    """Run launches in order."""
    for launch in launches:
        launch.run()


def check_tensor(name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raise InvariantError unless a tensor has this shape (None: any size), one of the dtypes, and contiguous rows."""
    fits = tensor.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype not in dtypes or (tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvariantError(
            f"{name} must be [{wanted}] of {' or '.join(map(str, dtypes))} with the last dimension in one piece, got "
            f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
        )


def check_contiguous(name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raise InvariantError unless check_tensor accepts a tensor and it is contiguous."""
    check_tensor(name, tensor, shape, *dtypes)
    if not tensor.is_contiguous():
        raise InvariantError(f"{name} must be in one piece, got strides {tensor.stride()} for {tuple(tensor.shape)}")
