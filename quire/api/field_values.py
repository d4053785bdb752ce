"""What a body has at a path, and what its type allows there: for the messages of errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, cast

import msgspec
from msgspec import inspect

MAX_SHOWN = 100  # characters of a value

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def find_value(body: object, path: str) -> object:
    """Return the value at a path such as "messages[2].role", `msgspec.UNSET` if there is none; for [...] the object of it."""
    for name, position in _steps(path):
        if isinstance(body, dict) and not position:
            body = cast("dict[str, object]", body).get(name, msgspec.UNSET)
        elif isinstance(body, list) and position and int(position) < len(cast("list[object]", body)):
            body = cast("list[object]", body)[int(position)]
        else:
            return msgspec.UNSET
    return body


def show_value(value: object) -> str:
    """Return a value as JSON of at most MAX_SHOWN characters, a string in Python's notation."""
    text = repr(value) if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def show_names(names: Iterable[str]) -> str:
    """Return up to 16 names as a list for a message."""
    shown = [repr(name) for name in islice(names, 17)]
    return ", ".join([*shown[:16], "..."] if len(shown) > 16 else shown)


def allowed_values(kind: type[msgspec.Struct], body: object, path: str) -> list[str]:
    """Return the values that an enum, or the tag of a union, may have at a path; empty for every other type."""
    steps = _steps(path)
    tags = [option.tag for option in _structs(_types_at(kind, body, steps[:-1])) if option.tag_field == steps[-1][0]]
    options = [option for one in _types_at(kind, body, steps) for option in alternatives(one)]
    literals = [value for option in options if isinstance(option, inspect.LiteralType) for value in option.values]
    enums = [member.value for option in options if isinstance(option, inspect.EnumType) for member in option.cls]
    return [str(value) for value in (*tags, *literals, *enums)]


def field_names(kind: type[msgspec.Struct], body: object, path: str) -> list[str]:
    """Return the names that the object at a path may have."""
    return [field.encode_name for option in _structs(_types_at(kind, body, _steps(path))) for field in option.fields]


def alternatives(described: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the members of a union, and any other type as it is."""
    if isinstance(described, inspect.UnionType):
        for option in described.types:
            yield from alternatives(option)
    elif isinstance(described, inspect.Metadata):
        yield from alternatives(described.type)
    else:
        yield described


def _steps(path: str) -> list[tuple[str, str]]:
    return _STEP.findall(path)


def _types_at(kind: type[msgspec.Struct], body: object, steps: list[tuple[str, str]]) -> list[inspect.Type]:
    types = [_described(kind)]
    for name, position in steps:
        types = list(_inner(types, body, name, bool(position)))
        body = find_value(body, f"[{position}]" if position else name)
    return types


@lru_cache(maxsize=64)
def _described(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _structs(types: list[inspect.Type]) -> Iterator[inspect.StructType]:
    for one in types:
        yield from (option for option in alternatives(one) if isinstance(option, inspect.StructType))


def _inner(types: list[inspect.Type], value: object, name: str, is_position: bool) -> Iterator[inspect.Type]:
    """Yield the types of an item, or of a field, of a value."""
    for option in (option for one in types for option in alternatives(one)):
        if is_position and isinstance(option, inspect.ListType):
            yield option.item_type
        elif isinstance(option, inspect.StructType) and isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            if option.tag_field is None or fields.get(option.tag_field) == option.tag:
                yield from (field.type for field in option.fields if field.encode_name == name)
