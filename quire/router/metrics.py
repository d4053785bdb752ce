"""RouterMetrics: what the router counts, in Prometheus' text format."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from quire.router.backend import STATES, Backend, BackendTable, PromptCounts
from quire.router.kv_subscriber import SOURCE_STATES
from quire.serving.metrics.instruments import Counter, Gauge, Histogram, InstrumentCollector

PREFIX = "quire_router:"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 160, 640)


def _counter(name: str, description: str, *labels: str) -> Counter:
    return Counter(PREFIX + name, description, {}, labels)


def _gauge(name: str, description: str, *labels: str) -> Gauge:
    return Gauge(PREFIX + name, description, {}, labels)


def _seconds(name: str, description: str) -> Histogram:
    return Histogram(PREFIX + name, description, {}, _SECONDS)


class RouterMetrics:
    """The instruments of one router. No label is a text that a client wrote."""

    def __init__(self, table: BackendTable) -> None:
        self._table = table
        backend, state = "backend", "state"
        self.requests = _counter(
            "requests",
            "Answers by status; 499: the client had gone. backend: whose answer it was, none for the router's own.",
            backend,
            "code",
        )
        self.chosen = _counter(
            "chosen", "Choices of a backend by what decided: prefix, load, sticky, only, turn or owner.", "reason"
        )
        self.retries = _counter("retries", "Requests that were sent to another backend.", backend)
        self.retries_denied = _counter("retries_denied", "Retries that the retry budget did not allow.")
        self.failures = _counter("backend_failures", "Requests that a backend failed.", backend)
        self.broken = _counter("broken_answers", "Answers that ended early because their backend did.", backend)
        self.resumes = _counter("resumes", "Streams that another backend was to continue.", backend)
        self.ttft = _seconds("time_to_first_byte_seconds", "From the arrival to the first byte of the body.")
        self.predicted = _seconds("predicted_time_to_first_token_seconds", "What the policy predicted at the choice.")
        self.overhead = _seconds("choice_seconds", "From the whole body to the request being sent: the router's own part.")
        self.prompt_tokens = _counter("prompt_tokens", "Prompt tokens sent, about.", backend)
        self.predicted_cached = _counter("predicted_cached_tokens", "Of these, predicted to be cached.", backend)
        self.served_tokens = _counter(
            "served_prompt_tokens",
            "Prompt tokens of all requests that a backend has answered, by its reports: quire's only.",
            backend,
        )
        self.cached_tokens = _counter("served_cached_tokens", "Of these, taken from the backend's prefix cache.", backend)
        self._shown: dict[str, PromptCounts] = {}
        self.tokenized = _counter("tokenized_prompts", "Prompts that backends tokenised: done, timeout, failed.", "result")
        self.state = _gauge("backend_state", "1 for the state of a backend.", backend, state)
        self.in_flight = _gauge("backend_in_flight", "Requests of this router at a backend.", backend)
        self.queued = _gauge(
            "backend_queued_prompt_tokens", "Prompt tokens a backend has still to compute, predicted.", backend
        )
        self.chunks = _gauge("prefix_chunks", "Entries of the prefix index of a backend.", backend)
        self.kv_blocks = _gauge("kv_event_blocks", "KV blocks that a backend holds by its events.", backend)
        self.kv_state = _gauge("kv_event_sources", "Sources of KV events by state: waiting, live, silent.", backend, state)
        self.kv_batches = _gauge("kv_event_batches", "Batches of KV events taken in.", backend)
        self.kv_gaps = _gauge("kv_event_gaps", "Gaps in the numbers of batches.", backend)
        self.kv_lost = _gauge("kv_event_losses", "Gaps that no replay filled.", backend)
        of_events = (self.kv_blocks, self.kv_state, self.kv_batches, self.kv_gaps, self.kv_lost)
        self._of_backends = (self.state, self.in_flight, self.queued, self.chunks, *of_events)
        found = [value for value in vars(self).values() if isinstance(value, Counter | Gauge | Histogram)]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(InstrumentCollector(found))

    def render(self) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        for gauge in self._of_backends:
            gauge.clear()
        names = {backend.name for backend in self._table}
        self._shown = {name: counts for name, counts in self._shown.items() if name in names}
        for backend in self._table:
            for state in STATES:
                self.state.labels(backend.name, state).set(float(backend.state == state and not backend.is_draining))
            self.state.labels(backend.name, "draining").set(float(backend.is_draining))
            self.in_flight.labels(backend.name).set(backend.num_in_flight)
            self.queued.labels(backend.name).set(backend.num_queued_tokens)
            self.chunks.labels(backend.name).set(len(backend.prefixes))
            self._show_events(backend)
            self._show_prompts(backend)
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _show_prompts(self, backend: Backend) -> None:
        """Add what a backend has counted since the last time; one that was added again begins at 0."""
        name, now = backend.name, backend.prompt_counts
        before = self._shown.get(name)
        if before is None or before.sent > now.sent or before.served > now.served:
            before = PromptCounts()
        self.prompt_tokens.labels(name).add(now.sent - before.sent)
        self.predicted_cached.labels(name).add(now.predicted - before.predicted)
        self.served_tokens.labels(name).add(now.served - before.served)
        self.cached_tokens.labels(name).add(now.cached - before.cached)
        self._shown[name] = replace(now)

    def _show_events(self, backend: Backend) -> None:
        subscribers, name = backend.kv_subscribers, backend.name
        if not subscribers:
            return
        for state in SOURCE_STATES:
            self.kv_state.labels(name, state).set(sum(one.state == state for one in subscribers))
        self.kv_blocks.labels(name).set(sum(len(one.index) for one in subscribers))
        self.kv_batches.labels(name).set(sum(one.counts.num_batches for one in subscribers))
        self.kv_gaps.labels(name).set(sum(one.counts.num_gaps for one in subscribers))
        self.kv_lost.labels(name).set(sum(one.counts.num_lost for one in subscribers))
