"""The share of a bounded resource that one owner may hold (dynamic thresholds)."""

from __future__ import annotations

_SHARE_OF_FREE_ROOM = 4


def most_beside(num_free: float, weight: float = 1.0) -> float:
    """Return how much an owner with a weight may hold while `free` is unused: four times the free amount, times the weight.

    A single owner then gets four fifths of the total, two get four ninths each, and a new owner always finds some (Choudhury
    and Hahne, 1998).
    """
    return _SHARE_OF_FREE_ROOM * weight * num_free
