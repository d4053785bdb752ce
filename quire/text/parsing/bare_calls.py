"""Calls whose arguments are an object with unquoted keys and words and marked strings; converted to JSON incrementally."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.text.parsing.call_draft import CallDraft
from quire.text.parsing.formats import BareObject
from quire.text.parsing.keyed_calls import escape_piece, find_end
from quire.text.parsing.reader import OutputEndError, Reader, RefusedError, Steps
from quire.text.parsing.tools import to_json

MAX_NESTING = 64
_WORD_END = re.compile(r"[,}\]]")
_ANY = frozenset[str]()

Write = Callable[[str], None]


def read_bare_call(draft: CallDraft, body: BareObject) -> Steps[None]:
    """Read the name and the object; truncated text leaves the arguments incomplete. Raises RefusedError if it is not a call."""
    reader = draft.reader
    yield from reader.skip_space()
    yield from reader.expect(body.prefixes)
    draft.accept((yield from reader.read_until((), ("{",))).strip())
    yield from _pass_object(reader, body, draft.write, 0)


def _pass_object(reader: Reader, body: BareObject, write: Write, depth: int) -> Steps[None]:
    yield from reader.expect(("{",))
    write("{")
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.match(("}",))) is not None:
            break
        key = yield from _read_key(reader, body)
        write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from _pass_value(reader, body, write, depth + 1)
        yield from reader.skip_space()
        if (yield from reader.expect((",", "}"))) == "}":
            break
    write("}")


def _pass_array(reader: Reader, body: BareObject, write: Write, depth: int) -> Steps[None]:
    yield from reader.expect(("[",))
    write("[")
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.match(("]",))) is not None:
            break
        write(separator)
        separator = ", "
        yield from _pass_value(reader, body, write, depth + 1)
        yield from reader.skip_space()
        if (yield from reader.expect((",", "]"))) == "]":
            break
    write("]")


def _pass_value(reader: Reader, body: BareObject, write: Write, depth: int) -> Steps[None]:
    if depth > MAX_NESTING:
        raise RefusedError
    yield from reader.skip_space()
    char = yield from reader.peek()
    if char == "{":
        yield from _pass_object(reader, body, write, depth)
    elif char == "[":
        yield from _pass_array(reader, body, write, depth)
    elif (yield from reader.match(body.quotes)) is not None:
        write('"')
        yield from _pass_string(reader, body, lambda text: write(escape_piece(text)))
        write('"')
    else:
        yield from _pass_word(reader, write)


def _read_key(reader: Reader, body: BareObject) -> Steps[str]:
    if (yield from reader.match(body.quotes)) is None:
        return (yield from reader.read_until((":",))).strip()
    pieces: list[str] = []
    yield from _pass_string(reader, body, pieces.append)
    yield from reader.skip_space()
    yield from reader.expect((":",))
    return "".join(pieces)


def _pass_string(reader: Reader, body: BareObject, write: Write) -> Steps[None]:
    """Write a string and read the quote that ends it."""
    while True:
        at, quote = find_end(reader, body.quotes)
        write(reader.take(at))
        if quote:
            reader.take(reader.position + len(quote))
            return
        if reader.is_closed:
            write(reader.take(len(reader.text)))
        yield from reader.wait()


def _pass_word(reader: Reader, write: Write) -> Steps[None]:
    """Write a number, a JSON literal, or otherwise a string; it ends before a comma or bracket."""
    pieces: list[str] = []
    while True:
        found = _WORD_END.search(reader.text, reader.position)
        pieces.append(reader.take(len(reader.text) if found is None else found.start()))
        if found is not None:
            write(to_json("".join(pieces).strip(), _ANY))
            return
        try:
            yield from reader.wait()
        except OutputEndError:
            write("".join(pieces))
            raise
