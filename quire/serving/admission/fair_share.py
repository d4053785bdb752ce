"""What every queue of the server that is fair between owners uses: who is next, and how much one may hold."""

from __future__ import annotations

from dataclasses import dataclass

_SHARE_OF_FREE_ROOM = 4


@dataclass(slots=True)
class Share:
    """The service that one party has received.

    weight    above 0; of two parties that always wait, the one of twice the weight gets twice as much
    received  service so far, over the weight; the party with the least is next
    """

    weight: float = 1.0
    received: float = 0.0

    def charge(self, cost: float) -> None:
        """Count service, or with a negative cost take back what was counted before."""
        self.received += cost / self.weight


class FairClock:
    """The virtual start time of a party that was idle: that of the one served last, so that idle time earns no credit.

    Start-time fair queueing (Goyal et al., 1996), which is deficit round robin without the rounds.
    """

    def __init__(self) -> None:
        self._level = 0.0

    def enter(self, share: Share) -> None:
        """Note that a party begins to wait of which nothing waited or ran."""
        share.received = max(share.received, self._level)

    def serve(self, share: Share) -> None:
        """Note that a party is served, before it is charged."""
        self._level = max(self._level, share.received)


def exceeds_share(own: int, more: int, num_free: float, weight: float = 1.0) -> bool:
    """Return whether `more` is too much for an owner that holds `own` of a bounded room with so much free.

    It may hold four times what is free, times its weight: one owner alone then gets four fifths of the room, two get four
    ninths each, and a newcomer always finds some (Choudhury and Hahne, 1998). Who holds nothing may always have the first.
    """
    return own > 0 and own + more > _SHARE_OF_FREE_ROOM * weight * num_free
