"""Names of models as clients of Ollama write them, and its moments and lines."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from quire.serving.context import ServerContext
from quire.serving.core.served_model import ServedModel

DEFAULT_TAG = ":latest"


def check_model(context: ServerContext, name: str | None) -> ServedModel:
    """Return the model of a name, with the tag that Ollama's clients add or without. Raises ApiError 404."""
    served = context.model
    if name is not None and name.endswith(DEFAULT_TAG) and name not in served.names:
        name = name.removesuffix(DEFAULT_TAG)
    return context.check_model(name)


def moment(seconds: float | None = None) -> str:
    """Return a moment, now where none is given, as Ollama writes it."""
    found = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return found.isoformat(timespec="microseconds").replace("+00:00", "Z")


def line(body: msgspec.Struct) -> bytes:
    """Return one line of a stream."""
    return msgspec.json.encode(body) + b"\n"
