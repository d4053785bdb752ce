"""TokenizerPool: threads that render and tokenise prompts, so that a long prompt does not delay the tokens of others."""

from __future__ import annotations

import asyncio
import random as randomness
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from quire.serving.admission.fair_share import FairClock, Share, exceeds_share
from quire.serving.errors import overloaded, rate_limited, spread_s

T = TypeVar("T")
LARGE_CHARACTERS = 32 << 10
"""A call with more text than this is large: it takes tens of milliseconds, and one thread is reserved for smaller calls."""
BRIEF_CHARACTERS = 1 << 10
"""A call with at most this much text is brief: it takes less than switching to a thread and back, unless the template is
slow."""
BRIEF_S = 0.0005
"""If brief calls take more CPU time than this, they go to the threads too, to keep the event loop responsive."""
_BRIEF_PER_TURN_S = 0.002
"""CPU time of brief calls in one iteration of the event loop; a burst would otherwise delay tokens and timers."""
_MEAN_OVER_CALLS = 20
_NUMBERS = frozenset((int, float, bool, type(None)))


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One waiting or running call, with its arrival number. `done` is a future of the event loop."""

    number: int
    is_large: bool
    is_brief: bool
    function: Callable[[], Any]
    done: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _Line:
    """The calls of one owner in order of arrival, with a separate queue for batches.

    share  of its owner, in seconds of processor time
    """

    is_batch: bool
    share: Share
    num_running: int = 0
    small: OrderedDict[int, _Call] = field(default_factory=OrderedDict[int, _Call])
    large: OrderedDict[int, _Call] = field(default_factory=OrderedDict[int, _Call])

    @property
    def num_held(self) -> int:
        return self.num_running + len(self.small) + len(self.large)

    @property
    def load(self) -> float:
        """How many of its calls run, over its weight."""
        return self.num_running / self.share.weight

    def waiting(self, is_large: bool) -> OrderedDict[int, _Call]:
        return self.large if is_large else self.small

    def first(self, may_be_large: bool) -> _Call | None:
        waiting = (self.small, self.large) if may_be_large else (self.small,)
        return min((next(iter(calls.values())) for calls in waiting if calls), key=lambda call: call.number, default=None)


class TokenizerPool:
    """A few threads with a bounded queue that is fair between owners. Used from the event loop.

    The next call is of the owner with the fewest running calls, then with the least CPU time, both divided by the owner's
    weight; an owner that was idle starts at the CPU time of the last served owner. Calls of batches run when no other call
    waits. All threads but one take large calls, so that small calls overtake them. If no call waits, a brief call runs at once
    on the event loop.

    max_waiting  calls that may run or wait; beyond that calls are refused with 503, or 429 if the owner holds more than its
                 share
    weight_of    returns the share of an owner, above 0, in the threads and in the queue
    random       returns a number in [0, 1), for the jitter of Retry-After
    """

    def __init__(
        self,
        num_threads: int = 2,
        max_waiting: int = 512,
        *,
        weight_of: Callable[[str], float] = lambda _: 1.0,
        random: Callable[[], float] = randomness.random,
    ) -> None:
        self._pool = _started_pool(num_threads)
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._weight_of = weight_of
        self._random = random
        self.lines: dict[tuple[str, bool], _Line] = {}
        """By owner, and whether of batches."""
        self._clock = FairClock()
        self._num_held = self._num_running = self._num_running_large = self._num_calls = 0
        self.mean_s = 0.0
        """Of the last calls."""
        self._mean_brief_s = 0.0
        self._turn_left_s = _BRIEF_PER_TURN_S

    async def run(
        self, owner: str, texts: object, function: Callable[[], T], *, is_batch: bool = False, may_run_here: bool = False
    ) -> T:
        """Return what the function returns.

        texts         the function's input: strings, and lists, dicts and structs of them; its size decides whether the call is
                      large or brief
        may_run_here  on the event loop, if it is brief; it must not block

        Raises ApiError 503 when too many calls wait, 429 when most of them are this owner's.
        """
        line = self.lines.get((owner, is_batch))
        if line is None:
            line = self.lines[owner, is_batch] = _Line(is_batch, Share(self._weight_of(owner)))
        self._check_room(line)
        if not line.num_held:
            self._clock.enter(line.share)
        num_characters = count_characters(texts, LARGE_CHARACTERS)
        is_brief = may_run_here and num_characters <= BRIEF_CHARACTERS
        while is_brief and not self._num_held and self._mean_brief_s <= BRIEF_S:
            if self._turn_left_s > 0:
                return self._run_here(line, function)
            await asyncio.sleep(0)
        self._num_calls += 1
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call = _Call(self._num_calls, num_characters > LARGE_CHARACTERS, is_brief, function, done)
        line.waiting(call.is_large)[call.number] = call
        self._num_held += 1
        self._dispatch()
        try:
            return await done
        finally:
            if line.waiting(call.is_large).pop(call.number, None) is not None:  # a running call is removed when it ends
                self._num_held -= 1

    def _run_here(self, line: _Line, function: Callable[[], T]) -> T:
        self._clock.serve(line.share)
        if self._turn_left_s == _BRIEF_PER_TURN_S:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        outcome = _timed(function)
        self._turn_left_s -= outcome.elapsed_s
        self._account(line, outcome, is_brief=True)
        if outcome.error is not None:
            raise outcome.error
        return cast("T", outcome.result)

    def _begin_turn(self) -> None:
        self._turn_left_s = _BRIEF_PER_TURN_S

    def _account(self, line: _Line, outcome: _Outcome, *, is_brief: bool) -> None:
        line.share.charge(outcome.processor_s)
        self.mean_s += (outcome.elapsed_s - self.mean_s) / (_MEAN_OVER_CALLS if self.mean_s else 1)
        if is_brief:
            self._mean_brief_s += (outcome.processor_s - self._mean_brief_s) / _MEAN_OVER_CALLS

    @property
    def retry_after_s(self) -> float:
        """Return the Retry-After of a full queue: the time in which a quarter of it is likely to be done, with jitter."""
        return spread_s(self._num_held / 4 * self.mean_s / self._num_threads, self._random)

    def close(self) -> None:
        """Refuse new calls and drop waiting ones; running calls end by themselves."""
        for line in self.lines.values():
            for call in (*line.small.values(), *line.large.values()):
                call.done.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_room(self, line: _Line) -> None:
        held, own, limit = self._num_held, line.num_held, self._max_waiting
        others = held - own
        if held >= limit:
            message = f"{held} prompts are being tokenised or wait for it, at most {limit} may"
        elif exceeds_share(own, 1, limit - held, line.share.weight):
            message = (
                f"{own} prompts of this key are being tokenised or wait for it, more than its share of the {limit} there may be"
            )
        else:
            return
        refusal = rate_limited if 0 < others < own else overloaded
        raise refusal(message, self.retry_after_s)

    def _dispatch(self) -> None:
        """Start waiting calls on free threads."""
        while self._num_running < self._num_threads:
            may_be_large = self._num_running_large < max(self._num_threads - 1, 1)
            found = [(line, call) for line in self.lines.values() if (call := line.first(may_be_large)) is not None]
            if not found:
                return
            line, call = min(found, key=lambda one: (one[0].is_batch, one[0].load, one[0].share.received, one[1].number))
            self._start(line, call)

    def _start(self, line: _Line, call: _Call) -> None:
        del line.waiting(call.is_large)[call.number]
        self._clock.serve(line.share)
        line.num_running += 1
        self._num_running += 1
        self._num_running_large += call.is_large
        loop = asyncio.get_running_loop()
        # Count the call as ended when the thread has ended it, not when the client has stopped waiting.
        self._pool.submit(_timed, call.function).add_done_callback(
            lambda future: _call_soon(loop, lambda: self._end(line, call, future))
        )

    def _end(self, line: _Line, call: _Call, future: Future[_Outcome]) -> None:
        self._num_held -= 1
        self._num_running -= 1
        self._num_running_large -= call.is_large
        line.num_running -= 1
        if future.cancelled():
            call.done.cancel()
            return
        outcome = future.result()
        self._account(line, outcome, is_brief=call.is_brief)
        if not call.done.done():
            if outcome.error is None:
                call.done.set_result(outcome.result)
            else:
                call.done.set_exception(outcome.error)
        self._dispatch()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result or the exception of a call, with its wall time and CPU time."""

    result: Any
    error: BaseException | None
    elapsed_s: float
    processor_s: float


def _started_pool(num_threads: int) -> ThreadPoolExecutor:
    """Return a pool whose threads run already, so that no call finds that the system has none for it. Raises RuntimeError."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-prepare")
    all_run = threading.Barrier(num_threads)
    try:
        for _ in range(num_threads):
            pool.submit(all_run.wait)
    except BaseException:
        all_run.abort()
        pool.shutdown(cancel_futures=True)
        raise
    return pool


def _timed(function: Callable[[], Any]) -> _Outcome:
    started_s, processor_s = time.monotonic(), time.thread_time()
    result = error = None
    try:
        result = function()
    except BaseException as raised:  # noqa: BLE001 - raised by `run`
        error = raised
    return _Outcome(result, error, time.monotonic() - started_s, time.thread_time() - processor_s)


def is_large(texts: object) -> bool:
    """Return whether there are more than LARGE_CHARACTERS in strings, lists, dicts and structs; a number counts as one."""
    return count_characters(texts, LARGE_CHARACTERS) > LARGE_CHARACTERS


def count_characters(texts: object, limit: int) -> int:
    """Return the number of characters, plus one for each value and item. If it exceeds `limit`, any number above it is
    returned.

    Looks at no more than `limit` values.
    """
    left = limit
    stack: list[object] = [texts]
    while stack and left >= 0:
        value = stack.pop()
        left -= len(value) if isinstance(value, str | bytes) else 1
        parts: Collection[object] = ()
        if isinstance(value, msgspec.Struct):
            parts = [part for part in msgspec.structs.astuple(value) if part is not None]
        elif isinstance(value, dict):
            found = cast("dict[object, object]", value)
            parts = (*found.keys(), *found.values()) if len(found) <= left else ()
            left -= len(found)
        elif isinstance(value, list | tuple):
            parts = cast("Collection[object]", value)
        left -= len(parts)
        if left < 0:
            break
        if _NUMBERS.issuperset(map(type, parts)):  # token ids
            left -= len(parts)
        else:
            stack.extend(parts)
    return limit - left


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
