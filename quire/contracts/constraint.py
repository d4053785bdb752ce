"""Constraint: what the text of an output has to match; compiled it is a Grammar, its state in one output a GrammarMatcher."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, get_args

from quire.base.errors import RequestError

ConstraintKind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]
GrammarBackend = Literal["auto", "llguidance", "xgrammar"]

_OTHER_BACKENDS: dict[str, GrammarBackend] = {"guidance": "llguidance"}  # what other engines call it

_SPACE = r"(?:[ \t\n\r]|\\[tnr]|\\x(?:20|09|0[aAdD])|\\u00(?:20|09|0[aAdD]))"
_WHITE_SPACE = re.compile(rf"(?:{_SPACE}|\[{_SPACE}+\]|\((?:\?:)?|\)|\||[*+?]|\{{\d+(?:,\d*)?\}})*")
"""What is written with these alone matches nothing but white space, if it is an expression."""

MAX_SOURCE_BYTES = 64 << 10
MAX_REGEX_BYTES = 4 << 10
MAX_CHOICES = 4096
MAX_DEPTH = 320
"""Levels of JSON: a schema of 128 objects within each other has 257, and a few more where it is part of a structural tag."""
MAX_OPEN_LENGTH = 1 << 16


def grammar_backend(name: str, disable_fallback: bool = False) -> GrammarBackend:
    """Return the backend of a name, or of one that it has elsewhere; disable_fallback: the first of "auto" alone.

    A name that there is not comes back as it is, for Constraint to refuse.
    """
    if disable_fallback and name == "auto":
        return "llguidance"
    return _OTHER_BACKENDS.get(name, cast("GrammarBackend", name)) if isinstance(name, str) else name


def json_depth(value: object) -> int:
    """Return how deep a JSON value is nested, 0 for one that holds no other."""
    depth, level = 0, [value]
    while level:
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += cast("dict[str, object]", item).values()
            elif isinstance(item, list | tuple):
                inner += cast("list[object]", item)
        is_nested = any(isinstance(item, dict | list | tuple) for item in level)
        if not is_nested:
            break
        depth += 1
        level = inner
    return depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an output has to match as a whole. Raises RequestError, naming `param`, for one that no backend could take.

    kind                    json_object: any JSON object, source is empty; choice: a JSON list of strings; grammar: Lark, or
                            GBNF where a rule has ::=; structural_tag: JSON, see quire/grammar/structural_tag.py
    source                  the schema (JSON), expression, grammar or list
    backend                 who compiles it; "auto": llguidance, and where it refuses a schema, xgrammar if it enforces that
    whitespace_pattern      what may stand where JSON allows white space, as a regular expression; None: one space, or a line
                            break with indentation
    disable_any_whitespace  none at all
    max_open_length         characters of strings and items of arrays where a JSON schema sets no limit of its own; None: none
    fit_max_tokens          complete JSON within the tokens that the output may have, where possible; None: as the engine's
                            option complete_json_within_max_tokens says
    param                   the field of the request that it came from, for errors
    schema_names            of a structural_tag that was put together of schemas which the request has elsewhere: where those of
                            its tags come from, in their order, or else any; () where the request has the tag itself
    """

    kind: ConstraintKind
    source: str = ""
    backend: GrammarBackend = "auto"
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    max_open_length: int | None = None
    fit_max_tokens: bool | None = field(default=None, compare=False)
    param: str = field(default="structured_outputs", compare=False)
    schema_names: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        self._check_type("kind", get_args(ConstraintKind))
        self._check_type("backend", get_args(GrammarBackend))
        if not isinstance(self.source, str):
            raise RequestError(f"{self.param}: must be text, got {type(self.source).__name__}", self.param)
        limit = MAX_REGEX_BYTES if self.kind == "regex" else MAX_SOURCE_BYTES
        size = len(self.source.encode("utf-8", errors="surrogatepass"))
        if size > limit:
            raise RequestError(f"{self.param}: a {self.kind} may have {limit} bytes, got {size}", self.param)
        if self.kind != "json_object" and not self.source:
            raise RequestError(f"{self.param}: a {self.kind} must not be empty", self.param)
        self._check_options()
        if self.kind in ("json_schema", "structural_tag", "choice"):
            self._check_json()

    def parsed(self) -> Any:
        """Return the JSON value of a json_schema, structural_tag or choice."""
        return json.loads(self.source)

    def _check_type(self, name: str, allowed: Sequence[str]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise RequestError(f"{self.param}: {name} must be one of {', '.join(allowed)}, got {value!r}", self.param)

    def _check_options(self) -> None:
        pattern, limit = self.whitespace_pattern, self.max_open_length
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_OPEN_LENGTH):
            raise RequestError(
                f"{self.param}: max_open_length must be an integer from 1 to {MAX_OPEN_LENGTH}, got {limit!r}", self.param
            )
        if not isinstance(self.disable_any_whitespace, bool):
            raise RequestError(f"{self.param}: disable_any_whitespace must be true or false", self.param)
        if self.fit_max_tokens is not None and not isinstance(self.fit_max_tokens, bool):
            raise RequestError(f"{self.param}: fit_max_tokens must be true, false or null", self.param)
        if self.kind in ("regex", "choice", "grammar"):
            self._refuse_for_text()
        if pattern is None:
            return
        if not isinstance(pattern, str) or not pattern or len(pattern.encode()) > MAX_REGEX_BYTES:
            raise RequestError(f"{self.param}: whitespace_pattern must be text of 1 to {MAX_REGEX_BYTES} bytes", self.param)
        if _WHITE_SPACE.fullmatch(pattern) is None:
            raise RequestError(
                f"{self.param}: whitespace_pattern may match white space of JSON and nothing else, such as [ \\t\\n\\r]* "
                f"(spaces, \\t, \\n and \\r with [], (), | and repetition), got {pattern!r:.100}",
                self.param,
            )
        if self.disable_any_whitespace:
            raise RequestError(f"{self.param}: whitespace_pattern and disable_any_whitespace exclude each other", self.param)

    def _refuse_for_text(self) -> None:
        """Refuse options that mean nothing where the output is no JSON."""
        for name in ("max_open_length", "whitespace_pattern", "disable_any_whitespace"):
            if getattr(self, name) not in (None, False):
                raise RequestError(
                    f"{self.param}: {name} is for JSON, and has no effect on a {self.kind}: leave it out", self.param
                )

    def _check_json(self) -> None:
        try:
            value: object = json.loads(self.source)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{self.param}: a {self.kind} must be JSON: {error}", self.param) from None
        depth = json_depth(value)
        if depth > MAX_DEPTH:
            raise RequestError(f"{self.param}: a {self.kind} may be nested {MAX_DEPTH} deep, got {depth}", self.param)
        if self.kind == "choice":
            self._check_choices(value)
        elif self.kind == "structural_tag" and not isinstance(value, dict):
            raise RequestError(f"{self.param}: a structural_tag must be a JSON object, got {value!r:.100}", self.param)
        elif self.kind == "json_schema" and not isinstance(value, dict | bool):
            raise RequestError(f"{self.param}: a JSON schema must be an object, true or false, got {value!r:.100}", self.param)

    def _check_choices(self, value: object) -> None:
        choices = cast("list[object]", value) if isinstance(value, list) else []
        if not choices or not all(isinstance(choice, str) and choice for choice in choices):
            raise RequestError(f"{self.param}: must be a list of at least one non-empty string", self.param)
        if len(choices) > MAX_CHOICES:
            raise RequestError(f"{self.param}: may hold {MAX_CHOICES} strings, got {len(choices)}", self.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint in the words of the request's fields; exactly one of the first six is to be given. Raises RequestError.

    json                            a JSON schema, as a dict or as text
    regex, grammar                  a regular expression; a grammar in Lark's notation or GBNF
    choice                          a list of texts
    json_object                     True: any JSON object
    structural_tag                  a dict, or JSON as text
    disable_any_whitespace          no white space in JSON
    disable_additional_properties   objects of the schema get no properties that it does not name
    whitespace_pattern, max_open_length, fit_max_tokens, backend  as in Constraint; "guidance" is llguidance
    disable_fallback                of "auto" take the first backend alone
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    max_open_length: int | None = None
    fit_max_tokens: bool | None = None
    backend: GrammarBackend | Literal["guidance"] = "auto"
    disable_fallback: bool = False

    def __post_init__(self) -> None:
        self.constraint()

    def constraint(self, param: str = "structured_outputs") -> Constraint:
        """Return what is asked for; errors name the field within `param`."""
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [
            name for name in names if getattr(self, name) is not None and (name, self.json_object) != ("json_object", False)
        ]
        if len(given) != 1:
            raise RequestError(f"{param}: give exactly one of {', '.join(names)}, got {given or 'none'}", param)
        name = given[0]
        where = f"{param}.{name}"
        value = getattr(self, name)
        if name == "json_object" and value is not True:
            raise RequestError(f"{where}: must be true or left out, got {value!r}", where)
        kind = cast("ConstraintKind", "json_schema" if name == "json" else name)
        source = "" if name == "json_object" else self._source(name, value, where)
        for flag in ("disable_additional_properties", "disable_fallback"):
            if not isinstance(getattr(self, flag), bool):
                raise RequestError(f"{param}: {flag} must be true or false", param)
        if self.disable_additional_properties:
            source = _close_objects(kind, source, param)
        return Constraint(
            kind=kind,
            source=source,
            backend=grammar_backend(self.backend, self.disable_fallback),
            whitespace_pattern=self.whitespace_pattern,
            disable_any_whitespace=self.disable_any_whitespace,
            max_open_length=self.max_open_length,
            fit_max_tokens=self.fit_max_tokens,
            param=where,
        )

    def _source(self, name: str, value: object, where: str) -> str:
        if name in ("regex", "grammar"):
            if not isinstance(value, str):
                raise RequestError(f"{where}: must be a string, got {type(value).__name__}", where)
            return value
        if isinstance(value, str) and name != "choice":
            return value
        if name == "choice" and not isinstance(value, list | tuple):
            raise RequestError(f"{where}: must be a list of strings, got {type(value).__name__}", where)
        return dump_json(cast("object", value), where)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """StructuredOutputsParams by an older name."""


def dump_json(value: object, param: str) -> str:
    """Return JSON, keys in their order. Raises RequestError, naming `param`, for what JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{param}: is no JSON: {error}", param) from None


def _close_objects(kind: ConstraintKind, source: str, param: str) -> str:
    if kind != "json_schema":
        raise RequestError(f"{param}: disable_additional_properties needs a JSON schema", param)
    constraint = Constraint(kind=kind, source=source, param=f"{param}.json")  # its depth is checked before it is walked

    return dump_json(_closed(constraint.parsed()), param)


def _closed(schema: object) -> object:
    """Return a schema whose objects are closed; also within keywords that no draft has, as a $ref may lead there."""
    if isinstance(schema, list):
        return [_closed(item) for item in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed_within(key, value) for key, value in cast("dict[str, object]", schema).items()}
    is_open = "properties" in closed and "additionalProperties" not in closed and "patternProperties" not in closed
    return {**closed, "additionalProperties": False} if is_open and isinstance(closed["properties"], dict) else closed


def _closed_within(keyword: str, value: object) -> object:
    if keyword in ("const", "enum", "default", "example", "examples"):
        return value
    if keyword in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas") and isinstance(value, dict):
        return {name: _closed(schema) for name, schema in cast("dict[str, object]", value).items()}
    return _closed(value)


class GrammarMatcher(Protocol):
    """Where one output stands in its grammar. Not thread-safe."""

    def advance(self, token_id: int) -> str | None:
        """Take in a token; return what went wrong, None where nothing did."""
        ...

    def retreat(self, num_tokens: int) -> str | None:
        """Give back the last tokens; return what went wrong, None where nothing did."""
        ...

    def num_fitting(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of these tokens could be taken in, one after the other; None where it cannot go on any more."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """Return the tokens that have to come next, as far as it sees: masks let through nothing else."""
        ...

    def fork(self) -> GrammarMatcher:
        """Return another that stands here."""
        ...

    @property
    def can_end(self) -> bool:
        """Whether the output matches."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the output matches, and nothing can follow."""
        ...

    @property
    def has_given_up(self) -> bool:
        """Whether it can never go on, as its grammar is too complex here or lets nothing follow: the request's own fault."""
        ...


class Grammar(Protocol):
    """A compiled constraint, bound to one vocabulary; may be shared between threads and requests."""

    def new_matcher(self) -> GrammarMatcher:
        """Return a matcher at the beginning."""
        ...
