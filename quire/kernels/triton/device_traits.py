"""DeviceTraits: what kernels and their tiles depend on of the GPU that they run on, or are compiled for. It needs no Triton.

Code that differs between GPUs asks only `device_traits()`, so that code for tensors on "meta" is compiled for the same GPU, and
tests can compile, or run, what another GPU gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """A kind of NVIDIA GPU.

    capability           compute capability, such as (9, 0)
    shared_bytes         shared memory that one program may take
    num_multiprocessors  programs run on these at the same time
    """

    capability: tuple[int, int]
    shared_bytes: int
    num_multiprocessors: int

    @classmethod
    def of(cls, device: torch.device) -> DeviceTraits:
        """Return those of a CUDA device."""
        import torch

        properties = torch.cuda.get_device_properties(device)
        capability = torch.cuda.get_device_capability(device)
        return cls(capability, properties.shared_memory_per_block_optin, properties.multi_processor_count)

    @classmethod
    def of_arch(cls, arch: int) -> DeviceTraits:
        """Return those of a GPU that is not here, by its compute capability as compilers have it, such as 90.

        Raises ConfigError for one that is not known.
        """
        capability = divmod(arch, 10)
        if capability not in _KNOWN:
            known = ", ".join(f"{major}.{minor}" for major, minor in _KNOWN)
            raise ConfigError(f"code is compiled for compute capabilities {known}, got {arch / 10}")
        shared_kib, num_multiprocessors = _KNOWN[capability]
        return cls(capability, shared_kib << 10, num_multiprocessors)

    @property
    def arch(self) -> int:
        """The compute capability as compilers have it, such as 90."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def name(self) -> str:
        """The compute capability as text, such as "9.0"."""
        return f"{self.capability[0]}.{self.capability[1]}"

    @property
    def matrix_instruction(self) -> str:
        """What Triton compiles matrix products to: "wgmma", of four warps, on 9.x; "tcgen05" on 10.x; else "mma", of one warp.

        With mma the operands lie in registers, so that tiles must be smaller.
        """
        return {9: "wgmma", 10: "tcgen05"}.get(self.capability[0], "mma")

    @property
    def is_hopper(self) -> bool:
        """Whether it is an H100, an H200 or another GPU of compute capability 9.x."""
        return self.capability[0] == 9

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a launch may begin before the previous one ends, see pdl.py; so are bulk copies and prefetches."""
        return self.capability >= (9, 0)

    @property
    def has_float8(self) -> bool:
        """Whether Triton converts float8_e4m3fn, and tensor cores multiply it."""
        return self.capability >= (8, 9)


_KNOWN = {
    (8, 0): (163, 108),  # A100
    (8, 6): (99, 82),  # RTX 3090; A10 has 72 multiprocessors
    (8, 7): (163, 16),  # Jetson Orin
    (8, 9): (99, 128),  # RTX 4090; L4 has 58
    (9, 0): (227, 132),  # H100 and H200, SXM
    (10, 0): (227, 148),  # B200
    (10, 3): (227, 148),  # B300
    (12, 0): (99, 170),  # RTX 5090
    (12, 1): (99, 48),  # GB10
}
"""KiB of shared memory for a program, and multiprocessors, of GPUs by compute capability (CUDA programming guide)."""

HOPPER = DeviceTraits.of_arch(90)
"""H100 and H200 (SXM), for which code is compiled where there is no GPU."""


class _Active:
    """The traits in use: one per process, whose kernels run on one kind of device; set before any launch."""

    traits: DeviceTraits | None = None


def device_traits() -> DeviceTraits:
    """Return the traits in use: until others are chosen those of torch's current CUDA device, without one those of HOPPER."""
    if _Active.traits is None:
        import torch  # compile servers, which do without, know for what they compile

        has_gpu = torch.cuda.is_available()
        _Active.traits = DeviceTraits.of(torch.device("cuda", torch.cuda.current_device())) if has_gpu else HOPPER
    return _Active.traits


def choose_traits(traits: DeviceTraits) -> None:
    """Use these traits for all further launches of this process."""
    _Active.traits = traits


@contextmanager
def using_traits(traits: DeviceTraits) -> Iterator[None]:
    """Use other traits within the context."""
    before, _Active.traits = _Active.traits, traits
    try:
        yield
    finally:
        _Active.traits = before
