"""is_json and read_partial: the arguments of tool calls, which may be truncated."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+)', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}


def is_json(text: str) -> bool:
    """Whether a text is complete JSON."""
    try:
        msgspec.json.decode(text)
    except ValueError:
        return False
    return True


def read_partial(text: str) -> Any:
    """Return the value of JSON text. Of truncated text, only the complete members and items are returned.

    {} if the text is empty or not JSON. Streaming clients get the same value from the pieces.
    """
    try:
        return msgspec.json.decode(text)
    except ValueError:
        return _decode(_complete(text))


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except ValueError:
        return {}


def _complete(text: str) -> str:
    """Return the text up to its last complete value, with the open brackets closed."""
    open_brackets: list[str] = []
    end, closers = 0, ""
    at, before = 0, ""
    while match := _TOKEN.match(text, at):
        at, token = match.end(), match[1]
        is_key = bool(open_brackets) and open_brackets[-1] == "}" and before in ("{", ",")
        if token in _CLOSERS:
            open_brackets.append(_CLOSERS[token])
        elif token in ("}", "]") and (not open_brackets or open_brackets.pop() != token):
            break
        before = token
        if token in (":", ",") or (is_key and token != "}") or not _is_whole(token):
            continue
        end, closers = at, "".join(reversed(open_brackets))
    return text[:end] + closers


def _is_whole(token: str) -> bool:
    """Whether a token is a bracket, a string, or a number or word that is not cut."""
    return token[0] in '{}[]"' or is_json(token)
