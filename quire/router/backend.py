"""Backend: one server behind the router, and what the router knows of its state and load. BackendTable: all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.base.errors import ConfigError
from quire.router.config import BackendAddress, KvEventSource, RouterConfig
from quire.router.kv_subscriber import KvSubscriber
from quire.router.prefill_servers import reachable_url
from quire.router.prefix_index import PrefixIndex
from quire.router.prompt import Prompt
from quire.router.prompt_cost import CostEstimate, PromptCost, mean_cost
from quire.router.upstream import Upstream

State = Literal["starting", "ready", "unhealthy"]
STATES: tuple[State, ...] = ("starting", "ready", "unhealthy")
WILDCARD = "*"
_LEARNING_RATE = 0.1
_MAX_PAUSE_S = 30.0
_MAX_DOUBLINGS = 32
"""Of the pause; 2.0 ** 1024 raises OverflowError."""
_RECOVERY_S = 10.0
"""For so long a backend that came back gets less: its caches are empty, and it may fail again."""


class LoadReport(msgspec.Struct, frozen=True):
    """What `GET /load` of quire says; other servers leave most of it out.

    running, waiting       requests
    kv_blocks_free         of kv_blocks_total, each of block_size tokens
    max_num_seqs           that run at once
    replica_id             which ids of the objects that it keeps begin with
    model_content          equal for servers that give the same tokens
    role                   both, prefill or decode
    prefill_listen         of a prefill server: where decode servers connect
    prefill_urls           of a decode server that takes them from a router: those in use; None while they are not known
    prompt_tokens_total    of requests that it has answered since its start; cached_tokens_total: of these, from its cache
    """

    running: int | None = None
    waiting: int | None = None
    kv_blocks_free: int | None = None
    kv_blocks_total: int | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    replica_id: str = ""
    model_content: str = ""
    role: str = "both"
    prefill_listen: str | None = None
    prefill_urls: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_tokens_total: int | None = None
    cached_tokens_total: int | None = None

    @property
    def kv_usage(self) -> float:
        """Return the share of KV blocks in use; 0 where unknown."""
        if not self.kv_blocks_total or self.kv_blocks_free is None:
            return 0.0
        return 1 - self.kv_blocks_free / self.kv_blocks_total


@dataclass(slots=True, eq=False)
class Flight:
    """One request at a backend.

    num_prompt_tokens                      that it has to compute, as predicted; 0 after the first byte
    num_tokens_ahead, num_prompts_ahead    that were to be computed there when it was sent
    """

    num_prompt_tokens: int
    num_tokens_ahead: int
    num_prompts_ahead: int
    started_s: float
    is_streaming: bool


@dataclass(slots=True)
class PromptCounts:
    """Prompt tokens at one backend since it was added.

    sent, predicted    by this router, about; of these, predicted to be cached
    served, cached     by its reports: of all its requests; of these, taken from its cache
    """

    sent: int = 0
    predicted: int = 0
    served: int = 0
    cached: int = 0
    _totals: tuple[int, int] | None = None

    def take(self, load: LoadReport) -> None:
        """Take in a report. What a backend served before the first one is not counted; one that started again begins at 0."""
        if load.prompt_tokens_total is None or load.cached_tokens_total is None:
            return
        last, self._totals = self._totals, (load.prompt_tokens_total, load.cached_tokens_total)
        if last is not None:
            before = last if all(old <= new for old, new in zip(last, self._totals, strict=True)) else (0, 0)
            self.served += self._totals[0] - before[0]
            self.cached += self._totals[1] - before[1]


@dataclass(slots=True, eq=False)
class Backend:
    """One server. Only the event loop's thread touches it.

    error               why it is not ready; None while it is
    models              as its /v1/models lists them, {id: entry}; empty until it was asked
    load                its last report, None where it has none
    num_others          requests that other clients have there, by the last report
    cost                of prompts, as learned from streams; None until one has answered
    request_s           mean duration of a request; None until one has ended
    retry_at_s          it is left out until then, after failures of requests
    kv_subscribers      of its KV events, one for each engine; empty without
    num_answers         requests that it has answered whole
    replica_id, model_content  that it last reported; empty where it has none
    role                by its last report: prefill servers get no requests
    prefill_url         where decode servers of other machines connect to it; None: it is no prefill server
    """

    address: BackendAddress
    upstream: Upstream
    prefixes: PrefixIndex
    clock: Callable[[], float] = time.monotonic
    state: State = "starting"
    error: str | None = None
    is_draining: bool = False
    is_changing: bool = False  # its role
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    load: LoadReport | None = None
    num_others: int = 0
    cost: PromptCost | None = None
    request_s: float | None = None
    retry_at_s: float = 0.0
    recovered_s: float = float("-inf")
    num_failures: int = 0
    num_probe_failures: int = 0
    flights: set[Flight] = field(default_factory=set)
    kv_subscribers: tuple[KvSubscriber, ...] = ()
    num_answers: int = 0
    replica_id: str = ""
    model_content: str = ""
    _estimate: CostEstimate = field(default_factory=CostEstimate, repr=False)
    role: str = "both"
    prefill_url: str | None = None
    prompt_counts: PromptCounts = field(default_factory=PromptCounts)

    @property
    def name(self) -> str:
        return self.address.name

    def serves(self, model: str | None) -> bool:
        """Return whether it answers requests for a model; None for any."""
        return not self.is_prefill and (model is None or model in self.models or WILDCARD in self.models)

    @property
    def is_prefill(self) -> bool:
        """Whether it is a prefill server, which answers no requests of clients."""
        return self.role == "prefill"

    @property
    def is_in_service(self) -> bool:
        """Whether it is ready, not drained, and its role is not being changed."""
        return self.state == "ready" and not (self.is_draining or self.is_changing)

    @property
    def is_available(self) -> bool:
        """Whether it is sent new requests."""
        is_open = self.is_in_service and not self.is_prefill
        return is_open and self.clock() >= self.retry_at_s

    @property
    def is_recovering(self) -> bool:
        """Whether it came back a moment ago."""
        return self.clock() - self.recovered_s < _RECOVERY_S

    @property
    def num_in_flight(self) -> int:
        """Requests of this router that it has."""
        return len(self.flights)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that it has still to compute, as predicted."""
        return sum([flight.num_prompt_tokens for flight in self.flights])

    @property
    def num_queued_prompts(self) -> int:
        """Prompts that it has still to compute, as far as is known."""
        return sum([flight.num_prompt_tokens > 0 for flight in self.flights])

    def num_cached(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt its cache holds: by its KV events, or, where they do not tell, by an estimate."""
        estimate = self.prefixes.num_known(prompt.keys) * prompt.chunk_tokens
        if prompt.token_ids is None or not self.has_live_events:
            return min(estimate, prompt.num_tokens - 1)
        is_complete = all(subscriber.is_complete for subscriber in self.kv_subscribers)
        found = 0 if is_complete else estimate
        for index in [subscriber.index for subscriber in self.kv_subscribers]:
            size = index.block_size
            if size is None:
                continue
            found = max(found, size * index.num_cached(prompt.block_keys(size, is_separate=False)))
            if index.has_separate:  # of this client's salt, or another's: what this client sent is the bound
                num_separate = size * index.num_cached(prompt.block_keys(size, is_separate=True))
                found = max(found, min(num_separate, estimate))
        return min(found, prompt.num_tokens - 1)

    @property
    def has_live_events(self) -> bool:
        """Whether all its engines tell which blocks they hold."""
        return bool(self.kv_subscribers) and all(subscriber.is_live for subscriber in self.kv_subscribers)

    def begin(self, num_prompt_tokens: int, is_streaming: bool) -> Flight:
        """Note that a request is sent."""
        ahead = (self.num_queued_tokens, self.num_queued_prompts)
        flight = Flight(num_prompt_tokens, *ahead, self.clock(), is_streaming)
        self.flights.add(flight)
        return flight

    def first_byte(self, flight: Flight, *, is_good: bool) -> float:
        """Note the first byte of an answer's body; return the seconds it took. Streams teach what prompts cost."""
        took_s = self.clock() - flight.started_s
        if flight.is_streaming and is_good:
            num_tokens = max(flight.num_prompt_tokens + flight.num_tokens_ahead, 1)
            self.cost = self._estimate.add(1 + flight.num_prompts_ahead, num_tokens, took_s)
        flight.num_prompt_tokens = 0
        return took_s

    def end(self, flight: Flight, *, is_good: bool) -> None:
        """Note that a request has ended; only one that was answered whole says how long requests take."""
        self.flights.discard(flight)
        if is_good:
            self.num_answers += 1
            took_s = self.clock() - flight.started_s
            self.request_s = took_s if self.request_s is None else _mean(self.request_s, took_s)

    def note_failure(self, error: str, *, is_refused: bool) -> None:
        """Note a request that failed. A refused connection takes the backend out until it answers a question again."""
        self.num_failures += 1
        if is_refused:
            self.mark_unhealthy(error)
        elif self.num_failures >= 2:
            self.error = error
            self.retry_at_s = self.clock() + backoff_s(0.5, self.num_failures, _MAX_PAUSE_S)

    def note_success(self) -> None:
        """Note a request that was answered."""
        self.num_failures = 0
        self.retry_at_s = 0.0

    def mark_ready(self) -> bool:
        """Note that it takes requests; return whether that is news."""
        was, self.state, self.error = self.state, "ready", None
        self.num_probe_failures = 0
        if was == "unhealthy":
            self.prefixes.clear()
            for subscriber in self.kv_subscribers:
                subscriber.restart()
            self.recovered_s = self.clock()
        return was != "ready"

    def mark_unhealthy(self, error: str) -> bool:
        """Note that it takes none; return whether that is news."""
        was, self.state, self.error = self.state, "unhealthy", error
        self.load, self.num_others = None, 0
        self.upstream.close_idle()
        return was != "unhealthy"

    def take_load(self, load: LoadReport | None) -> None:
        """Take in a report; what this router has in flight there is not counted twice."""
        self.load = load
        if load is not None:
            self.replica_id, self.model_content = load.replica_id, load.model_content
        if load is None:  # perhaps another server, which reports nothing
            self.num_others, self.role, self.prefill_url = 0, "both", None
            return
        self.prompt_counts.take(load)
        self.role, self.prefill_url = load.role, reachable_url(load.prefill_listen, self.address)
        self.num_others = max((load.running or 0) + (load.waiting or 0) - self.num_in_flight, 0)


def backoff_s(first_s: float, num_failures: int, max_s: float) -> float:
    """Return a pause that doubles with each failure, up to a limit."""
    return min(first_s * 2.0 ** min(num_failures, _MAX_DOUBLINGS), max_s)


def _mean(old: float, new: float) -> float:
    return old + _LEARNING_RATE * (new - old)


class BackendTable:
    """All backends in the order in which they were added, and those that were removed while requests run there."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._backends: dict[str, Backend] = {}
        for address in config.backends:
            self.add(address)

    def __iter__(self) -> Iterator[Backend]:
        return iter(list(self._backends.values()))

    def __len__(self) -> int:
        return len(self._backends)

    def get(self, name: str) -> Backend | None:
        """Return the backend of a name."""
        return self._backends.get(name)

    def add(self, address: BackendAddress, sources: Sequence[KvEventSource] | None = None) -> Backend:
        """Add a backend; it gets requests once it answers. Raises ConfigError where it is there already.

        sources  of its KV events; None: those of the configuration
        """
        if address.name in self._backends:
            raise ConfigError(f"the backend {address.name} is there already")
        config = self._config
        upstream = Upstream(address, config.connect_timeout_s)
        backend = Backend(address, upstream, PrefixIndex(config.max_prefix_chunks), self._clock)
        backend.kv_subscribers = tuple(
            KvSubscriber(address.name, source, lambda: backend.num_answers, config.kv_events_silence_s)
            for source in (config.kv_events.get(address.name, ()) if sources is None else sources)
        )
        self._backends[address.name] = backend
        return backend

    def remove(self, name: str) -> Backend | None:
        """Take a backend out; its running requests go on. None where there is none of that name."""
        backend = self._backends.pop(name, None)
        if backend is not None:
            backend.is_draining = True
            backend.upstream.close()
        return backend

    def serving(self) -> list[Backend]:
        """Return the backends that answer requests: all but prefill servers."""
        return [backend for backend in self if not backend.is_prefill]

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the models of all backends, each with the entry of the first that lists it."""
        found: dict[str, dict[str, Any]] = {}
        for backend in self.serving():
            for name, entry in backend.models.items():
                found.setdefault(name, entry)
        found.pop(WILDCARD, None)
        return found

    def differing(self) -> dict[str, list[str]]:
        """Return {model: its backends} of models under whose name backends serve different weights, tokenizers or options."""
        found: dict[str, dict[str, list[str]]] = {}
        for backend in self._backends.values():
            is_compared = backend.model_content and backend.state == "ready" and not backend.is_draining
            for model in backend.models if is_compared else ():
                found.setdefault(model, {}).setdefault(backend.model_content, []).append(backend.name)
        return {model: [name for names in by.values() for name in names] for model, by in found.items() if len(by) > 1}

    def mean_cost(self) -> PromptCost:
        """Return what prompts cost on a backend that has not shown it yet."""
        return mean_cost(backend.cost for backend in self._backends.values())
