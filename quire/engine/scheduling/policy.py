"""The order of sequences under a policy: who is admitted first, who runs first, and who gives way.

fcfs      earliest arrival first (the request's arrival time, then the order of `add`, then the choice)
priority  lowest priority value first, then as fcfs

Both queues are kept in this order, and the victim of a preemption is always the last of the running ones: the youngest
under fcfs; the one with the highest value, and of those the youngest, under priority. A preempted sequence keeps its key and
thus returns to the front of the queue: whatever is behind it there was behind it before.

Under both, requests in the background come behind all others.

Decision: admission preempts nobody but the background, under either policy. A request of low value waits for a seat and for
blocks like any other, only before the rest. Preemption costs the victim its whole prefix, and happens only where a running
sequence would otherwise be unable to take its next token, or to somebody in the background, which is there to give way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from quire.contracts.request import Request
from quire.engine.scheduling.sequence import OrderKey

_BACKGROUND = 2**32
"""Above all priorities."""


def _fcfs_key(request: Request, arrival: int, choice: int) -> OrderKey:
    return (_BACKGROUND * request.is_background, request.arrival_time_s, arrival, choice)


def _priority_key(request: Request, arrival: int, choice: int) -> OrderKey:
    return (request.priority + _BACKGROUND * request.is_background, request.arrival_time_s, arrival, choice)


_ORDERS: dict[str, Callable[[Request, int, int], OrderKey]] = {"fcfs": _fcfs_key, "priority": _priority_key}


def order_key(policy: Literal["fcfs", "priority"], request: Request, arrival: int, choice: int) -> OrderKey:
    """Return the key by which a sequence is sorted, smallest first; unique, as `arrival` numbers the requests."""
    return _ORDERS[policy](request, arrival, choice)
