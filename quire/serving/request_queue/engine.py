"""Engine and Subscription: what the gateway needs of the client of the engine process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.contracts.request import Request
from quire.serving.engine_client.messages import EngineInfo, RequestDelta, StepOutputs
from quire.serving.engine_client.supervisor import EngineState
from quire.serving.errors import ApiError
from quire.serving.interfaces import Sink


class Subscription(Protocol):
    """The deltas of one submitted request. When the engine ends, its client fails the subscriptions by itself."""

    @property
    def is_finished(self) -> bool:
        """Return whether the last delta has come, or an error in its place."""
        ...

    @property
    def error(self) -> ApiError | None:
        """Return what came in the place of the last delta."""
        ...

    def attach_sink(self, take: Sink) -> None:
        """Offer deltas to `take` while `next` waits, all but the last; what it takes does not come out of `next`."""
        ...

    async def next(self) -> RequestDelta:
        """Wait for the next delta; may be cancelled. Raises ApiError: the engine died, the reader was too slow."""
        ...


class Engine(Protocol):
    """The client of the engine process. Its listeners are called on the event loop."""

    @property
    def state(self) -> EngineState:
        """Return where the engine stands; requests are taken while it is "ready"."""
        ...

    @property
    def last_error(self) -> str | None:
        """Return why the engine ended the last time, in full."""
        ...

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def on_step(self) -> list[Callable[[StepOutputs], None]]: ...

    @property
    def on_state(self) -> list[Callable[[EngineState], None]]: ...

    def submit(self, request: Request) -> Subscription:
        """Hand over a request. Raises ApiError when the engine is not there."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; its last delta follows."""
        ...
