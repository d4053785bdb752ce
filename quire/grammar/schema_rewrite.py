"""Rewriter: replaces keywords that a backend cannot enforce by equivalent ones that it can.

Some rewritings allow less than the schema does, so that the output is valid, but never more.
"""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any, cast

from quire.contracts.argument_types import find_reference, type_name
from quire.grammar.regex_automaton import MAX_STATES, RegexAutomaton, automaton_of
from quire.grammar.schema_walk import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS

MAX_UNIQUE_VALUES = 5
"""Maximum number of enum values for unique items: 5 have 326 arrangements."""
_MAX_REFERENCES = 8
_MAX_COMPARED = 8
"""Maximum depth to which schemas are compared to see whether they exclude each other."""
_MAX_STATES = 100_000
"""Total number of states of automata for names: further patterns are not changed."""
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MEANINGLESS = frozenset(("title", "description", "default", "examples", "example", "deprecated", "$comment"))


class Rewriter:
    """Rewrites the schemas within a root, outer ones first.

    is_lone  keywords next to a $ref are ignored in the draft of the root
    """

    def __init__(self, root: object, is_lone: bool) -> None:
        self._root = root
        self._is_lone = is_lone
        self._num_states_left = _MAX_STATES

    def rewrite(self, schema: dict[str, Any], pointer: str) -> None:
        """Rewrite one schema, whose keywords have valid types."""
        self._close_impossible(schema)
        _leave_out_type(schema)
        self._join_covered_patterns(schema)
        self._spell_unique_items(schema)
        self._replace_exclusive_one_of(schema)

    def is_impossible(self, schema: object) -> bool:
        """Return whether a schema explicitly allows nothing, such as `not` of anything."""
        if not isinstance(schema, dict) or "not" not in schema or (self._is_lone and "$ref" in schema):
            return False
        inner: object = cast("dict[str, object]", schema)["not"]
        return inner is True or (isinstance(inner, dict) and not cast("dict[str, object]", inner).keys() - _MEANINGLESS)

    def _close_impossible(self, schema: dict[str, Any]) -> None:
        """Replace inner schemas that allow nothing by false."""
        for key in SCHEMA_MAPS:
            inner = schema.get(key)
            if isinstance(inner, dict):
                named = cast("dict[str, object]", inner)
                named.update({name: False for name, item in named.items() if self.is_impossible(item)})
        for key in (*SCHEMA_LISTS, "items"):
            inner = schema.get(key)
            if isinstance(inner, list):
                schema[key] = [not self.is_impossible(item) and item for item in cast("list[object]", inner)]
        for key in SCHEMAS:
            if key != "not" and self.is_impossible(schema.get(key)):
                schema[key] = False

    def _join_covered_patterns(self, schema: dict[str, Any]) -> None:
        """Remove patterns of names that match only declared names; their constraints are added to those properties.

        A backend would otherwise start another property for such a pattern, which can never be completed.
        """
        named: dict[str, object] = schema.get("properties") or {}
        patterns: dict[str, object] = schema.get("patternProperties") or {}
        for pattern, demand in list(patterns.items()):
            automaton = self._automaton_of(pattern) if named else None
            if automaton is None or not automaton.is_within(named):
                continue
            del patterns[pattern]
            for name in named:
                if automaton.distance(automaton.read(name)) == 0:
                    named[name] = _both(named[name], demand)
        if "patternProperties" in schema and not patterns:
            del schema["patternProperties"]

    def _automaton_of(self, pattern: str) -> RegexAutomaton | None:
        if self._num_states_left <= 0:
            return None
        found = automaton_of(pattern)
        self._num_states_left -= MAX_STATES if found is None else found.num_states
        return found

    def _spell_unique_items(self, schema: dict[str, Any]) -> None:
        """Enumerate all arrays of unique items of a small enum."""
        if schema.get("uniqueItems") is not True or "prefixItems" in schema or schema.keys() & {"enum", "const", "contains"}:
            return
        values = self._values_of(schema.get("items"))
        if values is None or len(values) > MAX_UNIQUE_VALUES:
            return
        least, most = int(schema.get("minItems", 0)), min(int(schema.get("maxItems", len(values))), len(values))
        arrays = [list(found) for size in range(least, most + 1) for found in permutations(values, size)]
        kinds = schema.get("type", "array")
        if kinds == "array":
            for key in ("type", "items", "minItems", "maxItems", "uniqueItems"):
                schema.pop(key, None)
            schema["enum"] = arrays

    def _values_of(self, schema: object) -> list[object] | None:
        """Return the values that a schema lists, without duplicates; None if it lists none, or has other constraints."""
        fields = self._resolved(schema)
        if fields is None or (fields.keys() - _MEANINGLESS) - {"type", "enum", "const"}:
            return None
        kinds = fields.get("type", [*_TYPES, "integer"])
        names = {kinds} if isinstance(kinds, str) else set(cast("list[str]", kinds))
        values: list[object] = [fields["const"]] if "const" in fields else fields.get("enum", [])
        if not fields.keys() & {"enum", "const"} and names <= {"boolean", "null"}:
            values = [*([True, False] if "boolean" in names else []), *([None] if "null" in names else [])]
        if not values or {"enum", "const"} <= fields.keys():
            return None
        if any(isinstance(value, float | list | dict) for value in values):
            return None  # equal ones may have several spellings
        allowed = [one for one in values if type_name(one) in names or (type_name(one) == "integer" and "number" in names)]
        return list({json.dumps(value): value for value in allowed}.values())

    def _resolved(self, schema: object) -> dict[str, Any] | None:
        """Return the target of a schema's references, itself without a reference; None if that is no object."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict):
                return None
            fields = cast("dict[str, Any]", schema)
            reference = fields.get("$ref")
            if not isinstance(reference, str):
                return fields
            if not self._is_lone and fields.keys() - _MEANINGLESS - {"$ref"}:
                return None
            schema = find_reference(self._root, reference)
        return None

    def _replace_exclusive_one_of(self, schema: dict[str, Any]) -> None:
        """Replace a oneOf whose schemas exclude each other by anyOf."""
        options: list[object] = schema.get("oneOf") or []
        pairs = ((one, other) for at, one in enumerate(options) for other in options[:at])
        if not options or not all(self._exclude(one, other, _MAX_COMPARED) for one, other in pairs):
            return
        del schema["oneOf"]
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": options}]
        else:
            schema["anyOf"] = options

    def _exclude(self, one: object, other: object, depth: int) -> bool:
        """Return whether it is evident that no value matches both schemas."""
        if one is False or other is False:
            return True
        first, second = self._resolved(one), self._resolved(other)
        if first is None or second is None or depth == 0:
            return False
        if not _types_of(first) & _types_of(second):
            return True
        values, others = _listed(first), _listed(second)
        if values is not None and others is not None:
            return not any(_is_equal(value, another) for value in values for another in others)
        if _types_of(first) & _types_of(second) != {"object"}:
            return False
        required: set[str] = set(first.get("required", ())) & set(second.get("required", ()))
        named: tuple[dict[str, object], dict[str, object]] = (first.get("properties", {}), second.get("properties", {}))
        return any(
            name in named[0] and name in named[1] and self._exclude(named[0][name], named[1][name], depth - 1)
            for name in required
        )


def _types_of(schema: dict[str, Any]) -> set[str]:
    """Return the types that a schema allows; integers count as "number"."""
    kinds = schema.get("type", _TYPES)
    names = {kinds} if isinstance(kinds, str) else set(cast("list[str]", kinds))
    if (values := _listed(schema)) is not None:
        names &= {type_name(value) for value in values} | {"number"}
    return {"number" if name == "integer" else name for name in names}


def _listed(schema: dict[str, Any]) -> list[object] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _is_equal(one: object, other: object) -> bool:
    """Return whether two JSON values may be equal: numbers are compared by value, and true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list | dict) and isinstance(other, list | dict):
        return True  # not compared in detail
    return one == other


def _leave_out_type(schema: dict[str, Any]) -> None:
    """Replace `not` of types by the other types."""
    inner = schema.get("not")
    if not isinstance(inner, dict) or cast("dict[str, object]", inner).keys() - _MEANINGLESS != {"type"}:
        return
    kinds = cast("dict[str, Any]", inner)["type"]
    excluded = {kinds} if isinstance(kinds, str) else set(cast("list[str]", kinds))
    own = schema.get("type", _TYPES)
    names = [own] if isinstance(own, str) else list(own)
    if "integer" in excluded and "number" in names and "number" not in excluded:
        return
    if "number" in excluded:
        excluded.add("integer")
    left = [name for name in names if name not in excluded]
    if left:
        schema["type"] = left[0] if len(left) == 1 else left
        del schema["not"]


def _both(one: object, other: object) -> object:
    """Return the schema of values that match both."""
    if one is False or other is False:
        return False
    if one in (True, {}) or one == other:
        return other
    return one if other in (True, {}) else {"allOf": [one, other]}
