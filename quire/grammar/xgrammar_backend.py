"""The xgrammar backend; grammars are compiled for the whole vocabulary in a SandboxedCompiler's process, which returns text."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from quire.contracts.argument_types import type_name
from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError, escape_pointer
from quire.grammar.matcher import BackendGrammar, MaskedMatcher, MaskSource, StateMatcher
from quire.grammar.sandbox import SandboxedCompiler
from quire.grammar.schema_check import KNOWN_KEYWORDS, XGRAMMAR, check_schema, close_ends
from quire.grammar.schema_depth import flatten_schema
from quire.grammar.schema_faults import NOTHING_MATCHES
from quire.grammar.schema_formats import FORMATS
from quire.grammar.schema_walk import has_open_names, iter_reached
from quire.grammar.special_tokens import SpecialTexts
from quire.grammar.vocabulary import Vocabulary
from quire.grammar.xgrammar_tags import SAFE_PATTERN, count_optional_groups, xgrammar_format

_ENFORCED = frozenset(
    (
        "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "enum",
        "const", "anyOf", "$ref", "$defs", "definitions", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "format", "pattern", "minProperties", "maxProperties", "propertyNames",
    )
)  # fmt: skip
_NEED_TYPE = frozenset(
    (
        "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "minItems", "maxItems", "minProperties", "maxProperties",
    )
)  # fmt: skip
_BESIDE_NAMES = frozenset(("type", "propertyNames", "additionalProperties", "minProperties", "maxProperties"))
_OWN_FORMATS = ("json-pointer", "relative-json-pointer")
"""Formats with quotation marks and backslashes, which xgrammar escapes; other formats are passed as patterns."""
_MAX_WHITESPACE = 24
_ESCAPES = re.compile(r"^basic_escape ::= .*$", re.MULTILINE)
_ESCAPED_LETTERS = r"basic_escape ::= [\"\\bfnrt]"
"""Characters allowed after a backslash if some names are declared and others are open; escapes would circumvent that."""

_MENDED = (
    (r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"),  # characters that are counted
    (r"([\0-.]) | ([0-}]) |", r"([ !#-.]) | ([0-[\]-}]) |"),  # of pointers
)
"""Parts of its rules that allow control characters, quotation marks or backslashes which JSON has to escape, and their
replacements. None of the parts can occur within a text of a schema."""

_SURROGATE_LEAD = b"\xed"
"""Followed by a byte from 0xA0 on, it would begin one of U+D800 to U+DFFF."""


class XgrammarBackend:
    """See Backend."""

    def __init__(self, vocabulary: Vocabulary, sandbox: SandboxedCompiler) -> None:
        self._sandbox = sandbox
        self._end_token_id = vocabulary.end_token_id
        self._spelling = vocabulary.spelling
        folder = Path(tempfile.mkdtemp(prefix="quire-grammar-"))
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)  # also where it is not closed
        tokens = token_texts(vocabulary)
        self._file = folder / "vocabulary.json"
        known = {"tokens": [token.decode("latin-1") for token in tokens], "special": SpecialTexts.of(vocabulary).ids}
        self._file.write_text(json.dumps(known))
        self._info = make_tokenizer_info(tokens)
        self._masks = _Masks(tokens)

    def compile(self, constraint: Constraint) -> BackendGrammar:
        """See Backend."""
        from xgrammar import CompiledGrammar, GrammarMatcher

        with self._sandbox.probe({"backend": "xgrammar", "vocabulary": str(self._file)}, constraint) as answer:
            compiled = CompiledGrammar.deserialize_json(answer["compiled"], self._info)
            self._spelling.check(_forced_bytes(GrammarMatcher(compiled)).decode("utf-8", errors="ignore"))
            if not self._masks.next_of(GrammarMatcher(compiled)).any():
                raise GrammarError("no output can begin")
        return BackendGrammar(lambda: GrammarMatcher(compiled), XgrammarMatcher, self._masks, self._end_token_id)

    def close(self) -> None:
        """See Backend."""
        self._remove()


def token_texts(vocabulary: Vocabulary) -> list[bytes]:
    """Return the tokens for xgrammar: an empty token is never allowed, and special tokens are not text.

    Special tokens begin with a byte that no text has, because xgrammar would never allow empty ones, even if a grammar names
    them.
    """
    special = vocabulary.special_token_ids
    texts = [b"\xff%d" % token_id if token_id in special else token for token_id, token in enumerate(vocabulary.tokens)]
    return [*texts, b"<|end of output|>"]


def make_tokenizer_info(tokens: list[bytes]) -> Any:
    """Return xgrammar's vocabulary; the last token is the end."""
    from xgrammar import TokenizerInfo, VocabType

    return TokenizerInfo(tokens, VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[len(tokens) - 1])


class ProbedXgrammar:
    """The compiler in a SandboxedCompiler's process: compiles, and serialises the result."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from xgrammar import GrammarCompiler

        known = json.loads(Path(setup["vocabulary"]).read_text())
        tokens = [token.encode("latin-1") for token in known["tokens"]]
        self._special = SpecialTexts(known["special"])
        self._compiler = GrammarCompiler(make_tokenizer_info(tokens), max_threads=1, cache_enabled=False)

    def compile(self, constraint: Constraint) -> str:
        """Return the compiled grammar as text. Raises GrammarError."""
        try:
            return self._compile(constraint).serialize_json()
        except (RuntimeError, ValueError) as error:
            raise GrammarError(" ".join(str(error).split())[-500:]) from None

    def _compile(self, constraint: Constraint) -> Any:
        kind, compiler = constraint.kind, self._compiler
        if kind in ("json_schema", "json_object"):
            schema: Any = {"type": "object"} if kind == "json_object" else _checked(constraint.parsed(), constraint)
            return compiler.compile_grammar(_rules_of(schema, constraint))
        if kind == "regex":
            return compiler.compile_regex(constraint.source)
        if kind == "choice":
            words = " | ".join(json.dumps(word, ensure_ascii=False) for word in constraint.parsed())
            return compiler.compile_grammar(f"root ::= {words}\n")
        if kind == "grammar":
            if "::=" not in constraint.source:
                raise GrammarError("xgrammar only supports GBNF, and this has no rule with ::=; use llguidance for Lark")
            return compiler.compile_grammar(constraint.source)
        return compiler.compile_structural_tag({"type": "structural_tag", "format": self._tag(constraint)})

    def _tag(self, constraint: Constraint) -> dict[str, Any]:
        return xgrammar_format(
            constraint.parsed(), self._special, lambda schema: _rules_of(_checked(schema, constraint), constraint)
        )


def check_for_xgrammar(constraint: Constraint, special: SpecialTexts) -> None:
    """Raise GrammarError, with a JSON pointer, for a schema or structural tag that xgrammar would not enforce.

    special  tokens that a structural tag may name
    """
    _whitespace(constraint)
    if constraint.kind == "structural_tag":
        xgrammar_format(constraint.parsed(), special, lambda schema: json.dumps(_checked(schema, constraint)))
    else:
        _checked(constraint.parsed(), constraint)


def _rules_of(schema: object, constraint: Constraint) -> str:
    """Return a checked schema as xgrammar's EBNF. Raises GrammarError if that has no rule for escapes."""
    from xgrammar import Grammar

    flat = flatten_schema(json.loads(json.dumps(schema)))
    rules = str(Grammar.from_json_schema(json.dumps(flat), strict_mode=False, **_whitespace(constraint)))
    for wide, exact in _MENDED:
        rules = rules.replace(wide, exact)
    if not has_open_names(schema):
        return rules
    rewritten, count = _ESCAPES.subn(lambda _: _ESCAPED_LETTERS, rules)
    if count != 1:
        raise GrammarError("this xgrammar writes escapes in another way: set additionalProperties to false")
    return rewritten


def _checked(parsed: object, constraint: Constraint) -> Any:
    """Return a schema as it is compiled. Raises GrammarError."""
    schema = close_ends(check_schema(parsed, XGRAMMAR), constraint.max_open_length)
    if schema is False:
        raise GrammarError("the schema false allows nothing", "")
    for pointer, inner in iter_reached(schema):
        for key in list(inner):
            if key not in KNOWN_KEYWORDS:
                del inner[key]  # it has no meaning
            elif key not in _ENFORCED:
                raise GrammarError(f"{key} is not enforced by xgrammar: use backend 'auto'", f"{pointer}/{key}")
        _check_beside(inner, pointer)
        _leave_out_properties(inner, pointer)
        form = FORMATS.get(str(inner.get("format")))
        if form is not None and inner["format"] not in _OWN_FORMATS:
            del inner["format"]
            inner["pattern"] = f"^(?:{form.single or form.body})$"
        if isinstance(inner.get("pattern"), str):
            inner["pattern"] = count_optional_groups(inner["pattern"])
    return schema


def _leave_out_properties(schema: dict[str, Any], pointer: str) -> None:
    """Remove properties that no value satisfies, which xgrammar does not accept.

    Raises GrammarError if they have to be excluded.
    """
    named: dict[str, Any] = schema.get("properties") or {}
    for name in [name for name, inner in named.items() if inner is False]:
        where = f"{pointer}/properties/{escape_pointer(name)}"
        if name in schema.get("required", ()):
            raise GrammarError(f"{NOTHING_MATCHES}: {name!r:.100} is required, but there is no value that it may have", where)
        if schema.get("additionalProperties") is not False:
            raise GrammarError("xgrammar does not exclude a property: set additionalProperties to false", where)
        del named[name]


def _check_beside(schema: dict[str, Any], pointer: str) -> None:
    """Refuse keywords that xgrammar silently ignores next to others."""
    if schema.keys() & {"enum", "const"}:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        kinds = schema.get("type", ())
        names = {kinds} if isinstance(kinds, str) else set(kinds)
        names |= {"integer"} if "number" in names else set()
        others = sorted((schema.keys() & KNOWN_KEYWORDS) - {"enum", "const", "type", "$defs", "definitions"})
        if {"enum", "const"} <= schema.keys() or (names and any(type_name(value) not in names for value in values)):
            others.append("type")
        if others:
            raise GrammarError("xgrammar ignores keywords next to enum and const", f"{pointer}/{others[0]}")
    elif "type" not in schema and not re.search(r"(?<!/properties)/propertyNames$", pointer):  # names are strings
        for key in sorted(schema.keys() & _NEED_TYPE):
            raise GrammarError(f"xgrammar ignores {key} where there is no type", f"{pointer}/{key}")
    properties: Any = schema.get("properties")
    named = set(cast("dict[str, Any]", properties)) if isinstance(properties, dict) else set[str]()
    if set(cast("list[str]", schema.get("required") or ())) - named:
        raise GrammarError("xgrammar ignores required names that are not among the properties", f"{pointer}/required")
    if schema.get("additionalProperties") is not False:
        for name in named:
            if json.dumps(name, ensure_ascii=False) != f'"{name}"':
                raise GrammarError(
                    "xgrammar treats an escaped name as a different name: set additionalProperties to false",
                    f"{pointer}/properties/{escape_pointer(name)}",
                )
    for key in ("anyOf", "$ref"):
        if key in schema and schema.keys() - {key, "$defs", "definitions"}:
            raise GrammarError(f"xgrammar ignores keywords next to {key}", f"{pointer}/{key}")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        raise GrammarError("xgrammar ignores references that do not lead into the schema itself", f"{pointer}/$ref")
    if "propertyNames" in schema and schema.get("type") != "object":
        raise GrammarError('xgrammar ignores propertyNames where the type is not "object"', f"{pointer}/propertyNames")
    if "propertyNames" in schema and schema.keys() - _BESIDE_NAMES:
        raise GrammarError("xgrammar ignores propertyNames next to properties", f"{pointer}/propertyNames")
    if schema.keys() >= {"format", "pattern"} or ("format" in schema and schema.keys() & {"minLength", "maxLength"}):
        raise GrammarError("xgrammar ignores lengths and patterns next to format", f"{pointer}/format")
    pattern = schema.get("pattern")
    if pattern is not None and (not isinstance(pattern, str) or not SAFE_PATTERN.fullmatch(pattern)):
        raise GrammarError("the pattern may let through what xgrammar does not escape", f"{pointer}/pattern")
    if pattern is not None and schema.keys() & {"minLength", "maxLength"}:
        raise GrammarError("xgrammar ignores lengths next to pattern", f"{pointer}/pattern")


def _whitespace(constraint: Constraint) -> dict[str, Any]:
    if constraint.whitespace_pattern is not None:
        raise GrammarError("whitespace_pattern is only supported by llguidance: use backend 'auto'")
    if constraint.disable_any_whitespace:
        return {"any_whitespace": False, "separators": (",", ":")}
    return {"any_whitespace": True, "max_whitespace_cnt": _MAX_WHITESPACE}


class _Masks:
    """Fills masks; tokens without a text are excluded from each."""

    first_mask_s = math.inf

    def __init__(self, tokens: list[bytes]) -> None:
        has_text = np.zeros(-(-len(tokens) // 32) * 32, dtype=np.bool_)
        has_text[: len(tokens)] = [bool(token) for token in tokens]
        self._possible = np.packbits(has_text, bitorder="little").view(np.int32)
        self._num_tokens = len(tokens)
        self._lead_ids = frozenset(token_id for token_id, token in enumerate(tokens) if token.endswith(_SURROGATE_LEAD))
        ends_surrogate = np.zeros_like(has_text)
        ends_surrogate[: len(tokens)] = [bool(token) and 0xA0 <= token[0] <= 0xBF for token in tokens]
        self._no_surrogate = ~np.packbits(ends_surrogate, bitorder="little").view(np.int32)
        self._own = threading.local()  # the bits that xgrammar writes, per thread

    def fill(self, matcher: MaskedMatcher, words: Any) -> str | None:
        """See MaskSource."""
        found = self.next_of(matcher.state)
        words[:] = 0
        words[: len(found)] = found
        return None

    def next_of(self, state: Any) -> Any:
        """Return the mask of a matcher, numpy [words] i32."""
        if not hasattr(self._own, "bits"):
            from xgrammar import allocate_token_bitmask

            self._own.bits = allocate_token_bitmask(1, self._num_tokens)
        bits = self._own.bits
        is_written = state.fill_next_token_bitmask(bits, 0)
        found = bits.numpy()[0][: len(self._possible)]
        return self._possible & found if is_written else self._possible.copy()

    def is_lead(self, token_id: int) -> bool:
        """Return whether the last byte of a token may begin a surrogate."""
        return token_id in self._lead_ids

    def forbid_surrogate(self, words: Any) -> None:
        """Remove from a mask the tokens that would complete a surrogate."""
        words[: len(self._no_surrogate)] &= self._no_surrogate


def _forced_bytes(state: Any) -> bytes:
    """Return the text that must come next.

    Up to xgrammar 0.2.8 it may end within a character, if the possible characters share a prefix; later versions leave out the
    begun character.
    """
    try:
        return state.find_jump_forward_string().encode("utf-8", errors="surrogatepass")
    except UnicodeDecodeError as error:  # these versions have bytes, and return them as a str
        return bytes(error.object)


class XgrammarMatcher(StateMatcher):
    """See MaskedMatcher. Surrogates, which are not characters, are excluded: xgrammar would allow their bytes."""

    __slots__ = ("_is_behind_lead",)

    def __init__(self, state: Any, masks: MaskSource, end_token_id: int, is_behind_lead: bool = False) -> None:
        super().__init__(state, masks, end_token_id)
        self._is_behind_lead = [is_behind_lead]  # after each token

    def advance(self, token_id: int) -> str | None:
        """See GrammarMatcher."""
        if not self.state.accept_token(token_id):
            return f"the grammar does not take token {token_id}"
        self._is_behind_lead.append(cast("_Masks", self._masks).is_lead(token_id))
        return None

    def retreat(self, num_tokens: int) -> str | None:
        """See GrammarMatcher."""
        self.state.rollback(num_tokens)
        del self._is_behind_lead[len(self._is_behind_lead) - num_tokens :]
        return None

    def num_fitting(self, token_ids: Sequence[int]) -> int | None:
        """See GrammarMatcher."""
        count = 0
        while count < len(token_ids) and self.state.accept_token(token_ids[count]):
            count += 1
        self.state.rollback(count)
        return count

    def forced_tokens(self) -> Sequence[int]:
        """See GrammarMatcher; a forced text may have several tokenizations, between which the model decides."""
        return ()

    def forced_bytes(self) -> bytes:
        """See MaskedMatcher."""
        return _forced_bytes(self.state)

    def restrict(self, words: Any) -> None:
        """See MaskedMatcher."""
        if self._is_behind_lead[-1]:
            cast("_Masks", self._masks).forbid_surrogate(words)

    def fork(self) -> XgrammarMatcher:
        """See GrammarMatcher."""
        return XgrammarMatcher(self.state.fork(), self._masks, self.end_token_id, self._is_behind_lead[-1])

    def fork_ahead(self) -> XgrammarMatcher:
        """See MaskedMatcher."""
        return self.fork()

    @property
    def can_end(self) -> bool:
        """See GrammarMatcher."""
        return self.state.is_completed()

    @property
    def has_given_up(self) -> bool:
        """See GrammarMatcher."""
        return False

    @property
    def is_complete(self) -> bool:
        """See GrammarMatcher."""
        if not self.state.is_completed():
            return False
        word, bit = divmod(self.end_token_id, 32)
        words = cast("_Masks", self._masks).next_of(self.state).view(np.uint32)
        return np.count_nonzero(words) == 1 and int(words[word]) == 1 << bit
