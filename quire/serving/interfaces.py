"""Interfaces between the parts of the server: tenants, jobs, and the streams of their deltas."""

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
AbortReason = Literal["disconnect", "slow_reader", "deadline", "shutdown", "cancelled", "tool_cut", "sleep"]
Sink = Callable[[RequestDelta], bool]
"""Called with each delta as it arrives. Returns whether it took the delta; if not, it must have had no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The sender of a request; it owns files, batches and stored responses.

    name         of the API key, as configured; "anonymous" without keys
    cache_salt   separates this tenant's prefix cache from that of others
    is_admin     may see everyone's requests in the live view
    may_use_interactive    may ask for the class "interactive"
    """

    name: str
    cache_salt: str
    is_admin: bool = False
    may_use_interactive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request for the engine, with its class, deadline and caller.

    deadline_s   of time.monotonic(); None for none
    route        label of metrics: "/v1/chat/completions"
    traceparent  W3C trace context that the client sent; None for none
    call_id      of the job's HTTP request, whose jobs count as one against the limits of a key; None for none
    client_id    of the same HTTP request, as the client has named it (x-request-id); None for none
    received_s   when the head of that request arrived, in time.monotonic(); None for none
    """

    request: Request
    owner: Tenant
    route: str
    is_streaming: bool
    priority: PriorityClass = "default"
    deadline_s: float | None = None
    traceparent: str | None = None
    call_id: str | None = None
    client_id: str | None = None
    received_s: float | None = None

    @property
    def has_client(self) -> bool:
        """Whether a client waits for the answer on a connection."""
        return self.call_id is not None


class GenerationStream(Protocol):
    """The deltas of one job, an asynchronous iterator that is used once, inside `async with`.

    Leaving `async with` before the last delta aborts the request exactly once. Iterating raises ApiError if
    the deadline passed, the engine died, or the request was refused or failed in a step.
    """

    @property
    def request_id(self) -> str: ...

    def abort(self, reason: AbortReason) -> None:
        """End the request; iteration then ends with its last delta (finish_reason "abort") or an ApiError."""
        ...

    def attach_sink(self, take: Sink) -> None:
        """Offer deltas to `take` from now on; those that it takes are not iterated over. A stream may ignore this.

        Deltas are offered only while a reader waits in the iteration, to keep their order. Errors and the last delta are not
        offered, since the reader's task must handle them. Exceptions of `take` are raised from the iteration.
        """
        ...

    def __aiter__(self) -> AsyncIterator[RequestDelta]: ...

    async def __anext__(self) -> RequestDelta: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Gateway(Protocol):
    """Access to the engine: admission, the fair queue, the engine itself."""

    def open(self, job: Job) -> GenerationStream:
        """Queue a job. Raises ApiError at once if it is not admitted: 400, 429 or 503."""
        ...

    def holding(self, owner: str, call_id: str | None) -> AbstractContextManager[None]:
        """Count a client's request as in flight for its key, inside `with`. Raises ApiError 429 over the key's limit.

        It counts once, even if its jobs are opened meanwhile. None (a line of a batch) is not counted.
        """
        ...

    @property
    def drain_left_s(self) -> float:
        """The expected time until a draining server has ended."""
        ...

    def ratelimit_headers(self, owner: str) -> dict[str, str]:
        """Return the x-ratelimit-* headers of an owner; empty without rates."""
        ...
