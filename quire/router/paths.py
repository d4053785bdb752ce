"""Which paths are passed on to servers, and Azure's URLs of the same routes."""

from __future__ import annotations

import re

from quire.serving.errors import ErrorStyle

RETRY_STATUSES = frozenset({502, 503})
"""With which a backend says that it has not taken a request."""
_PATHS = frozenset(
    {"/tokenize", "/detokenize", "/score", "/rerank", "/v2/rerank", "/classify", "/pooling", "/version", "/openapi.json"}
)
"""What is passed on in addition to /v1/; the rest of a backend (its pages, its switches) is not for a router's clients."""
OLLAMA_PATHS = frozenset({"/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"})
"""Ollama's routes that name a model."""
STREAMED_UNASKED = frozenset({"/api/chat", "/api/generate"})
"""Routes whose answers are streams unless the request says otherwise."""
_REFUSED = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_OF_ONE_SERVER = _REFUSED | {"/sleep", "/wake_up", "/is_sleeping"}
_DEPLOYMENT = re.compile(r"/openai/deployments/(.+?)/(chat/completions|completions|embeddings)")


def plain_path(path: str) -> tuple[str, str | None]:
    """Return a path without Azure's prefix, and the model that the prefix names; None for other paths."""
    found = _DEPLOYMENT.fullmatch(path)
    return (path, None) if found is None else (f"/v1/{found[2]}", found[1])


def is_passed_on(path: str) -> bool:
    """Return whether clients of a router may send requests to a path of its backends.

    path  decoded; one that a proxy in front of a backend might take for another, with empty segments, "." or "..", is not
    """
    if not {"", ".", ".."}.isdisjoint(path.split("/")[1:-1]) or path.endswith(("/.", "/..")):
        return False
    return (path in _PATHS or path in OLLAMA_PATHS or path.startswith("/v1/")) and path not in _REFUSED


def refusal(path: str) -> str:
    """Return the message of the 404 for a path that is not passed on."""
    if path in _OF_ONE_SERVER:
        return f"{path!r} is a route of a server with one model, and not passed on to it: send the request to that server"
    return f"there is no {path[:200]!r} here"


def error_style(path: str) -> ErrorStyle:
    """Return the API whose shape the errors of a path have."""
    if path.startswith("/api/"):
        return "ollama"
    return "anthropic" if path.startswith("/v1/messages") else "openai"
