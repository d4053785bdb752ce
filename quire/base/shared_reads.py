"""Files that several parts of a start-up ask for are read once."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_READ: ContextVar[dict[tuple[Path, object], object] | None] = ContextVar("shared_reads", default=None)
"""What was read in the current `shared_reads`. It ends with it: a file may change, and a header of GGUF is large."""


@contextmanager
def shared_reads() -> Generator[None, None, None]:
    """Within it, `read_once` returns the same object for the same file; one inside another is the outer one."""
    if _READ.get() is not None:
        yield
        return
    token = _READ.set({})
    try:
        yield
    finally:
        _READ.reset(token)


def read_once(path: Path, read: Callable[[Path], T]) -> T:
    """Return read(path), or what it returned before in the current `shared_reads`; nobody may change it."""
    known = _READ.get()
    if known is None:
        return read(path)
    key = (path, read)
    if key not in known:
        known[key] = read(path)
    return known[key]  # type: ignore[return-value] - what this very function returned
