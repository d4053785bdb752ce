"""Resumption: a stream that another server can continue, for routers: tokens are told as comments, and may be given back.

The headers and comments are described in quire.serving.resume_wire.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from quire.base.errors import RequestError
from quire.contracts.request import Request, check_output_tokens, check_prompt_length
from quire.engine.output import OutputStream
from quire.serving.core.events import GenerationEvent
from quire.serving.core.plan import GenerationPlan
from quire.serving.core.streams import resumable_events
from quire.serving.engine_client.messages import ChoiceDelta, RequestDelta
from quire.serving.errors import invalid
from quire.serving.interfaces import Gateway, Job
from quire.serving.resume_wire import END_COMMENT, RESUMABLE_HEADER, RESUME_HEADER, tokens_comment, unpack_tokens

_STATED = re.compile(r"(\d{1,20}) ([A-Za-z0-9]{8,64}) (\d{1,12})", re.ASCII)


class Encoder(Protocol):
    """Turns events into server-sent events."""

    def encode(self, events: list[GenerationEvent]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Resumption:
    """What makes the streams of two servers equal, and the output so far; token_ids is empty at the first server."""

    seed: int
    id_suffix: str
    created: int
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, headers: Mapping[str, str], output: bytes) -> Resumption | None:
        """Return what a request's headers ask for; None for nothing. output: the tokens after the body. Raises ApiError."""
        stated = headers.get(RESUMABLE_HEADER)
        if stated is None:
            if output:
                raise invalid(f"{RESUME_HEADER} needs {RESUMABLE_HEADER}", RESUME_HEADER)
            return None
        found = _STATED.fullmatch(stated)
        if found is None:
            raise invalid(f"{RESUMABLE_HEADER} must be like '7 k3fa8s2m 1700000000', got {stated[:100]!r}", RESUMABLE_HEADER)
        return cls(int(found[1]) % 2**64, found[2], int(found[3]), unpack_tokens(output))

    def apply(self, plan: GenerationPlan, vocab_size: int, max_model_len: int) -> GenerationPlan:
        """Return the plan with the seed and the output so far. Raises RequestError where it cannot be continued.

        The output is checked here, since its text is made before the engine sees it.
        """
        if self.token_ids and not is_resumable(plan):
            raise RequestError(
                f"{RESUME_HEADER}: a request with several choices, log probabilities, token ids in the answer, echo, or "
                "max_tokens 0 cannot be continued",
                RESUME_HEADER,
            )
        request = plan.request
        if request.params.seed is None:
            request = replace(request, seed=self.seed)
        request = replace(request, output_token_ids=self.token_ids)
        if is_complete(request, max_model_len):
            return replace(plan, request=request, is_complete=True)
        check_output_tokens(request, vocab_size)
        check_prompt_length(len(request.prompt_token_ids) + len(self.token_ids), max_model_len, is_pooling=False)
        return replace(plan, request=request)


def is_resumable(plan: GenerationPlan) -> bool:
    """Return whether the stream of a plan depends on its tokens only."""
    has_more = plan.has_positions or plan.has_prompt_positions or plan.hides_output or plan.wants_tokens
    return plan.num_choices == 1 and not plan.is_copied and not has_more and not plan.echo_text and plan.prompt_ids is None


def is_complete(request: Request, max_model_len: int) -> bool:
    """Return whether nothing follows a request's output so far: it has reached its length, or its last token ends it.

    A server sends the end of a stream in the frames of its last token, so only END_COMMENT is missing then.
    """
    token_ids = request.output_token_ids
    if not token_ids:
        return False
    limit = max_model_len - len(request.prompt_token_ids)
    if request.params.max_tokens is not None:
        limit = min(limit, request.params.max_tokens)
    if len(token_ids) > limit or not request.ending_token_ids.isdisjoint(token_ids[:-1]):
        return False
    return len(token_ids) == limit or token_ids[-1] in request.ending_token_ids


async def resumable_frames(
    gateway: Gateway, job: Job, plan: GenerationPlan, encoder: Encoder, resumption: Resumption
) -> AsyncIterator[bytes]:
    """Yield the frames of a stream with the comments that tell its tokens; those of the output so far are left out."""
    if plan.is_complete:
        yield END_COMMENT
        return
    is_skipping = bool(resumption.token_ids)
    resumed = _resumed_delta(plan) if is_skipping else None
    async with aclosing(resumable_events(gateway, job, plan, resumed)) as found:
        async for events, token_ids in found:
            frames = encoder.encode(events)
            if is_skipping:
                is_skipping = False
                continue
            yield frames + tokens_comment(token_ids)
    yield END_COMMENT


def _resumed_delta(plan: GenerationPlan) -> RequestDelta:
    request = plan.request
    text = OutputStream(request, plan.tokenizer, "delta").resume()
    return RequestDelta(request.request_id, [ChoiceDelta(0, text, list(request.output_token_ids))], False)
