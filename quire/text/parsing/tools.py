"""Tool: what the parser has to know of a tool, and how the text of an argument becomes a value of its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_NOTHING: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call; parameters is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)


def types_of(tool: Tool, argument: str) -> frozenset[str]:
    """Return the JSON types that the schema allows for an argument, {"string"} where it says nothing."""
    properties = tool.parameters.get("properties")
    schema = properties.get(argument) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, 0)) or frozenset(("string",))


def _types(schema: object, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kind = schema.get("type")
    found = (
        {kind}
        if isinstance(kind, str)
        else {name for name in kind if isinstance(name, str)}
        if isinstance(kind, list)
        else set()
    )
    if found:
        return found
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else []:
            found |= _types(option, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    for value in values if isinstance(values, list) else []:
        found.add(_type_name(value))
    if "$ref" in schema or "properties" in schema:
        found.add("object")
    return found


def _type_name(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    for kind, name in ((str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of an argument that the model wrote as plain text; what fits no other type is a string."""
    stripped = text.strip()
    if stripped in _WORDS:
        word = json.dumps(_WORDS[stripped])
        return word if types & {"null" if word == "null" else "boolean"} or "string" not in types else json.dumps(text)
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    name = _type_name(value)
    if name in types or (name == "integer" and "number" in types) or "string" not in types:
        return stripped
    return json.dumps(text, ensure_ascii=False)
