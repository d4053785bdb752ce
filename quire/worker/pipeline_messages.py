"""Messages of a pipeline's leader to its stages, over a MessageRing. Every message reaches all stages, in order.

Most are those of tensor parallelism (parallel_messages.py) with a number more; a request is answered by the last stage only.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.parallel.ring import RingMessage
from quire.speculate.proposer import DraftInput
from quire.worker.parallel_messages import Call, Encoded, StepCall, encode_rows, encode_step

_NUMBER, _READS = 3, 4
"""Where the header of a step has its number, and what draft heads read of it."""
_INPUTS: tuple[DraftInput, ...] = ("layers", "final", "last")


def encode_numbered_step(call: StepCall, number: int, reads: Sequence[DraftInput] = ()) -> Encoded:
    """Return the message of a step; number: of the steps before it, modulo 2**31; reads: what draft heads read of it."""
    header, arrays = encode_step(call)
    return [*header, number, sum(1 << _INPUTS.index(what) for what in reads)], arrays


def step_number(message: RingMessage) -> int:
    """Return the number of a step's message."""
    return int(message.header[_NUMBER])


def step_reads(message: RingMessage) -> list[DraftInput]:
    """Return what draft heads read of a step."""
    return [what for bit, what in enumerate(_INPUTS) if int(message.header[_READS]) >> bit & 1]


def encode_request(call: Call, slot: int, places: Sequence[int]) -> Encoded:
    """Return the message that asks the last stage for results of places in what it has left of the step in a slot."""
    header, arrays = encode_rows(Call.LOGITS, places)
    return [call, slot, *header[2:]], arrays


def request_slot(message: RingMessage) -> int:
    """Return the slot of a request."""
    return int(message.header[1])
