"""Calls whose arguments are JSON: an object with name and arguments, or a name in a header before the object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.text.parsing.call_draft import CallDraft
from quire.text.parsing.formats import JsonObject, NamedJson
from quire.text.parsing.pythonic_calls import read_pythonic_call
from quire.text.parsing.reader import OutputEndError, Reader, RefusedError, Steps

MAX_NESTING = 256
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id")


def read_object_call(draft: CallDraft, body: JsonObject) -> Steps[None]:
    """Read {"name": ..., "arguments": ...} in any order; unknown keys are skipped, unless the body is strict."""
    reader = draft.reader
    yield from reader.skip_space()
    char = yield from reader.peek()
    if char == "[" and not draft.is_in_list:
        reader.take(reader.position + 1)
        draft.is_in_list = True
        yield from reader.skip_space()
    elif body.has_dotted and char.isalpha():
        yield from read_pythonic_call(draft, ".call", has_list=False)
        return
    yield from reader.expect(("{",))
    held: list[str] = []
    has_arguments = False
    is_first = True
    while True:
        yield from reader.skip_space()
        if is_first and (yield from reader.peek()) == "}":
            raise RefusedError
        is_first = False
        key = yield from _read_key(reader)
        if key == body.name_key and not draft.is_accepted:
            draft.accept((yield from _read_string(reader)))
            draft.write("".join(held))
        elif key in _ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            yield from _pass_arguments(reader, draft.write if draft.is_accepted else held.append)
        elif body.is_strict and key not in _OTHER_KEYS and not draft.is_accepted:
            raise RefusedError
        else:
            yield from pass_value(reader, _ignore)
        yield from reader.skip_space()
        if (yield from reader.expect((",", "}"))) == "}":
            break
    if not draft.is_accepted:
        raise RefusedError
    if not has_arguments:
        draft.write("{}")


def read_name_as_key(draft: CallDraft) -> Steps[None]:
    """Read {"get_weather": {...}}, the first one in a list, or a single one."""
    reader = draft.reader
    yield from reader.skip_space()
    if not draft.is_in_list and (yield from reader.match(("[",))) is not None:
        draft.is_in_list = True
        yield from reader.skip_space()
    yield from reader.expect(("{",))
    yield from reader.skip_space()
    draft.accept((yield from _read_key(reader)))
    yield from _pass_arguments(reader, draft.write)
    yield from reader.skip_space()
    yield from reader.expect(("}",))


def read_named_call(draft: CallDraft, body: NamedJson) -> Steps[None]:
    """Read a name in a header, then an object of arguments; without one they are {}."""
    reader = draft.reader
    if body.has_list:
        yield from reader.skip_space()
        if (yield from reader.peek()) == "[":
            yield from read_object_call(draft, JsonObject())
            return
    if body.prefixes:
        yield from reader.skip_space()
        yield from reader.expect(body.prefixes)
    header = (yield from reader.read_until(body.name_ends, body.name_stops)).strip()
    if body.has_own_id:
        draft.accept(header.removeprefix("functions.").rpartition(":")[0] or header, header)
    else:
        mark = next((mark for mark in body.id_marks if mark in header), None)
        name, _, own_id = header.partition(mark) if mark else (header, "", "")
        draft.accept(name.strip(), own_id.strip() or None)
    yield from reader.match(body.fences, skips_space=True)
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        if reader.is_closed and any(fence.startswith(reader.text[reader.position :]) for fence in body.fences):
            reader.take(len(reader.text))
            raise OutputEndError
        draft.write("{}")
        return
    yield from pass_value(reader, draft.write)
    yield from reader.match(body.closing_fences, skips_space=True)


def pass_value(reader: Reader, write: Callable[[str], None]) -> Steps[None]:
    """Read one JSON value and write it unchanged; its end is found by counting brackets outside of strings.

    Raises RefusedError if brackets are nested deeper than MAX_NESTING, OutputEndError if the value is truncated.
    """
    char = yield from reader.peek()
    if char not in '{["':
        yield from _pass_scalar(reader, write)
        return
    depth, in_string, is_escaped = 0, False, False
    while True:
        text, end = reader.text, reader.position
        while True:
            if is_escaped and end < len(text):
                is_escaped, end = False, end + 1
            found = (_INSIDE if in_string else _OUTSIDE).search(text, end)
            if found is None:
                end = len(text)
                break
            end, char = found.end(), text[found.start()]
            if char == "\\":
                is_escaped = True
            elif char == '"':
                in_string = not in_string
            else:
                depth += 1 if char in "{[" else -1
            if (depth == 0 and not in_string) or depth > MAX_NESTING:
                break
        write(reader.take(end))
        if depth > MAX_NESTING:
            raise RefusedError
        if depth == 0 and not in_string:
            return
        yield from reader.wait()


def _pass_scalar(reader: Reader, write: Callable[[str], None]) -> Steps[None]:
    """Write a number or a literal. Raises RefusedError if there is none."""
    num_characters = 0
    while True:
        found = _SCALAR_END.search(reader.text, reader.position)
        piece = reader.take(len(reader.text) if found is None else found.start())
        num_characters += len(piece)
        write(piece)
        if found is not None and num_characters == 0:
            raise RefusedError
        if found is not None:
            return
        yield from reader.wait()


def _pass_arguments(reader: Reader, write: Callable[[str], None]) -> Steps[None]:
    """Write the value of the arguments; JSON text that some models put into a string is unquoted."""
    if (yield from reader.peek()) != '"':
        yield from pass_value(reader, write)
        return
    pieces: list[str] = []
    try:
        yield from pass_value(reader, pieces.append)
    except OutputEndError:
        write("".join(pieces))
        raise
    text = "".join(pieces)
    write(_decode(text) or text)


def _read_key(reader: Reader) -> Steps[str]:
    key = yield from _read_string(reader)
    yield from reader.skip_space()
    yield from reader.expect((":",))
    yield from reader.skip_space()
    return key


def _read_string(reader: Reader) -> Steps[str]:
    if (yield from reader.peek()) != '"':
        raise RefusedError
    pieces: list[str] = []
    yield from pass_value(reader, pieces.append)
    text = _decode("".join(pieces))
    if text is None:
        raise RefusedError
    return text


def _decode(text: str) -> str | None:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None


def _ignore(text: str) -> None:
    """Write nothing."""
