"""The lines of a batch's input: one JSON object each. The whole file is checked before anything runs."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator
from typing import BinaryIO

import msgspec

from quire.api.decode import BodyError, decode_body
from quire.serving.batch.records import BatchErrorItem
from quire.serving.errors import ApiError, invalid

MAX_LINES = 50_000
MAX_LINE_BYTES = 8 << 20
MAX_CUSTOM_ID_LENGTH = 512
MAX_ERRORS = 100  # later errors are not reported


class LineSpan(msgspec.Struct, frozen=True, array_like=True):
    """The position of a line in its file, without the line break. `number` counts lines from 1, including blank ones."""

    number: int
    custom_id: str
    offset: int
    num_bytes: int


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decoder = msgspec.json.Decoder(_Line)

CheckBody = Callable[[str, bytes], None]
"""Checks the body of a line as the online route does; raises ApiError."""


class Validation(msgspec.Struct):
    """The result of checking a file: the positions of its lines, or the errors."""

    spans: list[LineSpan]
    errors: list[BatchErrorItem]


def body_of(line: bytes) -> bytes:
    """Return the body in a validated line. Raises ApiError 400 if the line has changed since."""
    return bytes(_decode(line).body)


def url_of(line: bytes) -> str:
    """Return the url in a validated line. Raises ApiError 400 if the line has changed since."""
    return _decode(line).url


def _decode(line: bytes) -> _Line:
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid(f"the line has changed since it was checked: {error}", code="invalid_json_line") from None


def validate(file: BinaryIO, endpoints: Collection[str], check_body: CheckBody, max_lines: int = MAX_LINES) -> Validation:
    """Read a whole input file. If there is any error, nothing may run; the first 100 errors are kept."""
    found = Validation([], [])
    seen: set[str] = set()
    for number, offset, line in _iter_lines(file):
        if len(found.errors) >= MAX_ERRORS:
            break
        if not line.strip():
            continue
        try:
            custom_id = _check_line(line, endpoints, seen, check_body)
        except _LineError as error:
            found.errors.append(BatchErrorItem(error.code, error.message, number, error.param))
            continue
        seen.add(custom_id)
        found.spans.append(LineSpan(number, custom_id, offset, len(line)))
        if len(found.spans) > max_lines:
            found.errors.append(BatchErrorItem("too_many_lines", f"a batch may have {max_lines} lines", number))
            break
    if not found.spans and not found.errors:
        found.errors.append(BatchErrorItem("empty_file", "the input file has no lines"))
    return found


class _LineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def _iter_lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number, offset, line without its line break), without a leading byte order mark.
    A line that is too long is yielded only in part, enough for its check to fail.
    """
    offset = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0
    file.seek(offset)
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        yield number, offset, line.rstrip(b"\r\n")
        offset += len(line)
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
            offset += len(line)


def _check_line(line: bytes, endpoints: Collection[str], seen: set[str], check_body: CheckBody) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise _LineError("line_too_long", f"a line may have {MAX_LINE_BYTES} bytes")
    try:
        request, _ = decode_body(line, _Line, "the line")
        line.decode()
    except UnicodeDecodeError as error:
        raise _LineError("invalid_json_line", f"the line is not valid UTF-8: {error.reason}") from None
    except BodyError as error:
        raise _LineError("invalid_json_line" if error.code == "invalid_json" else error.code, str(error), error.param) from None
    if not 0 < len(request.custom_id) <= MAX_CUSTOM_ID_LENGTH:
        raise _LineError("invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID_LENGTH} characters", "custom_id")
    if request.custom_id in seen:
        raise _LineError("duplicate_custom_id", f"custom_id {request.custom_id[:100]!r} is on an earlier line", "custom_id")
    if request.method != "POST":
        raise _LineError("invalid_method", f"method must be 'POST', got {request.method[:20]!r}", "method")
    if request.url not in endpoints:
        raise _LineError("invalid_url", f"url must be {' or '.join(endpoints)}, got {request.url[:100]!r}", "url")
    try:
        check_body(request.url, bytes(request.body))
    except ApiError as error:
        param = "body" if error.param is None else f"body.{error.param}"
        raise _LineError(error.code or "invalid_request", error.message[:200], param) from None
    return request.custom_id
