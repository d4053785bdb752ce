"""Subscription: the deltas of one request, for the one task that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.base.errors import InvariantError
from quire.serving.engine_client.messages import ChoiceDelta, RequestDelta, TokenLogprob
from quire.serving.errors import ApiError

_GRACE_S = 0.5
"""A reader is slow only if a delta has waited this long: after a pause of the event loop many may arrive at once."""

_COALESCE_EVERY = 32
_DELTA_BYTES = 32
_TOKEN_BYTES = 8
_LOGPROB_BYTES = 24


class Subscription:
    """Holds the unread deltas, merged into one, up to a limit. Belongs to one event loop.

    sequence  number of the command that submitted it
    """

    def __init__(self, request_id: str, sequence: int, max_bytes: int, max_age_s: float) -> None:
        self.request_id = request_id
        self.sequence = sequence
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._pending: list[RequestDelta] = []
        self._num_pending_bytes = 0
        self._oldest_s = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[RequestDelta], bool] | None = None
        self._error: ApiError | None = None
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        """Whether the last delta, or an error in its place, has arrived; it may still be unread."""
        return self._is_finished or self._error is not None

    @property
    def error(self) -> ApiError | None:
        """The error that arrived in place of the last delta."""
        return self._error

    async def next(self) -> RequestDelta:
        """Return the new delta since the last call, waiting for one.

        A request that the engine refused, or that failed in a step, has a last delta with `error`. Raises ApiError when the
        engine has ended (503, code "engine_error"), or the reader was too slow (408, code "slow_reader"); unread deltas
        are then lost. Raises InvariantError after the last delta.
        """
        while not self._pending or self._error is not None:
            if self._error is not None:
                raise self._error
            if self._is_finished or self._waiter is not None:
                raise InvariantError(f"request {self.request_id}: nothing is left to read, or two tasks read at once")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._pending = self._pending, []
        self._num_pending_bytes = 0
        return coalesce(taken)

    def attach_sink(self, take: Callable[[RequestDelta], bool]) -> None:
        """Offer every delta except the last to `take` while `next` waits; it returns whether it took it, and must not raise.

        A taken delta is not returned by `next`, and so needs no task switch.
        """
        self._take = take

    def deliver(self, delta: RequestDelta, now: float) -> None:
        """Add a delta of the engine; now is from time.monotonic()."""
        waiter = self._waiter  # while it is not done, the reader waits and has read everything
        if self._take is not None and waiter is not None and not waiter.done() and not delta.finished and self._take(delta):
            return
        if not self._pending:
            self._oldest_s = now
        self._pending.append(delta)
        self._num_pending_bytes += _num_bytes(delta)
        self._is_finished = delta.finished
        if len(self._pending) >= _COALESCE_EVERY:
            self._pending = [coalesce(self._pending)]
        self._wake()

    def is_slow(self, now: float) -> bool:
        """Whether too many or too old deltas are unread; always False after the last one has arrived."""
        if not self._pending or self._is_finished:
            return False
        age_s = now - self._oldest_s
        return age_s > self._max_age_s or (self._num_pending_bytes > self._max_bytes and age_s > _GRACE_S)

    def fail(self, error: ApiError) -> None:
        """End the subscription with an error, unless it has ended."""
        if not self.is_finished:
            self._error = error
            self._pending.clear()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _num_bytes(delta: RequestDelta) -> int:
    """Estimate the size of a delta when it is sent to the client."""
    total = _DELTA_BYTES
    for choice in delta.choices:
        total += len(choice.text) + _TOKEN_BYTES * len(choice.token_ids)
        if choice.logprobs is not None:
            total += _LOGPROB_BYTES * sum(map(len, choice.logprobs))
    if delta.prompt_logprobs is not None:
        total += _LOGPROB_BYTES * sum(len(entries or ()) for entries in delta.prompt_logprobs)
    return total


def coalesce(deltas: list[RequestDelta]) -> RequestDelta:
    """Return the deltas merged into one: at least one, of the same request, in order. They are not changed."""
    if len(deltas) == 1:
        return deltas[0]
    by_index: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        for choice in delta.choices:
            by_index.setdefault(choice.index, []).append(choice)
    merged = RequestDelta(deltas[0].request_id, [_coalesce_choice(parts) for parts in by_index.values()], deltas[-1].finished)
    for delta in deltas:
        merged.metrics = delta.metrics or merged.metrics
        merged.prompt_logprobs = merged.prompt_logprobs or delta.prompt_logprobs
        merged.error = delta.error or merged.error
        merged.error_param = delta.error_param or merged.error_param
        merged.embedding = delta.embedding or merged.embedding
        merged.is_refused = delta.is_refused or merged.is_refused
    return merged


def _coalesce_choice(parts: list[ChoiceDelta]) -> ChoiceDelta:
    last = parts[-1]
    logprobs: list[list[TokenLogprob]] | None = None
    if any(part.logprobs is not None for part in parts):
        logprobs = [entries for part in parts for entries in part.logprobs or ()]
    return ChoiceDelta(
        last.index,
        "".join([part.text for part in parts]),
        [token_id for part in parts for token_id in part.token_ids],
        logprobs,
        last.finish_reason,
        last.stop_reason,
        last.cumulative_logprob,
    )
