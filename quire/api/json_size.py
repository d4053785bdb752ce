"""check_size: rejects a body with more JSON elements than any valid request has, before it is decoded.

Decoding holds the GIL until it ends, in any thread, so its duration is limited by limiting what is decoded.
"""

from __future__ import annotations

import re

MAX_STRINGS = 100_000  # including names of fields
MAX_CONTAINERS = 50_000
MAX_VALUES = 1 << 20
MAX_ESCAPES = 1 << 20  # in strings: each takes as long as dozens of plain characters
_PART_BYTES = 1 << 20
_BACKSLASH = ord("\\")
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+("?)', re.DOTALL)


def check_size(data: bytes, max_values: int | None = None) -> None:
    """Raise ValueError if JSON has more strings, escapes, containers, or values than a request can need.

    Invalid JSON is accepted, or refused for its size: the decoder reports the error. Other threads run meanwhile.
    """
    max_values = MAX_VALUES if max_values is None else max_values
    num_escapes = 0
    for start in range(0, len(data), _PART_BYTES):
        num_escapes += data.count(b"\\", start, start + _PART_BYTES)
        _check(num_escapes, MAX_ESCAPES, "escapes")
    num_strings = num_containers = num_values = position = 0
    while True:
        end = data.find(b'"', position, position + _PART_BYTES)
        is_string = end >= 0
        outside = data[position : end if is_string else position + _PART_BYTES]
        num_containers += outside.count(b"[") + outside.count(b"{")
        num_values += outside.count(b",")
        num_strings += is_string
        _check(num_strings, MAX_STRINGS, "strings")
        _check(num_containers, MAX_CONTAINERS, "lists and objects")
        _check(num_values, max_values, "values")
        position = _string_end(data, end + 1) if is_string else position + _PART_BYTES
        if position >= len(data):
            return


def _string_end(data: bytes, start: int) -> int:
    """Return the end of the string that begins at `start`, after its quote; the end of the data if it is not terminated."""
    while (quote := data.find(b'"', start)) >= 0:
        if data[quote - 1] != _BACKSLASH:
            return quote + 1
        found = _STRING.match(data, start, start + _PART_BYTES)
        if found is None or found.end() == start:
            break
        if found[1]:
            return found.end()
        start = found.end()
    return len(data)


def _check(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise ValueError(f"has more than {limit} {what}")
