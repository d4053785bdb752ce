"""BodyRoom: a bound on the bytes of all bodies that the server holds at once."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from types import TracebackType

from quire.serving.errors import BODY_ROOM_CODE, ApiError, spread_s

SMALL_BYTES = 64 << 10
"""A body may always have so much: the number of connections bounds these."""
RETRY_AFTER_S = 2.0  # a body arrives, or is given up, within seconds


class BodyRoom:
    """Used from the event loop alone.

    decoding  is held while a huge body is decoded
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.num_bytes = 0
        self.decoding = asyncio.Lock()

    def share(self) -> BodyShare:
        """Return the share of one request, which is nothing yet; to be entered, and left when the request is over."""
        return BodyShare(self)

    def has_room(self, num_more: int) -> bool:
        """Whether so many more bytes may come."""
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
    """What one request has of the room."""

    __slots__ = ("_room", "num_bytes")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.num_bytes = 0

    @property
    def decoding(self) -> asyncio.Lock:
        """That of the room."""
        return self._room.decoding

    def check(self, num_bytes: int) -> None:
        """Raise ApiError 503 where a body that says it has so many bytes would find no room now; it takes none yet."""
        if num_bytes > SMALL_BYTES and not self._room.has_room(num_bytes - self.num_bytes):
            raise self._room.refusal()

    def take(self, num_more: int) -> None:
        """Take room for bytes that have come. Raises ApiError 503 where there is none."""
        if self.num_bytes + num_more > SMALL_BYTES and not self._room.has_room(num_more):
            raise self._room.refusal()
        self.num_bytes += num_more
        self._room.num_bytes += num_more

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give the room back."""
        self._room.num_bytes -= self.num_bytes
        self.num_bytes = 0
