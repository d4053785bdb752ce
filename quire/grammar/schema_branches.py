"""The branches of a JSON schema: the types that it allows, and its constraints on values of each type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from quire.contracts.argument_types import find_reference, type_name
from quire.grammar.errors import GrammarError, escape_pointer
from quire.grammar.schema_check import KNOWN_KEYWORDS
from quire.grammar.schema_shape import ALL_TYPES

_KEYWORDS = {
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("prefixItems", "items", "minItems", "maxItems", "additionalItems"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
}
_KEYWORDS["number"] = _KEYWORDS["integer"]
_IDLE = frozenset(
    (
        "type", "$ref", "$defs", "definitions", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary",
        "contentEncoding", "contentMediaType", "contentSchema",
    )
)  # fmt: skip
_UNREAD = KNOWN_KEYWORDS - _IDLE - {key for keys in _KEYWORDS.values() for key in keys}
_CHOICES = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class Branch:
    """Values of one type, or literal values.

    kind      the type, "literal" if only `values` are allowed
    schema    its keywords apply to that type
    pointer   to the schema
    path      the references that led to it
    """

    kind: str
    schema: dict[str, Any]
    pointer: str
    path: tuple[str, ...]
    values: tuple[object, ...] = ()


def branches_of(
    root: object, schema: object, pointer: str, types: frozenset[str] = ALL_TYPES, path: tuple[str, ...] = ()
) -> list[Branch]:
    """Return the branches of a schema within its root for values of some types. Raises GrammarError with the JSON pointer."""
    types = types | {"integer"} if "number" in types else types
    return list(_Branches(root).of(schema, pointer, types, path))


class _Branches:
    """Collects the branches; holds the root for references."""

    def __init__(self, root: object) -> None:
        self._root = root

    def of(self, schema: object, pointer: str, types: frozenset[str], path: tuple[str, ...]) -> Iterator[Branch]:
        if schema is False:
            return
        fields = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
        types = _restricted(types, fields.get("type"))
        choices = [key for key in _CHOICES if key in fields]
        if not choices:
            yield from self._plain(fields, pointer, types, path)
            return
        self._check_alone(fields, choices, pointer)
        key, where = choices[0], f"{pointer}/{choices[0]}"
        if key == "$ref":
            yield from self._referred(str(fields["$ref"]), where, types, path)
        elif key in ("enum", "const"):
            values = [fields["const"]] if key == "const" else cast("list[object]", fields["enum"])
            allowed = tuple(value for value in values if type_name(value) in types)
            if allowed:
                yield Branch("literal", fields, where, path, allowed)
        else:
            options = cast("list[object]", fields[key])
            if key == "allOf" and len(options) > 1:
                raise GrammarError("allOf of several schemas cannot be enforced in tool calls of this form: write one", where)
            found = [list(self.of(option, f"{where}/{at}", types, path)) for at, option in enumerate(options)]
            if key == "oneOf" and not _are_apart(found):
                raise GrammarError(
                    "oneOf can only be enforced in tool calls of this form where its types differ: write anyOf", where
                )
            yield from (branch for option in found for branch in option)

    def _referred(self, reference: str, pointer: str, types: frozenset[str], path: tuple[str, ...]) -> Iterator[Branch]:
        target = find_reference(self._root, reference)
        if target is None:
            raise GrammarError(f"$ref {reference!r:.100} leads nowhere that can be followed", pointer)
        if reference in path:
            raise GrammarError("a recursive schema cannot be enforced in tool calls of this form", pointer)
        yield from self.of(target, reference[1:], types, (*path, reference))

    def _check_alone(self, fields: dict[str, Any], choices: list[str], pointer: str) -> None:
        others = [key for key in fields if key in KNOWN_KEYWORDS and key not in _IDLE and key != choices[0]]
        if others:
            raise GrammarError(
                f"{others[0]} next to {choices[0]} cannot be enforced in tool calls of this form",
                f"{pointer}/{escape_pointer(others[0])}",
            )

    def _plain(self, fields: dict[str, Any], pointer: str, types: frozenset[str], path: tuple[str, ...]) -> Iterator[Branch]:
        for key in fields.keys() & _UNREAD:
            raise GrammarError(f"{key} cannot be enforced in tool calls of this form", f"{pointer}/{key}")
        for kind in ("null", "boolean", "integer", "number", "string", "array", "object"):
            if kind not in types or (kind == "integer" and "number" in types):
                continue
            keywords = _KEYWORDS.get(kind, ())
            yield Branch(kind, {key: fields[key] for key in keywords if key in fields}, pointer, path)


def _restricted(types: frozenset[str], declared: object) -> frozenset[str]:
    if declared is None:
        return types
    names = frozenset(map(str, cast("list[object]", declared))) if isinstance(declared, list) else frozenset((str(declared),))
    if "number" in names:
        names |= {"integer"}
    return names & types


def _are_apart(options: list[list[Branch]]) -> bool:
    """Return whether no value matches two options, judging by types and literals."""
    pairs = ((one, other) for at, option in enumerate(options) for one in option for rest in options[:at] for other in rest)
    return not any(_overlap(one, other) for one, other in pairs)


def _overlap(one: Branch, other: Branch) -> bool:
    if one.kind != "literal":
        one, other = other, one
    if one.kind != "literal":
        return one.kind == other.kind or {one.kind, other.kind} == {"integer", "number"}
    if other.kind == "literal":
        return any(
            type_name(value) == type_name(another) and value == another for value in one.values for another in other.values
        )
    names = {type_name(value) for value in one.values}
    return other.kind in names or (other.kind == "number" and "integer" in names)
