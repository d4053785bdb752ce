"""Pages of lists: the query parameters of the routes that list something, and the ends of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.serving.endpoint import Call, query
from quire.serving.errors import invalid

AFTER_QUERY = query("after", {"type": "string"})
ORDER_QUERY = query("order", {"type": "string", "enum": ["asc", "desc"]})


def limit_query(highest: int) -> Mapping[str, Any]:
    """Return the OpenAPI parameter for how many entries a page may have."""
    return query("limit", {"type": "integer", "minimum": 1, "maximum": highest})


def page_limit(call: Call, default: int, highest: int) -> int:
    """Return how many entries a page may have, 1 to `highest`. Raises ApiError 400."""
    text = call.query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= highest):
        raise invalid(f"limit must be an integer from 1 to {highest}, got {text[:20]!r}", "limit")
    return int(text)


def is_ascending(call: Call) -> bool:
    """Return whether the oldest entry comes first; the default is the newest. Raises ApiError 400."""
    order = call.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(f"order must be 'asc' or 'desc', got {order[:20]!r}", "order")
    return order == "asc"


def ends_of(ids: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the first and the last id of a page, None where it is empty."""
    return (ids[0], ids[-1]) if ids else (None, None)
