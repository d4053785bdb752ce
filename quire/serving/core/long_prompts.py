"""Prompts of hundreds of thousands of tokens, processed without blocking the event loop.

Processing so many objects in one call holds the GIL, in any thread, so it is done in pieces.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from quire.contracts.request import Request

LONG_TOKENS = 4096
_PIECE_TOKENS = 4096


def pack_prompt(request: Request) -> Request:
    """Return a request with the tokens of a long prompt in an array, which is fast to copy and to free. Call it in a thread."""
    token_ids = request.prompt_token_ids
    if len(token_ids) <= LONG_TOKENS:
        return request
    packed = array("i")
    for piece in _pieces(token_ids):
        packed.extend(piece)
    return replace(request, prompt_token_ids=packed)


def write_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as JSON."""
    written = [msgspec.json.encode(list(piece))[1:-1] for piece in _pieces(token_ids)]
    return b"".join((b"[", b",".join(written), b"]"))


def _pieces(token_ids: Sequence[int]) -> list[Sequence[int]]:
    return [token_ids[start : start + _PIECE_TOKENS] for start in range(0, len(token_ids), _PIECE_TOKENS)]
