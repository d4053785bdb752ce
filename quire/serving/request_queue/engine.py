"""Engine and Subscription: the interface of the engine's client that the gateway needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.contracts.request import Request
from quire.serving.engine_client.messages import EngineInfo, RequestDelta, StepOutputs
from quire.serving.engine_client.supervisor import EngineState
from quire.serving.errors import ApiError
from quire.serving.interfaces import Sink


class Subscription(Protocol):
    """The deltas of one submitted request. When the engine ends, its client fails the subscriptions."""

    @property
    def is_finished(self) -> bool:
        """Return whether the last delta, or an error in its place, has arrived."""
        ...

    @property
    def error(self) -> ApiError | None:
        """Return the error that arrived in place of the last delta."""
        ...

    def attach_sink(self, take: Sink) -> None:
        """Offer deltas except the last to `take` while `next` waits; taken deltas are not returned by `next`."""
        ...

    async def next(self) -> RequestDelta:
        """Wait for the next delta; may be cancelled. Raises ApiError: the engine died, the reader was too slow."""
        ...


class Replica(Protocol):
    """One engine process."""

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo | None: ...


class Engine(Protocol):
    """The client of the engine process, or of several. Its listeners are called on the event loop."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """Return the engine processes, in the order of their numbers."""
        ...

    @property
    def state(self) -> EngineState:
        """Return the state of the engine; it takes requests while it is "ready"."""
        ...

    @property
    def last_error(self) -> str | None:
        """Return the full reason why the engine last ended."""
        ...

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def on_step(self) -> list[Callable[[StepOutputs], None]]: ...

    @property
    def on_state(self) -> list[Callable[[EngineState], None]]: ...

    def submit(self, request: Request) -> Subscription:
        """Submit a request. Raises ApiError if the engine is not available."""
        ...

    def abort(self, request_id: str) -> None:
        """Abort a request; its last delta follows."""
        ...
