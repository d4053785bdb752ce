"""RankStats: what a rank of a parallel group does, holds and has waited for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveStats:
    """What one operation of a communicator has been called for: see OperationCount."""

    num_calls: int
    num_bytes: int
    seconds: float
    exposed_seconds: float = 0.0

    def plus(self, other: CollectiveStats) -> CollectiveStats:
        """Return the counts of both together."""
        return CollectiveStats(
            num_calls=self.num_calls + other.num_calls,
            num_bytes=self.num_bytes + other.num_bytes,
            seconds=self.seconds + other.seconds,
            exposed_seconds=self.exposed_seconds + other.exposed_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """One rank; counts are since its start.

    pid           0 where it is not known
    state         "starting", "ready", "failed", or "ended" where another rank has failed
    host          where ranks are on several hosts
    memory_bytes  what its process has resident now, shared memory included; 0: not known
    share         its part of the weights, from 0 to 1
    part          which layers these are of, with pipeline stages
    num_barriers  of native steps and of the start; num_waits: those at which another rank was missing when this one came;
                  wait_s: the seconds of these
    num_bytes     of rows that it has written for the other ranks
    collectives   by operation, where ranks exchange tensors by a communicator: of the leader only
    """

    rank: int
    pid: int = 0
    state: str = "ready"
    host: str = ""
    memory_bytes: int = 0
    share: float = 0.0
    num_barriers: int = 0
    num_waits: int = 0
    wait_s: float = 0.0
    num_bytes: int = 0
    part: str = ""
    collectives: dict[str, CollectiveStats] = field(default_factory=dict[str, CollectiveStats])
