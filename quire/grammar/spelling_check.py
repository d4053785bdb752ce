"""Checks before a request runs whether a vocabulary without a token for each byte can spell what a constraint requires."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from quire.contracts.constraint import Constraint, Grammar
from quire.grammar.errors import GrammarError
from quire.grammar.masks import fill_mask
from quire.grammar.matcher import MaskedMatcher
from quire.grammar.schema_check import iter_tag_schemas
from quire.grammar.schema_faults import NOTHING_MATCHES
from quire.grammar.schema_walk import iter_schemas
from quire.grammar.special_tokens import SpecialTexts
from quire.grammar.vocabulary import Vocabulary

_MAX_PLACES = 128
"""Maximum number of states of outputs that are checked for dead ends."""
_MAX_ALIKE = 4
"""Maximum number of states with the same mask from which some tokens are followed."""
_MAX_FOLLOWED = 16
_TAG_TEXTS = frozenset(("value", "begin", "end", "separator", "triggers"))


def check_texts(constraint: Constraint, vocabulary: Vocabulary) -> None:
    """Raise GrammarError for a text of a choice, a JSON schema or a structural tag that no tokens spell."""
    if vocabulary.spelling.is_complete:
        return
    for text in _texts_of(constraint, vocabulary):
        vocabulary.spelling.check(text)


def _texts_of(constraint: Constraint, vocabulary: Vocabulary) -> Iterator[str]:
    if constraint.kind == "choice":
        yield from constraint.parsed()
    elif constraint.kind == "json_schema":
        yield from _schema_texts(constraint.parsed())
    elif constraint.kind == "structural_tag":
        tag = constraint.parsed()
        for text in _tag_texts(tag):
            yield from (part for part in SpecialTexts.of(vocabulary).split(text) if isinstance(part, str))
        for _, schema in iter_tag_schemas(tag, ""):
            yield from _schema_texts(schema)


def _schema_texts(schema: object) -> Iterator[str]:
    """Yield names and values, without JSON quoting: a string may be a part of a token."""
    for _, fields in iter_schemas(schema):
        for key in ("properties", "const"):
            if key in fields:
                yield from _strings(list(fields[key]) if key == "properties" else fields[key])
        for key in ("required", "enum"):
            yield from _strings(fields.get(key))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield json.dumps(value, ensure_ascii=False)
    elif isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        yield from _strings([*fields, *fields.values()])
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _strings(item)


def _tag_texts(part: Any) -> Iterator[str]:
    if isinstance(part, list):
        for item in cast("list[Any]", part):
            yield from _tag_texts(item)
    elif isinstance(part, dict):
        for name, item in cast("dict[str, Any]", part).items():
            texts = cast("list[Any]", item) if isinstance(item, list) else [item]
            if name in _TAG_TEXTS:
                yield from (text for text in texts if isinstance(text, str))
            if name not in ("json_schema", "schema"):
                yield from _tag_texts(item)


def check_places(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Follow outputs of a grammar; raise GrammarError, with the text, at the first state in which no token can follow."""
    if vocabulary.spelling.is_complete:
        return
    alike: Counter[bytes] = Counter()
    waiting = deque([(cast("MaskedMatcher", grammar.new_matcher()), b"")])
    words = np.zeros(vocabulary.num_mask_words, dtype=np.int32)
    for _ in range(_MAX_PLACES):
        if not waiting:
            return
        matcher, text = waiting.popleft()
        forced = matcher.forced_bytes()
        error = fill_mask(matcher, words)
        if error is not None and NOTHING_MATCHES not in error:
            return  # it is too complex, which is reported elsewhere
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if error is not None or len(allowed) == 0:
            raise _dead_end(text, forced, vocabulary)
        alike[words.tobytes()] += 1
        if alike[words.tobytes()] > _MAX_ALIKE:
            continue
        followed = allowed[allowed < vocabulary.size]
        for token_id in followed[:: len(followed) // _MAX_FOLLOWED + 1].tolist():
            following = matcher.fork()
            if following.advance(token_id) is None and not following.is_complete:
                waiting.append((following, text + vocabulary.tokens[token_id]))


def _dead_end(text: bytes, forced: bytes, vocabulary: Vocabulary) -> GrammarError:
    """Return the error for a state in which nothing can follow; forced: the text that would have to, if known."""
    try:
        vocabulary.spelling.check(forced.decode("utf-8", errors="ignore"))
    except GrammarError as error:
        return error
    where = f" after {text[-60:].decode('utf-8', errors='replace')!r}" if text else ""
    return GrammarError(f"no tokens of this model spell the text that has to come next{where}")
