"""A JSON schema without values and names that may not be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from quire.grammar.errors import escape_pointer

_ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_PASSES = 8
"""Each finds references to definitions of which the one before left nothing."""


def prune_schema(schema: object, is_banned: Callable[[object], bool]) -> object:
    """Return the schema, changed, without what is banned; False where nothing is left.

    schema     whose keywords have the shapes that they must have
    is_banned  whether a text, name or integer may not be written
    Whatever the result allows, the schema does, and nothing is lost but outputs with a banned text.
    """
    thinning = _Thinning(is_banned)
    thinned = schema
    for _ in range(_MAX_PASSES):
        num_empty = len(thinning.empty)
        thinned = thinning.thin(thinned, "#")
        if len(thinning.empty) == num_empty:
            break
    return thinned


class _Thinning:
    """empty: the references to definitions that allow nothing."""

    def __init__(self, is_banned: Callable[[object], bool]) -> None:
        self._is_banned = is_banned
        self.empty: set[str] = set()

    def thin(self, schema: object, place: str = "") -> Any:
        """Return what is left of a schema; place: "#" of the whole, whose definitions are referred to."""
        if not isinstance(schema, dict):
            return schema
        fields = cast("dict[str, Any]", schema)
        for key in ("$defs", "definitions"):
            if key in fields:
                self._thin_definitions(fields[key], f"{place}/{key}" if place else "")
        if "$ref" in fields:  # what stands beside it may count or not
            return False if fields["$ref"] in self.empty else fields
        if not self._thin_values(fields) or not self._thin_parts(fields):
            return False
        are_possible = {"object": self._thin_object(fields), "array": self._thin_array(fields)}
        for kind, is_possible in are_possible.items():
            if not is_possible and not _leave_out_type(fields, kind):
                return False
        return fields

    def _thin_definitions(self, definitions: dict[str, Any], place: str) -> None:
        for name in definitions:
            definitions[name] = self.thin(definitions[name])
            if definitions[name] is False and place:
                self.empty.add(f"{place}/{escape_pointer(name)}")

    def _thin_values(self, fields: dict[str, Any]) -> bool:
        """Leave out values that are banned; return whether there are others."""
        if "const" in fields and self._holds_banned(fields["const"]):
            return False
        if fields.get("enum"):
            fields["enum"] = [value for value in fields["enum"] if not self._holds_banned(value)]
            return bool(fields["enum"])
        return True

    def _holds_banned(self, value: object) -> bool:
        """Whether a value is or holds what is banned: of texts and integers, as all else can be written in several ways."""
        if isinstance(value, dict):
            return any(self._holds_banned(part) for item in cast("dict[str, object]", value).items() for part in item)
        if isinstance(value, list):
            return any(map(self._holds_banned, cast("list[object]", value)))
        return isinstance(value, str | int) and not isinstance(value, bool) and self._is_banned(value)

    def _thin_parts(self, fields: dict[str, Any]) -> bool:
        """Leave out alternatives that allow nothing; return whether anything is left."""
        for key in ("anyOf", "oneOf", "allOf"):
            if key not in fields:
                continue
            parts = [self.thin(part) for part in fields[key]]
            left = [part for part in parts if part is not False]
            if not left or (key == "allOf" and len(left) < len(parts)):
                return False
            fields[key] = left
        return True

    def _thin_object(self, fields: dict[str, Any]) -> bool:
        """Leave out properties that allow nothing; return whether an object can do without them."""
        if "additionalProperties" in fields:
            fields["additionalProperties"] = self.thin(fields["additionalProperties"])
        is_closed = fields.get("additionalProperties") is False and "patternProperties" not in fields
        required: list[str] = fields.get("required", [])
        if any(map(self._is_banned, required)):
            return False
        named: dict[str, Any] = fields.get("properties", {})
        for name in list(named):
            named[name] = False if self._is_banned(name) else self.thin(named[name])
            if named[name] is not False:
                continue
            if name in required:
                return False
            if is_closed:
                del named[name]
        return True

    def _thin_array(self, fields: dict[str, Any]) -> bool:
        """Have arrays end before an item that allows nothing; return whether they can."""
        parts = [self.thin(part) for part in fields.get("prefixItems", ())]
        num_possible = parts.index(False) if False in parts else len(parts)
        if parts:
            fields["prefixItems"] = parts[:num_possible]
        if "items" in fields:
            fields["items"] = self.thin(fields["items"])
        if num_possible == len(parts) and fields.get("items") is not False:
            return True
        if num_possible == 0:
            fields.pop("prefixItems", None)
        fields.pop("items", None)
        fields["maxItems"] = min(num_possible, fields.get("maxItems", num_possible))
        return fields.get("minItems", 0) <= num_possible


def _leave_out_type(fields: dict[str, Any], kind: str) -> bool:
    """Have a schema allow no objects, or no arrays; return whether it allows anything else."""
    kinds = fields.get("type", _ALL_TYPES)
    fields["type"] = [name for name in ([kinds] if isinstance(kinds, str) else kinds) if name != kind]
    return bool(fields["type"])
