"""Run a load: send requests when they are due, with limited concurrency, and keep their records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.bench.serving.records import RequestRecord
from quire.bench.serving.workload import Request

Clock = Callable[[], float]
_EARLY_S = 1e-6


class Sender(Protocol):
    """A connection to a server. send completes the record, including the server's errors; it may be cancelled."""

    async def send(self, request: Request, record: RequestRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The records of a run in the order of the workload, and its start and end."""

    records: tuple[RequestRecord, ...]
    start_s: float
    end_s: float
    is_interrupted: bool

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


async def run_load(
    requests: Sequence[Request],
    times: Sequence[float],
    sender: Sender,
    clock: Clock,
    max_concurrency: int | None = None,
    on_end: Callable[[RequestRecord], None] | None = None,
) -> LoadResult:
    """Return the records after the last request has ended, or after a cancellation (Ctrl-C) has stopped the rest.

    times    when each request is due, in seconds from now, ascending
    on_end   called with each record once it is complete

    Raises any exception of a sender, after stopping the others.
    """
    start = clock()
    records = [
        RequestRecord(index, start + time, request.num_prompt_tokens, request.num_output_tokens)
        for index, (request, time) in enumerate(zip(requests, times, strict=True))
    ]
    is_interrupted = False
    try:
        async with asyncio.TaskGroup() as group:
            await _dispatch(group, requests, records, _Turnstile(sender, max_concurrency, clock, on_end))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        is_interrupted = True
        for record in records:
            if record.outcome == "running":
                record.outcome = "aborted"
                record.end_s = clock()
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return LoadResult(tuple(records), start, clock(), is_interrupted)


class _Turnstile:
    """Passes requests to the sender, at most max_concurrency at a time."""

    def __init__(
        self, sender: Sender, max_concurrency: int | None, clock: Clock, on_end: Callable[[RequestRecord], None] | None
    ) -> None:
        self.clock = clock
        self._sender = sender
        self._places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._on_end = on_end

    async def enter(self) -> None:
        if self._places is not None:
            await self._places.acquire()

    async def pass_through(self, request: Request, record: RequestRecord) -> None:
        try:
            await self._sender.send(request, record)
        finally:
            if self._places is not None:
                self._places.release()
        if self._on_end is not None:
            self._on_end(record)


async def _dispatch(
    group: asyncio.TaskGroup, requests: Sequence[Request], records: Sequence[RequestRecord], turnstile: _Turnstile
) -> None:
    for request, record in zip(requests, records, strict=True):
        await turnstile.enter()
        while (wait := record.scheduled_s - turnstile.clock()) > _EARLY_S:  # a loop with millisecond timers wakes too early
            await asyncio.sleep(wait)
        record.outcome = "running"
        group.create_task(turnstile.pass_through(request, record))
