"""ReplicaChooser: which replica gets a request, by the router's policies, from what replicas report to Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quire.base.logging import get_logger
from quire.router.backend import Backend, Flight, LoadReport
from quire.router.config import BackendAddress, Policy
from quire.router.policy import make_policy
from quire.router.prefix_index import PrefixIndex
from quire.router.prompt import Prompt
from quire.router.prompt_cost import PromptCost, mean_cost
from quire.router.upstream import Upstream

logger = get_logger(__name__)

_BYTES_PER_TOKEN = 4
_MAX_RANKS = 3
"""Replicas that are put into an order; where they are all full, any other one is taken."""


class ReplicaStats(msgspec.Struct, frozen=True):
    """What a replica reports about itself, as `record_routing_stats` returns it.

    load       as `GET /load` has it; None before the first answer
    cost       of prompts, as learned from streams; request_s: seconds that a request takes
    """

    load: LoadReport | None = None
    cost: PromptCost | None = None
    request_s: float | None = None


class ReplicaChooser:
    """Keeps for each replica what was sent there and how loaded it is. Not thread-safe.

    Ray tells when a request ends, but not when its first byte came; a prompt counts as computed after the predicted time.
    """

    def __init__(
        self,
        policy: Policy,
        prefix_chunk_bytes: int,
        max_prefix_chunks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choose = make_policy(policy, self._mean_cost)
        self._chunk_bytes = prefix_chunk_bytes
        self._max_chunks = max_prefix_chunks
        self._clock = clock
        self._replicas: dict[str, Backend] = {}
        self._flights: dict[str, tuple[Backend, Flight]] = {}

    @property
    def replicas(self) -> Mapping[str, Backend]:
        """All replicas by their names."""
        return self._replicas

    def set_replicas(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Note which replicas there are, {name: its last report}; what was known of others is forgotten."""
        for name in [name for name in self._replicas if name not in stats]:
            del self._replicas[name]
        for name, report in stats.items():
            if name not in self._replicas:
                self._replicas[name] = self._new(name)
            self._take(self._replicas[name], report)

    def order(self, names: Sequence[str], prompt: Prompt | None) -> list[list[str]]:
        """Return the names in ranks, the best first; the last rank holds all that were not put into an order."""
        self._end_prefills()
        left = [self._replicas[name] for name in names if name in self._replicas]
        unknown = [name for name in names if name not in self._replicas]
        ranks: list[list[str]] = []
        while left and len(ranks) < _MAX_RANKS:
            best = self._choose(left, prompt if prompt is not None else Prompt(0, (), b"", 1)).backend
            ranks.append([best.name])
            left.remove(best)
        rest = [*(one.name for one in left), *unknown]
        return [*ranks, rest] if rest else ranks

    def begin(self, request_id: str, name: str, prompt: Prompt | None) -> None:
        """Note that a replica has got a request."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        num_new = 0 if prompt is None else max(prompt.num_tokens - replica.num_cached(prompt), 1)
        self._flights[request_id] = (replica, replica.begin(num_new, is_streaming=False))
        if prompt is not None:
            replica.prefixes.add(prompt.keys)

    def end(self, request_id: str) -> None:
        """Note that a request has ended. Does nothing for one that is not known."""
        found = self._flights.pop(request_id, None)
        if found is not None:
            replica, flight = found
            replica.end(flight, is_good=False)  # how long requests take is in the reports

    def _new(self, name: str) -> Backend:
        # The address is not used: Ray carries the request to its replica.
        address = BackendAddress("localhost", 80, label=name)
        backend = Backend(address, Upstream(address, 1.0), PrefixIndex(self._max_chunks), self._clock)
        backend.mark_ready()
        return backend

    def _take(self, replica: Backend, report: Mapping[str, Any]) -> None:
        try:
            stats = msgspec.convert(dict(report), type=ReplicaStats)
        except msgspec.ValidationError as error:
            logger.warning("the report of replica %s is not understood: %s", replica.name, error)
            return
        replica.cost, replica.request_s = stats.cost, stats.request_s
        replica.take_load(stats.load)
        load = stats.load
        if load is not None and load.kv_blocks_total and load.block_size:
            held_bytes = load.kv_blocks_total * load.block_size * _BYTES_PER_TOKEN
            replica.prefixes.limit(min(held_bytes // self._chunk_bytes, self._max_chunks))

    def _end_prefills(self) -> None:
        now_s = self._clock()
        for replica, flight in self._flights.values():
            if flight.num_prompt_tokens:
                cost, num_tokens = replica.cost or self._mean_cost(), flight.num_prompt_tokens + flight.num_tokens_ahead
                if now_s - flight.started_s > cost.seconds(1 + flight.num_prompts_ahead, num_tokens):
                    flight.num_prompt_tokens = 0

    def _mean_cost(self) -> PromptCost:
        return mean_cost(one.cost for one in self._replicas.values())
