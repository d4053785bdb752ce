"""The routes of the web page: its files, which need no key, and its own API, which does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.serving.answers import Answer, Ready, Stream
from quire.serving.context import ServerContext
from quire.serving.endpoint import Call, Endpoint, Handler
from quire.serving.errors import ApiError, invalid
from quire.serving.page.feed import FAST_HZ, SLOW_HZ, EngineFeed
from quire.serving.page.static_files import StaticFile, read_static_files

MAX_TOKEN_IDS = 256
NO_STORE = {"cache-control": "no-store"}


class ModelFacts(msgspec.Struct, kw_only=True):
    """The properties of the model that the page needs.

    defaults     sampling parameters recommended by the checkpoint
    has_chat     there is a chat template
    has_tools    tool calls are parsed
    max_logprobs likely tokens per position at most
    """

    name: str
    max_model_len: int
    max_logprobs: int
    defaults: dict[str, Any]
    has_chat: bool
    has_tools: bool
    has_reasoning: bool


class TokenFacts(msgspec.Struct):
    """One token: its text and its bytes, which may be part of a character."""

    id: int
    text: str
    bytes: list[int]


async def get_model_facts(context: ServerContext, call: Call) -> Answer:
    """Return the properties of the model for the page."""
    served = context.model
    facts = ModelFacts(
        name=served.name,
        max_model_len=served.info.max_model_len,
        max_logprobs=served.info.max_logprobs,
        defaults=dict(served.info.generation_defaults),
        has_chat=bool(served.template_source),
        has_tools=served.parsers.tool_format is not None,
        has_reasoning=served.parsers.reasoning_format is not None,
    )
    return Ready(msgspec.json.encode(facts), headers=NO_STORE)


async def get_tokens(context: ServerContext, call: Call) -> Answer:
    """Return the texts of tokens: ?ids=1,2,3."""
    served = context.model
    parts = call.query.get("ids", "").split(",")
    if len(parts) > MAX_TOKEN_IDS or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise invalid(f"ids must be 1 to {MAX_TOKEN_IDS} token ids with commas between them", "ids")
    ids = [int(part) for part in parts]
    size, tokenizer = served.info.vocab_size, served.tokenizer
    if max(ids) >= size:
        raise invalid(f"ids must be below {size}, got {max(ids)}", "ids")
    facts = [
        TokenFacts(token_id, f"token_id:{token_id}", [])
        if tokenizer is None
        else TokenFacts(token_id, tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id)))
        for token_id in ids
    ]
    return Ready(msgspec.json.encode(facts), headers=NO_STORE)


def page_endpoints(feeds: Sequence[EngineFeed]) -> tuple[Endpoint[ServerContext], ...]:
    """Return the routes of the page; feeds: of each engine."""

    async def get_events(context: ServerContext, call: Call) -> Answer:
        replica = call.query.get("replica", "0")
        if not (replica.isascii() and replica.isdigit() and len(replica) < 6 and int(replica) < len(feeds)):
            raise invalid(f"replica must be an integer from 0 to {len(feeds) - 1}, got {replica[:20]!r}", "replica")
        feed = feeds[int(replica)]
        hz = call.query.get("hz", str(FAST_HZ))
        if hz not in (str(FAST_HZ), str(SLOW_HZ)):
            raise invalid(f"hz must be {FAST_HZ} or {SLOW_HZ}, got {hz[:20]!r}", "hz")
        after = call.request.headers.get("last-event-id", "-1")
        if after != "-1" and not (after.isascii() and after.isdigit() and len(after) < 16):
            raise invalid(f"last-event-id must be the number of a step, got {after[:20]!r}", "last-event-id")
        return Stream(feed.frames(int(hz), call.owner.is_admin, int(after)), ApiError.openai_event)

    files = tuple(
        Endpoint(
            method="GET",
            path=file.path,
            handler=_sender_of(file),
            summary="The web page",
            tag="page",
            other_answers={304: None},
            is_open=True,
            success_media_type=file.media_type.partition(";")[0],
        )
        for file in read_static_files()
    )
    return (
        *files,
        _guarded(
            "/ui/events", get_events, "What the engine does, as server-sent events", query=(_HZ, _REPLICA), is_streaming=True
        ),
        _guarded("/ui/model", get_model_facts, "What the page needs of the model", answer=ModelFacts),
        _guarded("/ui/tokens", get_tokens, "The text and the bytes of tokens", query=(_IDS,), answer=list[TokenFacts]),
    )


_HZ = {"name": "hz", "in": "query", "required": False, "schema": {"type": "integer", "enum": [SLOW_HZ, FAST_HZ]}}
_REPLICA = {"name": "replica", "in": "query", "required": False, "schema": {"type": "integer", "minimum": 0}}
_IDS = {"name": "ids", "in": "query", "required": True, "schema": {"type": "string", "pattern": r"^[0-9]+(,[0-9]+)*$"}}


def _guarded(path: str, handler: Handler[ServerContext], summary: str, **options: Any) -> Endpoint[ServerContext]:
    return Endpoint(method="GET", path=path, handler=handler, summary=summary, tag="page", **options)


def _sender_of(file: StaticFile) -> Handler[ServerContext]:
    async def get_file(context: ServerContext, call: Call) -> Answer:
        return file.answer(call.request.headers.get("if-none-match", ""))

    return get_file
