"""Parser of server-sent events from arbitrarily split bytes."""

from __future__ import annotations


class EventSplitter:
    """Splits a stream into the data of its events. Comments, and fields other than `data`, are ignored."""

    def __init__(self) -> None:
        self._rest = b""
        self._held = b""
        self._is_start = True

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are complete now, lines joined by newlines."""
        if self._held or b"\r" in data:
            data = self._normalise(data)
        if self._rest:
            data = self._rest + data
        if self._is_start and len(data) >= 3:
            self._is_start = False
            data = data.removeprefix(b"\xef\xbb\xbf")
        *blocks, self._rest = data.split(b"\n\n")
        events = [_data_of(block) for block in blocks]
        return [event for event in events if event is not None]

    def finish(self) -> list[bytes]:
        """Return the data of a last event without a terminating empty line."""
        rest, self._rest, self._held = self._rest, b"", b""
        event = _data_of(rest)
        return [] if event is None else [event]

    def _normalise(self, data: bytes) -> bytes:
        """Return the bytes with all line ends as newlines; a final carriage return waits for the next byte."""
        data = self._held + data
        self._held = b""
        if data.endswith(b"\r"):
            self._held = b"\r"
            data = data[:-1]
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data_of(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
