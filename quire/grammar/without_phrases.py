"""A constraint without the texts in it that a banned phrase is part of: an output that began one could not end it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError
from quire.grammar.schema_check import iter_schemas


def without_phrases(constraint: Constraint, phrases: Sequence[str]) -> Constraint:
    """Return a constraint of whose choices, and texts of enum and const, none has a phrase; itself where none has.

    Whatever the result allows, the constraint does: a text stands in an output as it is, or as JSON writes it. Raises
    GrammarError where no choice is left.
    """
    if constraint.kind not in ("choice", "json_schema", "structural_tag"):
        return constraint
    value = constraint.parsed()
    if constraint.kind == "choice":
        found: object = [choice for choice in value if not _has_phrase(choice, phrases)]
        if not found:
            raise GrammarError("each of the texts has one of bad_words in it")
    elif constraint.kind == "json_schema":
        found = _thin_schema(constraint.parsed(), phrases)
    else:
        found = _thin_tag(constraint.parsed(), phrases)
    return constraint if found == value else replace(constraint, source=json.dumps(found, ensure_ascii=False))


def _has_phrase(text: str, phrases: Sequence[str]) -> bool:
    return any(phrase in text for phrase in phrases)


def _thin_schema(schema: object, phrases: Sequence[str]) -> object:
    """Return the schema, changed, without texts that have a phrase; what has no value left allows nothing."""
    for _, inner in list(iter_schemas(schema)):
        for key in ("enum", "const"):
            if key not in inner:
                continue
            values = cast("list[object]", inner[key]) if key == "enum" and isinstance(inner[key], list) else [inner[key]]
            left = [value for value in values if not _is_banned(value, phrases)]
            if key == "enum" and left:
                inner[key] = left
            elif values and not left:
                inner.pop(key)
                inner["allOf"] = [*cast("list[object]", inner.get("allOf") or []), False]
    return schema


def _is_banned(value: object, phrases: Sequence[str]) -> bool:
    """Whether a value has a phrase in it; of texts alone, as numbers and objects can be written in several ways."""
    return isinstance(value, str) and _has_phrase(json.dumps(value, ensure_ascii=False), phrases)


def _thin_tag(part: Any, phrases: Sequence[str]) -> Any:
    """Return a part of a structural tag without alternatives that have a phrase, but for the last of them."""
    if isinstance(part, list):
        return [_thin_tag(item, phrases) for item in cast("list[Any]", part)]
    if not isinstance(part, dict):
        return part
    fields = cast("dict[str, Any]", part)
    if fields.get("type") == "json_schema" and fields.get("style", "json") == "json" and "json_schema" in fields:
        return {**fields, "json_schema": _thin_schema(fields["json_schema"], phrases)}
    elements = fields.get("elements")
    if fields.get("type") == "or" and isinstance(elements, list):
        options = cast("list[Any]", elements)
        fields = {**fields, "elements": [one for one in options if not _is_banned_text(one, phrases)] or options}
    return {name: _thin_tag(inner, phrases) for name, inner in fields.items()}


def _is_banned_text(part: Any, phrases: Sequence[str]) -> bool:
    if not isinstance(part, dict):
        return False
    fields = cast("dict[str, Any]", part)
    text = fields.get("value")
    return fields.get("type") == "const_string" and isinstance(text, str) and _has_phrase(text, phrases)
