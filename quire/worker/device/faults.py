"""What errors of a device mean: that its memory has ended, or that the process has lost it."""

from __future__ import annotations

import torch

_SIGNS_OF_EXHAUSTION = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device's memory has ended: for a tensor, or for what the driver, Triton or a library takes by itself.

    The latter come as plain runtime errors: for the code of a kernel, for a CUDA graph when it is captured or first launched.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_EXHAUSTION)


def is_lost(device: torch.device) -> bool:
    """Return whether every call on a device fails in this process, as after an access to a wrong address. Waits for what was
    launched."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return not is_out_of_memory(error)
    return False


def release_unused(device: torch.device) -> None:
    """Give back the memory that the allocator caches, which the driver may need."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def release_pinned(device: torch.device) -> None:
    """Give back the pinned host memory that torch caches, such as that of weights that were dropped."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)  # not in every torch
    if device.type == "cuda" and empty is not None:
        empty()
