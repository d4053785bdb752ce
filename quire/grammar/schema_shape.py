"""Checks that the keywords of a JSON schema have values of valid types; others would be ignored, or cause odd errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from quire.grammar.errors import GrammarError, escape_pointer

ALL_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_number(value) and cast("float", value) >= 0 and cast("float", value) % 1 == 0


def _is_type(value: object) -> bool:
    names = cast("list[object]", value) if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in ALL_TYPES for name in names)


def _is_map_of_schemas(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, cast("dict[str, object]", value).values()))


def _is_list_of_schemas(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, cast("list[object]", value)))


def _is_list_of_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[object]", value))


_SHAPES: tuple[tuple[str, Callable[[object], bool], tuple[str, ...]], ...] = (
    ("an object of schemas", _is_map_of_schemas, ("properties", "patternProperties", "dependentSchemas")),
    ("an object", lambda value: isinstance(value, dict), ("$defs", "definitions")),
    ("a list of schemas", _is_list_of_schemas, ("allOf", "anyOf", "oneOf", "prefixItems")),
    (
        "a schema",
        _is_schema,
        ("additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames"),
    ),
    ("a schema or a list of schemas", lambda value: _is_schema(value) or isinstance(value, list), ("items",)),
    (f"one of {', '.join(sorted(ALL_TYPES))}, or a list of these", _is_type, ("type",)),
    ("a list", lambda value: isinstance(value, list), ("enum",)),
    ("a list of names", _is_list_of_strings, ("required",)),
    (
        "a whole number that is not negative",
        _is_count,
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    ),
    ("a number", _is_number, ("minimum", "maximum")),
    ("a number above 0", lambda value: _is_number(value) and 0 < cast("float", value) < math.inf, ("multipleOf",)),
    ("a number", lambda value: isinstance(value, int | float), ("exclusiveMinimum", "exclusiveMaximum")),  # bool in draft 4
    ("a string", lambda value: isinstance(value, str), ("pattern", "format", "$ref")),
)


def check_shape(schema: dict[str, Any], pointer: str) -> None:
    """Check one schema, without inner ones. Raises GrammarError with the JSON pointer of the invalid keyword."""
    for expected, is_right, keys in _SHAPES:
        for key in keys:
            if key in schema and not is_right(schema[key]):
                raise GrammarError(f"{key} must be {expected}, got {schema[key]!r:.60}", f"{pointer}/{key}")
    for least, most in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
        if least in schema and most in schema and schema[least] > schema[most]:
            raise GrammarError(f"{least} {schema[least]} is above {most} {schema[most]}", f"{pointer}/{least}")


def check_integers(value: object) -> None:
    """Raise GrammarError, with the JSON pointer, for an integer within a JSON value that needs more than 64 bits."""
    waiting: list[tuple[str, object]] = [("", value)]
    while waiting:
        pointer, found = waiting.pop()
        if isinstance(found, dict):
            waiting += [(f"{pointer}/{escape_pointer(key)}", inner) for key, inner in cast("dict[str, object]", found).items()]
        elif isinstance(found, list):
            waiting += [(f"{pointer}/{position}", inner) for position, inner in enumerate(cast("list[object]", found))]
        elif isinstance(found, int) and not -(2**63) <= found < 2**64:
            raise GrammarError(f"integers may have 64 bits, got one of {found.bit_length()}", pointer)
