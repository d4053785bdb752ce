"""JSON logs."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType

import msgspec

from quire.base.logging import get_logger

_log = get_logger(__name__)

FIELDS = (
    "request_id",
    "call_id",
    "client_request_id",
    "method",
    "route",
    "status",
    "owner",
    "priority",
    "duration_s",
    "queue_s",
    "ttft_s",
    "time_per_output_token_s",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "finish_reasons",
    "abort_reason",
)
"""Attributes of a log record (its `extra`) that are written. Others are not, so that no prompt or key is logged by accident."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the FIELDS that the record has, and its exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def setup_log_format(log_format: str) -> None:
    """Set this process's log format to ServerConfig.log_format; "text" is the default.

    With "json" every line is an object, also lines of libraries, warnings, and uncaught errors. Neither format shows the
    code location, thread or process of a record; not looking them up saves half of a record's cost.
    """
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # type: ignore[attr-defined]  # the documented way
    if log_format != "json":
        return
    for handler in logging.getLogger("quire").handlers:
        handler.setFormatter(JsonFormatter())
    others = logging.StreamHandler(sys.stderr)
    others.setFormatter(JsonFormatter())
    others.addFilter(lambda record: record.name.partition(".")[0] != "quire")
    logging.getLogger().addHandler(others)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _log.critical("an error that nothing caught", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    name = "?" if args.thread is None else args.thread.name
    error = args.exc_value or args.exc_type()
    _log.error("thread %s ended by an error", name, exc_info=(args.exc_type, error, args.exc_traceback))
