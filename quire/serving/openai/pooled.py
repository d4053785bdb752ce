"""Shared code of the pooling routes: limits of prompts, and running many requests at a time."""

from __future__ import annotations

import array
import asyncio
import base64
import sys
from collections.abc import Sequence

from quire.api.openai.embeddings import MAX_INPUT_TOKENS
from quire.base.errors import RequestError
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.request import Request, check_prompt_length
from quire.serving.core.long_prompts import pack_prompt
from quire.serving.core.prepare import check_text_length, encode_prompt, need_tokenizer, renamed, salt_of
from quire.serving.core.served_model import ServedModel
from quire.serving.errors import engine_unavailable
from quire.serving.interfaces import NOT_BY_CLIENT, Gateway, Job, Tenant
from quire.serving.openai.requests import make_id
from quire.text.text_pairs import encode_texts

MAX_AT_ONCE = 64  # inputs of one request that are in the engine at a time


class PooledRequests:
    """Makes the requests of one call, one prompt each. Raises RequestError with the field at fault.

    params      of all of them
    prefix      of their ids
    """

    def __init__(self, served: ServedModel, params: PoolingParams, owner: Tenant, cache_salt: str | None, prefix: str) -> None:
        self.id = make_id(prefix)
        self.made: list[Request] = []
        self.limit = served.factory.prompt_limit(params.truncate_prompt_tokens)
        self._served, self._params = served, params
        self._salt = salt_of(owner, cache_salt or "")
        self._num_tokens = 0

    def add(self, prompt: str | list[int], field: str, add_special_tokens: bool = True) -> None:
        """Add a prompt from this field."""
        with renamed("prompt", field):
            self.add_tokens(self._encode(prompt, add_special_tokens), field)

    def add_tokens(self, token_ids: list[int], field: str) -> None:
        """Add a tokenised prompt."""
        with renamed("prompt", field), renamed("prompt_token_ids", field):
            check_prompt_length(len(token_ids), self._served.info.max_model_len, is_pooling=True)
            self._num_tokens += len(token_ids)
            if self._num_tokens > MAX_INPUT_TOKENS:
                raise RequestError(f"{field}: may have {MAX_INPUT_TOKENS} tokens in total; send several requests", field)
            stated = {"prompt_token_ids": token_ids, "cache_salt": self._salt}
            request_id = f"{self.id}-{len(self.made)}"
            made = self._served.factory.make(request_id, self._served.next_index(), stated, self._params)
            self.made.append(pack_prompt(made))

    def check_length(self, num_characters: int, field: str) -> None:
        """Refuse, before tokenising, a text that cannot fit; with truncation only a text over the general limit."""
        limit = self._served.max_prompt_characters
        if self.limit is None:
            check_text_length(self._served, num_characters, field)
        elif num_characters > limit:
            raise RequestError(
                f"{field} has {num_characters} characters, and a prompt may have {limit} here: shorten it", field
            )

    def _encode(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        if self.limit is None or not isinstance(prompt, str):
            # Token ids are truncated when the request is made.
            kept = prompt if isinstance(prompt, str) else prompt[: self.limit]
            return encode_prompt(self._served, kept, add_special_tokens, is_pooling=True)[1]
        self.check_length(len(prompt), "prompt")
        tokenizer = need_tokenizer(self._served)
        if not add_special_tokens:
            return tokenizer.encode(prompt, add_special_tokens=False)[: self.limit]
        return encode_texts(tokenizer, (prompt,), self.limit)


def count_tokens(requests: Sequence[Request]) -> int:
    """Return the tokens of all prompts."""
    return sum(len(request.prompt_token_ids) for request in requests)


async def pool_all(gateway: Gateway, jobs: Sequence[Job]) -> list[list[float]]:
    """Return the vectors in order; if one request fails, the others are aborted."""
    limit = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(job: Job) -> list[float]:
        async with limit:
            return await _pool_one(gateway, job)

    tasks = [asyncio.create_task(one(job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel(NOT_BY_CLIENT)
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pool_one(gateway: Gateway, job: Job) -> list[float]:
    async with gateway.open(job) as stream:
        async for delta in stream:
            if delta.embedding is not None:
                return delta.embedding
    raise engine_unavailable("the engine ended the request before it was complete")


def to_base64(vector: Sequence[float]) -> str:
    """Return the values as little-endian 32-bit floats in base64."""
    values = array.array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")
