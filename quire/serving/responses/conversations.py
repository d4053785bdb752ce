"""The routes of /v1/conversations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.api.openai.conversations import (
    Conversation,
    ConversationItem,
    CreateConversation,
    CreateItems,
    DeletedConversation,
    UpdateConversation,
)
from quire.api.openai.responses_answers import ItemList
from quire.api.openai.responses_items import InputItem
from quire.serving.answers import Answer, Ready
from quire.serving.endpoint import Call, Endpoint
from quire.serving.openai.frames import encode_json
from quire.serving.openai.requests import make_id
from quire.serving.paging import is_ascending
from quire.serving.responses.conversation_table import StoredConversation
from quire.serving.responses.create import ResponseRoutes
from quire.serving.responses.paging import PAGE_QUERY, item_limit, page_of
from quire.serving.responses.requests import stored_items


def _answer(found: StoredConversation) -> Ready:
    metadata = msgspec.json.decode(found.metadata, type=dict[str, str])
    return Ready(encode_json(Conversation(id=found.id, created_at=found.created_at, metadata=metadata)))


def _id(call: Call) -> str:
    return str(call.path_params["conversation_id"])


def _new_items(items: Sequence[InputItem] | None) -> list[dict[str, Any]]:
    return stored_items(items or [])


async def create_conversation(routes: ResponseRoutes, call: Call) -> Answer:
    """Store a conversation."""
    routes.server.check_accepting()
    body = await call.body(CreateConversation)
    owner, items = call.owner.name, _new_items(body.items)
    found = StoredConversation(
        id=make_id("conv_" + routes.server.config.replica_id),
        created_at=int(time.time()),
        metadata=msgspec.json.encode(body.metadata or {}),
    )
    await routes.store.conversation(lambda table, _, expires_at: table.add(owner, found, items, expires_at))
    return _answer(found)


async def get_conversation(routes: ResponseRoutes, call: Call) -> Answer:
    """Return a conversation without its items."""
    return _answer(await routes.store.conversation(lambda table, now, _: table.get(call.owner.name, _id(call), now)))


async def update_conversation(routes: ResponseRoutes, call: Call) -> Answer:
    """Replace the metadata of a conversation."""
    body = await call.body(UpdateConversation)
    metadata = msgspec.json.encode(body.metadata)
    return _answer(
        await routes.store.conversation(
            lambda table, now, expires_at: table.update(call.owner.name, _id(call), metadata, now, expires_at)
        )
    )


async def delete_conversation(routes: ResponseRoutes, call: Call) -> Answer:
    """Delete a conversation with its items; the responses that were made in it stay."""
    await routes.store.conversation(lambda table, now, _: table.delete(call.owner.name, _id(call), now))
    return Ready(encode_json(DeletedConversation(_id(call))))


async def create_items(routes: ResponseRoutes, call: Call) -> Answer:
    """Append items to a conversation."""
    routes.server.check_accepting()
    body = await call.body(CreateItems)
    items = _new_items(body.items)
    await routes.store.conversation(
        lambda table, now, expires_at: table.add_items(call.owner.name, _id(call), items, now, expires_at)
    )
    return Ready(encode_json(page_of(items, len(items))))


async def list_items(routes: ResponseRoutes, call: Call) -> Answer:
    """List the items of a conversation."""
    ascending, after, limit = is_ascending(call), call.query.get("after"), item_limit(call)
    found = await routes.store.conversation(
        lambda table, now, _: table.page(call.owner.name, _id(call), after, limit, ascending, now)
    )
    return Ready(encode_json(page_of([msgspec.json.decode(item) for item in found], limit)))


async def get_item(routes: ResponseRoutes, call: Call) -> Answer:
    """Return an item of a conversation."""
    item_id = str(call.path_params["item_id"])
    return Ready(await routes.store.conversation(lambda table, now, _: table.item(call.owner.name, _id(call), item_id, now)))


async def delete_item(routes: ResponseRoutes, call: Call) -> Answer:
    """Delete an item, and return its conversation."""
    item_id = str(call.path_params["item_id"])
    return _answer(
        await routes.store.conversation(lambda table, now, _: table.delete_item(call.owner.name, _id(call), item_id, now))
    )


_ONE = "/v1/conversations/{conversation_id}"

CONVERSATION_ENDPOINTS: tuple[Endpoint[ResponseRoutes], ...] = (
    Endpoint(
        method="POST",
        path="/v1/conversations",
        handler=create_conversation,
        summary="Store a conversation",
        tag="conversations",
        body=CreateConversation,
        answer=Conversation,
    ),
    Endpoint(
        method="GET",
        path=_ONE,
        handler=get_conversation,
        summary="Read a conversation, without its items",
        tag="conversations",
        answer=Conversation,
    ),
    Endpoint(
        method="POST",
        path=_ONE,
        handler=update_conversation,
        summary="Replace the metadata of a conversation",
        tag="conversations",
        body=UpdateConversation,
        answer=Conversation,
    ),
    Endpoint(
        method="DELETE",
        path=_ONE,
        handler=delete_conversation,
        summary="Delete a conversation with its items",
        tag="conversations",
        answer=DeletedConversation,
    ),
    Endpoint(
        method="POST",
        path=f"{_ONE}/items",
        handler=create_items,
        summary="Append items to a conversation",
        tag="conversations",
        body=CreateItems,
        answer=ItemList,
    ),
    Endpoint(
        method="GET",
        path=f"{_ONE}/items",
        handler=list_items,
        summary="List the items of a conversation",
        tag="conversations",
        answer=ItemList,
        query=PAGE_QUERY,
    ),
    Endpoint(
        method="GET",
        path=f"{_ONE}/items/{{item_id}}",
        handler=get_item,
        summary="Read an item of a conversation",
        tag="conversations",
        answer=ConversationItem,
    ),
    Endpoint(
        method="DELETE",
        path=f"{_ONE}/items/{{item_id}}",
        handler=delete_item,
        summary="Delete an item of a conversation",
        tag="conversations",
        answer=Conversation,
    ),
)
