"""Distinguishes special-token text in clients' messages from the template's own special tokens, so that text cannot end a
turn."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.base.errors import RequestError

_FIRST_PRIVATE, _LAST_PRIVATE = 0x100000, 0x10FFFD
_PRIVATE = re.compile("[\U00100000-\U0010fffd]")
_PIECE_CHARACTERS = 1 << 16  # searched at a time: a search holds the GIL


def matches(
    pattern: re.Pattern[str], longest: int, text: str, start: int = 0, end: int | None = None
) -> Iterator[re.Match[str]]:
    """Like `pattern.finditer`, one piece of the text at a time, so that other threads can run in between.

    pattern  matches no empty text, has no look-around, and matches at most `longest` characters
    """
    position, end = start, len(text) if end is None else min(end, len(text))
    while position < end:
        edge = min(position + _PIECE_CHARACTERS, end)
        found = pattern.search(text, position, min(edge + longest - 1, end))
        if found is None or found.start() >= edge:  # a match that begins after the edge may have been truncated
            position = edge
        else:
            yield found
            position = found.end()


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a conversation, and the parts of it that only look like special tokens.

    literal_spans  [start, end) of spellings of special tokens that clients wrote, in order
    """

    text: str
    literal_spans: tuple[tuple[int, int], ...] = ()

    def cut(self, end: int) -> RenderedChat:
        """Return the first `end` characters."""
        return RenderedChat(
            self.text[:end], tuple((start, min(stop, end)) for start, stop in self.literal_spans if start < end)
        )


class SpellingHider:
    """Replaces spellings of tokens in messages by placeholders, and finds them again in the rendered text."""

    def __init__(self, spellings: Iterable[str]) -> None:
        ordered = sorted(spellings, key=len, reverse=True)
        self._longest = len(ordered[0]) if ordered else 1
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._found: list[str] = []
        self._opener = self._closer = ""

    def hide(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list[dict[str, Any]], Any]:
        """Return messages and tools with placeholders; of assistant messages only the calls are searched."""
        self._choose_marks([messages, tools])
        return [self._hide_message(message) for message in messages], self._hide_value(tools)

    def show(self, text: str) -> RenderedChat:
        """Return the text with the placeholders replaced by the spellings."""
        if not self._found:
            return RenderedChat(text)
        opener, closer = (f"(?:{mark}|{re.escape(_escape(mark))})" for mark in (self._opener, self._closer))
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        start, length = 0, 0
        placeholder = re.compile(f"{opener}([0-9]+){closer}")
        longest = 2 * len(_escape(self._opener)) + len(str(len(self._found)))
        for found in matches(placeholder, longest, text):
            spelling = self._found[int(found.group(1))]
            pieces += [text[start : found.start()], spelling]
            length += found.start() - start
            spans.append((length, length + len(spelling)))
            length += len(spelling)
            start = found.end()
        shown = "".join([*pieces, text[start:]])
        if self._opener in shown or self._closer in shown:
            raise RequestError("the chat template cuts through the spelling of a special token in a message", "messages")
        return RenderedChat(shown, tuple(spans))

    def _choose_marks(self, value: Any) -> None:
        """Choose two private-use characters that the messages do not contain."""
        used = {found.group() for text in _texts(value) if not text.isascii() for found in matches(_PRIVATE, 1, text)}
        free = (chr(code) for code in range(_FIRST_PRIVATE, _LAST_PRIVATE) if chr(code) not in used)
        self._opener, self._closer = next(free, ""), next(free, "")
        if not self._closer:
            raise RequestError("messages use all characters for private use", "messages")

    def _hide_message(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            return {**message, "tool_calls": self._hide_value(calls)} if calls else message
        return {name: value if name == "role" else self._hide_value(value) for name, value in message.items()}

    def _hide_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            return {self._hide_value(name): self._hide_value(item) for name, item in value.items()}
        return [self._hide_value(item) for item in value] if isinstance(value, list) else value

    def _hide_text(self, text: str) -> str:
        pieces: list[str] = []
        start = 0
        for found in matches(self._pattern, self._longest, text):
            pieces += [text[start : found.start()], self._replace(found)]
            start = found.end()
        return "".join([*pieces, text[start:]]) if pieces else text

    def _replace(self, found: re.Match[str]) -> str:
        self._found.append(found.group())
        return f"{self._opener}{len(self._found) - 1}{self._closer}"


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, including names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _escape(mark: str) -> str:
    return json.dumps(mark)[1:-1]
