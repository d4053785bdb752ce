"""Translates llguidance's error messages, and finds the faulty part of a schema."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from quire.grammar.errors import GrammarError, escape_pointer
from quire.grammar.schema_walk import iter_schemas

NOTHING_MATCHES = "nothing can match it"
_MAX_SEARCH_S = 0.3
"""Time limit of the search for the faulty part: compiling may take two seconds in all."""
_REQUIRED = re.compile(r"Unsatisfiable schema: required property '(.*)' is unsatisfiable", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Saying:
    """A message of llguidance, the keywords that it is about, and its translation."""

    pattern: re.Pattern[str]
    keywords: tuple[str, ...]
    words: str


def _saying(pattern: str, keywords: tuple[str, ...], words: str) -> _Saying:
    return _Saying(re.compile(pattern, re.DOTALL), keywords, words)


_SAYINGS = (
    _saying(
        "oneOf constraints are not supported.*",
        ("oneOf",),
        "oneOf can only be enforced where its schemas exclude each other: write anyOf",
    ),
    _saying(
        "min/maxProperties only supported.*",
        ("minProperties", "maxProperties"),
        "minProperties and maxProperties can only be enforced where all properties are required",
    ),
    _saying(r"Unsatisfiable schema: anyOf is empty", ("enum",), f"{NOTHING_MATCHES}: enum has no value"),
    _saying(_REQUIRED.pattern, ("required",), rf"{NOTHING_MATCHES}: '\1' is required, but there is no value that it may have"),
    _saying(
        "Unsatisfiable schema: required item is unsatisfiable",
        ("items", "prefixItems"),
        f"{NOTHING_MATCHES}: there is no value that an item may have",
    ),
    _saying(
        r"Unsatisfiable schema: ((?:minimum|minLength|minItems|minProperties|range).*)",
        ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "multipleOf"),
        rf"{NOTHING_MATCHES}: \1",
    ),
    _saying(
        r"Unsatisfiable schema: Regex is empty: .*",
        ("pattern",),
        f"{NOTHING_MATCHES}: no text matches all of its patterns",
    ),
    _saying(r"Unsatisfiable schema: (.*)", (), rf"{NOTHING_MATCHES}: \1"),
    _saying(
        r"Failed to generate regex for (?:float|integer) range: .*",
        ("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum"),
        "bounds of numbers cannot be enforced beyond 9e18",
    ),
    _saying(
        r"patternProperty regexes (.*) and (.*) are not disjoint",
        ("patternProperties",),
        r"patternProperties can only be enforced where no name matches two of them, but a name may match \1 and \2",
    ),
    _saying(
        r"lookarounds not supported yet; \w+ in regex (.*)",
        ("pattern", "patternProperties"),
        r"look-around, \\b, \\B, and anchors but at the ends cannot be enforced, got \1",
    ),
    _saying(r"(regex parse error: .*)", ("pattern", "patternProperties"), r"\1"),
    _saying(r"Pointer '(.*)' does not exist", ("$ref",), r"$ref '#\1' leads nowhere"),
    _saying(
        "circular references with sibling keys.*",
        (),
        "a $ref that leads back to its own schema cannot be enforced next to other keywords",
    ),
    _saying(
        r".*Current row has (\d+) items; max is (\d+).*",
        (),
        r"it is too complex: it goes on in \1 ways at one place, and may in \2; use fewer optional properties and alternatives",
    ),
    _saying(
        r".*(?:too many states|too many expressions|fuel exhausted).*",
        (),
        "it is too complex: its expressions have too many states; use smaller counts, and alternatives that differ early",
    ),
    _saying(
        "Unable to determine if regex is empty: .*",
        ("allOf", "pattern"),
        "it is too complex: whether any text matches all of its patterns cannot be determined; use fewer of them",
    ),
    _saying("Value for 'multipleOf' has too many digits.*", ("multipleOf",), "multipleOf may have 15 digits"),
    _saying(r".*NoExtensionBias.*", (), NOTHING_MATCHES),
    _saying(r"(.*?) *<non-verbose/>", (), r"\1"),
)


def plain_words(message: str) -> str:
    """Return the translation of a message of llguidance; an unknown one is returned as it is."""
    found = _find(message)
    return message if found is None else found[0].expand(found[1].words)


def _find(message: str) -> tuple[re.Match[str], _Saying] | None:
    for saying in _SAYINGS:
        match = saying.pattern.fullmatch(message)
        if match is not None:
            return match, saying
    return None


def find_fault(schema: object, message: str, failure_of: Callable[[object], str | None]) -> GrammarError:
    """Return why llguidance refuses a schema, with the JSON pointer if it is found.

    failure_of  compiles a schema on its own; returns the error message, None if there is none
    """
    search = _Search(schema, failure_of)
    fault, pointer, message = search.find(message)
    found = _find(message)
    keywords = () if found is None else found[1].keywords
    places = [f"{pointer}/{keyword}" for keyword in keywords if isinstance(fault, dict) and keyword in fault]
    if places:
        return GrammarError(plain_words(message), places[0])
    if pointer or (found is not None and not keywords):
        return GrammarError(plain_words(message), pointer)
    places = [f"{where}/{key}" for where, inner in iter_schemas(schema) for key in keywords if key in inner]
    return GrammarError(plain_words(message), places[0] if len(places) == 1 else None)


class _Search:
    """Compiles parts of a schema on their own to find the faulty one."""

    def __init__(self, root: object, failure_of: Callable[[object], str | None]) -> None:
        self._root = root
        self._failure_of = failure_of
        self._until = time.thread_time() + _MAX_SEARCH_S

    def find(self, message: str) -> tuple[object, str, str]:
        """Return the innermost faulty schema, its pointer, and its message."""
        fault, pointer = self._root, ""
        while True:
            fault, pointer = self._innermost(fault, pointer, message)
            required = _REQUIRED.fullmatch(message)
            properties = cast("dict[str, Any]", fault).get("properties") if isinstance(fault, dict) else None
            if required is None or not isinstance(properties, dict):
                return fault, pointer, message
            inner = cast("dict[str, Any]", properties).get(required[1])
            below = self._failure(inner) if isinstance(inner, dict) else None
            if below is None:
                return fault, pointer, message
            fault, pointer, message = inner, f"{pointer}/properties/{escape_pointer(required[1])}", below

    def _innermost(self, schema: object, pointer: str, message: str) -> tuple[object, str]:
        """Return the innermost schema within a schema that has the same message, and its pointer."""
        found, where = schema, pointer
        for inner_pointer, inner in iter_schemas(schema, pointer):
            is_within = found is schema or inner_pointer.startswith(f"{where}/")
            if inner is not schema and is_within and self._failure(inner) == message:
                found, where = inner, inner_pointer
        return found, where

    def _failure(self, schema: object) -> str | None:
        """Return the message for a schema on its own, with the definitions of the root; None also after the time limit."""
        if time.thread_time() > self._until:
            return None
        alone = dict(cast("dict[str, Any]", schema))
        root = cast("dict[str, Any]", self._root) if isinstance(self._root, dict) else {}
        for key in ("$schema", "$defs", "definitions"):
            if key in root:
                alone.setdefault(key, root[key])
        return self._failure_of(alone)
