"""What the parts of the server hand to each other: who asks, what for, and the stream of what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from quire.contracts.request import Request
from quire.serving.engine_client.messages import RequestDelta

PriorityClass = Literal["interactive", "default", "batch"]
NOT_BY_CLIENT = "not by the client"
"""The message of a cancellation (task.cancel) that does not mean that the client has gone."""
AbortReason = Literal["disconnect", "slow_reader", "deadline", "shutdown", "cancelled", "tool_cut"]
Sink = Callable[[RequestDelta], bool]
"""Offered a delta the moment it comes; returns whether it takes it, and must have left it alone if not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who sends a request; files, batches and stored responses belong to one.

    name         of the API key, as the server's operator called it; "anonymous" without keys
    cache_salt   keeps this tenant's prefix cache apart from all others'
    is_admin     may see the live view with everybody's requests
    may_use_interactive    may ask for the class "interactive"
    """

    name: str
    cache_salt: str
    is_admin: bool = False
    may_use_interactive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request for the engine, and how it is to be treated on the way there.

    deadline_s   of time.monotonic(); None for none
    route        label of metrics: "/v1/chat/completions"
    traceparent  W3C trace context that the client sent; None for none
    call_id      of the HTTP request that the job is a part of: its jobs count as one against the limits of a key; None for none
    received_s   when that request's head had arrived, in time.monotonic(); None for none
    """

    request: Request
    owner: Tenant
    route: str
    is_streaming: bool
    priority: PriorityClass = "default"
    deadline_s: float | None = None
    traceparent: str | None = None
    call_id: str | None = None
    received_s: float | None = None

    @property
    def has_client(self) -> bool:
        """Whether somebody waits for the answer on a connection."""
        return self.call_id is not None


class GenerationStream(Protocol):
    """The deltas of one job, an asynchronous iterator that is used once, inside `async with`.

    Leaving `async with` before the last delta aborts the request, exactly once, whatever the cause. Iterating raises ApiError:
    a deadline that passed, an engine that died, a request that the engine refused or that failed in a step.
    """

    @property
    def request_id(self) -> str: ...

    def abort(self, reason: AbortReason) -> None:
        """End the request; iteration then ends with its last delta (finish_reason "abort") or an ApiError."""
        ...

    def attach_sink(self, take: Sink) -> None:
        """Offer deltas to `take` from now on; those that it takes are not iterated over. A stream need not offer any.

        Only while a reader waits in the iteration, so that order is kept, and neither errors nor the last delta: what has to
        end in the reader's task. What `take` raises is raised from the iteration.
        """
        ...

    def __aiter__(self) -> AsyncIterator[RequestDelta]: ...

    async def __anext__(self) -> RequestDelta: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Gateway(Protocol):
    """The way to the engine: admission, the fair queue, the engine itself."""

    def open(self, job: Job) -> GenerationStream:
        """Queue a job. Raises ApiError at once where it is not admitted: 400, 429 or 503."""
        ...

    def holding(self, owner: str, call_id: str | None) -> AbstractContextManager[None]:
        """Count a client's request among those in flight of its key, inside `with`. Raises ApiError 429 over the key's limit.

        It counts once, also where its jobs are opened meanwhile; None, for a line of a batch, is not counted.
        """
        ...

    @property
    def drain_left_s(self) -> float:
        """How long it takes until a server that drains has ended."""
        ...

    def ratelimit_headers(self, owner: str) -> dict[str, str]:
        """Return the x-ratelimit-* headers of an owner; none where it has no rates."""
        ...
