"""Flattens deep schemas, because the backends accept JSON with at most about a hundred levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import quote, unquote

from quire.contracts.constraint import json_depth
from quire.grammar.errors import GrammarError, escape_pointer
from quire.grammar.schema_walk import iter_objects, iter_parts

MAX_FLAT_DEPTH = 48
"""Levels of JSON that are kept in one piece."""


def flatten_schema(root: object) -> object:
    """Return a schema, changed, whose deep parts are moved to definitions; one that is not deep is not changed.

    Raises GrammarError, with its pointer, for a value of enum, const or an unknown keyword that is itself deep.
    """
    if not isinstance(root, dict) or json_depth(cast("object", root)) <= MAX_FLAT_DEPTH:
        return cast("object", root)
    fields = cast("dict[str, Any]", root)
    definitions: dict[str, object] = fields.setdefault("$defs", {})
    names = (name for name in _numbered("deep") if name not in definitions)
    moved: dict[str, str] = {}
    found: dict[str, object] = {}
    waiting = [("", fields, 0)]
    while waiting:
        pointer, schema, depth = waiting.pop()
        for where, part in list(iter_parts(schema, pointer)):
            if not isinstance(part, dict):
                continue
            below = depth + 2 - (where.count("/") == pointer.count("/") + 1)
            if below >= MAX_FLAT_DEPTH // 2 and "$ref" not in part:
                name = next(names)
                moved[where], found[name] = name, dict(cast("dict[str, Any]", part))
                part.clear()
                part["$ref"] = f"#/$defs/{name}"
                waiting.append((where, cast("dict[str, Any]", found[name]), 0))
            else:
                waiting.append((where, cast("dict[str, Any]", part), below))
    definitions.update(found)
    for pointer, schema in iter_objects(fields):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            schema["$ref"] = _moved_reference(reference, moved)
        elif pointer and json_depth(schema) > 2 * MAX_FLAT_DEPTH:
            raise GrammarError(f"values within a schema may be nested {2 * MAX_FLAT_DEPTH} deep", pointer)
    return fields


def _numbered(name: str) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"{name}-{number}"


def _moved_reference(reference: str, moved: dict[str, str]) -> str:
    """Return a reference adjusted for moved parts."""
    parts = unquote(reference[1:]).split("/")
    for length in range(len(parts), 0, -1):
        name = moved.get("/".join(parts[:length]))
        if name is not None:
            rest = "/".join(parts[length:])
            return f"#/$defs/{escape_pointer(name)}{rest and f'/{quote(rest)}'}"
    return reference
