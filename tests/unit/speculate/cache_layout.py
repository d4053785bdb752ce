"""How the native kernels lay out a block of sixteen tokens."""

import torch


def by_token(part, block):
    """Return a block of sixteen tokens [K, 16, D], "k" or "v", one token after the other."""
    num_heads, _, dim = block.shape
    if block.dtype != torch.bfloat16:
        return block.view(num_heads, dim, 16).transpose(1, 2) if part == "k" else block
    if part == "k":
        return block.view(num_heads, dim // 2, 16, 2).transpose(1, 2).reshape(num_heads, 16, dim)
    return block.view(num_heads, 8, dim, 2).transpose(2, 3).reshape(num_heads, 16, dim)
