"""bad_words: phrases that an output must not contain, with a grammar or without one.

BannedGrammar wraps a grammar and removes from its masks the tokens that would complete a phrase, however it is tokenized.
`without_bad_words` changes a constraint before it is compiled, so that no output begins something that only a phrase can
complete.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import numpy as np

from quire.contracts.constraint import Constraint, Grammar
from quire.grammar.errors import GrammarError, escape_pointer
from quire.grammar.lark import regex_source
from quire.grammar.masks import fill_mask
from quire.grammar.matcher import MaskedMatcher, WrappingMatcher
from quire.grammar.rules import without
from quire.grammar.schema_faults import NOTHING_MATCHES
from quire.grammar.schema_shape import check_shape
from quire.grammar.schema_walk import iter_schemas
from quire.grammar.vocabulary import Vocabulary

MAX_PHRASE_BYTES = 64 << 10
MAX_EXPRESSION_CHARACTERS = 2048
_MAX_CACHED_MASKS = 512
_MAX_TOKENS_AHEAD = 16
"""The matcher looks ahead if a mask has at most this many tokens; one with more is usually free text, which forces nothing."""
_MAX_MASKS_AHEAD = 16
"""Maximum number of masks that are filled to look ahead from one mask."""
_MAX_FORCED = 8
_MAX_FORCED_CHARACTERS = 128
"""Maximum number of phrases that are excluded from an expression, and of their characters: each multiplies its states."""
_TERMINAL = re.compile(r"^([A-Z_][A-Z0-9_]*)[ \t]*:((?:(?!//|#).)*(?:\n[ \t]*\|(?:(?!//|#).)*)*)$", re.MULTILINE)
"""The definition of a terminal in Lark and its body, including following lines that begin with |, without comments."""
_WIDE_CLASS = re.compile(r"\[(?:\^[^\]]*|[^\]]*-[^\]]*)\]|\{[0-9,]*\}")
"""Classes with many characters, and counts, which contain no literal characters."""
_ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_PRUNE_PASSES = 8
"""Each pass finds references to definitions that the previous pass left empty."""
_TRIAL_TOKENS = 32
_TRIAL_STRIDES = (7919, 104729)
"""Which of the allowed tokens a trial output takes; one output for each stride."""


class TokenIndex:
    """The tokens of a vocabulary by prefix, and by substring."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = [
            (token, token_id)
            for token_id, token in enumerate(vocabulary.tokens)
            if token and token_id not in vocabulary.special_token_ids
        ]
        texts.sort()
        self._texts = [token for token, _ in texts]
        self._ids = np.array([token_id for _, token_id in texts], dtype=np.int64)
        self._joined = b"".join(self._texts)
        self._ends = np.array(list(accumulate(map(len, self._texts))), dtype=np.int64)

    def beginning_with(self, prefix: bytes) -> Any:
        """Return the ids of the tokens that begin with `prefix`, numpy [N] i64."""
        first = bisect_left(self._texts, prefix)
        above = _successor(prefix)
        last = len(self._texts) if above is None else bisect_left(self._texts, above, lo=first)
        return self._ids[first:last]

    def containing(self, part: bytes) -> Any:
        """Return the ids of the tokens that contain `part`, numpy [N] i64."""
        starts: list[int] = []
        at = self._joined.find(part)
        while at >= 0:
            starts.append(at)
            at = self._joined.find(part, at + 1)
        begins = np.array(starts, dtype=np.int64)
        owners = np.searchsorted(self._ends, begins, side="right")
        return self._ids[np.unique(owners[begins + len(part) <= self._ends[owners]])] if starts else self._ids[:0]


def _successor(prefix: bytes) -> bytes | None:
    """Return the smallest byte string above all that begin with the prefix."""
    bare = prefix.rstrip(b"\xff")
    return bare[:-1] + bytes([bare[-1] + 1]) if bare else None


class BannedPhrases:
    """The automaton of some phrases, and the mask of each of its states, computed on demand. Thread-safe.

    Phrases are matched in the bytes of the output (Aho and Corasick, 1975), so token borders make no difference. The state
    after an output identifies its longest suffix that is a prefix of a phrase; 0: none.

    phrases  none of them empty. Raises GrammarError if they have more than 64 KiB in total
    """

    def __init__(self, phrases: Iterable[str], vocabulary: Vocabulary, index: TokenIndex) -> None:
        self._phrases = sorted({phrase.encode("utf-8", errors="surrogatepass") for phrase in phrases})
        size = sum(map(len, self._phrases))
        if size > MAX_PHRASE_BYTES:
            raise GrammarError(f"banned words may have {MAX_PHRASE_BYTES} bytes together, got {size}")
        self._tokens = vocabulary.tokens
        self._special = vocabulary.special_token_ids
        self._num_bits = vocabulary.num_mask_words * 32
        self._index = index
        self._next: list[dict[int, int]] = [{}]
        self._begun: list[list[tuple[bytes, int]]] = [[]]  # per state the phrases that begin so, and where they continue
        complete: set[int] = set()
        for phrase in self._phrases:
            complete.add(self._add(phrase))
        self._fallback = [0] * len(self._next)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for byte, following in self._next[state].items():
                self._fallback[following] = self._step(self._fallback[state], byte)
                if self._fallback[following] in complete:
                    complete.add(following)
                waiting.append(following)
        self._complete = frozenset(complete)
        self._always = [index.containing(phrase) for phrase in self._phrases]
        self._lock = threading.Lock()
        self._masks: OrderedDict[int, Any] = OrderedDict()

    def _add(self, phrase: bytes) -> int:
        """Add the states of a phrase and return the last one."""
        state = 0
        for position, byte in enumerate(phrase, 1):
            if byte not in self._next[state]:
                self._next[state][byte] = len(self._next)
                self._next.append({})
                self._begun.append([])
            state = self._next[state][byte]
            if position < len(phrase):
                self._begun[state].append((phrase, position))
        return state

    def _step(self, state: int, byte: int) -> int:
        while byte not in self._next[state] and state != 0:
            state = self._fallback[state]
        return self._next[state].get(byte, 0)

    def _text_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; special tokens have none."""
        return b"" if token_id >= len(self._tokens) or token_id in self._special else self._tokens[token_id]

    def after(self, state: int, token_id: int) -> int:
        """Return the state after one more token."""
        for byte in self._text_of(token_id):
            state = self._step(state, byte)
        return state

    def after_text(self, state: int, text: bytes) -> int | None:
        """Return the state after a text, None if a phrase is completed within it; the phrase may have begun before."""
        for byte in text:
            state = self._step(state, byte)
            if state in self._complete:
                return None
        return state

    def after_prompt(self, token_ids: Sequence[int]) -> int:
        """Return the state after a prompt."""
        longest = max(map(len, self._phrases))
        num_bytes, first = 0, len(token_ids)
        while first > 0 and num_bytes < longest:
            first -= 1
            num_bytes += len(self._text_of(token_ids[first]))
        state = 0
        for token_id in token_ids[first:]:
            state = self.after(state, token_id)
        return state

    def mask(self, state: int) -> Any:
        """Return which tokens are allowed, numpy [num_mask_words] i32, one bit each; read-only."""
        with self._lock:
            if state in self._masks:
                self._masks.move_to_end(state)
                return self._masks[state]
        allowed = np.ones(self._num_bits, dtype=np.bool_)
        for token_ids in self._always:
            allowed[token_ids] = False
        part = state
        while part:
            for phrase, position in self._begun[part]:
                allowed[self._index.beginning_with(phrase[position:])] = False
            part = self._fallback[part]
        found = np.packbits(allowed, bitorder="little").view(np.int32)
        with self._lock:
            self._masks[state] = found
            if len(self._masks) > _MAX_CACHED_MASKS:
                self._masks.popitem(last=False)
        return found

    def forbids(self, state: int, token_id: int) -> bool:
        """Return whether a token would complete a phrase."""
        return not int(self.mask(state)[token_id // 32]) >> token_id % 32 & 1


class BannedGrammar:
    """See contracts.constraint.Grammar. A phrase may begin in the prompt.

    start  the state of the phrases after the prompt
    """

    def __init__(self, grammar: Grammar, phrases: BannedPhrases, start: int = 0) -> None:
        self._grammar = grammar
        self._phrases = phrases
        self._start = start

    def after_prompt(self, token_ids: Sequence[int]) -> BannedGrammar:
        """Return the same grammar for outputs after a prompt."""
        return BannedGrammar(self._grammar, self._phrases, self._phrases.after_prompt(token_ids))

    def new_matcher(self) -> BannedMatcher:
        """See Grammar."""
        return BannedMatcher(cast("MaskedMatcher", self._grammar.new_matcher()), self._phrases, [self._start])


class BannedMatcher(WrappingMatcher):
    """See MaskedMatcher."""

    __slots__ = ("_phrases", "_states")

    def __init__(self, inner: MaskedMatcher, phrases: BannedPhrases, states: list[int]) -> None:
        super().__init__(inner)
        self._phrases = phrases
        self._states = states

    def restrict(self, words: Any) -> None:
        """See MaskedMatcher."""
        self.inner.restrict(words)
        mask = self._phrases.mask(self._states[-1])
        words[: len(mask)] &= mask
        budget = iter(range(_MAX_MASKS_AHEAD))
        for token_id in _few_tokens(words):
            if token_id != self.end_token_id and self._leads_to_phrase(token_id, self._states[-1], budget):
                words.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)

    def _leads_to_phrase(self, token_id: int, state: int, budget: Iterator[int]) -> bool:
        """Return whether every continuation after a token contains a phrase, as far as the budget of masks shows."""
        if self.inner.advance(token_id) is not None:
            return False
        state = self._phrases.after(state, token_id)
        forced = self._phrases.after_text(state, self.inner.forced_bytes())
        is_met = forced is None or (forced != 0 and self._is_dead_end(state, budget))
        error = self.inner.retreat(1)
        if error is not None:
            raise RuntimeError(error)
        return is_met

    def _is_dead_end(self, state: int, budget: Iterator[int]) -> bool:
        if self.inner.is_complete or next(budget, None) is None:
            return False
        mask = self._phrases.mask(state)
        words = np.zeros_like(mask)
        if self.source.fill(self.inner, words) is not None:
            return False
        words &= mask
        if not words.any():
            return True
        following = _few_tokens(words)
        return bool(following) and all(
            token_id != self.end_token_id and self._leads_to_phrase(token_id, state, budget) for token_id in following
        )

    def advance(self, token_id: int) -> str | None:
        """See GrammarMatcher."""
        error = self.inner.advance(token_id)
        if error is None:
            self._states.append(self._phrases.after(self._states[-1], token_id))
        return error

    def retreat(self, num_tokens: int) -> str | None:
        """See GrammarMatcher."""
        error = self.inner.retreat(num_tokens)
        if error is None:
            del self._states[len(self._states) - num_tokens :]
        return error

    def num_fitting(self, token_ids: Sequence[int]) -> int | None:
        """See GrammarMatcher."""
        count = super().num_fitting(token_ids)
        if count is None:
            return None
        state = self._states[-1]
        for index, token_id in enumerate(token_ids[:count]):
            if self._phrases.forbids(state, token_id):
                return index
            state = self._phrases.after(state, token_id)
        return count

    def fork(self) -> BannedMatcher:
        """See GrammarMatcher."""
        return BannedMatcher(self.inner.fork(), self._phrases, self._states[-1:])

    def fork_ahead(self) -> BannedMatcher:
        """See MaskedMatcher."""
        return BannedMatcher(self.inner.fork_ahead(), self._phrases, self._states[-1:])


def _few_tokens(words: Any) -> list[int]:
    """Return the tokens of a mask, none if there are many."""
    if np.count_nonzero(words) > _MAX_TOKENS_AHEAD:
        return []
    found = _token_ids(words)
    return found.tolist() if len(found) <= _MAX_TOKENS_AHEAD else []


def _token_ids(words: Any) -> Any:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def without_bad_words(constraint: Constraint, phrases: Sequence[str]) -> Constraint:
    """Return a constraint without parts that contain a phrase: choices, literals of expressions, values and names of a schema.

    The result allows only what the constraint allows. A text occurs in an output as it is, or as JSON escapes it. The
    constraint itself is returned if nothing has to be removed. Raises GrammarError if nothing is left.
    """
    if constraint.kind == "json_object":
        return constraint
    if constraint.kind == "grammar":
        return _change_grammar(constraint, phrases)
    if constraint.kind == "regex":
        return _change_regex(constraint, phrases)
    value, can_exclude = constraint.parsed(), constraint.backend != "xgrammar"
    if constraint.kind == "choice":
        found: object = [choice for choice in value if not _has_phrase(choice, phrases)]
        if not found:
            raise GrammarError("each of the texts has one of bad_words in it")
    elif constraint.kind == "json_schema":
        found = _prune_schema(constraint.parsed(), phrases, can_exclude)  # changed in place
        if found is False and value is not False:
            raise GrammarError(f"bad_words leave nothing of it: {NOTHING_MATCHES}")
    else:
        found = _prune_tag(constraint.parsed(), phrases, can_exclude)
    return constraint if found == value else replace(constraint, source=json.dumps(found, ensure_ascii=False))


def _change_regex(constraint: Constraint, phrases: Sequence[str]) -> Constraint:
    """Return a grammar of the expression's matches without the phrases that it may force to be completed."""
    forced = _forced_phrases(constraint.source, phrases)
    if not forced:
        return constraint
    source = f"{regex_source(constraint.source).rstrip()}{without(forced)}\n"
    return replace(constraint, kind="grammar", source=source, backend="llguidance")


def _change_grammar(constraint: Constraint, phrases: Sequence[str]) -> Constraint:
    """Return a Lark grammar whose terminals exclude the phrases that they may force to be completed."""
    source = constraint.source
    if "::=" in source:
        return constraint
    bodies = [found[2] for found in _TERMINAL.finditer(source)]
    forced = _forced_phrases("\n".join(bodies), phrases)
    if not forced:
        return constraint
    return replace(constraint, source=_TERMINAL.sub(lambda found: f"{found[1]}: ({found[2]}){without(forced)}", source))


def _forced_phrases(pattern: str, phrases: Sequence[str]) -> list[str]:
    """Return the phrases that an expression may force to be completed, none if there are too many.

    These end with a literal character of the expression. Where other continuations exist, masks exclude a phrase at lower cost.
    """
    spelled = _WIDE_CLASS.sub("", pattern.replace("\\", ""))
    forced = [phrase for phrase in phrases if phrase[-1] in spelled and phrase.isprintable()]
    return forced if len(forced) <= _MAX_FORCED and sum(map(len, forced)) <= _MAX_FORCED_CHARACTERS else []


def _has_phrase(text: str, phrases: Sequence[str]) -> bool:
    return any(phrase in text for phrase in phrases)


def _prune_schema(schema: object, phrases: Sequence[str], can_exclude: bool) -> object:
    """Return the schema, changed, without values and names whose JSON contains a phrase; False if nothing is left.

    The result allows only what the schema allows, and excludes only outputs with a phrase.
    """
    for pointer, inner in tuple(iter_schemas(schema)):
        check_shape(inner, pointer)
        if can_exclude:
            _exclude_from_pattern(inner, phrases)
    pruning = _SchemaPruning(lambda value: _has_phrase(json.dumps(value, ensure_ascii=False), phrases))
    for _ in range(_MAX_PRUNE_PASSES):
        num_empty = len(pruning.empty)
        schema = pruning.prune(schema, "#")
        if len(pruning.empty) == num_empty:
            break
    return schema


def _exclude_from_pattern(schema: dict[str, Any], phrases: Sequence[str]) -> None:
    """Exclude from strings with a pattern the phrases that the pattern may force to be completed."""
    pattern = schema.get("pattern")
    forced = _forced_phrases(pattern, phrases) if isinstance(pattern, str) else []
    written = [excluding(phrase) for phrase in forced if phrase == json.dumps(phrase, ensure_ascii=False)[1:-1]]
    if any(written):
        schema["allOf"] = [*schema.get("allOf", ()), *({"pattern": f"^(?:{one})$"} for one in written if one)]


def _prune_tag(part: Any, phrases: Sequence[str], can_exclude: bool) -> Any:
    """Return a part of a structural tag without alternatives that contain a phrase; the last one is kept.

    can_exclude  whether expressions can exclude texts
    """
    if isinstance(part, list):
        return [_prune_tag(item, phrases, can_exclude) for item in cast("list[Any]", part)]
    if not isinstance(part, dict):
        return part
    fields = cast("dict[str, Any]", part)
    if fields.get("type") == "json_schema" and fields.get("style", "json") == "json" and "json_schema" in fields:
        schema = _prune_schema(fields["json_schema"], phrases, can_exclude)
        return {**fields, "json_schema": {"allOf": [False]} if schema is False else schema}
    pattern = fields.get("pattern")
    if fields.get("type") == "regex" and isinstance(pattern, str):
        forced = _forced_phrases(pattern, phrases) if can_exclude and pattern and "excludes" not in fields else []
        return {**fields, "excludes": forced} if forced else fields
    elements = fields.get("elements")
    if fields.get("type") == "or" and isinstance(elements, list):
        options = cast("list[Any]", elements)
        fields = {**fields, "elements": [one for one in options if not _is_banned_text(one, phrases)] or options}
    return {name: _prune_tag(inner, phrases, can_exclude) for name, inner in fields.items()}


def _is_banned_text(part: Any, phrases: Sequence[str]) -> bool:
    text = part.get("value") if isinstance(part, dict) and part.get("type") == "const_string" else None
    return isinstance(text, str) and _has_phrase(text, phrases)


class _SchemaPruning:
    """empty: the references to definitions that allow nothing."""

    def __init__(self, is_banned: Callable[[object], bool]) -> None:
        self._is_banned = is_banned
        self.empty: set[str] = set()

    def prune(self, schema: object, place: str = "") -> Any:
        """Return what is left of a schema; place: "#" for the root, whose definitions are referenced."""
        if not isinstance(schema, dict):
            return schema
        fields = cast("dict[str, Any]", schema)
        for key in ("$defs", "definitions"):
            if key in fields:
                self._prune_definitions(fields[key], f"{place}/{key}" if place else "")
        if "$ref" in fields:  # keywords next to it may apply or not
            return False if fields["$ref"] in self.empty else fields
        if not self._prune_values(fields) or not self._prune_parts(fields):
            return False
        are_possible = {"object": self._prune_object(fields), "array": self._prune_array(fields)}
        for kind, is_possible in are_possible.items():
            if not is_possible and not _leave_out_type(fields, kind):
                return False
        return fields

    def _prune_definitions(self, definitions: dict[str, Any], place: str) -> None:
        for name in definitions:
            definitions[name] = self.prune(definitions[name])
            if definitions[name] is False and place:
                self.empty.add(f"{place}/{escape_pointer(name)}")

    def _prune_values(self, fields: dict[str, Any]) -> bool:
        """Remove banned values; return whether others are left."""
        if "const" in fields and self._holds_banned(fields["const"]):
            return False
        if fields.get("enum"):
            fields["enum"] = [value for value in fields["enum"] if not self._holds_banned(value)]
            return bool(fields["enum"])
        return True

    def _holds_banned(self, value: object) -> bool:
        """Return whether a value is or contains a banned text or integer; other values have several spellings."""
        if isinstance(value, dict):
            return any(self._holds_banned(part) for item in cast("dict[str, object]", value).items() for part in item)
        if isinstance(value, list):
            return any(map(self._holds_banned, cast("list[object]", value)))
        return isinstance(value, str | int) and not isinstance(value, bool) and self._is_banned(value)

    def _prune_parts(self, fields: dict[str, Any]) -> bool:
        """Remove alternatives that allow nothing; return whether anything is left."""
        for key in ("anyOf", "oneOf", "allOf"):
            if key not in fields:
                continue
            parts = [self.prune(part) for part in fields[key]]
            left = [part for part in parts if part is not False]
            if not left or (key == "allOf" and len(left) < len(parts)):
                return False
            fields[key] = left
        return True

    def _prune_object(self, fields: dict[str, Any]) -> bool:
        """Remove properties that allow nothing; return whether objects without them are allowed."""
        if "additionalProperties" in fields:
            fields["additionalProperties"] = self.prune(fields["additionalProperties"])
        is_closed = fields.get("additionalProperties") is False and "patternProperties" not in fields
        required: list[str] = fields.get("required", [])
        if any(map(self._is_banned, required)):
            return False
        named: dict[str, Any] = fields.get("properties", {})
        for name in list(named):
            named[name] = False if self._is_banned(name) else self.prune(named[name])
            if named[name] is not False:
                continue
            if name in required:
                return False
            if is_closed:
                del named[name]
        return True

    def _prune_array(self, fields: dict[str, Any]) -> bool:
        """Make arrays end before an item that allows nothing; return whether that is allowed."""
        parts = [self.prune(part) for part in fields.get("prefixItems", ())]
        num_possible = parts.index(False) if False in parts else len(parts)
        if parts:
            fields["prefixItems"] = parts[:num_possible]
        if "items" in fields:
            fields["items"] = self.prune(fields["items"])
        if num_possible == len(parts) and fields.get("items") is not False:
            return True
        if num_possible == 0:
            fields.pop("prefixItems", None)
        fields.pop("items", None)
        fields["maxItems"] = min(num_possible, fields.get("maxItems", num_possible))
        return fields.get("minItems", 0) <= num_possible


def _leave_out_type(fields: dict[str, Any], kind: str) -> bool:
    """Exclude objects or arrays from a schema; return whether it allows anything else."""
    kinds = fields.get("type", _ALL_TYPES)
    fields["type"] = [name for name in ([kinds] if isinstance(kinds, str) else kinds) if name != kind]
    return bool(fields["type"])


def excluding(phrase: str) -> str | None:
    """Return an expression for whole texts without a phrase; None if it would be long. The phrase must not be empty.

    The state of the automaton that searches for the phrase (Knuth, Morris and Pratt, 1977) is the length of the phrase's prefix
    with which the text ends. The states are eliminated from the last one on: each is entered from the state below by one
    character only.
    """
    length = len(phrase)
    edges = [_edges(phrase, state) for state in range(length)]
    finish = ""  # how a text that has reached the state may end without reaching a lower one
    for state in range(length - 1, 0, -1):
        loop = edges[state].pop(state, "")
        enter = f"[{_escape(phrase[state - 1])}]" + (f"(?:{loop})*" if loop else "")
        for target, expression in edges[state].items():
            found = edges[state - 1].get(target)
            onward = f"{enter}(?:{expression})"
            edges[state - 1][target] = onward if found is None else f"{found}|{onward}"
        finish = f"(?:{enter}{finish})?"
        if len(finish) + sum(map(len, edges[state - 1].values())) > MAX_EXPRESSION_CHARACTERS:
            return None
    return f"(?:{edges[0][0]})*{finish}"


def _edges(phrase: str, state: int) -> dict[int, str]:
    """Return the characters that lead from a state to itself and to lower ones, by target state."""
    seen = phrase[:state]
    found: dict[int, str] = {}
    leading = {phrase[state]}
    for character in dict.fromkeys(phrase):
        text = seen + character
        target = next(size for size in range(state + 1, -1, -1) if text.endswith(phrase[:size]))
        if 0 < target <= state:
            found[target] = f"[{_escape(character)}]"
            leading.add(character)
    return {0: f"[^{''.join(map(_escape, sorted(leading)))}]", **found}


def _escape(character: str) -> str:
    return rf"\x{{{ord(character):X}}}"


def can_continue(grammar: Grammar) -> bool:
    """Return whether two trial outputs of at most 32 tokens succeed: a mask may be too complex to be filled."""
    for stride in _TRIAL_STRIDES:
        matcher = cast("MaskedMatcher", grammar.new_matcher())
        words = np.zeros(matcher.end_token_id // 32 + 1, dtype=np.int32)
        for count in range(1, _TRIAL_TOKENS + 1):
            if fill_mask(matcher, words) is not None:
                return False
            allowed = _token_ids(words)
            allowed = allowed[allowed != matcher.end_token_id]
            if len(allowed) == 0 or matcher.advance(int(allowed[stride * count % len(allowed)])) is not None:
                break
            if matcher.is_complete:
                break
    return True
