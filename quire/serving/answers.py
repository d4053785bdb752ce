"""Answer: what a handler gives to the HTTP shell, which sends it, and stops the work when the client goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Stream:
    """Server-sent events: each item of `frames` is one or more whole events, "data: ...\\n\\n", sent as they come.

    The status is sent with the first frame: an ApiError before it becomes an ordinary error answer, one after it the event that
    encode_error makes. When the client goes, `frames` is closed (its `aclose` runs, so that `async with` inside is left).
    """

    frames: AsyncIterator[bytes]
    encode_error: Callable[[ApiError], bytes]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Download:
    """Bytes that are sent as they are read. `headers` has the content-length; `pieces` is closed when the client goes."""

    pieces: AsyncIterator[bytes]
    headers: Mapping[str, str]
    media_type: str = "application/octet-stream"


Answer = Ready | Unary | Stream | Download
