"""Iterates over the schemas within a JSON schema, and the targets of its references."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast
from urllib.parse import unquote

from quire.contracts.argument_types import find_reference
from quire.grammar.errors import escape_pointer

SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = ("additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains", "propertyNames")


def iter_schemas(schema: object, pointer: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema that is an object within a schema, itself first, each with its JSON pointer.

    Changes to a yielded schema are taken into account. The nesting is unlimited.
    """
    waiting = [(pointer, schema)]
    while waiting:
        where, found = waiting.pop()
        if isinstance(found, dict):
            fields = cast("dict[str, Any]", found)
            yield where, fields
            waiting += reversed(list(iter_parts(fields, where)))


def iter_parts(fields: dict[str, Any], pointer: str) -> Iterator[tuple[str, object]]:
    """Yield the schemas that are direct parts of a schema, each with its JSON pointer."""
    for key in SCHEMA_MAPS:
        inner = fields.get(key)
        if isinstance(inner, dict):
            for name, item in cast("dict[str, object]", inner).items():
                yield f"{pointer}/{key}/{escape_pointer(name)}", item
    for key in (*SCHEMA_LISTS, "items"):
        inner = fields.get(key)
        if isinstance(inner, list):
            for position, item in enumerate(cast("list[object]", inner)):
                yield f"{pointer}/{key}/{position}", item
    for key in SCHEMAS:
        if key in fields:
            yield f"{pointer}/{key}", fields[key]


def iter_reached(root: object, references: References | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema within a root as iter_schemas does, then other targets of references, each once.

    Changes to a yielded schema are taken into account. references: of the same root, if they exist already
    """
    references = references or References(root)
    seen: dict[int, object] = {}
    waiting: list[tuple[str, object]] = [("", root)]
    for place in waiting:
        if id(place[1]) in seen:
            continue
        for pointer, schema in iter_schemas(place[1], place[0]):
            if id(schema) in seen:
                continue
            seen[id(schema)] = schema
            yield pointer, schema
            reference = schema.get("$ref")
            if isinstance(reference, str):
                waiting += references.targets(reference)


def has_open_names(part: object) -> bool:
    """Return whether names of an object are distinguished in several ways, such as declared and open ones; looks everywhere,
    because a $ref may lead anywhere."""
    return any(_has_open_names(fields) for _, fields in iter_objects(part))


def _has_open_names(fields: dict[str, Any]) -> bool:
    ways = [fields.get("properties"), fields.get("patternProperties"), fields.get("additionalProperties") is not False]
    return any(ways[:2]) and sum(map(bool, ways)) > 1


class References:
    """Finds all possible targets of the references within a schema; with $id, more than the actual ones."""

    def __init__(self, root: object) -> None:
        self._root = root

    def targets(self, reference: str) -> list[tuple[str, object]]:
        """Return the possible targets of a reference, each with its JSON pointer; empty if there are none."""
        base, _, written = reference.partition("#")
        fragment = unquote(written)
        if not base and not fragment:
            return [("", self._root)]
        if fragment and not fragment.startswith("/"):
            return [
                (pointer, fields)
                for pointer, fields in self._objects
                if fragment in (fields.get("$anchor"), fields.get("$dynamicAnchor")) or f"#{fragment}" in _names(fields)
            ]
        found = ((pointer, find_reference(resource, f"#{written}")) for pointer, resource in self._resources)
        return [(f"{pointer}{fragment}", value) for pointer, value in found if value is not None]

    @cached_property
    def _resources(self) -> list[tuple[str, object]]:
        """Return the root, and subschemas with an id, which are base URIs of references."""
        return [("", self._root), *((pointer, fields) for pointer, fields in self._objects if pointer and any(_names(fields)))]

    @cached_property
    def _objects(self) -> list[tuple[str, dict[str, Any]]]:
        return list(iter_objects(self._root))


def _names(fields: dict[str, Any]) -> list[str]:
    return [name for name in (fields.get("$id"), fields.get("id")) if isinstance(name, str)]


def iter_objects(value: object, pointer: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all objects in a JSON value, schemas or not, each with its JSON pointer."""
    waiting = [(pointer, value)]
    while waiting:
        where, found = waiting.pop()
        if isinstance(found, dict):
            fields = cast("dict[str, Any]", found)
            yield where, fields
            waiting += [(f"{where}/{escape_pointer(key)}", inner) for key, inner in fields.items()][::-1]
        elif isinstance(found, list):
            waiting += [(f"{where}/{at}", inner) for at, inner in enumerate(cast("list[object]", found))][::-1]
