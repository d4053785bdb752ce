"""The routes of the Ollama API."""

from __future__ import annotations

from quire.api.ollama.answers import (
    ChatAnswer,
    EmbedAnswer,
    EmbeddingsAnswer,
    GenerateAnswer,
    ModelTags,
    OllamaVersion,
    ShownModel,
)
from quire.api.ollama.requests import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, ShowRequest
from quire.serving.context import ServerContext
from quire.serving.endpoint import JOB_HEADERS, Endpoint
from quire.serving.ollama.embed import post_embed, post_embeddings
from quire.serving.ollama.generate import post_chat, post_generate
from quire.serving.ollama.models import list_running, list_tags, show_model, show_version

LINES = "application/x-ndjson"

ENDPOINTS: tuple[Endpoint[ServerContext], ...] = (
    Endpoint(
        method="POST",
        path="/api/chat",
        handler=post_chat,
        summary="Continue a conversation, as Ollama does",
        tag="ollama",
        body=ChatRequest,
        answer=ChatAnswer,
        headers=JOB_HEADERS,
        error_style="ollama",
        success_media_type=LINES,
    ),
    Endpoint(
        method="POST",
        path="/api/generate",
        handler=post_generate,
        summary="Continue a prompt, as Ollama does",
        tag="ollama",
        body=GenerateRequest,
        answer=GenerateAnswer,
        headers=JOB_HEADERS,
        error_style="ollama",
        success_media_type=LINES,
    ),
    Endpoint(
        method="POST",
        path="/api/embed",
        handler=post_embed,
        summary="Turn texts into vectors, as Ollama does",
        tag="ollama",
        body=EmbedRequest,
        answer=EmbedAnswer,
        headers=JOB_HEADERS,
        error_style="ollama",
    ),
    Endpoint(
        method="POST",
        path="/api/embeddings",
        handler=post_embeddings,
        summary="Turn one text into a vector, as Ollama did",
        tag="ollama",
        body=EmbeddingsRequest,
        answer=EmbeddingsAnswer,
        headers=JOB_HEADERS,
        error_style="ollama",
    ),
    Endpoint(
        method="POST",
        path="/api/show",
        handler=show_model,
        summary="Describe a model, as Ollama does",
        tag="ollama",
        body=ShowRequest,
        answer=ShownModel,
        error_style="ollama",
    ),
    *(
        Endpoint(method="GET", path=path, handler=handler, summary=summary, tag="ollama", answer=answer, error_style="ollama")
        for path, handler, summary, answer in (
            ("/api/tags", list_tags, "List the models, as Ollama does", ModelTags),
            ("/api/ps", list_running, "List the loaded models, as Ollama does", ModelTags),
            ("/api/version", show_version, "The version of Ollama whose API this is", OllamaVersion),
        )
    ),
)
