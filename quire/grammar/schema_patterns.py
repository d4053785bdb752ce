"""Rewrites patterns whose classes llguidance would treat as too wide within JSON.

It treats a class that contains all control characters, or all but the line feed, as if `"` and the backslash were in it, too.
Such classes are written without U+0000, which no output needs.
"""

from __future__ import annotations

import re
from typing import Any, cast

from quire.grammar.errors import GrammarError, escape_pointer

_TAKEN_WIDE = '"\\'
_VERBOSE = re.compile(r"\(\?[A-Za-z]*x")
_SET_OPERATION = re.compile(r"&&|--|~~|\|\|")
_BRACED = re.compile(r"\\[xuU]\{([0-9A-Fa-f]{1,6})\}")
_NULL = re.compile(r"\\(?:x00|u0000|U00000000|[xuU]\{0+\})|\x00")
_MAY_BE_WIDE = re.compile(rf"\[|\\[pP]|{_NULL.pattern}")
_PIECE = re.compile(r"\\(?:[pP](?:\{[^}]*\}|.)|[xuU]\{[^}]*\}|x..|u....|U........|.)|.", re.DOTALL)


def restrict_patterns(schema: dict[str, Any], pointer: str) -> None:
    """Rewrite the patterns of a schema so that no class is too wide. Raises GrammarError if one cannot be rewritten."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        schema["pattern"] = restrict_pattern(pattern, f"{pointer}/pattern")
    named = cast("dict[str, Any]", schema.get("patternProperties") or {})
    if named:
        schema["patternProperties"] = {
            restrict_pattern(name, f"{pointer}/patternProperties/{escape_pointer(name)}"): part for name, part in named.items()
        }


def restrict_pattern(pattern: str, pointer: str) -> str:
    """Return an expression with the same matches except texts with U+0000. Raises GrammarError if there is none."""
    if _MAY_BE_WIDE.search(pattern) is None:
        return pattern
    if _VERBOSE.search(pattern):
        raise GrammarError("classes and the flag x cannot be enforced together", pointer)
    parts = _parts(pattern)
    if any(_NULL.fullmatch(part) for part in parts):
        raise GrammarError("U+0000 cannot be enforced outside of classes", pointer)
    return "".join(part if _is_exact(part) else rf"[{part}&&[^\x00]]" for part in parts)


def _is_exact(part: str) -> bool:
    """Return whether a part of an expression needs no change: it is no class, or one without U+0000, or with `"` and the
    backslash."""
    if part[:2] in (r"\p", r"\P"):
        return False
    if not part.startswith("["):
        return True
    if "[" in part[1:] or _SET_OPERATION.search(part):
        return False
    try:
        holds = re.compile(_BRACED.sub(lambda found: rf"\U{found[1]:0>8}", part)).fullmatch
    except (re.error, OverflowError):
        return False
    return holds("\x00") is None or all(map(holds, _TAKEN_WIDE))


def _parts(pattern: str) -> list[str]:
    """Return an expression in parts: classes including nested ones, escapes, and single characters."""
    parts: list[str] = []
    depth, begin, is_empty = 0, 0, False
    for match in _PIECE.finditer(pattern):
        piece = match[0]
        if depth == 0:
            begin = match.start()
        if piece == "[":
            depth, is_empty = depth + 1, True
        elif depth and not (is_empty and piece == "^" and pattern[match.start() - 1] == "["):
            depth -= piece == "]" and not is_empty
            is_empty = False
        if depth == 0:
            parts.append(pattern[begin : match.end()])
    return parts if depth == 0 else [pattern]
