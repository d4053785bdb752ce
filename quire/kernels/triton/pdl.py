"""Programmatic dependent launch: a kernel begins while the previous one ends, and waits before it accesses its results.

Every program of such a kernel calls `launch_dependents` first, then may read constant data, mainly weights, and calls `wait`
before anything else. If a program returned without waiting, the next kernel could continue before the previous one is done.
Neither call exists in the interpreter or on devices before compute capability 9.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import INTERPRETED
from quire.kernels.triton.device_traits import device_traits

if TYPE_CHECKING:
    import torch


def has_dependent_launch(device: torch.device) -> bool:
    """Return whether a device supports dependent launches; "meta" stands for the GPU in use, see device_traits.py."""
    if INTERPRETED.value or not hasattr(getattr(tl.extra, "cuda", None), "gdc_wait"):
        return False
    return device.type in ("cuda", "meta") and device_traits().has_dependent_launch


@triton.jit
def launch_dependents(IS_PDL: tl.constexpr) -> None:
    """Allow the next kernel to begin once all programs of this one have called it."""
    if IS_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(IS_PDL: tl.constexpr) -> None:
    """Wait until the previous kernels are done and their writes are visible."""
    if IS_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(ptrs: tl.tensor, mask: tl.tensor, NUM_BYTES: tl.constexpr, IS_PDL: tl.constexpr) -> None:
    """Prefetch NUM_BYTES after each pointer into the L2 cache, 0: none; a hint, without effect if IS_PDL is False.

    ptrs  [threads of the program], each a multiple of 16 as NUM_BYTES is; only those in the mask are used
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
