"""Texts and expressions in llguidance's variant of Lark."""

from __future__ import annotations

import json
from typing import Any

from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError
from quire.grammar.schema_depth import flatten_schema
from quire.grammar.schema_formats import write_format
from quire.grammar.schema_patterns import restrict_patterns
from quire.grammar.schema_walk import has_open_names, iter_reached

_BOUNDED_WHITESPACE = r" |\n {0,24}"
"""One space, or a line break with indentation, so that an output cannot continue with white space forever."""

_ESCAPED_LETTERS = r"nrbtf\""
r"""Characters allowed after a backslash if names are distinguished in several ways: not u, because llguidance would treat
"\u0079" as another name than "y". Control characters without a letter cannot be written then, not even in values."""


def quote(text: str) -> str:
    """Return a text as a literal; it must not be empty."""
    return json.dumps(text, ensure_ascii=False)


def quote_regex(pattern: str) -> str:
    """Return an expression between slashes. Anchors at its ends are removed, as the whole text has to match."""
    if pattern.startswith("^"):
        pattern = pattern[1:]
    num_escapes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    if pattern.endswith("$") and num_escapes % 2 == 0:
        pattern = pattern[:-1]
    return "/" + _escape_slashes(pattern).replace("\n", r"\n") + "/" if pattern else '""'


def _escape_slashes(pattern: str) -> str:
    found: list[str] = []
    is_escaped = False
    for character in pattern:
        found.append("\\/" if character == "/" and not is_escaped else character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(found)


def choice_source(choices: list[str]) -> str:
    """Return a grammar of one of several texts."""
    return "start: CHOICE\nCHOICE: " + " | ".join(quote(choice) for choice in choices) + "\n"


def regex_source(pattern: str) -> str:
    """Return a grammar of an expression."""
    return f"start: TEXT\nTEXT: {quote_regex(pattern)}\n"


def schema_options(schema: object, constraint: Constraint) -> dict[str, Any]:
    """Return llguidance's options for white space and escapes, which also disable ignoring keywords."""
    options: dict[str, Any] = {"whitespace_flexible": False, "coerce_one_of": False, "lenient": False}
    if has_open_names(schema):
        options["json_allowed_escapes"] = _ESCAPED_LETTERS
    if not constraint.disable_any_whitespace:
        options["whitespace_pattern"] = constraint.whitespace_pattern or _BOUNDED_WHITESPACE
    return options


def whitespace_of(constraint: Constraint) -> str:
    """Return the expression of the white space that is allowed in JSON, "" for none."""
    return "" if constraint.disable_any_whitespace else constraint.whitespace_pattern or _BOUNDED_WHITESPACE


def schema_fields(schema: object) -> Any:
    """Return a checked schema in the form that llguidance accepts. Raises GrammarError if there is none."""
    if schema is False:
        raise GrammarError("the schema false allows nothing", "")
    if schema is True:
        return {}
    rewritten = json.loads(json.dumps(schema))
    for pointer, inner in iter_reached(rewritten):
        write_format(inner)
        restrict_patterns(inner, pointer)
    return flatten_schema(rewritten)


def inline_schema(schema: Any, constraint: Constraint) -> str:
    """Return a schema as an item of a rule."""
    return "%json " + json.dumps(
        {"x-guidance": schema_options(schema, constraint), **schema_fields(schema)}, ensure_ascii=False
    )
