"""ReasoningPrefix: the free text before an output's JSON, usually reasoning, and the tokens that open and close it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from quire.grammar.special_tokens import SpecialTexts
from quire.grammar.vocabulary import Vocabulary

FIRST_TEXT_PLACE = 3
"""Places below are places in JSON, see shortest_completion.py."""
_MAX_MARKERS = 512
_SPECIAL = 256
"""The symbols of a text are its bytes, and a special token's id plus this offset."""

Symbols = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReasoningPrefix:
    """Markers that open the text, () if it begins with the output, and that close it, () if there is none.

    An output that begins with none of the openers is JSON at once.
    """

    openers: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()


@lru_cache(maxsize=256)
def text_before(source: str) -> ReasoningPrefix | None:
    """Return the text before the JSON of a structural tag, None if the tag is more than JSON after an optional text."""
    tag: Any = json.loads(source)
    found = _read(tag.get("format"))
    if found is None or sum(map(len, (*found.openers, *found.closes))) > _MAX_MARKERS:
        return None
    return found


def _read(item: Any) -> ReasoningPrefix | None:
    kind, elements = _elements(item)
    if kind == "or":
        options = [_read(element) for element in elements]
        return _either([option for option in options if option is not None]) if None not in options else None
    if kind == "sequence" and len(elements) > 1:
        tags = _text_tags(elements[0])
        if tags and _is_json({"type": "sequence", "elements": elements[1:]}):
            openers = {str(tag.get("begin", "")): None for tag in tags}
            closes = {close: None for tag in tags for close in _ends(tag)}
            if not closes or "" in closes or ("" in openers and len(openers) > 1):
                return None
            return ReasoningPrefix(() if "" in openers else tuple(openers), tuple(closes))
    return ReasoningPrefix() if _is_json(item) else None


def _either(options: list[ReasoningPrefix]) -> ReasoningPrefix | None:
    """Return the combined prefix of several options; if one begins with text, all must be equal."""
    if any(option.closes and not option.openers for option in options):
        return options[0] if all(option == options[0] for option in options) else None
    openers = dict.fromkeys(text for option in options for text in option.openers)
    return ReasoningPrefix(tuple(openers), tuple(dict.fromkeys(text for option in options for text in option.closes)))


def _text_tags(item: Any) -> list[dict[str, Any]]:
    """Return the tags with free text among which one may be chosen, [] if something else may come, too."""
    kind, elements = _elements(item)
    if kind == "or":
        found = [_text_tags(element) for element in elements]
        return [tag for tags in found for tag in tags] if all(found) else []
    content: Any = item.get("content") if kind == "tag" else None
    return [item] if isinstance(content, dict) and cast("dict[str, Any]", content).get("type") == "any_text" else []


def _ends(tag: dict[str, Any]) -> list[str]:
    ends = tag.get("end")
    return [str(end) for end in cast("list[object]", ends)] if isinstance(ends, list) else [str(ends)]


def _is_json(item: Any) -> bool:
    """Return whether a format is JSON, possibly with fixed text around it."""
    kinds = list(_leaves(item))
    return "json" in kinds and all(kind in ("json", "const_string", "regex") for kind in kinds)


def _leaves(item: Any) -> Iterator[str]:
    """Yield the types of the formats without inner formats; "json" for a schema in JSON style."""
    kind, elements = _elements(item)
    if kind in ("sequence", "or", "tags_with_separator"):
        for element in elements:
            yield from _leaves(element)
    elif kind == "tag":
        yield from _leaves(item.get("content"))
    elif kind == "json_schema" and item.get("style", "json") == "json":
        yield "json"
    else:
        yield kind


def _elements(item: Any) -> tuple[str, list[Any]]:
    fields = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
    kind = str(fields.get("type"))
    elements = fields.get("tags" if kind == "tags_with_separator" else "elements")
    return kind, cast("list[Any]", elements) if isinstance(elements, list) else []


class TextPlaces:
    """States of an output before its JSON: one for each prefix of an opener or a close that was read last."""

    def __init__(self, text: ReasoningPrefix, vocabulary: Vocabulary, special: SpecialTexts) -> None:
        self._vocabulary = vocabulary
        self._special = special
        self._openers, self._closes = ({self._symbols(text) for text in texts} for texts in (text.openers, text.closes))
        begun = [(False, part) for part in _beginnings(self._openers)] + [(True, part) for part in _beginnings(self._closes)]
        self._places = {state: FIRST_TEXT_PLACE + at for at, state in enumerate(begun)}
        self._states = {place: state for state, place in self._places.items()}
        self.start = self._places[not text.openers, ()]
        self._closings = tuple(ids for ids in map(self._spell, text.closes) if ids)

    def closings(self, place: int) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each text that ends the free text, () if the output is not in it."""
        return self._closings if self._states[place][0] else ()

    def after(self, place: int, token_id: int) -> tuple[int | None, bytes]:
        """Return the state after one more token; None, and the part of the token that is JSON, if the text is over."""
        symbols = self._symbols_of(token_id)
        state = self._states[place]
        for at, symbol in enumerate(symbols):
            is_inside, seen = state
            longer = (*seen, symbol)
            if not is_inside and longer in self._openers:
                state = (True, ())
            elif not is_inside and (False, longer) not in self._places:
                return None, _bytes_of((*longer, *symbols[at + 1 :]))
            elif is_inside and any(longer[-len(close) :] == close for close in self._closes):
                return None, _bytes_of(symbols[at + 1 :])
            else:
                suffixes = (longer[start:] for start in range(len(longer) + 1))
                state = (is_inside, next(part for part in suffixes if (is_inside, part) in self._places))
        return self._places[state], b""

    def _symbols_of(self, token_id: int) -> Symbols:
        vocabulary = self._vocabulary
        if token_id in vocabulary.special_token_ids:
            return (_SPECIAL + token_id,)
        return tuple(vocabulary.tokens[token_id]) if token_id < vocabulary.size else ()

    def _symbols(self, text: str) -> Symbols:
        parts = self._special.split(text)
        return tuple(symbol for part in parts for symbol in ((_SPECIAL + part,) if isinstance(part, int) else part.encode()))

    def _spell(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, () if no tokens spell it."""
        found: list[int] = []
        for part in self._special.split(text):
            found += [part] if isinstance(part, int) else self._vocabulary.encode(part)
        spelled = tuple(symbol for token_id in found for symbol in self._symbols_of(token_id))
        return tuple(found) if spelled == self._symbols(text) else ()


def _beginnings(markers: set[Symbols]) -> list[Symbols]:
    return sorted({marker[:length] for marker in markers for length in range(len(marker))} | {()})


def _bytes_of(symbols: Symbols) -> bytes:
    return bytes(symbol for symbol in symbols if symbol < _SPECIAL)
