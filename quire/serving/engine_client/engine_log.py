"""EngineLog: turns the standard output and error of the engine's process into records of the server's JSON log."""

from __future__ import annotations

import sys
import threading
from typing import BinaryIO

import msgspec

from quire.base.logging import get_logger

logger = get_logger("quire.engine.output")

MAX_LINE_BYTES = 64 << 10  # a longer line is split


class EngineLog:
    """Reads one pipe to its end in a thread of its own.

    Lines that are JSON objects (the engine's own log) are passed on unchanged. Other lines, written by libraries or the
    interpreter without Python's logging, become log records without a request id.
    """

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, name="quire-engine-log", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the pipe: until the process and its children that inherited the pipe have ended."""
        self._thread.join(timeout_s)

    def _read(self) -> None:
        with self._pipe:
            while line := self._pipe.readline(MAX_LINE_BYTES):
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if _is_record(line):
                    sys.stderr.write(text + "\n")
                    sys.stderr.flush()
                elif text.strip():
                    logger.warning("%s", text)


def _is_record(line: bytes) -> bool:
    if not line.startswith(b"{"):
        return False
    try:
        return "logger" in msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except ValueError:
        return False
