"""Pages of items: how long they may be, and the answer."""

from __future__ import annotations

from typing import Any

from quire.api.openai.responses_answers import ItemList
from quire.serving.endpoint import Call
from quire.serving.paging import AFTER_QUERY, ORDER_QUERY, ends_of, limit_query, page_limit

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
PAGE_QUERY = (AFTER_QUERY, limit_query(MAX_LIMIT), ORDER_QUERY)


def item_limit(call: Call) -> int:
    """Return how many items a page may have. Raises ApiError 400."""
    return page_limit(call, DEFAULT_LIMIT, MAX_LIMIT)


def page_of(items: list[dict[str, Any]], limit: int) -> ItemList:
    """Return the first `limit` items as a page; further ones show that there are more."""
    page = items[:limit]
    return ItemList("list", page, *ends_of([item["id"] for item in page]), len(items) > limit)
