"""The order of sequences under a policy, for admission, execution and preemption.

fcfs      earliest arrival first (the request's arrival time, then the order of `add`, then the choice)
priority  lowest priority value first, then as fcfs

Both queues are kept in this order, and the victim of a preemption is always the last of the running ones: the youngest
under fcfs; the one with the highest value, and of those the youngest, under priority. A preempted sequence keeps its key and
thus returns to the front of the queue.

Under both, background requests come after all others.

Decision: under both policies admission preempts only background sequences. A request of low value waits for room
like any other, but first. Preemption costs the victim its whole prefix, and happens only if a running
sequence could not get its next token otherwise, or to background sequences.
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
