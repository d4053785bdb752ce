"""POST /v1/responses/input_tokens."""

from __future__ import annotations

from quire.api.openai.responses import ResponsePrompt
from quire.api.openai.responses_answers import InputTokenCount
from quire.serving.answers import Answer, Ready
from quire.serving.core.prepare import count_chat_tokens
from quire.serving.endpoint import Call
from quire.serving.openai.frames import encode_json
from quire.serving.responses.create import ResponseRoutes, stored_history
from quire.serving.responses.requests import chat_input, ignored_by_model


async def post_input_tokens(routes: ResponseRoutes, call: Call) -> Answer:
    """Count the tokens of a conversation, including tools, stored responses and the text that the chat template adds."""
    context = routes.server
    body = await call.body(ResponsePrompt, max_bytes=context.max_chat_bytes)
    call.ignore(ignored_by_model(context.model, body))
    served = context.check_model(body.model)
    history = await stored_history(routes, body, call.owner.name)

    def count() -> int:
        return count_chat_tokens(served, chat_input(served, body, history))

    texts = (body, [(stored.items, stored.body) for stored in history])
    return Ready(encode_json(InputTokenCount(await context.prepare(call.owner, call.request_id, texts, count))))
