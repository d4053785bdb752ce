"""The message ring: messages from one rank to all others, in shared memory, decoded without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvariantError
from quire.parallel.barrier import ProcessBarrier, native_extension
from quire.parallel.shared_memory import SharedMemoryFile

NUM_SLOTS = 8
SLOT_BYTES = 256 << 10
HEADER_WORDS = 16

_LINE = 64
_MAX_ARRAYS = 15
_TABLE_BYTES = 2 * _LINE  # i32: the number of arrays, then a code of the dtype and the number of elements for each
_FIRST_ARRAY = HEADER_WORDS * 4 + _TABLE_BYTES
_DTYPES = tuple(np.dtype(name) for name in ("int32", "int64", "uint8", "float32", "uint64", "uint32"))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


@dataclass(frozen=True, slots=True)
class RingMessage:
    """A message: views of its slot, valid until the reader receives the next one or releases it.

    header  [16] int32, defined by the sender; the ring does not interpret it
    arrays  of one dimension, in the order and dtypes in which they were sent
    """

    header: NDArray[np.int32]
    arrays: tuple[NDArray[np.generic], ...]


def message_bytes(arrays: Sequence[NDArray[np.generic]]) -> int:
    """Return the size of a message with these arrays."""
    return _FIRST_ARRAY + sum(_padded(array.nbytes) for array in arrays)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def check_message(header: Sequence[int], arrays: Sequence[NDArray[np.generic]]) -> None:
    """Raise InvariantError for a message that cannot be sent."""
    if len(header) > HEADER_WORDS or len(arrays) > _MAX_ARRAYS:
        raise InvariantError(
            f"a message has at most {HEADER_WORDS} numbers and {_MAX_ARRAYS} arrays, got {len(header)} and {len(arrays)}"
        )
    for array in arrays:
        if array.dtype not in _CODES:
            raise InvariantError(f"a message cannot hold an array of {array.dtype}, only {', '.join(map(str, _DTYPES))}")


def encode_message(into: NDArray[np.uint8], header: Sequence[int], arrays: Sequence[NDArray[np.generic]]) -> None:
    """Write a message into message_bytes(arrays) bytes."""
    words = into[:_FIRST_ARRAY].view(np.int32)
    words[: len(header)] = header
    words[len(header) : HEADER_WORDS] = 0
    words[HEADER_WORDS] = len(arrays)
    at = _FIRST_ARRAY
    for index, array in enumerate(arrays):
        place = HEADER_WORDS + 1 + 2 * index
        words[place] = _CODES[array.dtype]
        words[place + 1] = array.size
        if array.size:
            into[at : at + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        at += _padded(array.nbytes)


def decode_message(message: NDArray[np.uint8]) -> RingMessage:
    """Return the message in these bytes, as views of them."""
    words = message[:_FIRST_ARRAY].view(np.int32)
    arrays: list[NDArray[np.generic]] = []
    at = _FIRST_ARRAY
    table = words[HEADER_WORDS:].tolist()
    for index in range(table[0]):
        dtype, size = _DTYPES[table[1 + 2 * index]], table[2 + 2 * index]
        num_bytes = size * dtype.itemsize
        arrays.append(message[at : at + num_bytes].view(dtype))
        at += _padded(num_bytes)
    return RingMessage(words[:HEADER_WORDS], tuple(arrays))


class MessageReader(Protocol):
    """Receives every message of one rank, in order."""

    def receive(self, timeout_s: float | None = None) -> RingMessage | None: ...


class _Ring:
    """Areas of a ring: counters of the writer and of each rank, and slots, each with a line that describes its contents."""

    def __init__(self, memory: SharedMemoryFile, barrier: ProcessBarrier, name: str) -> None:
        self._native = native_extension()
        self._barrier = barrier
        self._written = memory.address(f"{name}.counters")
        self._slots = memory.area(f"{name}.slots").reshape(NUM_SLOTS, _LINE + SLOT_BYTES)

    def _read_counter(self, rank: int) -> int:
        """Return the address of the counter of a rank's read pieces."""
        return self._written + _LINE * (1 + rank)

    def _slot(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return the line of a piece, [bytes of it, bytes of the message left from it on], and its bytes."""
        slot = self._slots[number % NUM_SLOTS]
        return slot[:_LINE].view(np.int32), slot[_LINE:]


def ring_areas(size: int, name: str = "ring") -> dict[str, int]:
    """Return the areas of a ring for this number of ranks."""
    return {f"{name}.counters": _LINE * (1 + size), f"{name}.slots": NUM_SLOTS * (_LINE + SLOT_BYTES)}


class RingWriter(_Ring):
    """The sending rank; used by one thread."""

    def __init__(self, memory: SharedMemoryFile, barrier: ProcessBarrier, name: str = "ring") -> None:
        super().__init__(memory, barrier, name)
        self._number = self._native.read_counter(self._written)
        self._readers = [member for member in range(barrier.size) if member != barrier.rank]

    def send(self, header: Sequence[int], arrays: Sequence[NDArray[np.generic]] = ()) -> None:
        """Send to all other ranks; waits if one is 8 pieces behind. Raises WorkerError if the group has ended.

        header  up to 16 numbers of 32 bits; arrays: up to 15, contiguous, of int32, int64, uint8, float32, uint32 or uint64
        """
        check_message(header, arrays)
        total = message_bytes(arrays)
        if total <= SLOT_BYTES:
            line, place = self._next_slot()
            encode_message(place, header, arrays)
            self._publish(line, total, 0)
            return
        whole = np.empty(total, np.uint8)
        encode_message(whole, header, arrays)
        for begin in range(0, total, SLOT_BYTES):
            piece = whole[begin : begin + SLOT_BYTES]
            line, place = self._next_slot()
            place[: piece.size] = piece
            self._publish(line, piece.size, total - begin - piece.size)

    def _next_slot(self) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        for member in self._readers:
            self._barrier.wait_for_counter(self._read_counter(member), self._number + 1 - NUM_SLOTS)
        return self._slot(self._number)

    def _publish(self, line: NDArray[np.int32], num_bytes: int, num_left: int) -> None:
        line[0], line[1] = num_bytes, num_left
        self._number = (self._number + 1) & 0xFFFFFFFF
        self._native.advance_counter(self._written, self._number)


class RingReader(_Ring):
    """A rank that receives every message, in order; used by one thread."""

    def __init__(self, memory: SharedMemoryFile, barrier: ProcessBarrier, name: str = "ring") -> None:
        super().__init__(memory, barrier, name)
        self._own = self._read_counter(barrier.rank)
        self._number = self._native.read_counter(self._own)
        self._holds_slot = False

    def receive(self, timeout_s: float | None = None) -> RingMessage | None:
        """Release the previous message, and return the next one; None: none came within timeout_s.

        Raises WorkerError if the group has ended.
        """
        self.release()
        if not self._barrier.wait_for_message(self._written, self._number + 1, timeout_s):
            return None
        line, place = self._slot(self._number)
        if line[1] == 0:
            self._holds_slot = True
            return decode_message(place[: line[0]])
        return decode_message(self._receive_long())

    def _receive_long(self) -> NDArray[np.uint8]:
        """Return the bytes of a message in pieces, concatenated."""
        line, _ = self._slot(self._number)
        whole = np.empty(int(line[0]) + int(line[1]), np.uint8)
        begin = 0
        while begin < whole.size:
            self._barrier.wait_for_counter(self._written, self._number + 1)
            line, place = self._slot(self._number)
            num_bytes = int(line[0])
            whole[begin : begin + num_bytes] = place[:num_bytes]
            begin += num_bytes
            self._advance()
        return whole

    def release(self) -> None:
        """Release the slot of the last message, whose views are invalid afterwards."""
        if self._holds_slot:
            self._holds_slot = False
            self._advance()

    def _advance(self) -> None:
        self._number = (self._number + 1) & 0xFFFFFFFF
        self._native.advance_counter(self._own, self._number)
