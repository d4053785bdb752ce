"""BodyRoom: a bound on the bytes of all bodies that the server holds at once."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from types import TracebackType

from quire.serving.errors import BODY_ROOM_CODE, ApiError, spread_s

SMALL_BYTES = 64 << 10
"""Bodies up to this size are always accepted; the number of connections bounds them."""
RETRY_AFTER_S = 2.0  # a body arrives or times out within seconds


class BodyRoom:
    """Used from the event loop only.

    decoding  is held while a huge body is decoded
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.num_bytes = 0
        self.decoding = asyncio.Lock()

    def share(self) -> BodyShare:
        """Return the (empty) share of one request, a context manager for the duration of the request."""
        return BodyShare(self)

    def has_room(self, num_more: int) -> bool:
        """Whether this many more bytes are within the limit."""
        return self.num_bytes + num_more <= self._limit_bytes

    def refusal(self) -> ApiError:
        """Return a 503."""
        return ApiError(
            503,
            f"the server holds as much of other requests' bodies as it may, {self._limit_bytes} bytes",
            code=BODY_ROOM_CODE,
            retry_after_s=spread_s(RETRY_AFTER_S),
        )


class BodyShare(AbstractContextManager["BodyShare"]):
    """The bytes that one request holds."""

    __slots__ = ("_room", "num_bytes")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.num_bytes = 0

    @property
    def decoding(self) -> asyncio.Lock:
        """The lock of the room."""
        return self._room.decoding

    def check(self, num_bytes: int) -> None:
        """Raise ApiError 503 if there is no room for a body of this declared size. Reserves nothing."""
        if num_bytes > SMALL_BYTES and not self._room.has_room(num_bytes - self.num_bytes):
            raise self._room.refusal()

    def take(self, num_more: int) -> None:
        """Reserve room for bytes that have arrived. Raises ApiError 503 if there is none."""
        if self.num_bytes + num_more > SMALL_BYTES and not self._room.has_room(num_more):
            raise self._room.refusal()
        self.num_bytes += num_more
        self._room.num_bytes += num_more

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release the room."""
        self._room.num_bytes -= self.num_bytes
        self.num_bytes = 0
