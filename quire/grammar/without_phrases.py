"""A constraint without the texts in it that a banned phrase is part of: an output that began one could not end it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError
from quire.grammar.excluding import excluding
from quire.grammar.lark import regex_source
from quire.grammar.prune_schema import prune_schema
from quire.grammar.rules import without
from quire.grammar.schema_faults import NOTHING_MATCHES
from quire.grammar.schema_shape import check_shape
from quire.grammar.schema_walk import iter_schemas

_MAX_FORCED = 8
_MAX_FORCED_CHARACTERS = 128
"""Phrases that are taken out of an expression, and what they have together: with each its states are more."""
_TERMINAL = re.compile(r"^([A-Z_][A-Z0-9_]*)[ \t]*:((?:(?!//|#).)*(?:\n[ \t]*\|(?:(?!//|#).)*)*)$", re.MULTILINE)
"""The definition of a terminal in Lark and its body, with lines that go on with an alternative, and without comments."""
_WIDE_CLASS = re.compile(r"\[(?:\^[^\]]*|[^\]]*-[^\]]*)\]|\{[0-9,]*\}")
"""What lets through many characters, and counts, which are none."""


def without_phrases(constraint: Constraint, phrases: Sequence[str]) -> Constraint:
    """Return a constraint without what has a phrase in it: choices, texts of expressions, values and names of a schema.

    Whatever the result allows, the constraint does: a text stands in an output as it is, or as JSON writes it. It is itself
    where nothing has to be left out. Raises GrammarError where nothing is left.
    """
    if constraint.kind == "json_object":
        return constraint
    if constraint.kind == "grammar":
        return _thin_grammar(constraint, phrases)
    if constraint.kind == "regex":
        return _thin_regex(constraint, phrases)
    value, can_exclude = constraint.parsed(), constraint.backend != "xgrammar"
    if constraint.kind == "choice":
        found: object = [choice for choice in value if not _has_phrase(choice, phrases)]
        if not found:
            raise GrammarError("each of the texts has one of bad_words in it")
    elif constraint.kind == "json_schema":
        found = _thin_schema(constraint.parsed(), phrases, can_exclude)
        if found is False and value is not False:
            raise GrammarError(f"bad_words leave nothing of it: {NOTHING_MATCHES}")
    else:
        found = _thin_tag(constraint.parsed(), phrases, can_exclude)
    return constraint if found == value else replace(constraint, source=json.dumps(found, ensure_ascii=False))


def _thin_regex(constraint: Constraint, phrases: Sequence[str]) -> Constraint:
    """Return a grammar of what an expression matches that has no phrase in it, of those that it may force to be completed."""
    forced = _forced_phrases(constraint.source, phrases)
    if not forced:
        return constraint
    source = f"{regex_source(constraint.source).rstrip()}{without(forced)}\n"
    return replace(constraint, kind="grammar", source=source, backend="llguidance")


def _thin_grammar(constraint: Constraint, phrases: Sequence[str]) -> Constraint:
    """Return a grammar in Lark whose terminals have no phrase in them, of those that they may force to be completed."""
    source = constraint.source
    if "::=" in source:
        return constraint
    bodies = [found[2] for found in _TERMINAL.finditer(source)]
    forced = _forced_phrases("\n".join(bodies), phrases)
    if not forced:
        return constraint
    return replace(constraint, source=_TERMINAL.sub(lambda found: f"{found[1]}: ({found[2]}){without(forced)}", source))


def _forced_phrases(pattern: str, phrases: Sequence[str]) -> list[str]:
    """Return the phrases that an expression may force to be completed, none where they are too many.

    These end with a character that it spells. Where others go on too, masks keep a phrase out for less.
    """
    spelled = _WIDE_CLASS.sub("", pattern.replace("\\", ""))
    forced = [phrase for phrase in phrases if phrase[-1] in spelled and phrase.isprintable()]
    return forced if len(forced) <= _MAX_FORCED and sum(map(len, forced)) <= _MAX_FORCED_CHARACTERS else []


def _has_phrase(text: str, phrases: Sequence[str]) -> bool:
    return any(phrase in text for phrase in phrases)


def _thin_schema(schema: object, phrases: Sequence[str], can_exclude: bool) -> object:
    """Return the schema, changed, without what JSON cannot write but with a phrase; False where nothing is left."""
    for pointer, inner in tuple(iter_schemas(schema)):
        check_shape(inner, pointer)
        if can_exclude:
            _exclude_from_pattern(inner, phrases)
    return prune_schema(schema, lambda value: _has_phrase(json.dumps(value, ensure_ascii=False), phrases))


def _exclude_from_pattern(schema: dict[str, Any], phrases: Sequence[str]) -> None:
    """Have strings of a pattern match those of no phrase, too, of those that the pattern may force to be completed."""
    pattern = schema.get("pattern")
    forced = _forced_phrases(pattern, phrases) if isinstance(pattern, str) else []
    written = [excluding(phrase) for phrase in forced if phrase == json.dumps(phrase, ensure_ascii=False)[1:-1]]
    if any(written):
        schema["allOf"] = [*schema.get("allOf", ()), *({"pattern": f"^(?:{one})$"} for one in written if one)]


def _thin_tag(part: Any, phrases: Sequence[str], can_exclude: bool) -> Any:
    """Return a part of a structural tag without alternatives that have a phrase, but for the last of them.

    can_exclude  expressions may say what is not to be in them
    """
    if isinstance(part, list):
        return [_thin_tag(item, phrases, can_exclude) for item in cast("list[Any]", part)]
    if not isinstance(part, dict):
        return part
    fields = cast("dict[str, Any]", part)
    if fields.get("type") == "json_schema" and fields.get("style", "json") == "json" and "json_schema" in fields:
        schema = _thin_schema(fields["json_schema"], phrases, can_exclude)
        return {**fields, "json_schema": {"allOf": [False]} if schema is False else schema}
    pattern = fields.get("pattern")
    if fields.get("type") == "regex" and isinstance(pattern, str):
        forced = _forced_phrases(pattern, phrases) if can_exclude and pattern and "excludes" not in fields else []
        return {**fields, "excludes": forced} if forced else fields
    elements = fields.get("elements")
    if fields.get("type") == "or" and isinstance(elements, list):
        options = cast("list[Any]", elements)
        fields = {**fields, "elements": [one for one in options if not _is_banned_text(one, phrases)] or options}
    return {name: _thin_tag(inner, phrases, can_exclude) for name, inner in fields.items()}


def _is_banned_text(part: Any, phrases: Sequence[str]) -> bool:
    if not isinstance(part, dict):
        return False
    fields = cast("dict[str, Any]", part)
    text = fields.get("value")
    return fields.get("type") == "const_string" and isinstance(text, str) and _has_phrase(text, phrases)
