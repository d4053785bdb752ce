"""Parser of HTTP/1.1 responses from arbitrarily split bytes, without sockets."""

from __future__ import annotations

from enum import Enum

_MAX_HEAD_BYTES = 65536
_MAX_LINE_BYTES = 4096


class HttpError(Exception):
    """A response that never came, ended early, or is not HTTP; `kind` is its short category."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _State(Enum):
    HEAD = 0
    LENGTH = 1
    UNTIL_EOF = 2
    CHUNK_SIZE = 3
    CHUNK_DATA = 4
    CHUNK_END = 5
    TRAILER = 6
    COMPLETE = 7


class ResponseReader:
    """Parses one response. feed accepts bytes as they come and returns the part of the body in them.

    status, headers  of the response once they are known (header names in lower case, repeated ones joined by ", ")
    is_complete      whether the last byte of the body has come
    keeps_alive      whether the connection may be used for another request afterwards
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.keeps_alive = True
        self._state = _State.HEAD
        self._rest = b""
        self._remaining = 0

    @property
    def is_complete(self) -> bool:
        return self._state is _State.COMPLETE

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in `data`. Raises HttpError("protocol")."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        pieces: list[bytes] = []
        position = 0
        while position < len(data) and self._state is not _State.COMPLETE:
            after = self._advance(data, position, pieces)
            if after is None:
                self._rest = data[position:]
                return b"".join(pieces)
            position = after
        if position < len(data):
            self.keeps_alive = False  # more than one response came: the connection is out of sync
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def feed_eof(self) -> None:
        """Handle the end of the stream. Raises HttpError if the response is not complete."""
        self.keeps_alive = False
        if self._state is _State.UNTIL_EOF:
            self._state = _State.COMPLETE
        elif self._state is _State.HEAD:
            what = "in the middle of the response's head" if self._rest else "without a response"
            raise HttpError("closed", f"the server closed the connection {what}")
        elif self._state is not _State.COMPLETE:
            raise HttpError("truncated", "the server closed the connection before the end of the response's body")

    def _advance(self, data: bytes, position: int, pieces: list[bytes]) -> int | None:
        """Parse one element of data[position:]; return where the next starts, or None if this one is incomplete."""
        state = self._state
        if state is _State.CHUNK_DATA or state is _State.LENGTH:
            return self._take_counted(data, position, pieces)
        if state is _State.HEAD:
            return self._take_head(data, position)
        if state is _State.UNTIL_EOF:
            pieces.append(data[position:])
            return len(data)
        end = data.find(b"\r\n", position)
        if end < 0:
            if len(data) - position > _MAX_LINE_BYTES:
                raise HttpError("protocol", f"a line of a chunked body is longer than {_MAX_LINE_BYTES} bytes")
            return None
        self._take_line(data[position:end])
        return end + 2

    def _take_counted(self, data: bytes, position: int, pieces: list[bytes]) -> int:
        end = min(position + self._remaining, len(data))
        pieces.append(data[position:end])
        self._remaining -= end - position
        if not self._remaining:
            self._state = _State.CHUNK_END if self._state is _State.CHUNK_DATA else _State.COMPLETE
        return end

    def _take_line(self, line: bytes) -> None:
        if self._state is _State.CHUNK_SIZE:
            self._remaining = _chunk_size(line)
            self._state = _State.CHUNK_DATA if self._remaining else _State.TRAILER
        elif self._state is _State.CHUNK_END:
            if line:
                raise HttpError("protocol", f"a chunk is longer than its size said: {line[:40]!r} follows it")
            self._state = _State.CHUNK_SIZE
        elif not line:
            self._state = _State.COMPLETE

    def _take_head(self, data: bytes, position: int) -> int | None:
        end = data.find(b"\r\n\r\n", position)
        if end - position > _MAX_HEAD_BYTES or (end < 0 and len(data) - position > _MAX_HEAD_BYTES):
            raise HttpError("protocol", f"the response's head is longer than {_MAX_HEAD_BYTES} bytes")
        if end < 0:
            return None
        lines = data[position:end].decode("latin-1").split("\r\n")
        version, self.status = _status_line(lines[0])
        self.headers = _headers(lines[1:])
        if 100 <= self.status < 200:
            return end + 4  # an interim response; the real one follows
        connection = self.headers.get("connection", "").lower()
        self.keeps_alive = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        self._choose_framing()
        return end + 4

    def _choose_framing(self) -> None:
        length = self.headers.get("content-length")
        if self.status in (204, 304):
            self._state = _State.COMPLETE
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._state = _State.CHUNK_SIZE
        elif length is None:
            self._state = _State.UNTIL_EOF
            self.keeps_alive = False
        elif not (length.isascii() and length.isdigit()):
            raise HttpError("protocol", f"Content-Length must be a number, got {length[:40]!r}")
        else:
            self._remaining = int(length)
            self._state = _State.LENGTH if self._remaining else _State.COMPLETE


def _status_line(line: str) -> tuple[str, int]:
    version, _, rest = line.partition(" ")
    status = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (status.isascii() and status.isdigit() and len(status) == 3):
        raise HttpError("protocol", f"the server does not speak HTTP/1.1: it answered {line[:60]!r}")
    return version, int(status)


def _headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise HttpError("protocol", f"a header line must be `name: value`, got {line[:60]!r}")
        name = name.lower()
        headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
    return headers


def _chunk_size(line: bytes) -> int:
    digits = line.split(b";", 1)[0].strip()
    if not digits or len(digits) > 8 or any(byte not in b"0123456789abcdefABCDEF" for byte in digits):
        raise HttpError("protocol", f"a chunk must start with its size in hexadecimal digits, got {line[:40]!r}")
    return int(digits, 16)
