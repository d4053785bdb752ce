"""Checks whether a grammar can enforce a JSON schema completely; finds what it would weaken or silently ignore.

A keyword that no draft defines has no meaning and is ignored, according to the standard. One that a draft defines is enforced,
an annotation, or refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from quire.contracts.argument_types import find_reference, has_lone_references
from quire.contracts.string_formats import enforces_format
from quire.grammar.errors import GrammarError, escape_pointer
from quire.grammar.schema_formats import FORMATS
from quire.grammar.schema_rewrite import Rewriter
from quire.grammar.schema_shape import check_integers, check_shape
from quire.grammar.schema_walk import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS, References, iter_objects, iter_reached

_LOOKAROUND = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k<")
_NOT_ENFORCED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "disallow",
    "extends", "divisibleBy",
)  # fmt: skip
_COUNTS = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"))
KNOWN_KEYWORDS = frozenset(
    (
        *SCHEMA_MAPS, *SCHEMA_LISTS, *SCHEMAS, *_NOT_ENFORCED, "$ref", "type", "enum", "const", "required", "format",
        "pattern", "uniqueItems", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength",
        "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "contentEncoding", "contentMediaType",
        "contentSchema",
        "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary",
    )
)  # fmt: skip
"""Every keyword of any draft that is or may be a constraint."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What a backend enforces.

    missing   keywords that it does not enforce
    formats   those that it enforces; others are annotations unless they are in FORMATS
    counts_closed  it counts the properties of closed objects, even if not all are required
    """

    missing: tuple[str, ...]
    formats: frozenset[str]
    counts_closed: bool


LLGUIDANCE = Reach(_NOT_ENFORCED, frozenset(FORMATS), False)
XGRAMMAR = Reach(
    tuple(key for key in _NOT_ENFORCED if key != "propertyNames"),
    frozenset(FORMATS) - {"regex"},  # texts with backslashes, which it would not escape
    True,
)

_OLD_DRAFTS = re.compile(r"/draft-0[0-3]\b")
_DRAFTS = re.compile(
    r"(?:http://json-schema\.org/draft-0[4-7]/schema|https://json-schema\.org/draft/(?:2019-09|2020-12)/schema)#?"
)
"""Other values of $schema name no known draft; the newest one applies then."""


def check_schema(schema: object, reach: Reach = LLGUIDANCE) -> object:
    """Return the schema without what has no effect; raise GrammarError, with a JSON pointer, for what cannot be enforced."""
    if isinstance(schema, dict):
        fields = cast("dict[str, Any]", schema)
        if "x-guidance" in fields:
            raise GrammarError("x-guidance is not for requests to set: leave it out", "/x-guidance")
        draft = fields.get("$schema")
        if isinstance(draft, str) and _OLD_DRAFTS.search(draft):
            raise GrammarError(f"{draft} is too old: write it in draft 4 or later", "/$schema")
    check_integers(schema)
    cleaned: object = json.loads(json.dumps(schema))  # a copy, at any depth
    has_ids = _has_ids(cleaned)
    references = References(cleaned)
    is_new_draft = _is_new_draft(cleaned)
    is_lone = has_lone_references(cleaned)
    is_draft4 = _is_draft4(cleaned)
    rewriter = Rewriter(cleaned, is_lone)
    literals = _literals(cleaned, references)
    if rewriter.is_impossible(cleaned):
        return False
    for pointer, inner in iter_reached(cleaned, references):
        check_shape(inner, pointer)
        _check_draft(inner, pointer, is_lone)
        _write_bounds(inner, pointer, is_draft4)
        _drop_idle(inner, is_lone)
        rewriter.rewrite(inner, pointer)
        _check_one(inner, pointer, is_new_draft, reach)
        _check_reference(inner.get("$ref"), f"{pointer}/$ref", has_ids, references, literals)
        _check_loop(cleaned, inner, f"{pointer}/$ref")
    return cleaned


def close_ends(schema: object, limit: int | None) -> object:
    """Return a checked schema with limits for strings and arrays that had none; it allows only what the schema allows."""
    if limit is None:
        return schema
    closed: object = json.loads(json.dumps(schema))
    for _, inner in iter_reached(closed):
        kinds = inner.get("type")
        names: set[object] = set(cast("list[object]", kinds)) if isinstance(kinds, list) else {kinds}
        if "string" in names and not inner.keys() & {"maxLength", "pattern", "format", "enum", "const"}:
            inner["maxLength"] = max(limit, _as_int(inner.get("minLength")))
        if "array" in names and not inner.keys() & {"maxItems", "enum", "const"}:
            inner["maxItems"] = max(limit, _as_int(inner.get("minItems")))
    return closed


def _as_int(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _check_draft(schema: dict[str, Any], pointer: str, is_lone: bool) -> None:
    """Remove an unknown draft; refuse a nested draft in which more keywords apply than in the outer draft.

    is_lone  keywords next to a $ref are ignored in the draft of the root
    """
    draft = schema.get("$schema")
    if not isinstance(draft, str) or _DRAFTS.fullmatch(draft) is None:
        schema.pop("$schema", None)
    elif is_lone and not has_lone_references(schema):
        raise GrammarError("a schema of a newer draft within one of an older draft cannot be enforced", f"{pointer}/$schema")


def _drop_idle(schema: dict[str, Any], is_lone: bool) -> None:
    """Remove keywords without effect, and convert counts such as 2.0 to integers."""
    for key in _COUNTS & schema.keys():
        if isinstance(schema[key], float) and schema[key].is_integer():
            schema[key] = int(schema[key])
    if is_lone and isinstance(schema.get("$ref"), str):
        for key in (schema.keys() & KNOWN_KEYWORDS) - {"$ref", "definitions", "$defs"}:
            del schema[key]
    if schema.get("uniqueItems") is False or schema.get("maxItems", 2) <= 1:
        schema.pop("uniqueItems", None)
    if schema.get("not") is False:
        del schema["not"]
    if "format" in schema and not enforces_format(schema):
        del schema["format"]
    if _says_nothing_of_names(schema.get("propertyNames")):
        schema.pop("propertyNames", None)
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)


def _says_nothing_of_names(names: object) -> bool:
    """Return whether every property name is allowed: names are strings."""
    if not isinstance(names, dict):
        return names is True
    fields = cast("dict[str, Any]", names)
    kinds = fields.get("type", "string")
    return not (fields.keys() & KNOWN_KEYWORDS) - {"type"} and "string" in ((kinds,) if isinstance(kinds, str) else kinds)


def iter_tag_schemas(part: object, pointer: str) -> Iterator[tuple[str, object]]:
    """Yield the JSON schemas in a structural tag, each with its JSON pointer."""
    if isinstance(part, dict):
        fields = cast("dict[str, object]", part)
        if fields.get("type") == "json_schema" and fields.get("style", "json") == "json" and "json_schema" in fields:
            yield f"{pointer}/json_schema", fields["json_schema"]
            return
        for name, inner in fields.items():
            yield from iter_tag_schemas(inner, f"{pointer}/{escape_pointer(name)}")
    elif isinstance(part, list):
        for position, inner in enumerate(cast("list[object]", part)):
            yield from iter_tag_schemas(inner, f"{pointer}/{position}")


def _check_one(schema: dict[str, Any], pointer: str, is_new_draft: bool, reach: Reach) -> None:
    for key in reach.missing:
        if key in schema:
            raise GrammarError(f"{key} cannot be enforced: leave it out", f"{pointer}/{key}")
    if "uniqueItems" in schema:
        raise GrammarError(
            "uniqueItems can only be enforced where items are of an enum with few values, or maxItems is 1: leave it out",
            f"{pointer}/uniqueItems",
        )
    known_format = schema.get("format")
    if known_format is not None and known_format not in reach.formats:
        allowed = ", ".join(sorted(reach.formats))
        raise GrammarError(f"format {known_format!r} cannot be enforced; allowed are {allowed}", f"{pointer}/format")
    _check_bounds(schema, pointer)
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        _check_pattern(pattern, f"{pointer}/pattern")
    for pattern in cast("dict[str, Any]", schema.get("patternProperties") or {}):
        _check_pattern(pattern, f"{pointer}/patternProperties/{escape_pointer(pattern)}")
    if isinstance(schema.get("items"), list) and is_new_draft:
        raise GrammarError("items must be a schema; a list of them is prefixItems since draft 2020-12", f"{pointer}/items")
    if not (reach.counts_closed and schema.get("additionalProperties") is False and "patternProperties" not in schema):
        _check_counts(schema, pointer)


def _check_pattern(pattern: str, pointer: str) -> None:
    if _LOOKAROUND.search(pattern):
        raise GrammarError("look-around and back-references cannot be enforced", pointer)


def _check_counts(schema: dict[str, Any], pointer: str) -> None:
    """Refuse counts that cannot be enforced: properties that the schema does not name may occur twice."""
    required = schema.get("required")
    num_required = len(set(map(str, cast("list[object]", required)))) if isinstance(required, list) else 0
    least = schema.get("minProperties")
    if isinstance(least, int | float) and least > max(1, num_required):
        raise GrammarError(
            "minProperties above 1 and the number of required ones cannot be enforced", f"{pointer}/minProperties"
        )


def _check_bounds(schema: dict[str, Any], pointer: str) -> None:
    """Refuse exclusive integer bounds less than 1 from another bound, for example exclusiveMinimum 0, maximum 0.5: the bound
    itself would be allowed."""
    for exclusive, others, sign in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        bound = schema.get(exclusive)
        if not isinstance(bound, int | float) or isinstance(bound, bool) or bound % 1 != 0:
            continue
        far = [schema[key] for key in others if isinstance(schema.get(key), int | float)]
        if any(0 < sign * (value - bound) < 1 for value in far):
            raise GrammarError(
                f"{exclusive} {bound} cannot be enforced with another bound less than 1 away", f"{pointer}/{exclusive}"
            )


def _write_bounds(schema: dict[str, Any], pointer: str, is_draft4: bool) -> None:
    """Convert exclusive bounds of draft 4, which are booleans, to the numbers of later drafts; refuse them in those."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        flag = schema.get(exclusive)
        if not isinstance(flag, bool):
            continue
        if not is_draft4:
            raise GrammarError(
                f"{exclusive} is a number; true or false is only allowed in draft 4, which $schema has to name: "
                f"write the number in place of {bound}",
                f"{pointer}/{exclusive}",
            )
        del schema[exclusive]
        if flag and bound in schema:
            schema[exclusive] = schema.pop(bound)


def _is_draft4(root: object) -> bool:
    draft = cast("dict[str, Any]", root).get("$schema") if isinstance(root, dict) else None
    return isinstance(draft, str) and _DRAFTS.fullmatch(draft) is not None and "draft-04" in draft


def _is_new_draft(root: object) -> bool:
    draft = cast("dict[str, Any]", root).get("$schema") if isinstance(root, dict) else None
    return draft is None or (isinstance(draft, str) and "2020-12" in draft)


def _literals(root: object, references: References) -> dict[int, object]:
    """Return the objects within the values of enum and const by id(): these are not schemas, and must not be changed."""
    values = [inner[key] for _, inner in iter_reached(root, references) for key in ("enum", "const") if key in inner]
    return {id(found): found for _, found in iter_objects(values)}


def _check_reference(
    reference: object, pointer: str, has_ids: bool, references: References, literals: Mapping[int, object]
) -> None:
    """Refuse a reference that is not found here, because its target would not be checked."""
    if not isinstance(reference, str):
        return
    if not reference.startswith("#"):
        if not has_ids:
            raise GrammarError(f"$ref {reference!r:.100}: only references within the schema (#...) can be followed", pointer)
        if "#" not in reference:
            return
    targets = [target for _, target in references.targets(reference)]
    if not any(isinstance(target, dict | bool) for target in targets):
        raise GrammarError(f"$ref {reference!r:.100} leads nowhere", pointer)
    if any(id(target) in literals for target in targets):
        raise GrammarError(f"$ref {reference!r:.100} leads to a value of enum or const, which is not a schema", pointer)


def _check_loop(root: object, schema: dict[str, Any], pointer: str) -> None:
    """Raise GrammarError for a cycle of references without anything else."""
    seen: set[str] = set()
    found: object = schema
    while isinstance(found, dict):
        reference = cast("dict[str, Any]", found).get("$ref")
        if not isinstance(reference, str):
            return
        if reference in seen:
            raise GrammarError(f"$ref {reference!r:.100} leads back to itself and constrains nothing", pointer)
        seen.add(reference)
        found = find_reference(root, reference)


def _has_ids(value: object) -> bool:
    return any("$id" in fields or "id" in fields for _, fields in iter_objects(value))
