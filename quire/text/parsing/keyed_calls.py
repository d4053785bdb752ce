"""Calls whose arguments are keys and values in plain text; converted to JSON incrementally."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.text.parsing.call_draft import CallDraft
from quire.text.parsing.formats import KeyedValues
from quire.text.parsing.json_calls import pass_value
from quire.text.parsing.reader import MAX_SKIPPED_SPACES, OutputEndError, Reader, Steps
from quire.text.parsing.tools import to_json, types_of

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = frozenset(("string",))
_ANY = frozenset[str]()


def escape_piece(text: str) -> str:
    """Return a part of a text, escaped for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_keyed_call(draft: CallDraft, body: KeyedValues) -> Steps[None]:
    """Read the name, then pairs until the call ends; truncated text leaves the arguments incomplete."""
    reader = draft.reader
    yield from reader.skip_space()
    if body.name_opens:
        yield from reader.expect(body.name_opens)
    name = yield from reader.read_until(body.name_ends, body.name_stops)
    tool = draft.accept(name.strip())
    separator = "{"
    yield from reader.skip_space()
    if body.has_json and (yield from reader.peek()) == "{":
        yield from pass_value(reader, draft.write)
        yield from reader.match(body.ends, skips_space=True)
        return
    while True:
        yield from reader.skip_space()
        marker = yield from reader.expect((*body.pair_opens, *body.ends))
        if marker in body.ends:
            draft.write("{}" if separator == "{" else "}")
            return
        key = (yield from reader.read_until(body.key_ends)).strip()
        key_end = max((end for end in body.key_ends if reader.text.endswith(end, 0, reader.position)), key=len)
        if body.value_opens:
            yield from reader.skip_space()
            yield from reader.expect(body.value_opens)
        draft.write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        types = _STRING if key_end in body.text_key_ends else _ANY if key_end in body.json_key_ends else types_of(tool, key)
        if types == _STRING:
            draft.write('"')
            yield from _pass_value(reader, body, lambda text: draft.write(escape_piece(text)))
            draft.write('"')
        else:
            yield from _pass_typed(reader, body, draft.write, types)


def _pass_typed(reader: Reader, body: KeyedValues, write: Callable[[str], None], types: frozenset[str]) -> Steps[None]:
    pieces: list[str] = []
    try:
        yield from _pass_value(reader, body, pieces.append)
    except OutputEndError:
        write("".join(pieces))
        raise
    write(to_json("".join(pieces), types))


def _pass_value(reader: Reader, body: KeyedValues, write: Callable[[str], None]) -> Steps[None]:
    """Write the text of a value, without the line breaks of the format, and read the marker that ends it."""
    if body.trims_newlines:
        yield from reader.match(("\n",))
    held = ""
    while True:
        at, marker = find_end(reader, body.value_ends)
        text = held + reader.take(at)
        held = "\n" if body.trims_newlines and text.endswith("\n") else ""
        write(text[: len(text) - len(held)])
        if not marker:
            yield from reader.wait()
        elif (yield from _is_end(reader, body, len(marker))):
            reader.take(reader.position + len(marker))
            return
        else:
            write(held + reader.take(reader.position + len(marker)))
            held = ""


def find_end(reader: Reader, ends: tuple[str, ...]) -> tuple[int, str]:
    """Return the position and text of a value end, or the end of the text that is certainly not part of one, and ""."""
    text, start = reader.text, reader.position
    found = [(at, end) for end in ends if (at := text.find(end, start)) >= 0]
    if found:
        return min(found)
    stop = len(text)
    for end in ends:
        for at in range(max(start, len(text) - len(end) + 1), stop):
            if end.startswith(text[at:]):
                stop = at
                break
    return stop, ""


def _is_end(reader: Reader, body: KeyedValues, offset: int) -> Steps[bool]:
    """Whether the text after `offset` characters can only follow a value; the end of the output can."""
    options = (*body.pair_opens, *body.ends)
    longest = max(map(len, options))
    num_marker = offset
    while True:
        found = _SPACE.match(reader.text, reader.position + offset)
        offset = offset if found is None else found.end() - reader.position
        at = reader.position + offset
        rest = reader.text[at : at + longest]
        reader.num_steps += longest
        if any(rest.startswith(option) for option in options):
            return True
        if offset - num_marker > MAX_SKIPPED_SPACES or not any(option.startswith(rest) for option in options):
            return False
        if reader.is_closed:
            return True
        yield from reader.wait()
