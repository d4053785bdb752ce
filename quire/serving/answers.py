"""Answer: what a handler gives to the HTTP shell, which sends it, and stops the work when the client goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from quire.serving.errors import ApiError


@dataclass(frozen=True, slots=True)
class Ready:
    """An answer that is there already.

    body  None sends no body
    """

    body: bytes | None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    media_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Unary:
    """An answer that takes time: `work` is awaited while the shell watches the client; when it goes, `work` is cancelled.

    `work` may raise ApiError.
    """

    work: Callable[[], Awaitable[Ready]]


class FrameSink(Protocol):
    """Where frames of a stream can be written at once, without waiting.

    last_write_s  when that was done last, of time.monotonic()
    """

    last_write_s: float

    @property
    def is_open(self) -> bool:
        """Whether the stream has begun, and its connection takes more."""
        ...

    def write(self, frame: bytes) -> None:
        """Write one or more whole events; only while it is open."""
        ...


@dataclass(slots=True)
class DirectSink:
    """The way past `Stream.frames`: while whoever iterates waits for the next frame, what makes the frames may write to `sink`.

    A frame then costs no turn of a task, and no coroutine is resumed.

    sink  set by the shell, where its connection can be written to in this way
    """

    sink: FrameSink | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream: each item of `frames` is one or more whole events, "data: ...\\n\\n", sent as they come.

    With is_lines the items are lines of JSON, and no comment is sent in a silence, as such a line may not be one.

    The status is sent with the first frame: an ApiError before it becomes an ordinary error answer, one after it the event that
    encode_error makes. When the client goes, `frames` is closed (its `aclose` runs, so that `async with` inside is left).
    """

    frames: AsyncIterator[bytes]
    encode_error: Callable[[ApiError], bytes]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    bypass: DirectSink | None = None
    is_lines: bool = False


@dataclass(frozen=True, slots=True)
class Download:
    """Bytes that are sent as they are read. `headers` has the content-length; `pieces` is closed when the client goes."""

    pieces: AsyncIterator[bytes]
    headers: Mapping[str, str]
    media_type: str = "application/octet-stream"


Answer = Ready | Unary | Stream | Download
