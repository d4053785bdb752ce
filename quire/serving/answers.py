"""Answer: the return value of a handler. The HTTP layer sends it, and cancels the work when the client disconnects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from quire.serving.errors import ApiError


@dataclass(frozen=True, slots=True)
class Ready:
    """An answer that is complete.

    body  None sends no body
    """

    body: bytes | None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    media_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Unary:
    """An answer that takes time: `work` is awaited, and cancelled if the client disconnects.

    `work` may raise ApiError.
    """

    work: Callable[[], Awaitable[Ready]]


class FrameSink(Protocol):
    """A sink for frames of a stream that writes without waiting.

    last_write_s  time of the last write, from time.monotonic()
    """

    last_write_s: float

    @property
    def is_open(self) -> bool:
        """Whether the stream has begun and its connection accepts more data."""
        ...

    def write(self, frame: bytes) -> None:
        """Write one or more whole events. Call only while the sink is open."""
        ...


@dataclass(slots=True)
class DirectSink:
    """A shortcut around `Stream.frames`: while the consumer waits for the next frame, the producer may write to `sink`
    directly. A frame then needs no task switch.

    sink  set by the HTTP layer, if its connection supports direct writes
    """

    sink: FrameSink | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream: each item of `frames` is one or more whole events, "data: ...\\n\\n", sent as they come.

    With is_lines the items are lines of JSON, and no comment is sent in a silence, as such a line may not be one.

    The status is sent with the first frame. An ApiError before it becomes an ordinary error response; a later one becomes the
    event that encode_error makes. When the client disconnects, `frames` is closed (`aclose`, so `async with` blocks inside it
    exit).
    """

    frames: AsyncIterator[bytes]
    encode_error: Callable[[ApiError], bytes]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    direct_sink: DirectSink | None = None
    is_lines: bool = False


@dataclass(frozen=True, slots=True)
class Download:
    """Bytes that are sent as they are read. `headers` has the content-length; `pieces` is closed when the client
    disconnects."""

    pieces: AsyncIterator[bytes]
    headers: Mapping[str, str]
    media_type: str = "application/octet-stream"


Answer = Ready | Unary | Stream | Download
