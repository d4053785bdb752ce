"""Sinks that take events directly, without a task switch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.serving.answers import DirectSink
from quire.serving.core.events import GenerationEvent, TextDelta

Encode = Callable[[Sequence[GenerationEvent]], bytes]
EncodeText = Callable[[int, str], bytes]


class DirectFrames:
    """Writes the frames of events directly to the connection, while it accepts them.

    encode_text  like encode, for (choice, text) of a TextDelta without positions, if there is a faster way
    """

    def __init__(self, direct_sink: DirectSink, encode: Encode, encode_text: EncodeText | None = None) -> None:
        self._direct_sink = direct_sink
        self._encode = encode
        self._encode_text = encode_text

    @property
    def is_open(self) -> bool:
        """Whether the connection accepts frames now."""
        sink = self._direct_sink.sink
        return sink is not None and sink.is_open

    def put(self, events: list[GenerationEvent]) -> None:
        """Encode and write the events, if they cause any frame."""
        self._write(self._encode(events))

    def put_text(self, choice: int, text: str) -> None:
        """Encode and write text."""
        encode = self._encode_text
        self._write(self._encode([TextDelta(choice, text)]) if encode is None else encode(choice, text))

    def _write(self, frame: bytes) -> None:
        if frame and self._direct_sink.sink is not None:
            self._direct_sink.sink.write(frame)


class Folding:
    """Adds events to an answer that is sent as a whole, so it never waits."""

    is_open = True

    def __init__(self, add: Callable[[Sequence[GenerationEvent]], object]) -> None:
        self._add = add

    def put(self, events: list[GenerationEvent]) -> None:
        """Add them."""
        self._add(events)

    def put_text(self, choice: int, text: str) -> None:
        """Add text."""
        self._add([TextDelta(choice, text)])
