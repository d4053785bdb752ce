"""Programmatic dependent launch: a kernel begins while the one before it ends, and waits before it touches what that wrote.

Every program of a kernel that is launched so calls `begin` first, then reads what nobody writes, weights above all, and calls
`wait` before anything else is read or written. A program that returned without waiting would let the next kernel go on before
the last one is done. The interpreter has neither call, nor have devices before compute capability 9.0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import INTERPRETED

_CAPABILITY = 9


def has_dependent_launch(device: torch.device) -> bool:
    """Return whether kernels on a device can be launched so; what is made for no device, on "meta", is made for 9.0."""
    if INTERPRETED.value or not hasattr(getattr(tl.extra, "cuda", None), "gdc_wait"):
        return False
    if device.type == "meta":
        return True
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= _CAPABILITY


@triton.jit
def begin(IS_PDL: tl.constexpr) -> None:
    """Let the next kernel begin as soon as all programs of this one have."""
    if IS_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(IS_PDL: tl.constexpr) -> None:
    """Wait until the kernels before this one are done and what they wrote is there."""
    if IS_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch(ptrs: tl.tensor, mask: tl.tensor, NUM_BYTES: tl.constexpr, IS_PDL: tl.constexpr) -> None:
    """Begin to bring NUM_BYTES behind each pointer into the L2 cache, 0 none; a hint, and nothing without dependent launch.

    ptrs  [threads of the program], each a multiple of 16 as NUM_BYTES is; only the masked ones are looked at
    """
    if IS_PDL and NUM_BYTES > 0:
        counts = tl.where(mask, NUM_BYTES, 0)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [ptrs, counts],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
