"""CompilingRequests: requests that wait for their constraints to be compiled, outside of the scheduler; grammar_use."""

from __future__ import annotations

import threading

from quire.base.ids import RequestId
from quire.contracts.config import EngineConfig
from quire.contracts.request import Request
from quire.grammar.compiler import Compilation, GrammarContext


class CompilingRequests:
    """Requests in order of arrival. Owned by the engine's thread, which compilations wake."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, tuple[Request, Compilation]] = {}
        self._is_news = threading.Event()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Request, compilation: Compilation) -> None:
        """Add a request."""
        self._waiting[request.request_id] = (request, compilation)
        compilation.notify(self._is_news.set)

    def wait(self, timeout_s: float) -> None:
        """Wait until a compilation ends, or the timeout."""
        if self._is_news.wait(timeout_s):
            self._is_news.clear()

    def take_done(self) -> list[tuple[Request, Compilation]]:
        """Remove and return the requests whose compilations have ended."""
        done = [item for item in self._waiting.values() if item[1].is_done]
        for request, _ in done:
            del self._waiting[request.request_id]
        return done

    def remove(self, request_id: str) -> bool:
        """Remove a request; return whether it waited here. Its compilation continues, since other requests may need it."""
        return self._waiting.pop(RequestId(request_id), None) is not None


def grammar_use(request: Request, config: EngineConfig, max_model_len: int) -> GrammarContext:
    """Return the fields of a request, other than the constraint, on which its grammar depends."""
    params, constraint = request.params, request.params.constraint
    max_tokens = None
    is_completed = constraint is not None and constraint.fit_max_tokens
    if constraint is not None and (config.complete_json_within_max_tokens if is_completed is None else is_completed):
        room = max_model_len - len(request.prompt_token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    return GrammarContext(request.prompt_token_ids if params.bad_words else (), max_tokens)
