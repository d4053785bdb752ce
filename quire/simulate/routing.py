"""Routing policies: which replica a request goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from quire.base.errors import ConfigError
from quire.contracts.request import Request
from quire.contracts.scheduler_config import SchedulerConfig
from quire.engine.replica_router import ReplicaRouter

RoutingPolicy = Literal["round-robin", "least-loaded", "prefix"]
ROUTING_POLICIES: tuple[RoutingPolicy, ...] = ("round-robin", "least-loaded", "prefix")


class Router(Protocol):
    """Is told of every request's end, of outputs and of lost replicas, so that it knows the load."""

    def choose(self, request: Request, usable: Sequence[int]) -> int:
        """Return the replica of a request, of at least one that is usable, and count it there."""
        ...

    def note_output(self, request: Request, num_tokens: int) -> None:
        """Note output tokens of a request."""
        ...

    def end(self, request: Request, replica: int) -> None:
        """Forget a request."""
        ...

    def lose(self, replica: int) -> None:
        """Forget what a replica has computed: its process has ended."""
        ...


class RoundRobin:
    """One replica after the other."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = 0

    def choose(self, request: Request, usable: Sequence[int]) -> int:
        num = self._num_replicas
        replica = min(usable, key=lambda index: (index - self._next) % num)
        self._next = (replica + 1) % num
        return replica

    def note_output(self, request: Request, num_tokens: int) -> None:
        return

    def end(self, request: Request, replica: int) -> None:
        return

    def lose(self, replica: int) -> None:
        return


class LeastLoaded:
    """The replica with the fewest unfinished requests; of equal ones the one that was chosen longest ago."""

    def __init__(self, num_replicas: int) -> None:
        self._num_unfinished = [0] * num_replicas
        self._chosen = list(range(-num_replicas, 0))
        self._count = 0

    def choose(self, request: Request, usable: Sequence[int]) -> int:
        unfinished, chosen = self._num_unfinished, self._chosen
        replica = min(usable, key=lambda index: (unfinished[index], chosen[index]))
        unfinished[replica] += 1
        chosen[replica] = self._count
        self._count += 1
        return replica

    def note_output(self, request: Request, num_tokens: int) -> None:
        return

    def end(self, request: Request, replica: int) -> None:
        self._num_unfinished[replica] -= 1

    def lose(self, replica: int) -> None:
        return


class PrefixAware:
    """The router that `quire serve --data-parallel-size` uses: least predicted wait, known prefixes included."""

    def __init__(self, num_replicas: int, config: SchedulerConfig) -> None:
        self._router = ReplicaRouter([1.0] * num_replicas)
        self._config = config
        for index in range(num_replicas):
            self._open(index)

    def _open(self, index: int) -> None:
        config = self._config
        self._router.open(
            index,
            max_num_seqs=config.max_num_seqs,
            block_size=config.block_size,
            num_kv_blocks=config.num_kv_blocks if config.enable_prefix_caching else 0,
        )

    def choose(self, request: Request, usable: Sequence[int]) -> int:
        route = self._router.choose(request, usable)
        self._router.add(request, route)
        return route.replica

    def note_output(self, request: Request, num_tokens: int) -> None:
        self._router.note_output(request.request_id, num_tokens)

    def end(self, request: Request, replica: int) -> None:
        self._router.end(request.request_id)

    def lose(self, replica: int) -> None:
        self._router.close(replica)
        self._open(replica)


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
