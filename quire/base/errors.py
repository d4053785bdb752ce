"""The exceptions that quire raises deliberately; any other exception that escapes is a bug."""

from __future__ import annotations


class QuireError(Exception):
    """Base of every error whose message is meant for the user."""


class ConfigError(QuireError):
    """An option of the engine has a value that is not allowed; the message names it, what was got and what is allowed."""


class ModelFormatError(QuireError):
    """A checkpoint folder or a file in it is missing, damaged or contradicts its configuration."""


class UnsupportedError(QuireError):
    """The request is valid but not supported by quire (yet)."""


class RequestError(QuireError):
    """A request is invalid or can never be served.

    param  the API's name of the invalid field ("temperature", "prompt"), or None
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class WorkerError(QuireError):
    """A worker failed, ended or does not answer; `rank` is its rank."""

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class DeviceLostError(WorkerError):
    """A device no longer works in this process: another process has to continue."""


class InvariantError(QuireError):
    """An internal invariant does not hold: a bug in quire, please report it."""
