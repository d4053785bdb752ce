"""How much of a bounded room one owner may hold."""

from __future__ import annotations

_SHARE_OF_FREE_ROOM = 4


def most_beside(num_free: float, weight: float = 1.0) -> float:
    """Return how much an owner of a weight may hold beside so much room that is free: four times it, times the weight.

    One owner alone then gets four fifths of the room, two get four ninths each, and a newcomer always finds some (Choudhury
    and Hahne, 1998).
    """
    return _SHARE_OF_FREE_ROOM * weight * num_free
