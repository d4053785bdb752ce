"""The texts that a JSON schema's keywords allow for a string, as the body of a terminal."""

from __future__ import annotations

import re
from typing import Any

from quire.grammar.errors import GrammarError
from quire.grammar.lark import quote_regex
from quire.grammar.rules import ANY_TEXT
from quire.grammar.schema_formats import FORMATS

_FLAGS = re.compile(r"\(\?[A-Za-z-]+\)")


def has_form(schema: dict[str, Any]) -> bool:
    """Return whether a schema constrains strings by more than their length."""
    return "pattern" in schema or "format" in schema


def form_body(schema: dict[str, Any], pointer: str) -> str:
    """Return the texts that pattern, format and lengths allow. Raises GrammarError."""
    parts = [length_body(schema)]
    if "pattern" in schema:
        parts.append(search_body(str(schema["pattern"]), f"{pointer}/pattern"))
    if "format" in schema:
        known = FORMATS[str(schema["format"])]
        parts += [search_body(pattern, f"{pointer}/format") for pattern in known.patterns]
        if known.max_length is not None:
            parts.append(length_body({"maxLength": known.max_length}))
    return " & ".join(f"({part})" for part in parts)


def length_body(schema: dict[str, Any]) -> str:
    """Return the texts that the lengths allow."""
    bounds = repeat_bounds(schema, "Length")
    return ANY_TEXT if bounds == "*" else f"/(?s:.{bounds})/"


def repeat_bounds(schema: dict[str, Any], counted: str) -> str:
    """Return minLength and maxLength, or minItems and maxItems, as a repetition operator."""
    least, most = schema.get(f"min{counted}", 0), schema.get(f"max{counted}")
    if most is None:
        return f"{{{least},}}" if least else "*"
    return f"{{{least},{most}}}"


def search_body(pattern: str, pointer: str) -> str:
    """Return the texts in which a pattern is found; its alternatives may be anchored at their ends."""
    alternatives = _alternatives(pattern)
    if not any(_has_anchor(part) for part in alternatives):
        return f"{ANY_TEXT} {quote_regex(f'(?:{pattern})')} {ANY_TEXT}"
    if len(alternatives) > 1 and _FLAGS.match(pattern):
        raise GrammarError("flags before anchored alternatives cannot be enforced", pointer)
    found: list[str] = []
    for part in alternatives:
        has_head, has_tail = part.startswith("^"), _ends_anchored(part)
        core = part[has_head : len(part) - has_tail]
        if _has_anchor(core):
            raise GrammarError("^ and $ can only be enforced at the ends of a pattern or of its alternatives", pointer)
        body = quote_regex(f"(?:{core})") if core else '""'
        found.append(f"{'' if has_head else ANY_TEXT} {body} {'' if has_tail else ANY_TEXT}".strip())
    return " | ".join(found)


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a pattern, split at each | outside of groups."""
    parts, depth = [""], 0
    for piece, is_plain in _pieces(pattern):
        depth += {"(": 1, ")": -1}.get(piece, 0) if is_plain else 0
        if is_plain and piece == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _has_anchor(pattern: str) -> bool:
    return (
        any(is_plain and piece in "^$" for piece, is_plain in _pieces(pattern)) or re.search(r"\\[AzZbB]", pattern) is not None
    )


def _ends_anchored(pattern: str) -> bool:
    *_, (piece, is_plain) = [("", False), *_pieces(pattern)]
    return is_plain and piece == "$"


def _pieces(pattern: str) -> list[tuple[str, bool]]:
    """Return the characters of a pattern, each with its backslash, and whether it is outside of classes and escapes."""
    found: list[tuple[str, bool]] = []
    at, class_begin = 0, -1
    while at < len(pattern):
        if pattern[at] == "\\":
            found.append((pattern[at : at + 2], False))
            at += 2
            continue
        piece = pattern[at]
        if class_begin < 0 and piece == "[":
            class_begin = at + 1 + (pattern[at + 1 : at + 2] == "^")
            found.append((piece, False))
        elif class_begin >= 0:
            found.append((piece, False))
            if piece == "]" and at > class_begin:
                class_begin = -1
        else:
            found.append((piece, True))
        at += 1
    return found
