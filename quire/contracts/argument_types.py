"""Which JSON types the schema of a tool allows for an argument: who reads calls and who constrains them have to agree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import unquote

_MAX_DEPTH = 8
_MAX_DIGITS = 9
"""Of an index into a list; int() refuses thousands of them."""
_STRING = frozenset(("string",))
_LONE_REFERENCES = re.compile(r"http://json-schema\.org/draft-0[4-7]/schema#?")


def types_of(parameters: Mapping[str, object], argument: str) -> frozenset[str]:
    """Return the types of an argument, {"string"} where the schema says nothing of it.

    What is not among the properties has the schema of additionalProperties.
    """
    properties = _resolve(parameters, parameters).get("properties")
    schema: Any = cast("Mapping[str, Any]", properties).get(argument) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = _resolve(parameters, parameters).get("additionalProperties")
    return frozenset(_types(schema, parameters, 0, set())) or _STRING


def has_lone_references(root: object) -> bool:
    """Whether nothing counts that stands beside a $ref, as the draft has it that a schema is declared to be of."""
    draft = cast("Mapping[str, object]", root).get("$schema") if isinstance(root, Mapping) else None
    return isinstance(draft, str) and _LONE_REFERENCES.fullmatch(draft) is not None


def find_reference(root: object, reference: str) -> object | None:
    """Return the schema that a reference within its own document means, None where there is none."""
    base, _, fragment = reference.partition("#")
    steps = unquote(fragment).split("/")
    if base or "#" not in reference:
        return None
    if steps[0]:
        return _find_anchor(root, steps[0]) if len(steps) == 1 else None
    found: object = root
    for part in steps[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = cast("Mapping[str, object]", found)[key]
        elif (
            isinstance(found, list)
            and key.isdecimal()
            and len(key) <= _MAX_DIGITS
            and int(key) < len(cast("list[object]", found))
        ):
            found = cast("list[object]", found)[int(key)]
        else:
            return None
    return found


def _find_anchor(root: object, name: str) -> object | None:
    """Return the object that has a name by $anchor, the first one."""
    waiting = [root]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Mapping):
            fields = cast("Mapping[str, object]", found)
            if fields.get("$anchor") == name:
                return fields
            waiting += reversed(list(fields.values()))
        elif isinstance(found, list):
            waiting += reversed(cast("list[object]", found))
    return None


def type_name(value: object) -> str:
    """Return the JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    for kind, name in ((str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _resolve(schema: Mapping[str, object], root: object) -> Mapping[str, object]:
    """Return what a schema refers to, and itself where it refers to nothing."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref")
        found = find_reference(root, reference) if isinstance(reference, str) else None
        if not isinstance(found, Mapping):
            break
        schema = cast("Mapping[str, object]", found)
    return schema


def _types(schema: object, root: object, depth: int, seen: set[int]) -> set[str]:
    """Return the types of a schema; seen: what was looked at, as references may lead there again and again."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or id(cast("object", schema)) in seen:
        return set()
    seen.add(id(cast("object", schema)))
    fields = cast("Mapping[str, Any]", schema)
    if isinstance(fields.get("$ref"), str) and has_lone_references(root):
        fields = {"$ref": fields["$ref"]}
    kind = fields.get("type")
    found: set[str] = set()
    if isinstance(kind, str):
        found = {kind}
    elif isinstance(kind, list):
        found = {name for name in cast("list[Any]", kind) if isinstance(name, str)}
    if found:
        return found
    for name in ("anyOf", "oneOf", "allOf"):
        options = fields.get(name)
        for option in cast("list[object]", options) if isinstance(options, list) else []:
            found |= _types(option, root, depth + 1, seen)
    values = fields.get("enum", [fields["const"]] if "const" in fields else [])
    found |= {type_name(value) for value in cast("list[object]", values)} if isinstance(values, list) else set()
    resolved = _resolve(fields, root)
    if resolved is not fields:
        found |= _types(resolved, root, depth + 1, seen)
    elif "$ref" in fields or "properties" in fields:
        found.add("object")
    return found
