"""Tool: the description of a tool for the parser, and the conversion of an argument's text by its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.contracts import argument_types

_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call; parameters is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)


def types_of(tool: Tool, argument: str) -> frozenset[str]:
    """Return the JSON types that the schema allows for an argument, {"string"} if it does not say."""
    return argument_types.types_of(tool.parameters, argument)


def to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of an argument that the model wrote as plain text; text that matches no other type is a string."""
    stripped = text.strip()
    if stripped in _WORDS:
        word = json.dumps(_WORDS[stripped])
        return word if types & {"null" if word == "null" else "boolean"} or "string" not in types else json.dumps(text)
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    name = argument_types.type_name(value)
    if name in types or (name == "integer" and "number" in types) or "string" not in types:
        return stripped
    return json.dumps(text, ensure_ascii=False)
