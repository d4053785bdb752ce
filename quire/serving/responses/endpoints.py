"""The routes of the Responses API, and the handlers for stored responses."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.api.openai.responses import ResponsePrompt, ResponsesRequest
from quire.api.openai.responses_answers import DeletedResponse, InputTokenCount, ItemList, Response
from quire.serving.answers import Answer, Ready
from quire.serving.core.prepare import count_chat_tokens
from quire.serving.endpoint import JOB_HEADERS, Call, Endpoint, query
from quire.serving.errors import invalid, not_found, unsupported
from quire.serving.openai.frames import encode_json
from quire.serving.paging import is_ascending
from quire.serving.responses.background import ended_with_server
from quire.serving.responses.conversations import CONVERSATION_ENDPOINTS
from quire.serving.responses.create import ResponseRoutes, post_response, stored_history
from quire.serving.responses.paging import PAGE_QUERY, item_limit, page_of
from quire.serving.responses.requests import chat_input, ignored_by_model
from quire.serving.responses.store import StoredResponse


async def post_input_tokens(routes: ResponseRoutes, call: Call) -> Answer:
    """Count the tokens of a conversation, tools, stored responses and all that the chat template adds included."""
    context = routes.server
    body = await call.body(ResponsePrompt, max_bytes=context.max_chat_bytes)
    call.ignore(ignored_by_model(context.model, body))
    served = context.check_model(body.model)
    history = await stored_history(routes, body, call.owner.name)

    def count() -> int:
        return count_chat_tokens(served, chat_input(served, body, history))

    texts = (body, [(stored.items, stored.body) for stored in history])
    return Ready(encode_json(InputTokenCount(await context.prepare(call.owner, call.request_id, texts, count))))


class _Status(msgspec.Struct):
    status: str


async def _stored(routes: ResponseRoutes, call: Call) -> StoredResponse:
    return await routes.store.get(call.owner.name, str(call.path_params["response_id"]))


async def get_response(routes: ResponseRoutes, call: Call) -> Answer:
    """Return a stored response."""
    if call.query.get("stream", "false") != "false":
        raise unsupported("stream", "a stored response is not streamed again; leave stream out")
    response_id = str(call.path_params["response_id"])
    current = routes.background.current(call.owner.name, response_id)
    if current is not None:
        return Ready(current)
    body = (await _stored(routes, call)).body
    failed = ended_with_server(body)
    if failed is not None:
        await routes.store.replace(call.owner.name, response_id, failed)
    return Ready(failed or body)


async def delete_response(routes: ResponseRoutes, call: Call) -> Answer:
    """Delete a stored response; conversations that continued it cannot be continued any more."""
    response_id = str(call.path_params["response_id"])
    await routes.background.cancel(call.owner.name, response_id)
    await routes.store.delete(call.owner.name, response_id)
    return Ready(encode_json(DeletedResponse(response_id)))


async def cancel_response(routes: ResponseRoutes, call: Call) -> Answer:
    """End a response that is made in the background; one that was cancelled before is returned again."""
    record = await _stored(routes, call)
    cancelled = await routes.background.cancel(call.owner.name, record.id)
    if cancelled is not None:
        return Ready(cancelled)
    record = await _stored(routes, call)  # it may have ended meanwhile
    if msgspec.json.decode(record.body, type=_Status).status == "cancelled":
        return Ready(record.body)
    raise invalid(
        f"the response {record.id!r} has ended; one that is not made in the background is cancelled by closing its connection",
        "response_id",
        "response_not_cancellable",
    )


async def compact_response(routes: ResponseRoutes, call: Call) -> Answer:
    """Refuse: compaction would need a form of the conversation that the model was trained on."""
    raise not_found("compaction is not supported here; send a shorter input", "unsupported_endpoint")


async def list_input_items(routes: ResponseRoutes, call: Call) -> Answer:
    """List the items of a response's own input."""
    record = await _stored(routes, call)
    items: list[dict[str, Any]] = msgspec.json.decode(record.items)
    after = call.query.get("after")
    if not is_ascending(call):
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid(f"after: there is no item {after[:100]!r}", "after")
        items = items[places[0] + 1 :]
    return Ready(encode_json(page_of(items, item_limit(call))))


ENDPOINTS: tuple[Endpoint[ResponseRoutes], ...] = (
    Endpoint(
        method="POST",
        path="/v1/responses",
        handler=post_response,
        summary="Continue a conversation, perhaps a stored one",
        tag="responses",
        body=ResponsesRequest,
        answer=Response,
        is_streaming=True,
        headers=JOB_HEADERS,
    ),
    Endpoint(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=post_input_tokens,
        summary="Count the tokens of a conversation",
        tag="responses",
        body=ResponsePrompt,
        answer=InputTokenCount,
    ),
    Endpoint(
        method="POST",
        path="/v1/responses/compact",
        handler=compact_response,
        summary="Not supported: always a 404",
        tag="responses",
        answer=Response,
    ),
    Endpoint(
        method="GET",
        path="/v1/responses/{response_id}",
        handler=get_response,
        summary="Read a stored response",
        tag="responses",
        answer=Response,
        query=(query("stream", {"type": "string", "enum": ["false"]}),),
    ),
    Endpoint(
        method="DELETE",
        path="/v1/responses/{response_id}",
        handler=delete_response,
        summary="Forget a stored response",
        tag="responses",
        answer=DeletedResponse,
    ),
    Endpoint(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        handler=cancel_response,
        summary="Cancel a response that is made in the background",
        tag="responses",
        answer=Response,
    ),
    Endpoint(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        handler=list_input_items,
        summary="List the items of a response's own input",
        tag="responses",
        answer=ItemList,
        query=PAGE_QUERY,
    ),
    *CONVERSATION_ENDPOINTS,
)
