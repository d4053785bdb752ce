"""Values of a JSON schema in languages other than plain JSON: Python literals, bare words, JSON within markers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError, escape_pointer
from quire.grammar.lark import inline_schema, quote, quote_regex
from quire.grammar.rules import Rules, without
from quire.grammar.schema_branches import ALL_TYPES, Branch, branches_of
from quire.grammar.string_rules import form_body, has_form, length_body, repeat_bounds

INTEGER = r"-?(?:0|[1-9][0-9]{0,308})"
NUMBER = rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
MAX_DEPTH = 40
"""Maximum nesting of values; the parsers of calls fail at 64."""
_ANY_DEPTH = 8
"""Maximum nesting of a value that the schema does not describe."""
_NUM_KEY_CHARACTERS = 64
_KEY_EDGE = r"[^\s\x00-\x1f\x7f:,{}\[\]<>\"]"
_BARE_KEY = rf"/{_KEY_EDGE}|{_KEY_EDGE}[^\x00-\x1f\x7f:<>]{{0,{_NUM_KEY_CHARACTERS - 2}}}{_KEY_EDGE}/"
"""Names that are read literally: up to the colon, without spaces at their ends, and not similar to a value."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a language writes values.

    words      for null, true and false
    quotes     possible quotation marks of strings
    escapes    in a string, in addition to plain characters; "" if strings have none and end at the quote
    gap        the expression of the white space that is allowed after commas, colons and brackets; "" for none
    bare_keys  the names of properties are not quoted
    forbidden  texts that no string may contain, because a parser would mistake them for the end of something
    """

    words: tuple[str, str, str] = ("null", "true", "false")
    quotes: tuple[str, ...] = ('"',)
    escapes: str = r'\\["\\bfnrt]|\\u00[01][0-9A-Fa-f]'
    gap: str = ""
    bare_keys: bool = False
    forbidden: tuple[str, ...] = ()


PYTHON = Dialect(
    words=("None", "True", "False"),
    quotes=('"', "'"),
    escapes=r"""\\["'\\abfnrtv]|\\x[0-9A-Fa-f]{2}|\\u(?:[0-9A-CEFa-cef][0-9A-Fa-f]{3}|[Dd][0-7][0-9A-Fa-f]{2})""",
    gap=" ",
)
BARE = Dialect(quotes=("<escape>",), escapes="", bare_keys=True, forbidden=("<escape>",))
GEMMA4 = replace(BARE, quotes=('<|"|>',), forbidden=('<|"|>',))


class ValueWriter:
    """Writes rules of values; every method returns items of a rule. Raises GrammarError with the pointer of a keyword."""

    def __init__(self, rules: Rules, dialect: Dialect, root: object, constraint: Constraint) -> None:
        self._rules = rules
        self._dialect = dialect
        self._root = root
        self._constraint = constraint
        self._any: dict[int, str] = {}
        self._gap = f"{rules.terminal(quote_regex(dialect.gap))}?" if dialect.gap else '""'

    @property
    def comma(self) -> str:
        """The separator of values, or pairs."""
        return f'"," {self._gap}'

    def value(self, schema: object, pointer: str, path: tuple[str, ...] = (), depth: int = 0) -> str:
        """Return the values of a schema."""
        if depth > MAX_DEPTH:
            raise GrammarError(f"values nested deeper than {MAX_DEPTH} cannot be enforced in tool calls of this form", pointer)
        return self.one_of(branches_of(self._root, schema, pointer, ALL_TYPES, path), pointer, depth)

    def one_of(self, branches: Iterable[Branch], pointer: str, depth: int = 0) -> str:
        """Return the values of several branches."""
        options = [self._branch(branch, depth) for branch in branches]
        if not options:
            raise GrammarError("this allows nothing", pointer)
        return self._rules.rule(" | ".join(options))

    def literal(self, value: object, pointer: str) -> str:
        """Return one value, in all spellings of the language."""
        if isinstance(value, str):
            spelled = [self._spell_text(value, mark, pointer) for mark in self._dialect.quotes]
            return f"({' | '.join(text for text in spelled if text)})"
        if isinstance(value, bool) or value is None:
            return quote(self._dialect.words[0 if value is None else 1 if value else 2])
        if isinstance(value, list):
            items = [self.literal(item, pointer) for item in cast("list[object]", value)]
            return " ".join(['"["', f" {self.comma} ".join(items), '"]"'])
        if isinstance(value, dict):
            fields = cast("dict[str, object]", value)
            pairs = [f"{self.key(key, pointer)} {self.literal(item, pointer)}" for key, item in fields.items()]
            return " ".join(['"{"', f" {self.comma} ".join(pairs), '"}"'])
        return quote(json.dumps(value))

    def key(self, name: str, pointer: str) -> str:
        """Return the name of a property and the separator before its value."""
        if self._dialect.bare_keys and re.fullmatch(r"[^\s:}<](?:[^:]{0,510}[^\s:])?", name):
            return f"{quote(name)} {quote(':')}"
        return f"{self.literal(name, pointer)} {quote(':')} {self._gap}"

    def other_key(self, names: Iterable[str]) -> str:
        """Return any name of a property except `names`, like `key`."""
        if self._dialect.bare_keys:
            body = f"({_BARE_KEY}){''.join(f' & ~{quote(name)}' for name in names if name)}"
            return f"{self._rules.terminal(body)} {quote(':')}"
        keys: list[str] = []
        for mark in self._dialect.quotes:
            inner = f"/[^{mark}\\\\\\x00-\\x1f]{{1,{_NUM_KEY_CHARACTERS}}}/{without(self._dialect.forbidden)}"
            inner += "".join(f" & ~{quote(name)}" for name in names if name)
            keys.append(self._rules.terminal(f"{quote(mark)} ({inner}) {quote(mark)}"))
        return f"({' | '.join(keys)}) {quote(':')} {self._gap}"

    def pairs(self, branch: Branch, depth: int = 0) -> str:
        """Return the properties of an object without the brackets: named ones in order, then others."""
        schema = branch.schema
        check_object(schema, branch.pointer)
        named = named_properties(schema, branch.pointer)
        pairs: list[tuple[str, bool]] = []
        for name, inner, where, is_required in named:
            if inner is False and not is_required:
                continue
            pairs.append((f"{self.key(name, where)} {self.value(inner, where, branch.path, depth + 1)}", is_required))
        return self._rules.rule(self.sequence(pairs, self._other_pair(branch, named, depth)))

    def sequence(self, items: list[tuple[str, bool]], other: str | None) -> str:
        """Return items in order, each required or not, then any number of `other`, separated by commas."""
        behind = f"({self.comma} {other})*" if other else '""'
        whole = f"({other} ({self.comma} {other})*)?" if other else '""'
        for item, is_required in reversed(items):
            item = self._rules.rule(item)
            behind = self._rules.rule(behind)
            whole = f"{item} {behind}" if is_required else f"{item} {behind} | {self._rules.rule(whole)}"
            behind = f"{self.comma} {item} {behind}" if is_required else f"({self.comma} {item})? {behind}"
        return whole

    def _other_pair(self, branch: Branch, named: list[tuple[str, object, str, bool]], depth: int) -> str | None:
        inner = branch.schema.get("additionalProperties", True)
        if inner is False:
            return None
        where = f"{branch.pointer}/additionalProperties"
        return self._rules.rule(
            f"{self.other_key([name for name, *_ in named])} {self.value(inner, where, branch.path, depth + 1)}"
        )

    def _branch(self, branch: Branch, depth: int) -> str:
        kind, schema = branch.kind, branch.schema
        if kind == "literal":
            return " | ".join(self.literal(value, branch.pointer) for value in branch.values)
        if kind == "null":
            return quote(self._dialect.words[0])
        if kind == "boolean":
            return " | ".join(map(quote, self._dialect.words[1:]))
        if kind in ("integer", "number"):
            if schema:
                return inline_schema({"type": kind, **schema}, self._constraint)
            return self._rules.terminal(f"/{INTEGER if kind == 'integer' else NUMBER}/")
        if kind == "string":
            return self._text(schema, branch.pointer)
        if not schema:
            return self._any_container(kind, _ANY_DEPTH)
        return self._array(branch, depth) if kind == "array" else self._object(branch, depth)

    def _object(self, branch: Branch, depth: int) -> str:
        return f'"{{" {self._gap} {self.pairs(branch, depth)} {self._gap} "}}"'

    def _array(self, branch: Branch, depth: int) -> str:
        schema, where = branch.schema, branch.pointer
        if isinstance(schema.get("items"), list) or "additionalItems" in schema:
            raise GrammarError("items that are a list cannot be enforced in tool calls of this form", f"{where}/items")
        first = cast("list[object]", schema.get("prefixItems") or [])
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most is not None and most < least:
            raise GrammarError(f"maxItems is less than minItems, {least}", f"{where}/maxItems")
        first = first if most is None else first[:most]
        items = [self.value(item, f"{where}/prefixItems/{at}", branch.path, depth + 1) for at, item in enumerate(first)]
        has_others = schema.get("items", True) is not False and (most is None or most > len(items))
        if not has_others and least > len(items):
            raise GrammarError(f"minItems is more than there can be, {len(items)}", f"{where}/minItems")
        inner = ""
        if has_others:
            item = self.value(schema.get("items", True), f"{where}/items", branch.path, depth + 1)
            inner = self._repeated(item, max(least - len(items), 0), None if most is None else most - len(items), not items)
        for at in range(len(items) - 1, -1, -1):
            inner = self._rules.rule(f"{self.comma if at else ''} {items[at]} {inner}")
            inner = inner if at < least else f"({inner})?"
        return f'"[" {self._gap} {inner} {self._gap} "]"'

    def _repeated(self, item: str, least: int, most: int | None, is_first: bool) -> str:
        """Return a repeated item, with a comma before each except the first of the array."""
        if not is_first:
            return f"({self.comma} {item}){repeat_bounds({'minItems': least, 'maxItems': most}, 'Items')}"
        more = repeat_bounds({"minItems": max(least - 1, 0), "maxItems": None if most is None else most - 1}, "Items")
        body = f"{item} ({self.comma} {item}){more}"
        return body if least else f"({body})?"

    def _any_container(self, kind: str, depth: int) -> str:
        item = self._any_value(depth - 1)
        if kind == "array":
            return f'"[" {self._gap} ({item} ({self.comma} {item})*)? {self._gap} "]"'
        return f'"{{" {self._gap} {self.sequence([], self._rules.rule(f"{self.other_key(())} {item}"))} {self._gap} "}}"'

    def _any_value(self, depth: int) -> str:
        """Return any value that is not nested deeper than `depth`."""
        if depth not in self._any:
            simple = [
                *map(quote, self._dialect.words),
                self._rules.terminal(f"/{NUMBER}/"),
                self._text({}, ""),
                *([self._any_container("array", depth), self._any_container("object", depth)] if depth > 0 else []),
            ]
            self._any[depth] = self._rules.rule(" | ".join(simple))
        return self._any[depth]

    def _text(self, schema: dict[str, Any], pointer: str) -> str:
        return " | ".join(self._quoted(mark, schema, pointer) for mark in self._dialect.quotes)

    def _quoted(self, mark: str, schema: dict[str, Any], pointer: str) -> str:
        """Return quoted strings; with a pattern or format only those that need no escapes."""
        banned = without(self._dialect.forbidden)
        if not self._dialect.escapes:
            body = form_body(schema, pointer) if has_form(schema) else length_body(schema)
            return f"{self._rules.literal(mark)} {self._rules.ended(f'({body}){banned}', mark)}"
        plain = f"[^{mark}\\\\\\x00-\\x1f]"
        if has_form(schema):
            inner = f"{form_body(schema, pointer)} & /{plain}*/{banned}"
        else:
            inner = f"/(?:{plain}|{self._dialect.escapes}){repeat_bounds(schema, 'Length')}/{banned}"
        return self._rules.terminal(f"{quote(mark)} ({inner}) {quote(mark)}")

    def _spell_text(self, text: str, mark: str, pointer: str) -> str:
        """Return a quoted string, "" if it cannot be written with this mark."""
        if any(banned in text for banned in self._dialect.forbidden):
            raise GrammarError(f"{text!r:.100} cannot be written in tool calls of this form", pointer)
        if not self._dialect.escapes:
            return " ".join([self._rules.literal(mark), self._rules.literal(text), self._rules.literal(mark)])
        if mark == '"':
            return quote(json.dumps(text, ensure_ascii=False))
        return quote(f"{mark}{text}{mark}") if re.fullmatch(rf"[^{mark}\\\x00-\x1f]*", text) else ""


def named_properties(schema: dict[str, Any], pointer: str) -> list[tuple[str, object, str, bool]]:
    """Return name, schema, pointer and whether it is required of each property; those that are only required come last."""
    properties = cast("dict[str, object]", schema.get("properties") or {})
    required = list(map(str, cast("list[object]", schema.get("required") or [])))
    found = [
        (name, inner, f"{pointer}/properties/{escape_pointer(name)}", name in required) for name, inner in properties.items()
    ]
    other = schema.get("additionalProperties", True)
    for name in dict.fromkeys(required):
        if name not in properties:
            if other is False:
                raise GrammarError(f"{name!r:.100} is required, and additionalProperties forbids it", f"{pointer}/required")
            found.append((name, other, f"{pointer}/additionalProperties", True))
    return found


def check_object(schema: dict[str, Any], pointer: str) -> None:
    """Raise GrammarError for constraints on all properties of an object together that cannot be enforced."""
    num_required = len(set(map(str, schema.get("required") or ())))
    most = len(schema.get("properties") or ()) if schema.get("additionalProperties", True) is False else None
    is_held = {
        "patternProperties": not schema.get("patternProperties"),
        "minProperties": schema.get("minProperties", 0) <= num_required,
        "maxProperties": most is not None and most <= schema.get("maxProperties", most),
    }
    for key, holds in is_held.items():
        if key in schema and not holds:
            raise GrammarError(f"{key} cannot be enforced in tool calls of this form: leave it out", f"{pointer}/{key}")
