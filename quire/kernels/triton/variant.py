"""Variant: the properties of a launch that its compiled code depends on, to be compiled without a GPU and without torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget

from quire.kernels.triton.cache_keys import hash_callees
from quire.kernels.triton.tma_tensor import TmaTensor, with_descriptors


@dataclass(frozen=True, slots=True)
class Pointer:
    """Stand-in for a tensor argument, with the properties that compiled code depends on; dtype: torch's name, "bfloat16"."""

    dtype: str
    address: int

    def data_ptr(self) -> int:
        """Return an address with the same alignment as the tensor's."""
        return self.address


class Variant(NamedTuple):
    """What launches share that can run the same code.

    arguments  by name, with representative numbers and tensors
    """

    module: str
    kernel: str
    arguments: tuple[tuple[str, Pointer | TmaTensor | int | float | None], ...]
    constants: tuple[tuple[str, object], ...]
    options: tuple[tuple[str, object], ...]


class AbsentDriver:
    """Triton's driver interface for compilation without a GPU."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return what is compiled for."""
        return self._target


def compile_variant(variant: Variant, arch: int) -> str:
    """Compile one variant into Triton's cache, where the launch finds it; return its key there. Not in the interpreter.

    Triton has no other driver afterwards: to be called in a process that launches nothing.
    """
    triton.runtime.driver.set_active(AbsentDriver(arch))
    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    hash_callees(kernel)
    return kernel.warmup(
        grid=(1,), **with_descriptors(dict(variant.arguments)), **dict(variant.constants), **dict(variant.options)
    ).hash
