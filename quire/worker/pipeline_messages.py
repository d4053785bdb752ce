"""What the leader of a pipeline tells its stages, as messages of a MessageRing. Every message reaches all stages, in order.

Most are those of tensor parallelism (parallel_messages.py) with a number more; a request is answered by the last stage only.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from quire.parallel.ring import RingMessage
from quire.worker.parallel_messages import Call, Encoded, StepCall, encode_rows, encode_step

_NUMBER = 3
"""Where the header of a step has its number."""


class StageCall(IntEnum):
    """Which call a message is."""

    STEP = Call.STEP
    CHANGES = Call.CHANGES
    MOVE_TOKENS = Call.MOVE_TOKENS
    LOGITS = Call.LOGITS
    HIDDEN_STATES = 16
    SLEEP = Call.SLEEP
    WAKE_UP = Call.WAKE_UP


def encode_numbered_step(call: StepCall, number: int) -> Encoded:
    """Return the message of a step; number: of the steps before it, modulo 2**31."""
    header, arrays = encode_step(call)
    return [*header, number], arrays


def step_number(message: RingMessage) -> int:
    """Return the number of a step's message."""
    return int(message.header[_NUMBER])


def encode_request(call: StageCall, slot: int, places: Sequence[int]) -> Encoded:
    """Return the message that asks the last stage for results of places in what it has left of the step in a slot."""
    header, arrays = encode_rows(Call.LOGITS, places)
    return [call, slot, *header[2:]], arrays


def request_slot(message: RingMessage) -> int:
    """Return the slot of a request."""
    return int(message.header[1])
