"""Bodies and answers of /v1/conversations."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.api.decode import Body
from quire.api.openai.responses_items import InputItem
from quire.api.openai.shared import Metadata

MAX_NEW_ITEMS = 20
NewItems = Annotated[list[InputItem], Meta(max_length=MAX_NEW_ITEMS)]


def _check_items(items: list[InputItem]) -> None:
    for position, item in enumerate(items):
        item.check(f"items[{position}]")


class CreateConversation(Body, kw_only=True):
    """A conversation to be stored, perhaps with its first items."""

    items: NewItems | None = None
    metadata: Metadata | None = None

    def check(self) -> None:
        """Check that each item has the fields of its type."""
        _check_items(self.items or [])


class UpdateConversation(Body, kw_only=True):
    """The new metadata of a conversation; it replaces the whole of the old."""

    metadata: Metadata


class CreateItems(Body, kw_only=True):
    """Items that are appended to a conversation."""

    items: Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_NEW_ITEMS)]

    def check(self) -> None:
        """Check that each item has the fields of its type."""
        _check_items(self.items)


class Conversation(msgspec.Struct, kw_only=True):
    """A stored conversation, without its items."""

    id: str
    object: str = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(msgspec.Struct):
    """The answer to a deletion."""

    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


class ConversationItem(msgspec.Struct):
    """One item, with the fields of its type; the listed ones are of all types."""

    id: str
    type: str
    status: str | None = None
    role: str | None = None
    content: list[dict[str, Any]] | None = None
