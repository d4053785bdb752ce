"""Calls written as Python does, name(key=value, ...), with the values converted to JSON incrementally."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable

from quire.text.parsing.call_draft import CallDraft
from quire.text.parsing.reader import Reader, RefusedError, Steps

MAX_NESTING = 64
_MAX_NUMBER_CHARACTERS = 400
_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z0-9_.+\-]*")
_STRING_STOPS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}

Write = Callable[[str], None]


def read_pythonic_call(draft: CallDraft, suffix: str = "", *, has_list: bool = True) -> Steps[None]:
    """Read one call, in a list or alone; `suffix` follows its name. Raises RefusedError if it is not a call."""
    reader = draft.reader
    yield from reader.skip_space()
    if has_list and not draft.is_in_list:
        yield from reader.expect(("[",))
        draft.is_in_list = True
        yield from reader.skip_space()
    name = yield from _read_word(reader, _NAME)
    yield from reader.skip_space()
    yield from reader.expect(("(",))
    if not name.endswith(suffix):
        raise RefusedError
    draft.accept(name.removesuffix(suffix))
    write = draft.write
    write("{")
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.match((")",))) is not None:
            write("}")
            return
        key = yield from _read_word(reader, _NAME)
        yield from reader.skip_space()
        yield from reader.expect(("=",))
        if not key:
            raise RefusedError
        write(f"{separator}{json.dumps(key)}: ")
        separator = ", "
        yield from _pass_value(reader, write, 0)
        yield from reader.skip_space()
        if (yield from reader.peek()) != ")":
            yield from reader.expect((",",))


def _read_word(reader: Reader, pattern: re.Pattern[str]) -> Steps[str]:
    pieces: list[str] = []
    while True:
        found = pattern.match(reader.text, reader.position)
        pieces.append(reader.take(reader.position if found is None else found.end()))
        if reader.position < len(reader.text):
            return "".join(pieces)
        yield from reader.wait()


def _pass_value(reader: Reader, write: Write, depth: int) -> Steps[None]:
    yield from reader.skip_space()
    char = yield from reader.peek()
    if char in _CLOSERS:
        if depth >= MAX_NESTING:
            raise RefusedError
        yield from _pass_container(reader, write, char, depth)
    elif char in _STRING_STOPS:
        write('"')
        yield from _pass_string(reader, lambda text: write(json.dumps(text, ensure_ascii=False)[1:-1]), char)
        write('"')
    else:
        word = yield from _read_word(reader, _WORD)
        if not word:
            raise RefusedError
        write(_word_to_json(word))


def _pass_container(reader: Reader, write: Write, opener: str, depth: int) -> Steps[None]:
    """Write a list, a tuple as a list, or a dict, whose keys become strings."""
    closer = _CLOSERS[opener]
    reader.take(reader.position + 1)
    is_object = opener == "{"
    write("{" if is_object else "[")
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.match((closer,))) is not None:
            write("}" if is_object else "]")
            return
        write(separator)
        separator = ", "
        if is_object:
            key: list[str] = []
            yield from _pass_value(reader, key.append, depth + 1)
            text = "".join(key)
            write(text if text.startswith('"') else json.dumps(text))
            write(": ")
            yield from reader.skip_space()
            yield from reader.expect((":",))
        yield from _pass_value(reader, write, depth + 1)
        yield from reader.skip_space()
        if (yield from reader.peek()) != closer:
            yield from reader.expect((",",))


def _pass_string(reader: Reader, write: Write, quote: str) -> Steps[None]:
    """Write the characters of a string whose opening quote is next."""
    reader.take(reader.position + 1)
    while True:
        found = _STRING_STOPS[quote].search(reader.text, reader.position)
        write(reader.take(len(reader.text) if found is None else found.start()))
        if found is None:
            yield from reader.wait()
        elif found.group() == quote:
            reader.take(found.end())
            return
        else:
            reader.take(found.end())
            write((yield from _read_escape(reader)))


def _read_escape(reader: Reader) -> Steps[str]:
    char = yield from reader.peek()
    reader.take(reader.position + 1)
    num_digits = _HEX_ESCAPES.get(char)
    if num_digits is None:
        return _ESCAPES.get(char, char if char in "\\'\"" else f"\\{char}")
    while len(reader.text) - reader.position < num_digits and not reader.is_closed:
        yield from reader.wait()
    digits = reader.take(min(reader.position + num_digits, len(reader.text)))
    try:
        code = int(digits, 16)
    except ValueError:
        return f"\\{char}{digits}"
    return chr(code) if code < 0xD800 or 0xDFFF < code <= 0x10FFFF else "\ufffd"


def _word_to_json(word: str) -> str:
    """Return a number or a word as JSON; an unknown name becomes a string."""
    if _NUMBER.fullmatch(word):
        return word
    if word in _WORDS or len(word) > _MAX_NUMBER_CHARACTERS:
        return _WORDS.get(word) or json.dumps(word)
    try:
        value = ast.literal_eval(word)
        return json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(word)
