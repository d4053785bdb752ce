"""PromptTokens: asks a backend which tokens a prompt has, so that it can be looked up among the blocks of KV events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec

from quire.base.logging import get_logger
from quire.router.backend import Backend
from quire.router.config import RouterConfig
from quire.router.incoming import KEY_HEADERS, Incoming
from quire.router.kv_events import TokenId
from quire.router.metrics import RouterMetrics
from quire.router.prompt import ParsedBody, Prompt
from quire.router.upstream import Headers, UpstreamError

logger = get_logger(__name__)

_FIELDS = {
    "/v1/completions": ("model", "prompt", "add_special_tokens"),
    "/v1/chat/completions": (
        *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    ),
}
"""By path, what of a body /tokenize takes; the prompts of other paths are not known to it."""
_MAX_ANSWER_BYTES = 16 << 20
_MAX_TOKENS = 1 << 20


class _Tokens(msgspec.Struct):
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=_MAX_TOKENS)]


class PromptTokens:
    """Asks with the client's own key. A backend that does not answer in time is no error: the estimate decides then."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self._timeout_s = config.tokenize_timeout_s
        self._metrics = metrics

    async def of(
        self, prompt: Prompt, parsed: ParsedBody, incoming: Incoming, backends: Sequence[Backend], model: str | None = None
    ) -> Prompt:
        """Return the prompt with its tokens, where these can tell backends apart; else as it is.

        model  by its name at the backends, which the body may call by an alias; None: as the body says
        """
        names = _FIELDS.get(incoming.path)
        ready = [one for one in backends if one.is_available]
        if names is None or prompt.token_ids is not None or len(ready) < 2 or not any(one.has_live_events for one in ready):
            return prompt
        fields: dict[str, object] = {name: parsed.fields[name] for name in names if name in parsed.fields}
        body = msgspec.json.encode(fields if model is None else {**fields, "model": model})
        headers = [(name, value) for name, value in incoming.headers if name in KEY_HEADERS]
        least = min(ready, key=lambda one: one.num_in_flight)
        try:
            async with asyncio.timeout(self._timeout_s):
                token_ids = await self._ask(least, [*headers, (b"content-type", b"application/json")], body)
        except TimeoutError:
            self._metrics.tokenized.labels("timeout").add()
            return prompt
        except (UpstreamError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._metrics.tokenized.labels("failed").add()
            logger.debug("a prompt was not tokenised by %s: %s", least.name, error)
            return prompt
        self._metrics.tokenized.labels("done").add()
        return replace(prompt, token_ids=token_ids, _block_keys={})

    async def _ask(self, backend: Backend, headers: Headers, body: bytes) -> tuple[int, ...]:
        answer = await backend.upstream.send("POST", b"/tokenize", headers, body, idle_timeout_s=self._timeout_s)
        async with answer:
            found = await answer.read(_MAX_ANSWER_BYTES)
        if answer.status != 200:
            raise UpstreamError(f"/tokenize answers {answer.status}: {found[:200].decode(errors='replace')}")
        return tuple(msgspec.json.decode(found, type=_Tokens).tokens)
