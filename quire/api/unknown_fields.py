"""unknown_fields: finds the fields of a body, at any depth, that its type does not define."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import msgspec
from msgspec import inspect

from quire.api.field_values import alternatives


@dataclass(frozen=True, slots=True)
class UnknownField:
    """An unknown field.

    path    as in error messages: "messages[2].prefix"
    name    the last component of the path
    holder  the Struct in which the field was found
    """

    path: str
    name: str
    holder: type[msgspec.Struct]
    value: Any


@dataclass(frozen=True, slots=True)
class _Object:
    """A Struct: its field names, and those of them that can contain unknown fields."""

    kind: type[msgspec.Struct]
    names: frozenset[str]
    deeper: Mapping[str, _Shape]


@dataclass(frozen=True, slots=True)
class _Shape:
    """The possible types of a value: objects by tag, lists of `items`. Other values are not inspected."""

    tag_field: str | None
    objects: Mapping[object, _Object]
    items: _Shape | None

    def object_for(self, value: Mapping[str, Any]) -> _Object | None:
        """Return the Struct as which the value was decoded."""
        if len(self.objects) == 1:
            return next(iter(self.objects.values()))
        tag = value.get(self.tag_field) if self.tag_field is not None else None
        return self.objects.get(tag) if isinstance(tag, str) else None


def unknown_fields(fields: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct]) -> Iterator[UnknownField]:
    """Yield the unknown fields of a valid body, in order. A null field counts as absent.

    fields  of the body; only those that can contain unknown fields are decoded
    """
    whole = _object(kind)
    for name, raw in fields.items():
        if name in whole.deeper:
            if bytes(memoryview(raw)[:1]) in (b"{", b"["):
                yield from _inside(msgspec.json.decode(raw), whole.deeper[name], name)
        elif name not in whole.names and (value := msgspec.json.decode(raw)) is not None:
            yield UnknownField(name, name, kind, value)


def _inside(value: Any, shape: _Shape, path: str) -> Iterator[UnknownField]:
    if isinstance(value, list):
        if shape.items is None:
            return
        for position, item in enumerate(cast("list[Any]", value)):
            if isinstance(item, dict | list):
                yield from _inside(item, shape.items, f"{path}[{position}]")
        return
    if not isinstance(value, dict):
        return
    fields = cast("dict[str, Any]", value)
    found = shape.object_for(fields)
    if found is None:
        return
    for name, inner in fields.items():
        if name not in found.names:
            if inner is not None:
                yield UnknownField(f"{path}.{name}", name, found.kind, inner)
        elif name in found.deeper:
            yield from _inside(inner, found.deeper[name], f"{path}.{name}")


@lru_cache(maxsize=64)
def _object(kind: type[msgspec.Struct]) -> _Object:
    described = inspect.type_info(kind)
    if not isinstance(described, inspect.StructType):
        raise TypeError(f"{kind} is no Struct")
    return _object_of(described)


def _object_of(described: inspect.StructType) -> _Object:
    names = {field.encode_name for field in described.fields}
    if described.tag_field is not None:
        names.add(described.tag_field)
    shapes = {field.encode_name: _shape_of(field.type) for field in described.fields}
    return _Object(described.cls, frozenset(names), {name: shape for name, shape in shapes.items() if shape is not None})


def _shape_of(described: inspect.Type) -> _Shape | None:
    """Return the shape of a type, None if it contains no Structs."""
    objects: dict[object, _Object] = {}
    tag_field, items = None, None
    for option in alternatives(described):
        if isinstance(option, inspect.StructType):
            objects[option.tag] = _object_of(option)
            tag_field = option.tag_field
        elif isinstance(option, inspect.ListType):
            items = _shape_of(option.item_type)
    return _Shape(tag_field, objects, items) if objects or items is not None else None
