"""shared_reads: read files once that several parts of the startup need."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_READ: ContextVar[dict[tuple[Path, object], object] | None] = ContextVar("shared_reads", default=None)
"""Results of the current `shared_reads`. They are dropped at its end: a file may change, and a GGUF header is large."""


@contextmanager
def shared_reads() -> Generator[None, None, None]:
    """Within the context, `read_once` returns the same object for the same file; a nested context uses the outer one."""
    if _READ.get() is not None:
        yield
        return
    token = _READ.set({})
    try:
        yield
    finally:
        _READ.reset(token)


def read_once(path: Path, read: Callable[[Path], T]) -> T:
    """Return read(path), or its earlier result in the current `shared_reads`; the result must not be modified."""
    known = _READ.get()
    if known is None:
        return read(path)
    key = (path, read)
    if key not in known:
        known[key] = read(path)
    return known[key]  # type: ignore[return-value] - what this very function returned
