"""Loggers under the name `quire`, and their setup for the command line."""

from __future__ import annotations

import logging
import sys
import threading
import time
from datetime import UTC, datetime


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def setup_logging(level: str = "INFO") -> None:
    """Print the `quire` loggers to standard error as `LEVEL message`; not called by programs that embed quire."""
    logger = logging.getLogger("quire")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(level)


def show_log() -> None:
    """Show the log at level INFO in a program that has not configured logging at all; do nothing otherwise."""
    logger = logging.getLogger("quire")
    if not logger.hasHandlers() and logger.level == logging.NOTSET:
        setup_logging()


class UnexpectedErrors:
    """Counts the errors that no code foresees in the jobs of threads and tasks that go on after them, and tells each kind once.

    count  of errors so far
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._lock = logger, threading.Lock()
        self._told: set[tuple[str, type[Exception]]] = set()
        self._open: dict[str, tuple[float, int, str]] = {}  # by job: since when, how often, and how it failed last
        self.count = 0

    def note(self, job: str, error: Exception, subject: str = "") -> None:
        """Take in an error, and log it with its traceback if none of its type has ended such a job before.

        subject  of the job, such as a key
        """
        kind = job, type(error)
        with self._lock:
            self.count += 1
            since_s, number, _ = self._open.pop(job, (time.time(), 0, ""))
            self._open[job] = since_s, number + 1, f"{job} failed: {type(error).__name__}: {error}"
            is_new = kind not in self._told
            self._told.add(kind)
        if is_new:
            self._logger.error("%s failed unexpectedly%s", job, subject and f" ({subject})", exc_info=error)

    def end(self, job: str) -> None:
        """Take note that such a job has done its work: its errors are past."""
        if self._open:
            with self._lock:
                self._open.pop(job, None)

    @property
    def last(self) -> str:
        """What failed last, how, how often and since when, of the jobs that have not worked since; empty: all have."""
        with self._lock:
            if not self._open:
                return ""
            since_s, number, text = next(reversed(self._open.values()))
        since = datetime.fromtimestamp(since_s, UTC).isoformat(" ", "seconds")
        return f"{text} ({number} {'error' if number == 1 else 'errors'} since {since})"
