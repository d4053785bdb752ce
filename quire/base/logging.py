"""Loggers under the name `quire`, and their setup for the command line."""

from __future__ import annotations

import logging
import sys


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
