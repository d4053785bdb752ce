"""Launch: one kernel with its arguments, constants and options, ready to run or to be compiled for another machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.arithmetic import INTERPRETED

ELEMENT_TYPES: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.int8: tl.int8,
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and all it is launched with.

    kernel     a function under triton.jit
    grid       number of programs per axis
    arguments  by parameter name: what changes from launch to launch. A number that may be anything is not specialised by
               the kernel: otherwise each of 1, multiples of 16 and others would be compiled, in the middle of serving
    constants  by parameter name: what the compiled code is made for
    num_warps  warps of 32 threads per program
    num_stages tiles that a loop has under way
    is_fused   whether a multiply and an add may become one operation; noise.py forbids it
    is_pdl     whether it begins before the launch before it has ended; its kernel waits, see dependent.py
    """

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float | None]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    is_fused: bool = True
    is_pdl: bool = False

    def run(self) -> None:
        """Launch on the current stream; nothing where the grid is empty."""
        if 0 in self.grid:
            return
        noted = _NOTED.get()
        if noted is None:
            settle_key(self.kernel)
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options)
        else:
            noted.append(self)

    @property
    def options(self) -> dict[str, int | bool]:
        """What the compiler is told besides."""
        told: dict[str, int | bool] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.is_fused,
        }
        return {**told, "launch_pdl": True} if self.is_pdl else told


_SETTLED: set[int] = set()


def settle_key(kernel: triton.JITFunction) -> None:
    """Have Triton hash a kernel behind all that it calls; to be called before it is launched or compiled.

    Triton 3.6 leaves the constants of a function that it has not hashed yet out of the key of its caller. That key finds the
    compiled code, and would depend on which kernel was launched first: not on the same one as where it was compiled ahead.
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
    """Launch nothing meanwhile, in this thread: what would be is in the list."""
    noted: list[Launch] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def run_all(launches: Iterable[Launch]) -> None:
    """Run launches one after the other."""
    for launch in launches:
        launch.run()


def check_tensor(name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raise InvariantError unless a tensor has this shape (None: any size), one of the dtypes, and rows in one piece."""
    fits = tensor.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype not in dtypes or (tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvariantError(
            f"{name} must be [{wanted}] of {' or '.join(map(str, dtypes))} with the last dimension in one piece, got "
            f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
        )


def check_contiguous(name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raise InvariantError unless check_tensor accepts a tensor and it is in one piece."""
    check_tensor(name, tensor, shape, *dtypes)
    if not tensor.is_contiguous():
        raise InvariantError(f"{name} must be in one piece, got strides {tensor.stride()} for {tuple(tensor.shape)}")
