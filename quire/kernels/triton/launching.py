"""Launch: one kernel with its arguments, constants and options, ready to run or to be compiled for another machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.arithmetic import INTERPRETED
from quire.kernels.triton.bound import BoundLauncher, run_by_triton
from quire.kernels.triton.tma_tensor import TmaTensor

ELEMENT_TYPES: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.int8: tl.int8,
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Argument = Tensor | TmaTensor | int | float | None


class Launch(NamedTuple):
    """A kernel and its launch parameters.

    kernel     a function decorated with triton.jit
    grid       number of programs per axis
    arguments  by parameter name: values that change between launches. Kernels do not specialise numbers that may take any
               value: else 1, multiples of 16 and others would each be compiled, in the middle of serving
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
        if noted is not None:
            noted.append(self)
        elif INTERPRETED.value:
            run_by_triton(self)
        else:
            BOUND.run(self)

    @property
    def options(self) -> dict[str, int | bool]:
        """The compiler options."""
        told: dict[str, int | bool] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.is_fused,
        }
        return {**told, "launch_pdl": True} if self.is_pdl else told


BOUND = BoundLauncher()
"""Of all launches of the process."""

_NOTED: ContextVar[list[Launch] | None] = ContextVar("noted launches", default=None)


@contextmanager
def collected_launches() -> Iterator[list[Launch]]:
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
    sizes = tensor.shape
    if tensor.dtype not in dtypes or not (sizes == shape or _fits(sizes, shape)) or not _has_whole_rows(tensor):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvariantError(
            f"{name} must be [{wanted}] of {' or '.join(map(str, dtypes))} with the last dimension in one piece, got "
            f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
        )


def _fits(sizes: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    if len(sizes) != len(shape):
        return False
    for size, wanted in zip(sizes, shape, strict=True):  # noqa: SIM110 - a generator takes longer, and launches wait for this
        if wanted is not None and size != wanted:
            return False
    return True


def _has_whole_rows(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 or tensor.numel() == 0


def check_contiguous(name: str, tensor: Tensor | None, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raise InvariantError unless check_tensor accepts a tensor and it is contiguous."""
    if tensor is None:
        raise InvariantError(f"{name} is missing")
    sizes = tensor.shape
    if not (tensor.is_contiguous() and tensor.dtype in dtypes and (sizes == shape or _fits(sizes, shape))):
        check_tensor(name, tensor, shape, *dtypes)
        raise InvariantError(f"{name} must be in one piece, got strides {tensor.stride()} for {tuple(tensor.shape)}")
