"""JobStream: the deltas of one job, first from the queue, then from the engine."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from quire.base.errors import RequestError
from quire.base.logging import get_logger
from quire.serving.admission.ticket import Ticket
from quire.serving.engine_client.messages import ChoiceDelta, RequestDelta
from quire.serving.errors import ApiError, from_quire_error
from quire.serving.interfaces import NOT_BY_CLIENT, AbortReason, Job, Sink
from quire.serving.metrics.request_record import RequestRecord
from quire.serving.public_error import show_error
from quire.serving.request_queue.engine import Subscription

logger = get_logger(__name__)


class StreamOwner(Protocol):
    """The gateway, as its streams see it."""

    def end_early(self, stream: JobStream, reason: AbortReason) -> None:
        """Take the job out of the queue, or abort it in the engine, unless either has happened or the job has ended."""
        ...

    def subscription_failed(self, stream: JobStream, error: ApiError) -> None:
        """Note that the engine's client has given the request up."""
        ...

    def entered(self, stream: JobStream) -> None:
        """Note that the stream is being read."""
        ...

    def left(self, stream: JobStream) -> None:
        """Note that nobody reads the stream any more."""
        ...


class JobStream:
    """A GenerationStream. Its gateway changes its state; its reader awaits it.

    The reader waits directly in the engine's subscription. To fail a stream at once, its reading task is cancelled and the
    cancellation is converted into the error, as asyncio.timeout does; so a token costs no additional task or future.
    """

    def __init__(self, owner: StreamOwner, ticket: Ticket, record: RequestRecord) -> None:
        self.ticket = ticket
        self.record = record
        self.timer: asyncio.TimerHandle | None = None
        self.is_closed = False  # the gateway no longer counts it
        self.is_aborted = False  # the engine was told to end it
        self.is_read = False  # a reader is inside `async with`
        self.subscription: Subscription | None = None
        self._owner = owner
        self._sink: Sink | None = None
        self._failure: Exception | None = None
        self._last: RequestDelta | None = None
        self._is_over = False
        self._moved: asyncio.Future[None] | None = None
        self._reader: asyncio.Task[object] | None = None
        self._is_interrupted = False

    @property
    def job(self) -> Job:
        """Return the job."""
        return self.ticket.job

    @property
    def request_id(self) -> str:
        """Return the id of the request."""
        return self.ticket.job.request.request_id

    def abort(self, reason: AbortReason) -> None:
        """End the request; iteration then ends with its last delta (finish_reason "abort") or an ApiError."""
        self._owner.end_early(self, reason)

    def attach_sink(self, take: Sink) -> None:
        """Offer deltas to `take` while the reader waits, except errors and the last delta."""
        self._sink = take
        if self.subscription is not None:
            self.subscription.attach_sink(self._offer)

    # Called by the gateway.

    def start(self, subscription: Subscription) -> None:
        """Continue with the engine's deltas."""
        self.subscription = subscription
        if self._sink is not None:
            subscription.attach_sink(self._offer)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raise an error from the iteration at once, even while it waits. Only the first error counts."""
        if self._is_over or self._failure is not None:
            return
        self._failure = error
        self._wake()
        if self._reader is not None:
            self._is_interrupted = True
            self._reader.cancel()

    def finish_unstarted(self) -> None:
        """End with a last delta with "abort", for a request that was never sent to the engine."""
        choices = [ChoiceDelta(index, "", [], finish_reason="abort") for index in range(self.job.request.params.n)]
        self._last = RequestDelta(self.request_id, choices, finished=True)
        self._wake()

    def _offer(self, delta: RequestDelta) -> bool:
        """Return whether the sink has taken a delta; its exceptions are raised only to the reader of this stream."""
        if self._sink is None or self._failure is not None or delta.error is not None:
            return False
        try:
            return self._sink(delta)
        except Exception as error:  # noqa: BLE001 - raised by the iteration
            self.fail(error)
            return True

    def _wake(self) -> None:
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)

    # Called by the reader.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestDelta:
        if self._is_over:
            raise StopAsyncIteration
        try:
            delta = await self._next()
            error = error_of(delta)
            if error is not None:
                raise error
        except ApiError:
            self._is_over = True
            raise
        self._is_over = delta.finished
        return delta

    async def _next(self) -> RequestDelta:
        while self._failure is None:
            if self.subscription is not None:
                return await self._next_of(self.subscription)
            if self._last is not None:
                return self._last
            self._moved = asyncio.get_running_loop().create_future()
            await self._moved
        raise self._failure

    async def _next_of(self, subscription: Subscription) -> RequestDelta:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a stream can only be read in a task")
        num_cancellations = task.cancelling()
        self._reader = task
        try:
            return await subscription.next()
        except ApiError as error:
            self._owner.subscription_failed(self, error)
            raise
        except asyncio.CancelledError:
            if self._is_interrupted and task.uncancel() <= num_cancellations and self._failure is not None:
                raise self._failure from None
            raise
        finally:
            self._reader = None

    async def __aenter__(self) -> Self:
        self._owner.entered(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError | GeneratorExit)
        is_gone = is_cancelled and self.job.has_client and error is not None and error.args != (NOT_BY_CLIENT,)
        self._owner.end_early(self, "disconnect" if is_gone else "cancelled")
        self._is_over = True
        self._owner.left(self)


def error_of(delta: RequestDelta) -> ApiError | None:
    """Return the error that the reader gets instead of a delta of a request that was refused, or failed in a step."""
    if delta.error is None:
        return None
    if delta.is_refused:
        return from_quire_error(RequestError(delta.error, delta.error_param))
    logger.warning("request %s failed in a step: %s", delta.request_id, delta.error)  # the full error only goes to the log
    return ApiError(500, f"the engine failed on this request: {show_error(delta.error)}", code="engine_error")
