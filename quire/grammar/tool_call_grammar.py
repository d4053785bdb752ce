"""The arguments of a tool call in formats other than JSON; the parser of a format reads all outputs according to the schema.

Arguments come in the order of the schema, each once, then others where additionalProperties allows them.
  qwen_xml, minimax_xml, deepseek_xml, glm_xml, seed_xml, step_xml, hy_xml
                 pairs of a key and a value: a string is written as it is, all else as JSON
  python         name=value, ... with Python's literals
  functiongemma  name:value,... with strings between <escape>; gemma4: between <|"|>
The styles have the names that xgrammar gives them, where it has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from quire.contracts.argument_types import types_of
from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError, escape_pointer
from quire.grammar.lark import quote, whitespace_of
from quire.grammar.literal_grammar import (
    BARE,
    GEMMA4,
    INTEGER,
    NUMBER,
    PYTHON,
    Dialect,
    ValueWriter,
    check_object,
    named_properties,
)
from quire.grammar.rules import ANY_TEXT, Rules, without
from quire.grammar.schema_branches import ALL_TYPES, Branch, branches_of
from quire.grammar.string_rules import form_body, has_form, length_body

_OTHER_KEY = r"""/[^\s<>"=]|[^\s<>"=][^<>"\n\r]{0,62}[^\s<>"]/"""
_OTHER_NAME = r"/[A-Za-z0-9_.\-]{1,64}/"
_SPACES = r"[\s\x1c-\x1f]*"


@dataclass(frozen=True, slots=True)
class PairStyle:
    """How a pair is written: before the key, before the value, after it (close), after the pair. "\\n?" is an optional line
    break.

    json_opens    before a JSON value, if the format distinguishes it from a string; None: the schema distinguishes them
    marker        of the close: no value may contain it
    trims_lines   a line break at the end or the beginning of a value is lost
    """

    before_key: str
    opens: tuple[str, ...]
    close: str
    behind: str
    marker: str
    json_opens: tuple[str, ...] | None = None
    trims_lines: bool = False


_QWEN = PairStyle("<parameter=", (">\n",), "\n</parameter>", "\n", "</parameter>")
_MINIMAX = PairStyle('<parameter name="', ('">',), "</parameter>", "\n", "</parameter>", trims_lines=True)
_GLM = PairStyle("<arg_key>", ("</arg_key>", "\n?", "<arg_value>"), "</arg_value>", "\n?", "</arg_value>")
_SEED = PairStyle("<parameter=", (">",), "</parameter>", "\n", "</parameter>")
_STEP = PairStyle('<steptml:parameter name="', ('">',), "</steptml:parameter>", "", "</steptml:parameter>")
_HY = PairStyle(
    "<arg_key:opensource>",
    ("</arg_key:opensource>", "\n?", "<arg_value:opensource>"),
    "</arg_value:opensource>",
    "\n?",
    "</arg_value",
)
_DEEPSEEK = PairStyle(
    '<｜DSML｜parameter name="',
    ('" string="true">',),
    "</｜DSML｜parameter>",
    "\n",
    "</｜DSML｜parameter>",
    json_opens=('" string="false">',),
)
STYLES: dict[str, PairStyle | Dialect | None] = {
    "json": None,
    "qwen_xml": _QWEN,
    "minimax_xml": _MINIMAX,
    "deepseek_xml": _DEEPSEEK,
    "glm_xml": _GLM,
    "seed_xml": _SEED,
    "step_xml": _STEP,
    "hy_xml": _HY,
    "python": PYTHON,
    "functiongemma": BARE,
    "gemma4": GEMMA4,
}


class ArgumentWriter:
    """Writes the arguments of one tool, by a checked schema. Raises GrammarError with the pointer of an unsupported part."""

    def __init__(self, rules: Rules, style: str, schema: object, constraint: Constraint) -> None:
        found = STYLES[style]
        self._rules = rules
        self._pair = found if isinstance(found, PairStyle) else None
        self._is_python = style == "python"
        self._schema: dict[str, Any] = schema if isinstance(schema, dict) else {}
        dialect = found if isinstance(found, Dialect) else Dialect(gap=whitespace_of(constraint))
        if self._pair is not None:
            dialect = replace(dialect, forbidden=(self._pair.marker,))
        self._values = ValueWriter(rules, dialect, self._schema, constraint)
        self._branch = self._find_object(schema)

    def write(self) -> str:
        """Return the arguments as an item of a rule."""
        if self._pair is not None:
            return self._write_pairs(self._pair)
        return self._write_python() if self._is_python else self._values.pairs(self._branch)

    def _find_object(self, schema: object) -> Branch:
        found = [branch for branch in branches_of(self._schema, schema, "") if branch.kind == "object"]
        if len(found) != 1:
            raise GrammarError("the arguments of a tool must be one object", "")
        check_object(found[0].schema, found[0].pointer)
        return found[0]

    def _write_python(self) -> str:
        branch, values = self._branch, self._values
        named = named_properties(branch.schema, branch.pointer)
        pairs: list[tuple[str, bool]] = []
        for name, inner, where, is_required in named:
            if not re.fullmatch(r"[A-Za-z0-9_.\-]+", name):
                raise GrammarError(f"{name!r:.100} cannot be the name of an argument in calls written as Python", where)
            if inner is not False or is_required:
                pairs.append((f"{quote(f'{name}=')} {values.value(inner, where, branch.path, 1)}", is_required))
        inner = branch.schema.get("additionalProperties", True)
        other = None
        if inner is not False:
            key = self._other_key([name for name, *_ in named], _OTHER_NAME)
            value = values.value(inner, f"{branch.pointer}/additionalProperties", branch.path, 1)
            other = self._rules.rule(f'{key} "=" {value}')
        return self._rules.rule(values.sequence(pairs, other))

    def _other_key(self, names: list[str], body: str) -> str:
        return self._rules.terminal(body + "".join(f" & ~{quote(name)}" for name in names if name))

    def _write_pairs(self, style: PairStyle) -> str:
        branch = self._branch
        named = named_properties(branch.schema, branch.pointer)
        items: list[str] = []
        for name, inner, where, is_required in named:
            self._check_key(style, name, where)
            if inner is not False or is_required:
                pair = self._write_pair(style, quote(name), inner, where, types_of(self._schema, name))
                items.append(pair if is_required else f"{pair}?")
        inner = branch.schema.get("additionalProperties", True)
        if inner is not False:
            key = self._other_key([name for name, *_ in named], _OTHER_KEY)
            unnamed = next(name for name in map(str, range(len(named) + 1)) if all(name != other for other, *_ in named))
            where = f"{branch.pointer}/additionalProperties"
            items.append(f"{self._write_pair(style, key, inner, where, types_of(self._schema, unnamed))}*")
        return self._rules.rule(" ".join(items) or '""')

    def _check_key(self, style: PairStyle, name: str, pointer: str) -> None:
        stops = {style.opens[0], *(style.json_opens or ()), style.opens[0][0]}
        if not name or name != name.strip() or any(stop in name for stop in stops) or len(name) > 512:
            raise GrammarError(f"{name!r:.100} cannot be written as the key of an argument in this form of calls", pointer)

    def _write_pair(self, style: PairStyle, key: str, schema: object, pointer: str, types: frozenset[str]) -> str:
        """Return a pair. types: the types as which the parser may read the value, "string" for literal text."""
        behind = self._pieces((style.behind,))
        before = f"{self._rules.literal(style.before_key)} {key}"
        path = self._branch.path
        if style.json_opens is None:
            found = branches_of(self._schema, schema, pointer, types & ALL_TYPES, path)
            value = self._typed_value(style, found, pointer, types)
            return self._rules.rule(f"{before} {self._pieces(style.opens)} {value} {behind}")
        found = branches_of(self._schema, schema, pointer, ALL_TYPES, path)
        texts, others = _split_texts(found)
        options: list[str] = []
        if texts:
            options.append(f"{self._pieces(style.opens)} {self._plain_text(style, texts, '')}")
        if others:
            close = self._rules.literal(style.close)
            options.append(f"{self._pieces(style.json_opens)} {self._values.one_of(others, pointer, 1)} {close}")
        if not options:
            raise GrammarError("this allows nothing", pointer)
        return self._rules.rule(f"{before} ({' | '.join(options)}) {behind}")

    def _pieces(self, texts: tuple[str, ...]) -> str:
        return " ".join('"\\n"?' if text == "\n?" else self._rules.literal(text) for text in texts)

    def _typed_value(self, style: PairStyle, found: list[Branch], pointer: str, types: frozenset[str]) -> str:
        """Return a value whose type the parser knows from the schema, and the close."""
        close = self._rules.literal(style.close)
        if "string" not in types:
            return f"{self._values.one_of(found, pointer, 1)} {close}"
        if types == {"string"}:
            if not found:
                raise GrammarError("this allows nothing", pointer)
            return self._plain_text(style, found, "")
        containers = [branch for branch in found if branch.kind in ("array", "object")]
        scalars = [branch for branch in found if branch.kind not in ("array", "object")]
        options = [f"{self._values.one_of(containers, pointer, 1)} {close}"] if containers else []
        if scalars:
            options.append(self._plain_text(style, scalars, _read_otherwise(types)))
        if not options:
            raise GrammarError("this allows nothing", pointer)
        return self._rules.rule(" | ".join(options))

    def _plain_text(self, style: PairStyle, branches: list[Branch], otherwise: str) -> str:
        """Return texts up to the close: strings that the parser does not read as another type, and bare words."""
        bodies: list[str] = []
        for branch in branches:
            if branch.kind == "literal":
                bodies += [self._plain_literal(style, value, otherwise, branch.pointer) for value in branch.values]
            elif branch.kind == "string":
                body = form_body(branch.schema, branch.pointer) if has_form(branch.schema) else length_body(branch.schema)
                bodies.append(f"(({body}){self._limits(style, otherwise)})")
            elif branch.schema:
                keyword = next(iter(branch.schema))
                raise GrammarError(
                    f"{keyword} cannot be enforced in tool calls of this form where the value may be a string, too",
                    f"{branch.pointer}/{escape_pointer(keyword)}",
                )
            else:
                words = {"null": '"null"', "boolean": '"true" | "false"', "integer": f"/{INTEGER}/", "number": f"/{NUMBER}/"}
                bodies.append(f"({words[branch.kind]})")
        return self._rules.ended(" | ".join(bodies), style.close)

    def _limits(self, style: PairStyle, otherwise: str) -> str:
        trimmed = rf" & ~(/\n/ {ANY_TEXT}) & ~({ANY_TEXT} /\n/)" if style.trims_lines else ""
        return f"{without([style.marker])}{trimmed}{otherwise}"

    def _plain_literal(self, style: PairStyle, value: object, otherwise: str, pointer: str) -> str:
        if not isinstance(value, str):
            if isinstance(value, dict | list):
                raise GrammarError("lists and objects next to strings cannot be enforced in tool calls of this form", pointer)
            return f"({self._values.literal(value, pointer)})"
        is_lost = style.trims_lines and (value.startswith("\n") or value.endswith("\n"))
        if style.marker in value or is_lost:
            raise GrammarError(f"{value!r:.100} cannot be written in tool calls of this form", pointer)
        if not otherwise:
            return quote(value)
        return f"(({quote(value)}){otherwise} | {self._values.literal(value, pointer)})"


def _split_texts(branches: list[Branch]) -> tuple[list[Branch], list[Branch]]:
    """Return the branches for strings, and those for other values."""
    texts: list[Branch] = []
    others: list[Branch] = []
    for branch in branches:
        if branch.kind != "literal":
            (texts if branch.kind == "string" else others).append(branch)
            continue
        strings = tuple(value for value in branch.values if isinstance(value, str))
        rest = tuple(value for value in branch.values if not isinstance(value, str))
        texts += [replace(branch, values=strings)] if strings else []
        others += [replace(branch, values=rest)] if rest else []
    return texts, others


def _read_otherwise(types: frozenset[str]) -> str:
    """Return a suffix for the body of a string that excludes texts which the parser would read as values of another type."""
    starts = {"array": r"\[", "object": r"\{"}
    bodies = [rf"{_SPACES}\"(?s:.*)", *(f"{_SPACES}{start}(?s:.*)" for kind, start in starts.items() if kind in types)]
    if "null" in types:
        bodies.append(rf"{_SPACES}(?:null|None){_SPACES}")
    if "boolean" in types:
        bodies.append(rf"{_SPACES}(?:true|false|True|False){_SPACES}")
    if types & {"integer", "number"}:
        bodies.append(rf"{_SPACES}(?:-?[0-9][0-9.eE+-]*|NaN|-?Infinity){_SPACES}")
    return "".join(f" & ~/{body}/" for body in bodies)
