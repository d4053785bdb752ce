"""Compile kernels before they are launched, without a GPU, into Triton's cache."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from quire.kernels.triton.launching import Argument, Boxes, Launch, placed, settle_key

_ALIGNMENT = 16
_WIDE = 1 << 31


@dataclass(frozen=True, slots=True)
class Pointer:
    """Stand-in for a tensor argument, with the properties that compiled code depends on."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """Return an address with the same alignment as the tensor's."""
        return self.address


class Variant(NamedTuple):
    """The properties of a launch that its compiled code depends on: launches of equal variants share the code.

    arguments  by name, with representative numbers and tensors
    """

    module: str
    kernel: str
    arguments: tuple[tuple[str, Pointer | Boxes | int | float | None], ...]
    constants: tuple[tuple[str, object], ...]
    options: tuple[tuple[str, object], ...]


def variant_of(launch: Launch) -> Variant:
    """Return the variant of a launch, whose tensors may be on the device "meta"."""
    is_plain = {param.name: bool(param.do_not_specialize) for param in launch.kernel.params}
    arguments = tuple((name, _stand_in(value, is_plain[name])) for name, value in launch.arguments.items())
    options = tuple(launch.options.items())
    return Variant(launch.kernel.fn.__module__, launch.kernel.fn.__name__, arguments, tuple(launch.constants.items()), options)


def _stand_in(value: Argument, is_plain: bool) -> Pointer | Boxes | int | float | None:
    if isinstance(value, Boxes):
        return Boxes(Pointer(value.tensor.dtype, 0), value.box, value.box)
    if isinstance(value, Tensor):
        is_aligned = value.storage_offset() * value.itemsize % _ALIGNMENT == 0
        return Pointer(value.dtype, 0 if is_aligned or is_plain else value.itemsize)
    if value is None or isinstance(value, float):
        return None if value is None else 0.5
    if value == 1 and not is_plain:
        return 1
    unit = _ALIGNMENT if value % _ALIGNMENT == 0 and not is_plain else _ALIGNMENT + 1
    return unit if -_WIDE <= value < _WIDE else _WIDE * unit + (unit - _ALIGNMENT)


class _AbsentDriver:
    """Triton's driver interface for compilation without a GPU."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_variant(variant: Variant, arch: int, has_launchers: bool) -> str:
    """Compile one variant into Triton's cache, where the launch finds it; return its key there. Not in the interpreter."""
    triton.runtime.driver.set_active(_AbsentDriver(arch))
    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    settle_key(kernel)
    compiled = kernel.warmup(grid=(1,), **placed(dict(variant.arguments)), **dict(variant.constants), **dict(variant.options))
    if has_launchers:
        from triton.backends.nvidia.driver import CudaLauncher  # looks for the driver's library

        CudaLauncher(compiled.src, compiled.metadata)
    return compiled.hash
