"""Structural tags in xgrammar's format, if it supports the same: reasoning before an answer, tool calls in JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from quire.grammar.errors import GrammarError
from quire.grammar.special_tokens import SpecialTexts
from quire.grammar.tag_fields import (
    Fields,
    begun_tags,
    check_keys,
    ends_of,
    ends_open,
    get_field,
    items_of,
    iter_elements,
    refuse_others,
    schema_of,
    texts_of,
)


def free_text_rules(end: str, excludes: Sequence[str]) -> str:
    """Return a grammar of the texts that end with `end` and contain it nowhere else; "": of all texts.

    excludes  texts that must not occur before

    A rule is a state: the longest prefix of one of the texts with which the text so far ends.
    """
    words = [word for word in (end, *excludes) if word]
    begun = sorted({word[:length] for word in words for length in range(len(word))} | {""}, key=lambda text: (len(text), text))
    numbers = {text: number for number, text in enumerate(begun)}
    rules = [f"t{number} ::= {' | '.join(_options(text, words, end, numbers))}" for text, number in numbers.items()]
    return "\n".join(["root ::= t0", *rules]) + "\n"


def _options(text: str, words: list[str], end: str, numbers: dict[str, int]) -> list[str]:
    """Return the continuations in the state of a text that ends with the prefix of a word."""
    following = sorted({word[len(part)] for part in _suffixes(text) for word in words if word.startswith(part)})
    options = [] if end else ['""']
    for character in following:
        longer = text + character
        found = {word for word in words if longer.endswith(word)}
        if end in found:
            options.append(_class_of(character))
        elif not found:
            begun = next(part for part in _suffixes(longer) if part in numbers)
            options.append(f"{_class_of(character)} t{numbers[begun]}")
    others = f"[^{''.join(map(_escape, following))}]" if following else r"[\U00000000-\U0010ffff]"
    return [*options, f"{others} t0"]


def _suffixes(text: str) -> list[str]:
    """Return the suffixes of a text, the longest first, including itself and ""."""
    return [text[start:] for start in range(len(text) + 1)]


def _class_of(character: str) -> str:
    return f"[{_escape(character)}]"


def _escape(character: str) -> str:
    return f"\\U{ord(character):08x}"


SAFE_PATTERN = re.compile(
    r"\^?(?:[\w ,:/@%-]|\\[d./-]|[().|?*+]|\{\d+(?:,\d*)?\}"
    r"|\[\^?(?:\\[d./-]|[a-z]-[a-z]|[A-Z]-[A-Z]|[0-9]-[0-9]|[\w ,:/@.])+-?\])*\$?",
    re.ASCII,
)
"""Patterns that all implementations read alike, and that cannot match a quotation mark or a backslash, which xgrammar would not
escape within JSON."""

_OPTIONAL_GROUP = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|\)\?\??", re.DOTALL)


def count_optional_groups(pattern: str) -> str:
    """Return a pattern with {0,1} for ? after groups: xgrammar allows a group without its beginning, `0` for `(a0*)?`."""
    return _OPTIONAL_GROUP.sub(lambda found: found[1] or "){0,1}", pattern)


def xgrammar_format(tag: Fields, special: SpecialTexts, write: Callable[[dict[str, Any] | bool], str]) -> Fields:
    """Return a structural tag as a format of xgrammar.

    Raises GrammarError, with the JSON pointer, for what xgrammar does not support, or handles differently.

    write  returns the values of a schema as xgrammar's EBNF, or raises GrammarError
    """
    if "structures" in tag or "triggers" in tag:
        raise GrammarError("structural tags of the old form are only supported by llguidance: use backend 'auto'", "")
    return _Translator(special, write).format(get_field(tag, "format", dict, ""), "/format", "")


class _Translator:
    """Translates each format followed by the text `end`, which ends it if it is free text."""

    def __init__(self, special: SpecialTexts, write: Callable[[dict[str, Any] | bool], str]) -> None:
        self._special = special
        self._write = write

    def format(self, fields: Any, pointer: str, end: str) -> Fields:
        writers: dict[str, Callable[[Fields, str, str], Fields]] = {
            "const_string": self._const_string,
            "any_text": self._any_text,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "tags_with_separator": self._tags_with_separator,
        }
        kind = fields.get("type") if isinstance(fields, dict) else None
        if kind not in writers:
            raise GrammarError(
                f"xgrammar is given {', '.join(writers)} in structural tags, not {kind!r:.50}: use backend 'auto'",
                f"{pointer}/type",
            )
        check_keys(fields, kind, pointer)
        return writers[kind](fields, pointer, end)

    def _literal(self, text: str) -> list[Fields]:
        parts = self._special.split(text)
        return [_const(part) if isinstance(part, str) else {"type": "token", "token": part} for part in parts]

    def _const_string(self, fields: Fields, pointer: str, end: str) -> Fields:
        return _joined(self._literal(get_field(fields, "value", str, pointer) + end))

    def _json_schema(self, fields: Fields, pointer: str, end: str) -> Fields:
        if fields.get("style", "json") != "json":
            raise GrammarError("calls that are not JSON are only supported by llguidance", f"{pointer}/style")
        refuse_others(fields, pointer, "json_schema", "style")
        try:
            written = self._write(schema_of(fields, pointer))
        except GrammarError as error:
            raise GrammarError(str(error), f"{pointer}/json_schema{error.pointer or ''}") from None
        return _joined([{"type": "grammar", "grammar": written}, *self._literal(end)])

    def _regex(self, fields: Fields, pointer: str, end: str) -> Fields:
        refuse_others(fields, pointer, "pattern")
        pattern = get_field(fields, "pattern", str, pointer)
        if not pattern or SAFE_PATTERN.fullmatch(pattern.replace(r"\n", " ")) is None:
            raise GrammarError("xgrammar may read this expression in another way: use backend 'auto'", f"{pointer}/pattern")
        return _joined([{"type": "regex", "pattern": count_optional_groups(pattern)}, *self._literal(end)])

    def _any_text(self, fields: Fields, pointer: str, end: str) -> Fields:
        refuse_others(fields, pointer, "excludes")
        excludes = texts_of(fields, "excludes", pointer)
        close, *rest = self._literal(end) or [_const("")]
        if close["type"] == "token":
            close, rest = _const(""), [close, *rest]
        elif rest:
            raise GrammarError("xgrammar cannot end free text by a text and a special token: use backend 'auto'", pointer)
        return _joined([{"type": "grammar", "grammar": free_text_rules(close["value"], excludes)}, *rest])

    def _sequence(self, fields: Fields, pointer: str, end: str) -> Fields:
        return _joined([self.format(*element) for element in iter_elements(fields, pointer, end)])

    def _or(self, fields: Fields, pointer: str, end: str) -> Fields:
        elements = items_of(fields, "elements", pointer)
        return _any_of([self.format(item, f"{pointer}/elements/{at}", end) for at, item in enumerate(elements)])

    def _tag(self, fields: Fields, pointer: str, end: str) -> Fields:
        begin = self._literal(get_field(fields, "begin", str, pointer))
        content, ends, where = fields.get("content"), ends_of(fields, pointer), f"{pointer}/content"
        rests = [self.format(_without(content, ends, text, where), where, text + end) for text in ends]
        return _joined([*begin, _any_of(rests)])

    def _tags_with_separator(self, fields: Fields, pointer: str, end: str) -> Fields:
        separator = self._literal(get_field(fields, "separator", str, pointer))
        found = self._one_of(begun_tags(fields, pointer), pointer)
        if not fields.get("stop_after_first"):
            one = self._one_of(items_of(fields, "tags", pointer), pointer)
            found = _joined([found, {"type": "star", "content": _joined([*separator, one])}])
        if not fields.get("at_least_one"):
            found = {"type": "optional", "content": found}
        return _joined([found, *self._literal(end)])

    def _one_of(self, tags: list[Any], pointer: str) -> Fields:
        return _any_of([self.format(tag, f"{pointer}/tags/{at}", "") for at, tag in enumerate(tags)])


def _without(content: Any, ends: list[str], end: str, pointer: str) -> Any:
    """Return the content of a tag that ends with `end`; free text ends at the first of all ends."""
    if not ends_open(content) or len(ends) == 1:
        return content
    others = [other for other in ends if other not in ("", end)]
    return {**content, "excludes": [*texts_of(content, "excludes", pointer), *others]}


def _const(text: str) -> Fields:
    return {"type": "const_string", "value": text}


def _joined(parts: list[Fields]) -> Fields:
    """Return a sequence; xgrammar does not accept empty ones."""
    if len(parts) == 1:
        return parts[0]
    return {"type": "sequence", "elements": parts} if parts else _const("")


def _any_of(options: list[Fields]) -> Fields:
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}
