"""Codes of four bits of rotated vectors ("rotated4" of kernels/reference/kv_formats.py): rotation, quantising, packing.

A byte of the cache holds the codes of two dims: d in its low half, and d + D / 2 in its high half. D is a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.kv_spec import can_rotate_on_gpu
from quire.kernels.triton.launching import FLOATS, Launch, check_contiguous
from quire.kernels.triton.rotated_codes_kernels import (
    _unrotate_heads,
)

PACKED = torch.uint8
"""The dtype of caches of codes of four bits."""


def width_of(dtype: torch.dtype, head_dim: int) -> int:
    """Return how many elements of a cache of this dtype a vector takes."""
    return head_dim // 2 if dtype == PACKED else head_dim


def unrotate_launch(x: Tensor) -> Launch:
    """Return the launch that rotates vectors [T, H, D] back, in place."""
    check_contiguous("x", x, (None, None, None), *FLOATS)
    num_tokens, num_heads, head_dim = x.shape
    if not can_rotate_on_gpu(head_dim):
        raise InvariantError(f"vectors of {head_dim} values cannot be rotated: powers of two from 16 on can")
    constants = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim}
    return Launch(_unrotate_heads, (num_tokens, num_heads), {"x_ptr": x}, constants, num_warps=1, num_stages=1)
