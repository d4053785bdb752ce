"""Checked access to the fields of structural tags, and the ends of free text in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from quire.grammar.errors import GrammarError, escape_pointer

Fields = dict[str, Any]

_KEYS = {
    "const_string": ("value",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "begin", "at_least_one", "stop_after_first"),
}
"""Allowed fields of formats in addition to the type; the other formats check theirs themselves."""


def iter_elements(fields: Fields, pointer: str, end: str) -> Iterator[tuple[Any, str, str]]:
    """Yield the formats of a sequence, each with its pointer and the following text, which ends it if it is free text.

    end  after the whole sequence
    """
    elements = items_of(fields, "elements", pointer)
    is_begun = False
    for position, item in enumerate(elements):
        where, is_last = f"{pointer}/elements/{position}", position == len(elements) - 1
        following = end if is_last else ""
        rest = _after_beginning(item) if is_begun else item
        is_begun = ends_open(item) and not is_last
        if is_begun:
            following = _beginning_of(elements[position + 1], f"{pointer}/elements/{position + 1}")
        yield rest, where, following


def ends_open(item: Any) -> bool:
    """Return whether a format is free text, which needs a following text as its end."""
    return isinstance(item, dict) and cast("Fields", item).get("type") == "any_text"


def _beginning_of(item: Any, pointer: str) -> str:
    """Return the text that a format begins with. Raises GrammarError if there is none."""
    fields = as_fields(item, pointer)
    key = {"const_string": "value", "tag": "begin"}.get(str(fields.get("type")))
    if key is None or not get_field(fields, key, str, pointer):
        raise GrammarError("what follows any_text must begin with a text: a const_string or a tag", pointer)
    return get_field(fields, key, str, pointer)


def _after_beginning(item: Fields) -> Fields:
    """Return the rest of a format that begins with a text."""
    key = "value" if item["type"] == "const_string" else "begin"
    return {**item, key: ""}


def ends_of(fields: Fields, pointer: str) -> list[str]:
    """Return the alternative end texts of a tag. Raises GrammarError if there are none."""
    ends = fields.get("end")
    texts = [ends] if isinstance(ends, str) else texts_of(fields, "end", pointer)
    if not texts:
        raise GrammarError("a tag needs an end", f"{pointer}/end")
    return texts


def begun_tags(fields: Fields, pointer: str) -> list[Fields]:
    """Return the tags of tags_with_separator, each including the text before the first one."""
    begin = fields.get("begin", "") and get_field(fields, "begin", str, pointer)
    tags = [as_fields(tag, f"{pointer}/tags/{at}") for at, tag in enumerate(items_of(fields, "tags", pointer))]
    return [{**tag, "begin": f"{begin}{tag.get('begin', '')}"} for tag in tags] if begin else tags


def schema_of(fields: Fields, pointer: str) -> dict[str, Any] | bool:
    """Return the schema of a json_schema. Raises GrammarError."""
    schema = fields.get("json_schema")
    if not isinstance(schema, dict | bool):
        raise GrammarError("must be a JSON schema", f"{pointer}/json_schema")
    return cast("dict[str, Any] | bool", schema)


def check_keys(fields: Fields, kind: str, pointer: str) -> None:
    """Refuse fields that a format of this type does not have."""
    known = _KEYS.get(kind)
    for key, value in fields.items() if known is not None else ():
        if key != "type" and key not in (known or ()):
            raise GrammarError(f"{kind} has no {key!r:.50}, but {', '.join(known or ())}", f"{pointer}/{escape_pointer(key)}")
        if key in ("at_least_one", "stop_after_first") and not isinstance(value, bool):
            raise GrammarError(f"{key} must be true or false, got {value!r:.50}", f"{pointer}/{key}")


def get_field(fields: Fields, key: str, kind: type, pointer: str) -> Any:
    """Return a field of a given type. Raises GrammarError."""
    value = fields.get(key)
    if not isinstance(value, kind):
        name = {str: "a text", list: "a list", dict: "an object"}[kind]
        raise GrammarError(f"{key} must be {name}, got {value!r:.100}", f"{pointer}/{key}")
    return value


def as_fields(item: Any, pointer: str) -> Fields:
    """Return an object's fields. Raises GrammarError."""
    if not isinstance(item, dict):
        raise GrammarError(f"must be an object, got {item!r:.100}", pointer)
    return cast("Fields", item)


def items_of(fields: Fields, key: str, pointer: str) -> list[Any]:
    """Return a non-empty list. Raises GrammarError."""
    items = cast("list[Any]", get_field(fields, key, list, pointer))
    if not items:
        raise GrammarError(f"{key} must not be empty", f"{pointer}/{key}")
    return items


def texts_of(fields: Fields, key: str, pointer: str) -> list[str]:
    """Return an optional list of non-empty texts. Raises GrammarError."""
    items: Any = fields.get(key) or []
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in cast("list[Any]", items)):
        raise GrammarError(f"{key} must be a list of texts", f"{pointer}/{key}")
    return cast("list[str]", items)


def refuse_others(fields: Fields, pointer: str, *known: str) -> None:
    """Refuse fields other than the type and `known`."""
    for key, value in fields.items():
        if key not in ("type", *known):
            raise GrammarError(f"{key} {value!r:.50} is not supported here", f"{pointer}/{key}")
