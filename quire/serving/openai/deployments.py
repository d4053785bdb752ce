"""The URLs of Azure, which name the model as a deployment: aliases of the OpenAI routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quire.api.openai.answers import ChatCompletion, Completion, Embeddings
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.completions import CompletionRequest
from quire.api.openai.embeddings import EmbeddingRequest
from quire.serving.answers import Answer
from quire.serving.context import ServerContext
from quire.serving.endpoint import JOB_HEADERS, Call, Endpoint
from quire.serving.openai.chat import post_chat
from quire.serving.openai.completions import post_completion
from quire.serving.openai.embeddings import post_embeddings

Post = Callable[[ServerContext, Call], Awaitable[Answer]]
_API_VERSION = {"name": "api-version", "in": "query", "required": False, "schema": {"type": "string"}}


def _of_deployment(post: Post) -> Post:
    async def answer(context: ServerContext, call: Call) -> Answer:
        call.deployment = str(call.path_params["deployment"])
        return await post(context, call)

    return answer


def _alias(path: str, post: Post, summary: str, body: type[msgspec.Struct], answer: Any) -> Endpoint[ServerContext]:
    return Endpoint(
        method="POST",
        path=f"/openai/deployments/{{deployment:path}}/{path}",
        handler=_of_deployment(post),
        summary=f"{summary}, with Azure's URL",
        tag="azure",
        body=body,
        answer=answer,
        is_streaming=post is not post_embeddings,
        query=(_API_VERSION,),
        headers=JOB_HEADERS,
    )


DEPLOYMENT_ENDPOINTS = (
    _alias("chat/completions", post_chat, "Continue a conversation", ChatCompletionRequest, ChatCompletion),
    _alias("completions", post_completion, "Continue a text", CompletionRequest, Completion),
    _alias("embeddings", post_embeddings, "Turn texts into vectors", EmbeddingRequest, Embeddings),
)
