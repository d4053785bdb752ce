"""decode_body: decodes the bytes of a request into a checked Struct, or raises one RequestError that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from functools import lru_cache
from itertools import islice
from typing import ClassVar, Literal, TypeVar, cast

import msgspec

from quire.api.field_values import allowed_values, field_names, find_value, show_value
from quire.api.json_size import check_size
from quire.api.refusal import Refusal
from quire.api.unknown_fields import UnknownField, unknown_fields
from quire.base.errors import RequestError
from quire.contracts.string_formats import find_annotations

LARGE_BYTES = 64 << 10
"""Longer bodies are checked with check_size first, and decoded in a thread."""
MAX_FIELD_BYTES = 1 << 20  # of fields that are not listed as long_fields
MAX_MESSAGE_LENGTH = 1000
MAX_IGNORED = 64  # names of unknown fields that are reported
_WHERE = re.compile(r" - at (`key` in )?`(\$[^`]*)`$")
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_ID_LIST = re.compile(rb"\s*\[\s*\d")
_ID_LISTS = re.compile(rb"\s*\[\s*\[")
_INDEX = re.compile(r"\[\d+\]")
_PARTS_HINT = re.compile(r"content\[\d+\]\.type$")
_MISSING = re.compile(r"^Object missing required field `([^`]+)`")

ErrorCode = Literal["invalid_value", "missing_required_parameter", "unsupported_parameter", "unsupported_value", "invalid_json"]


class BodyError(RequestError):
    """An invalid body; `code` is the API's stable error code."""

    def __init__(self, message: str, param: str | None = None, code: ErrorCode = "invalid_value") -> None:
        super().__init__(shorten(message, MAX_MESSAGE_LENGTH), None if param is None else shorten(param, 200))
        self.code = code


class Part(msgspec.Struct):
    """Base of structs that have refused fields."""

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        """Return the fields of the API that are refused here, entirely or for some values; null is never refused."""
        return {}


class Body(Part, kw_only=True):
    """Base of request bodies. Fields that are absent or null are None.

    max_values   maximum number of JSON values, if it is lower than the default; checked before the body is decoded
    long_fields  fields that may be longer than MAX_FIELD_BYTES
    """

    max_values: ClassVar[int | None] = None
    long_fields: ClassVar[frozenset[str]] = frozenset(
        ("messages", "prompt", "input", "tools", "system", "instructions", "tokens", "allowed_token_ids")
    )

    def check(self) -> None:
        """Check constraints between fields. Raises RequestError."""

    def ignored_parts(self) -> Mapping[str, str]:
        """Return the paths of parts without effect, each with its reported name; nothing below them is reported."""
        return {}

    def output_schemas(self) -> Iterable[tuple[str, object]]:
        """Return the JSON schemas that the output must match, each with its path in the body."""
        return ()


T = TypeVar("T", bound=msgspec.Struct)


def decode_body(
    data: bytes,
    struct_type: type[T],
    name: str = "the body",
    check_fields: Callable[[Mapping[str, msgspec.Raw]], None] | None = None,
) -> tuple[T, tuple[str, ...]]:
    """Return the body, and the paths of unknown fields in it. Raises RequestError (BodyError) for any invalid body.

    If a key occurs twice, the last value is used. An unknown field in many items of a list is reported for the first only.
    Errors about the body itself call it `name`. `check_fields` may refuse fields, with a RequestError, before they are decoded.
    """
    if len(data) > LARGE_BYTES:
        try:
            check_size(data, struct_type.max_values if issubclass(struct_type, Body) else None)
        except ValueError as error:
            raise BodyError(f"{name} {error}; send several requests") from None
    try:
        fields = _field_decoder().decode(data)
        if issubclass(struct_type, Body) and len(data) > MAX_FIELD_BYTES:
            _check_lengths(fields, struct_type.long_fields)
        if check_fields is not None:
            check_fields(fields)
        _refuse(fields, struct_type)
        body = _decoder(struct_type).decode(data)
        ignored = _ignored(unknown_fields(fields, struct_type))
    except RecursionError:
        raise BodyError(f"{name} is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise BodyError(f"{name} is not valid UTF-8: {error.reason}", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise _explain(str(error), name, data, struct_type) from None
    except ValueError as error:
        raise BodyError(f"{name} is not valid JSON: {_why_malformed(error, data)}", code="invalid_json") from None
    if issubclass(struct_type, Body):
        cast(Body, body).check()
        if parts := cast(Body, body).ignored_parts():
            inside = tuple(f"{path}." for path in parts)
            ignored = (*parts.values(), *(path for path in ignored if not path.startswith(inside)))
    return body, ignored


def annotations_of(body: msgspec.Struct) -> tuple[str, ...]:
    """Return the paths of schema formats in a body that are not enforced: unknown ones of strings, and all of numbers."""
    schemas = body.output_schemas() if isinstance(body, Body) else ()
    found = (f"{path}.{inner}" for path, schema in schemas for inner in find_annotations(schema))
    return tuple(shorten(path, 200) for path in islice(found, MAX_IGNORED))


def _why_malformed(error: ValueError, data: bytes) -> str:
    """Return why a body is malformed; if half of a surrogate pair is at its end, the decoder only reports truncation."""
    text = str(error)
    is_truncated = "truncated" in text and data.rstrip().endswith(b"}") and _HALF_PAIR.search(data, max(len(data) - 64, 0))
    is_half_pair = "surrogate" in text or is_truncated or ("hex escape" in text and _HALF_PAIR.search(data))
    return f"a string has an unpaired surrogate, such as a single \\ud83d ({text})" if is_half_pair else text


def count_ids(raw: msgspec.Raw) -> int | None:
    """Return the number of items of a list of numbers without decoding it, by counting commas; None for anything else."""
    return _count_numbers(raw, _ID_LIST)


def count_listed_ids(raw: msgspec.Raw) -> int | None:
    """Return the number of numbers in a list of lists, as `count_ids` does; None for anything else."""
    return _count_numbers(raw, _ID_LISTS)


def _count_numbers(raw: msgspec.Raw, opening: re.Pattern[bytes]) -> int | None:
    return bytes(raw).count(b",") + 1 if opening.match(memoryview(raw)) else None


def check_depth(value: object, limit: int, name: str) -> None:
    """Raise ValueError if lists and objects are nested deeper than `limit`."""
    layer = [value]
    for _ in range(limit):
        layer = [item for holder in layer for item in _items(holder)]
        if not layer:
            return
    raise ValueError(f"{name} is nested more than {limit} deep")


def shorten(text: str, limit: int) -> str:
    """Return a text truncated to `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def _items(holder: object) -> list[object]:
    if isinstance(holder, dict):
        return list(cast("dict[str, object]", holder).values())
    return cast("list[object]", holder) if isinstance(holder, list) else []


@lru_cache(maxsize=1)
def _field_decoder() -> msgspec.json.Decoder[dict[str, msgspec.Raw]]:
    return msgspec.json.Decoder(dict[str, msgspec.Raw])


@lru_cache(maxsize=64)
def _decoder(struct_type: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(struct_type)


@lru_cache(maxsize=256)
def _refusals(struct_type: type[msgspec.Struct]) -> Mapping[str, Refusal]:
    return struct_type.refusals() if issubclass(struct_type, Part) else {}


def _check_lengths(fields: Mapping[str, msgspec.Raw], may_be_long: Collection[str]) -> None:
    for name, raw in fields.items():
        num_bytes = len(memoryview(raw))
        if num_bytes > MAX_FIELD_BYTES and name not in may_be_long:
            shown = shorten(name, 100)
            raise BodyError(f"{shown}: may have {MAX_FIELD_BYTES} bytes of JSON, got {num_bytes}", shown)


def _refuse(fields: Mapping[str, msgspec.Raw], struct_type: type[msgspec.Struct]) -> None:
    refusals = _refusals(struct_type)
    for name, raw in fields.items():
        refusal = refusals.get(name)
        if refusal is None:
            continue
        value = msgspec.json.decode(raw)
        reason = None if value is None else refusal(value)
        if reason is not None:
            raise BodyError(f"{name}: {reason}", name, "unsupported_parameter")


def _ignored(unknown: Iterable[UnknownField]) -> tuple[str, ...]:
    """Return the paths of unknown fields, without known parameters that have a neutral value.

    Raises BodyError for a refused field at any depth.
    """
    found: dict[str, str] = {}
    for field in unknown:
        refusal = _refusals(field.holder).get(field.name)
        if refusal is not None:
            if reason := refusal(field.value):
                raise BodyError(f"{field.path}: {reason}", field.path, "unsupported_parameter")
        elif len(found) < MAX_IGNORED:
            found.setdefault(_INDEX.sub("[]", field.path), shorten(field.path, 100))
    return tuple(found.values())


def _explain(message: str, name: str, data: bytes, struct_type: type[msgspec.Struct]) -> BodyError:
    """Convert msgspec's message, `... - at `$.messages[0].role``, into ours, with the given value and the allowed ones."""
    path = ""
    if found := _WHERE.search(message):
        path = found[2].removeprefix("$").removeprefix(".")
        message = message[: found.start()]
        if found[1]:
            message = f"{message} as a key"
    if missing := _MISSING.match(message):
        path = f"{path}.{missing[1]}".removeprefix(".")
        return BodyError(f"{path} is required", path, "missing_required_parameter")
    if path and not message.endswith(" as a key"):
        message = _with_values(message, path, _whole(data), struct_type)
    if _PARTS_HINT.search(path):
        message = f"{message}; only text parts are supported"
    message = message.replace("`", "")
    if not path:
        return BodyError(f"{name} is invalid: {message[:1].lower()}{message[1:]}")
    return BodyError(f"{path}: {message[:1].lower()}{message[1:]}", path)


def _whole(data: bytes) -> object:
    """Return an invalid body as Python objects, `msgspec.UNSET` where another part of it cannot be decoded either."""
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return msgspec.UNSET


def _with_values(message: str, path: str, body: object, struct_type: type[msgspec.Struct]) -> str:
    """Return msgspec's message with what was given, or what is allowed, where it lacks one of them."""
    if message.startswith("Object contains unknown field"):
        return f"{message}; it may have {', '.join(field_names(struct_type, body, path))}"
    value = find_value(body, path)
    if value is msgspec.UNSET:
        return message
    if message.startswith("Invalid "):
        allowed = allowed_values(struct_type, body, path)
        return f"may be one of {', '.join(map(repr, allowed))}, got {show_value(value)}" if allowed else message
    if message.startswith("Expected") and ", got" not in message:
        has_length = " of length " in message and isinstance(value, str | list | dict) and "[...]" not in path
        given = f"one of length {len(cast(Sized, value))}" if has_length else show_value(value)
        return f"{message}, got {given}"
    return message
