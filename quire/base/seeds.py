"""SplitMix64 (Steele, Lea, Flood 2014): derives independent 64-bit seeds from a seed and an index."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of stream `index` under `seed`; both are taken modulo 2**64."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
