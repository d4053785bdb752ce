"""Routing policies: which replica a request goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from quire.base.errors import ConfigError
from quire.contracts.config import SchedulerConfig
from quire.contracts.request import Request
from quire.engine.replica_router import ReplicaRouter

RoutingPolicy = Literal["round-robin", "least-loaded", "prefix"]
ROUTING_POLICIES: tuple[RoutingPolicy, ...] = ("round-robin", "least-loaded", "prefix")


class Router(Protocol):
    """Is told of every request's end, of computed prompts and of outputs, so that it can know the load."""

    def choose(self, request: Request) -> int:
        """Return the replica of a request, and count it there."""
        ...

    def note_output(self, request: Request, num_tokens: int) -> None:
        """Note output tokens of a request."""
        ...

    def end(self, request: Request, replica: int) -> None:
        """Forget a request."""
        ...


class RoundRobin:
    """One replica after the other."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = 0

    def choose(self, request: Request) -> int:
        replica = self._next
        self._next = (self._next + 1) % self._num_replicas
        return replica

    def note_output(self, request: Request, num_tokens: int) -> None:
        return

    def end(self, request: Request, replica: int) -> None:
        return


class LeastLoaded:
    """The replica with the fewest unfinished requests; of equal ones the one that was chosen longest ago."""

    def __init__(self, num_replicas: int) -> None:
        self._num_unfinished = [0] * num_replicas
        self._chosen = list(range(-num_replicas, 0))
        self._count = 0

    def choose(self, request: Request) -> int:
        unfinished, chosen = self._num_unfinished, self._chosen
        replica = min(range(len(unfinished)), key=lambda index: (unfinished[index], chosen[index]))
        unfinished[replica] += 1
        chosen[replica] = self._count
        self._count += 1
        return replica

    def note_output(self, request: Request, num_tokens: int) -> None:
        return

    def end(self, request: Request, replica: int) -> None:
        self._num_unfinished[replica] -= 1


class PrefixAware:
    """The router that `quire serve --data-parallel-size` uses: least predicted wait, known prefixes included."""

    def __init__(self, num_replicas: int, config: SchedulerConfig) -> None:
        self._router = ReplicaRouter([1.0] * num_replicas)
        self._replicas = range(num_replicas)
        for index in self._replicas:
            self._router.open(
                index,
                max_num_seqs=config.max_num_seqs,
                block_size=config.block_size,
                num_kv_blocks=config.num_kv_blocks if config.enable_prefix_caching else 0,
            )

    def choose(self, request: Request) -> int:
        route = self._router.choose(request, self._replicas)
        self._router.add(request, route)
        return route.replica

    def note_output(self, request: Request, num_tokens: int) -> None:
        self._router.note_output(request.request_id, num_tokens)

    def end(self, request: Request, replica: int) -> None:
        self._router.end(request.request_id)


def make_router(policy: str, num_replicas: int, config: SchedulerConfig) -> Router:
    """Return a router. Raises ConfigError."""
    if num_replicas < 1:
        raise ConfigError(f"--replicas must be an integer >= 1, got {num_replicas}")
    makers: dict[str, type[RoundRobin] | type[LeastLoaded]] = {"round-robin": RoundRobin, "least-loaded": LeastLoaded}
    if policy == "prefix":
        return PrefixAware(num_replicas, config)
    if policy not in makers:
        raise ConfigError(f"--routing must be one of {', '.join(ROUTING_POLICIES)}, got {policy!r}")
    return makers[policy](num_replicas)


def requests_by_replica(replicas: Sequence[int], num_replicas: int) -> list[int]:
    """Return how many requests each replica got."""
    counts = [0] * num_replicas
    for replica in replicas:
        counts[replica] += 1
    return counts
