"""Structural tags: sequences of text and constrained parts, as llguidance's Lark.

The old form has "structures" and "triggers"; the other one a "format", by its type:

  const_string         value
  any_text             excludes: texts that it may not contain; begins_without: an expression that it may not begin with; the
                       text ends where the next format begins
  json_schema          json_schema; style: how its values are written, "json" or arguments of a tool, see tool_call_grammar.py
  regex                pattern; excludes: texts that it may not contain
  sequence, or         elements
  tag                  begin, content, end: a text, or a list of alternatives
  triggered_tags       free text, in which each trigger begins one of the tags; at_least_one, stop_after_first, excludes
  tags_with_separator  tags with a text between them; begin: a text before the first one; at_least_one, stop_after_first
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError
from quire.grammar.lark import inline_schema, quote_regex
from quire.grammar.rules import ANY_TEXT, Rules, without
from quire.grammar.schema_check import check_schema, close_ends
from quire.grammar.tag_fields import (
    Fields,
    as_fields,
    begun_tags,
    check_keys,
    ends_of,
    get_field,
    items_of,
    iter_elements,
    refuse_others,
    schema_of,
    texts_of,
)
from quire.grammar.tool_call_grammar import STYLES, ArgumentWriter
from quire.grammar.vocabulary import Vocabulary


def structural_tag_source(constraint: Constraint, vocabulary: Vocabulary) -> str:
    """Return the grammar. Raises GrammarError with the JSON pointer of the error."""
    tag = constraint.parsed()
    if "structures" in tag or "triggers" in tag:
        tag = {"format": _from_old(tag)}
    return _Writer(constraint, vocabulary).write(get_field(tag, "format", dict, ""))


def _from_old(tag: Fields) -> Fields:
    structures = cast("list[Any]", get_field(tag, "structures", list, ""))
    tags: list[Fields] = []
    for index, item in enumerate(structures):
        pointer = f"/structures/{index}"
        structure = as_fields(item, pointer)
        content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
        tags.append(
            {
                "type": "tag",
                "begin": get_field(structure, "begin", str, pointer),
                "content": content,
                "end": get_field(structure, "end", str, pointer),
            }
        )
    return {"type": "triggered_tags", "triggers": get_field(tag, "triggers", list, ""), "tags": tags}


class _Writer:
    """Writes a rule per format; the surrounding formats matter only to free text."""

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary) -> None:
        self._constraint = constraint
        self._rules = Rules(vocabulary)

    def write(self, root: Fields) -> str:
        return self._rules.write(self._format(root, "/format", ""))

    def _format(self, item: Any, pointer: str, end: str) -> str:
        """Return the name of a rule for a format followed by the text `end`."""
        fields = as_fields(item, pointer)
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
        check_keys(fields, str(kind), pointer)
        return writers[kind](fields, pointer, end)

    def _const_string(self, fields: Fields, pointer: str, end: str) -> str:
        return self._rules.rule(self._rules.literal(get_field(fields, "value", str, pointer) + end))

    def _json_schema(self, fields: Fields, pointer: str, end: str) -> str:
        style = fields.get("style", "json")
        if style not in STYLES:
            raise GrammarError(f"style must be one of {', '.join(STYLES)}, got {style!r:.50}", f"{pointer}/style")
        refuse_others(fields, pointer, "json_schema", "style")
        schema = schema_of(fields, pointer)
        try:
            written = self._written(close_ends(check_schema(schema), self._constraint.max_open_length), style)
        except GrammarError as error:
            raise GrammarError(str(error), f"{pointer}/json_schema{error.pointer or ''}") from None
        return self._rules.rule(f"{written} {self._rules.literal(end)}")

    def _written(self, schema: object, style: str) -> str:
        """Return the values of a checked schema as an item of a rule."""
        if style == "json":
            return inline_schema(schema, self._constraint)
        return ArgumentWriter(self._rules, style, schema, self._constraint).write()

    def _regex(self, fields: Fields, pointer: str, end: str) -> str:
        refuse_others(fields, pointer, "pattern", "excludes")
        pattern = quote_regex(get_field(fields, "pattern", str, pointer))
        excludes = texts_of(fields, "excludes", pointer)
        text = self._rules.terminal(pattern + without(excludes)) if excludes else self._rules.rule(pattern)
        return self._rules.rule(f"{text} {self._rules.literal(end)}")

    def _any_text(self, fields: Fields, pointer: str, end: str) -> str:
        refuse_others(fields, pointer, "excludes", "begins_without")
        body = ANY_TEXT + without(texts_of(fields, "excludes", pointer))
        if "begins_without" in fields:
            body += f" & ~({quote_regex(get_field(fields, 'begins_without', str, pointer))} {ANY_TEXT})"
        return self._rules.ended(body, end)

    def _sequence(self, fields: Fields, pointer: str, end: str) -> str:
        return self._rules.rule(" ".join(self._format(*element) for element in iter_elements(fields, pointer, end)))

    def _or(self, fields: Fields, pointer: str, end: str) -> str:
        elements = items_of(fields, "elements", pointer)
        return self._rules.rule(
            " | ".join(self._format(item, f"{pointer}/elements/{at}", end) for at, item in enumerate(elements))
        )

    def _tag(self, fields: Fields, pointer: str, end: str) -> str:
        begin = get_field(fields, "begin", str, pointer)
        return self._rules.rule(f"{self._rules.literal(begin)} {self._tag_rest(fields, pointer, end)}")

    def _tag_rest(self, fields: Fields, pointer: str, end: str) -> str:
        """Return the part of a tag after its beginning."""
        texts = ends_of(fields, pointer)
        return self._rules.rule(
            " | ".join(self._format(fields.get("content"), f"{pointer}/content", text + end) for text in texts)
        )

    def _triggered_tags(self, fields: Fields, pointer: str, end: str) -> str:
        if end:
            raise GrammarError("triggered_tags can only stand at the end", pointer)
        triggers = texts_of(fields, "triggers", pointer)
        tags = [as_fields(tag, f"{pointer}/tags/{at}") for at, tag in enumerate(items_of(fields, "tags", pointer))]
        excludes = texts_of(fields, "excludes", pointer)
        parts: list[str] = []
        for trigger in triggers:
            rests: list[str] = []
            for at, tag in enumerate(tags):
                begin = get_field(tag, "begin", str, f"{pointer}/tags/{at}")
                if begin.startswith(trigger):
                    head = self._rules.literal(begin[len(trigger) :])
                    rests.append(self._rules.rule(f"{head} {self._tag_rest(tag, f'{pointer}/tags/{at}', '')}"))
            if not rests:
                raise GrammarError(f"no tag begins with the trigger {trigger!r}", f"{pointer}/triggers")
            others = [other for other in triggers if other != trigger and not self._rules.is_special(other)]
            text = self._any_text({"type": "any_text", "excludes": excludes + others}, pointer, trigger)
            parts.append(self._rules.rule(f"{text} ({' | '.join(rests)})"))
        for at, tag in enumerate(tags):
            if not any(get_field(tag, "begin", str, pointer).startswith(trigger) for trigger in triggers):
                raise GrammarError("no trigger begins this tag", f"{pointer}/tags/{at}/begin")
        one = self._rules.rule(" | ".join(parts))
        spelled = [trigger for trigger in triggers if not self._rules.is_special(trigger)]
        rest = self._rules.terminal(ANY_TEXT + without(excludes + spelled))
        if fields.get("stop_after_first"):
            return self._rules.rule(one if fields.get("at_least_one") else f"{one} | {rest}")
        return self._rules.rule(f"{one}{'+' if fields.get('at_least_one') else '*'} {rest}")

    def _tags_with_separator(self, fields: Fields, pointer: str, end: str) -> str:
        tags = items_of(fields, "tags", pointer)
        separator = get_field(fields, "separator", str, pointer)
        is_single, has_begin = bool(fields.get("stop_after_first")), bool(fields.get("begin"))
        one = "" if is_single and has_begin else self._one_of(tags, pointer)
        first = self._one_of(begun_tags(fields, pointer), pointer) if has_begin else one
        body = first if is_single else f"{first} ({self._rules.literal(separator)} {one})*"
        return self._rules.rule(f"{body if fields.get('at_least_one') else f'({body})?'} {self._rules.literal(end)}")

    def _one_of(self, tags: list[Any], pointer: str) -> str:
        return self._rules.rule(" | ".join(self._format(tag, f"{pointer}/tags/{at}", "") for at, tag in enumerate(tags)))
