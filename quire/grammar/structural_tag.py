"""Structural tags: text and constrained parts one after the other, as llguidance's Lark.

The old form has "structures" and "triggers"; the other one a "format", by its type:
  const_string         value
  any_text             excludes: what may not stand in it; begins_without: an expression of what it may not begin with; the text
                       ends where what follows it begins
  json_schema          json_schema; style: how its values are written, "json" or the arguments of a tool, see argument_styles.py
  regex                pattern
  sequence, or         elements
  tag                  begin, content, end: a text, or a list of which any
  triggered_tags       free text, in which each trigger begins one of the tags; at_least_one, stop_after_first, excludes
  tags_with_separator  tags with a text between them; begin: a text before the first one; at_least_one, stop_after_first
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from quire.contracts.constraint import Constraint
from quire.grammar.argument_styles import STYLES, ArgumentWriter
from quire.grammar.errors import GrammarError, escape_pointer
from quire.grammar.lark import inline_schema, quote_regex
from quire.grammar.rules import ANY_TEXT, Rules, without
from quire.grammar.schema_check import check_schema, close_ends
from quire.grammar.vocabulary import Vocabulary

_KEYS = {
    "const_string": ("value",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "begin", "at_least_one", "stop_after_first"),
}
"""What formats may have beside their type; the others look for themselves."""

Fields = dict[str, Any]


def structural_tag_source(constraint: Constraint, vocabulary: Vocabulary) -> str:
    """Return the grammar. Raises GrammarError with the JSON pointer of what is wrong."""
    tag = constraint.parsed()
    if "structures" in tag or "triggers" in tag:
        tag = {"format": _from_old(tag)}
    return _Writer(constraint, vocabulary).write(_get(tag, "format", dict, ""))


def _from_old(tag: Fields) -> Fields:
    structures = cast("list[Any]", _get(tag, "structures", list, ""))
    tags: list[Fields] = []
    for index, item in enumerate(structures):
        pointer = f"/structures/{index}"
        structure = _as_fields(item, pointer)
        content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
        tags.append(
            {
                "type": "tag",
                "begin": _get(structure, "begin", str, pointer),
                "content": content,
                "end": _get(structure, "end", str, pointer),
            }
        )
    return {"type": "triggered_tags", "triggers": _get(tag, "triggers", list, ""), "tags": tags}


class _Writer:
    """Writes a rule per format; what a format follows and is followed by is never looked at, but for free text."""

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary) -> None:
        self._constraint = constraint
        self._rules = Rules(vocabulary)

    def write(self, root: Fields) -> str:
        return self._rules.write(self._format(root, "/format", ""))

    def _format(self, item: Any, pointer: str, end: str) -> str:
        """Return the name of a rule for a format and the text `end` behind it."""
        fields = _as_fields(item, pointer)
        kind = fields.get("type")
        writers: dict[str, Callable[[Fields, str, str], str]] = {
            "const_string": self._const_string,
            "any_text": self._any_text,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }
        if kind not in writers:
            raise GrammarError(f"type must be one of {', '.join(writers)}, got {kind!r:.50}", f"{pointer}/type")
        _check_keys(fields, str(kind), pointer)
        return writers[kind](fields, pointer, end)

    def _const_string(self, fields: Fields, pointer: str, end: str) -> str:
        return self._rules.rule(self._rules.literal(_get(fields, "value", str, pointer) + end))

    def _json_schema(self, fields: Fields, pointer: str, end: str) -> str:
        style = fields.get("style", "json")
        if style not in STYLES:
            raise GrammarError(f"style must be one of {', '.join(STYLES)}, got {style!r:.50}", f"{pointer}/style")
        _refuse({key: value for key, value in fields.items() if key != "style"}, pointer, "json_schema", {})
        schema = fields.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise GrammarError("must be a JSON schema", f"{pointer}/json_schema")
        try:
            written = self._written(close_ends(check_schema(cast("Any", schema)), self._constraint.max_open_length), style)
        except GrammarError as error:
            raise GrammarError(str(error), f"{pointer}/json_schema{error.pointer or ''}") from None
        return self._rules.rule(f"{written} {self._rules.literal(end)}")

    def _written(self, schema: object, style: str) -> str:
        """Return the values of a checked schema as an item of a rule."""
        if style == "json":
            return inline_schema(schema, self._constraint)
        return ArgumentWriter(self._rules, style, schema, self._constraint).write()

    def _regex(self, fields: Fields, pointer: str, end: str) -> str:
        _refuse(fields, pointer, "pattern", {})
        text = self._rules.rule(quote_regex(_get(fields, "pattern", str, pointer)))
        return self._rules.rule(f"{text} {self._rules.literal(end)}")

    def _any_text(self, fields: Fields, pointer: str, end: str) -> str:
        _refuse({key: value for key, value in fields.items() if key != "begins_without"}, pointer, "excludes", {})
        body = ANY_TEXT + without(_texts(fields, "excludes", pointer))
        if "begins_without" in fields:
            body += f" & ~({quote_regex(_get(fields, 'begins_without', str, pointer))} {ANY_TEXT})"
        return self._rules.ended(body, end)

    def _sequence(self, fields: Fields, pointer: str, end: str) -> str:
        elements = _items(fields, "elements", pointer)
        names: list[str] = []
        position = 0
        while position < len(elements):
            where = f"{pointer}/elements/{position}"
            is_last = position == len(elements) - 1
            following = end if is_last else ""
            taken = 1
            if _ends_open(elements[position]) and not is_last:
                following = _beginning(elements[position + 1], f"{pointer}/elements/{position + 1}")
                taken = 2
            names.append(self._format(elements[position], where, following))
            if taken == 2:
                rest = _after_beginning(elements[position + 1])
                behind = end if position + 1 == len(elements) - 1 else ""
                names.append(self._format(rest, f"{pointer}/elements/{position + 1}", behind))
            position += taken
        return self._rules.rule(" ".join(names))

    def _or(self, fields: Fields, pointer: str, end: str) -> str:
        elements = _items(fields, "elements", pointer)
        return self._rules.rule(
            " | ".join(self._format(item, f"{pointer}/elements/{at}", end) for at, item in enumerate(elements))
        )

    def _tag(self, fields: Fields, pointer: str, end: str) -> str:
        begin = _get(fields, "begin", str, pointer)
        return self._rules.rule(f"{self._rules.literal(begin)} {self._tag_rest(fields, pointer, end)}")

    def _tag_rest(self, fields: Fields, pointer: str, end: str) -> str:
        """Return what comes after the beginning of a tag."""
        ends = fields.get("end")
        texts = [ends] if isinstance(ends, str) else _texts(fields, "end", pointer)
        if not texts:
            raise GrammarError("a tag needs an end", f"{pointer}/end")
        return self._rules.rule(
            " | ".join(self._format(fields.get("content"), f"{pointer}/content", text + end) for text in texts)
        )

    def _triggered_tags(self, fields: Fields, pointer: str, end: str) -> str:
        if end:
            raise GrammarError("triggered_tags can only stand at the end", pointer)
        triggers = _texts(fields, "triggers", pointer)
        tags = [_as_fields(tag, f"{pointer}/tags/{at}") for at, tag in enumerate(_items(fields, "tags", pointer))]
        excludes = _texts(fields, "excludes", pointer)
        parts: list[str] = []
        for trigger in triggers:
            rests: list[str] = []
            for at, tag in enumerate(tags):
                begin = _get(tag, "begin", str, f"{pointer}/tags/{at}")
                if begin.startswith(trigger):
                    head = self._rules.literal(begin[len(trigger) :])
                    rests.append(self._rules.rule(f"{head} {self._tag_rest(tag, f'{pointer}/tags/{at}', '')}"))
            if not rests:
                raise GrammarError(f"no tag begins with the trigger {trigger!r}", f"{pointer}/triggers")
            others = [other for other in triggers if other != trigger and not self._rules.is_special(other)]
            text = self._any_text({"type": "any_text", "excludes": excludes + others}, pointer, trigger)
            parts.append(self._rules.rule(f"{text} ({' | '.join(rests)})"))
        for at, tag in enumerate(tags):
            if not any(_get(tag, "begin", str, pointer).startswith(trigger) for trigger in triggers):
                raise GrammarError("no trigger begins this tag", f"{pointer}/tags/{at}/begin")
        one = self._rules.rule(" | ".join(parts))
        spelled = [trigger for trigger in triggers if not self._rules.is_special(trigger)]
        rest = self._rules.terminal(ANY_TEXT + without(excludes + spelled))
        if fields.get("stop_after_first"):
            return self._rules.rule(one if fields.get("at_least_one") else f"{one} | {rest}")
        return self._rules.rule(f"{one}{'+' if fields.get('at_least_one') else '*'} {rest}")

    def _tags_with_separator(self, fields: Fields, pointer: str, end: str) -> str:
        tags = _items(fields, "tags", pointer)
        separator = _get(fields, "separator", str, pointer)
        is_single, begin = bool(fields.get("stop_after_first")), fields.get("begin", "")
        first = one = "" if is_single and begin else self._one_of(tags, pointer)
        if begin:
            begin = _get(fields, "begin", str, pointer)
            starts = [_as_fields(tag, f"{pointer}/tags/{at}") for at, tag in enumerate(tags)]
            first = self._one_of([{**tag, "begin": f"{begin}{tag.get('begin', '')}"} for tag in starts], pointer)
        body = first if is_single else f"{first} ({self._rules.literal(separator)} {one})*"
        return self._rules.rule(f"{body if fields.get('at_least_one') else f'({body})?'} {self._rules.literal(end)}")

    def _one_of(self, tags: list[Any], pointer: str) -> str:
        return self._rules.rule(" | ".join(self._format(tag, f"{pointer}/tags/{at}", "") for at, tag in enumerate(tags)))


def _ends_open(item: Any) -> bool:
    """Whether a format is free text, which has to know what ends it."""
    return isinstance(item, dict) and cast("Fields", item).get("type") == "any_text"


def _beginning(item: Any, pointer: str) -> str:
    fields = _as_fields(item, pointer)
    key = {"const_string": "value", "tag": "begin"}.get(str(fields.get("type")))
    if key is None or not _get(fields, key, str, pointer):
        raise GrammarError("what follows any_text must begin with a text: a const_string or a tag", pointer)
    return _get(fields, key, str, pointer)


def _after_beginning(item: Fields) -> Fields:
    key = "value" if item["type"] == "const_string" else "begin"
    return {**item, key: ""}


def _check_keys(fields: Fields, kind: str, pointer: str) -> None:
    known = _KEYS.get(kind)
    for key, value in fields.items() if known is not None else ():
        if key != "type" and key not in (known or ()):
            raise GrammarError(f"{kind} has no {key!r:.50}, but {', '.join(known or ())}", f"{pointer}/{escape_pointer(key)}")
        if key in ("at_least_one", "stop_after_first") and not isinstance(value, bool):
            raise GrammarError(f"{key} must be true or false, got {value!r:.50}", f"{pointer}/{key}")


def _get(fields: Fields, key: str, kind: type, pointer: str) -> Any:
    value = fields.get(key)
    if not isinstance(value, kind):
        name = {str: "a text", list: "a list", dict: "an object"}[kind]
        raise GrammarError(f"{key} must be {name}, got {value!r:.100}", f"{pointer}/{key}")
    return value


def _as_fields(item: Any, pointer: str) -> Fields:
    if not isinstance(item, dict):
        raise GrammarError(f"must be an object, got {item!r:.100}", pointer)
    return cast("Fields", item)


def _items(fields: Fields, key: str, pointer: str) -> list[Any]:
    items = cast("list[Any]", _get(fields, key, list, pointer))
    if not items:
        raise GrammarError(f"{key} must not be empty", f"{pointer}/{key}")
    return items


def _texts(fields: Fields, key: str, pointer: str) -> list[str]:
    items: Any = fields.get(key) or []
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in cast("list[Any]", items)):
        raise GrammarError(f"{key} must be a list of texts", f"{pointer}/{key}")
    return cast("list[str]", items)


def _refuse(fields: Fields, pointer: str, known: str, defaults: Fields) -> None:
    for key, value in fields.items():
        if key not in ("type", known) and (key not in defaults or value != defaults[key]):
            raise GrammarError(f"{key} {value!r:.50} is not supported here", f"{pointer}/{key}")
