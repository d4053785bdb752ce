"""FleetMetrics: what a server with several models counts, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from quire.serving.metrics.instruments import Counter, Gauge, Histogram, InstrumentCollector

PREFIX = "quire_fleet:"
_SECONDS = (0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class FleetMetrics:
    """The instruments of one fleet. The label `model` is a name of the configuration, never a text that a client wrote."""

    def __init__(self) -> None:
        none: dict[str, str] = {}
        self.loads = Counter(
            PREFIX + "loads", "Starts of a model's process by result: loaded, failed.", none, ("model", "result")
        )
        self.unloads = Counter(
            PREFIX + "unloads", "Ends of a model's process by reason: memory, idle, crashed.", none, ("model", "reason")
        )
        self.refused = Counter(
            PREFIX + "refused",
            "Requests that got 503 while their model was not loaded, by reason: queue_full, timeout, failed.",
            none,
            ("model", "reason"),
        )
        self.load_seconds = Histogram(
            PREFIX + "load_seconds", "From the start of a model's process until it is ready.", none, _SECONDS, ("model",)
        )
        self.wait_seconds = Histogram(
            PREFIX + "wait_seconds", "That requests waited for a model that was loaded then.", none, _SECONDS, ("model",)
        )
        self.waiting = Gauge(PREFIX + "waiting_requests", "Requests that wait for a model to be loaded.", none, ("model",))
        self.state = Gauge(PREFIX + "model_state", "1 for the state of a model.", none, ("model", "state"))
        self.memory = Gauge(PREFIX + "memory_bytes", "Memory by kind: budget, used.", none, ("kind",))
        found = [value for value in vars(self).values() if isinstance(value, Counter | Gauge | Histogram)]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(InstrumentCollector(found))

    def render(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self._registry)
