"""How a router and its servers tell each other the tokens of a stream, so that another server can continue it.

A request with the header `x-quire-resumable: SEED ID CREATED` gets a stream in which the comment `: quire-tokens 1,2,3` follows
the frames of each delta, and `: quire-end` the last one. Sent to another server with `x-quire-resume: N`, and the N tokens of
these comments (4 bytes each, little-endian) after the body, it is answered by the frames that follow. SEED is used where the
body has none, so that both servers sample alike; ID and CREATED make the frames the same.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from quire.serving.errors import invalid

RESUMABLE_HEADER = "x-quire-resumable"
RESUME_HEADER = "x-quire-resume"
TOKENS_COMMENT = b": quire-tokens "
END_COMMENT = b": quire-end\n\n"
_TOKEN_BYTES = 4


def tokens_comment(token_ids: Iterable[int]) -> bytes:
    """Return the comment that tells the tokens of the frames before it."""
    return TOKENS_COMMENT + ",".join(map(str, token_ids)).encode() + b"\n\n"


def read_tokens_comment(comment: bytes) -> list[int]:
    """Return the tokens of a comment, which may end with newlines. Raises ValueError."""
    return [int(one) for one in comment.removeprefix(TOKENS_COMMENT).split(b",") if one.strip()]


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Return 4 bytes for each token, little-endian."""
    return _swapped(array("i", token_ids)).tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Return the tokens of 4 bytes each. The length must be a multiple of that."""
    found = array("i")
    found.frombytes(data)
    return tuple(_swapped(found))


def _swapped(found: array[int]) -> array[int]:
    if sys.byteorder == "big":
        found.byteswap()
    return found


def cut_output(parts: list[bytes], stated: str) -> tuple[list[bytes], bytes]:
    """Return the body without the tokens after it, and these. Raises ApiError."""
    data = b"".join(parts)
    num_bytes = _TOKEN_BYTES * int(stated) if stated.isascii() and stated.isdigit() and len(stated) < 10 else -1
    if not 0 < num_bytes <= len(data):
        raise invalid(f"{RESUME_HEADER} must be the number of tokens after the body, got {stated[:50]!r}", RESUME_HEADER)
    return [data[:-num_bytes]], data[-num_bytes:]
