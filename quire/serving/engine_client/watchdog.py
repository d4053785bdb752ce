"""Watchdog: detects an engine without progress. RestartPolicy: decides whether and when an engine is restarted."""

from __future__ import annotations

import math
from collections import deque

from quire.serving.engine_client.messages import FromEngine, Heartbeat, StepOutputs


class Watchdog:
    """Judges an engine by its messages. Times are of time.monotonic(), when a message was read.

    Call `problem` often: if it was not called for a quarter of the timeout, the server itself was stopped (a paused
    container, a suspended machine), and probably the engine too.
    """

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._asked_s = now
        self._heard_s = now
        self._progress_s = now
        self._num_steps = 0
        self._was_idle = True

    def note(self, message: FromEngine, now: float) -> None:
        """Record a message."""
        self._heard_s = now
        if isinstance(message, StepOutputs):
            if message.report is not None:
                self._progress_s = now
        elif isinstance(message, Heartbeat):
            is_idle = message.num_unfinished == 0
            if is_idle or self._was_idle or message.num_steps > self._num_steps:
                self._progress_s = now
            self._was_idle, self._num_steps = is_idle, message.num_steps

    def silence_s(self, now: float) -> float:
        """Seconds since the last message of the engine's loop; a running step counts as silence."""
        return now - self._heard_s

    def problem(self, now: float) -> str | None:
        """Return why the engine must be ended, None if it is well."""
        stood_still_s = now - self._asked_s
        self._asked_s = now
        if stood_still_s > self._timeout_s / 4:
            self._heard_s = min(self._heard_s + stood_still_s, now)
            self._progress_s = min(self._progress_s + stood_still_s, now)
        if now - self._heard_s > self._timeout_s:
            return f"it has not answered for {now - self._heard_s:.1f} s (watchdog_timeout_s is {self._timeout_s:g})"
        if now - self._progress_s > self._timeout_s:
            return f"it has made no step for {now - self._progress_s:.1f} s though requests wait for one"
        return None


class RestartPolicy:
    """Exponential backoff with a limit of max_restarts within window_s."""

    def __init__(self, max_restarts: int, window_s: float, first_delay_s: float = 0.5, max_delay_s: float = 30.0) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._restarts: deque[float] = deque()

    def next_delay_s(self, now: float) -> float | None:
        """Return the delay before the next restart, and count it; None: give up."""
        while self._restarts and now - self._restarts[0] > self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return None
        delay_s = self._first_delay_s * math.pow(2.0, len(self._restarts))
        self._restarts.append(now)
        return min(delay_s, self._max_delay_s)
