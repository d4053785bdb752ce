"""Pages of items: the query parameters of the routes that list them, and the answer."""

from __future__ import annotations

from typing import Any

from quire.api.openai.responses_answers import ItemList
from quire.serving.endpoint import Call, query
from quire.serving.errors import invalid

DEFAULT_LIMIT, MAX_LIMIT = 20, 100


PAGE_QUERY = (
    query("after", {"type": "string"}),
    query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}),
    query("order", {"type": "string", "enum": ["asc", "desc"]}),
)


def is_ascending(call: Call) -> bool:
    """Whether the oldest item comes first; the default is the newest. Raises ApiError."""
    order = call.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(f"order must be 'asc' or 'desc', got {order[:20]!r}", "order")
    return order == "asc"


def page_limit(call: Call) -> int:
    """Return how many items a page may have. Raises ApiError."""
    text = call.query.get("limit", str(DEFAULT_LIMIT))
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= MAX_LIMIT):
        raise invalid(f"limit must be an integer from 1 to {MAX_LIMIT}, got {text[:20]!r}", "limit")
    return int(text)


def page_of(items: list[dict[str, Any]], limit: int) -> ItemList:
    """Return the first `limit` items as a page; further ones show that there are more."""
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemList("list", page, first, last, len(items) > limit)
