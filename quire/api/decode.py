"""decode_body: the bytes of a request as a checked Struct, or one RequestError that names the field at fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar, cast

import msgspec

from quire.api.json_size import check_size
from quire.base.errors import RequestError

LARGE_BYTES = 64 << 10
"""Longer bodies are worth a look at their size before, and a thread."""
MAX_MESSAGE_LENGTH = 1000
MAX_IGNORED = 64  # names of unknown fields that are told back
_WHERE = re.compile(r" - at (`key` in )?`(\$[^`]*)`$")
_PARTS_HINT = re.compile(r"content\[\d+\]\.type$")
_MISSING = re.compile(r"^Object missing required field `([^`]+)`")

Refusal = Callable[[Any], str | None]
"""Looks at the value of a field (JSON as Python objects); returns why it is refused, or None."""

ErrorCode = Literal["invalid_value", "missing_required_parameter", "unsupported_parameter", "unsupported_value", "invalid_json"]


class BodyError(RequestError):
    """A body that cannot be taken; `code` is the stable word of the API for it."""

    def __init__(self, message: str, param: str | None = None, code: ErrorCode = "invalid_value") -> None:
        super().__init__(shorten(message, MAX_MESSAGE_LENGTH), None if param is None else shorten(param, 200))
        self.code = code


class Body(msgspec.Struct, kw_only=True):
    """Base of the bodies of requests. Fields that are absent or null are None."""

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        """Return the fields that the API has and that are refused here, wholly or for some values; null never is."""
        return {}

    def check(self) -> None:
        """Check what lies between fields. Raises RequestError."""


T = TypeVar("T", bound=msgspec.Struct)


def always(reason: str) -> Refusal:
    """Return the refusal of any value."""
    return lambda _value: reason


def unless(*allowed: object, reason: str) -> Refusal:
    """Return the refusal of any value but these."""
    return lambda value: None if any(value is one or (value == one and type(value) is type(one)) for one in allowed) else reason


def decode_body(data: bytes, struct_type: type[T], name: str = "the body") -> tuple[T, tuple[str, ...]]:
    """Return the body, and the top-level fields in it that are not known. Raises RequestError (BodyError), whatever is sent.

    Of a key that stands twice the last value counts. Errors of the whole call it `name`.
    """
    if len(data) > LARGE_BYTES:
        try:
            check_size(data)
        except ValueError as error:
            raise BodyError(f"{name} {error}; send several requests") from None
    try:
        fields = _field_decoder().decode(data)
        known = _known_fields(struct_type)
        _refuse(fields, struct_type)
        body = _decoder(struct_type).decode(data)
    except RecursionError:
        raise BodyError(f"{name} is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise BodyError(f"{name} is not valid UTF-8: {error.reason}", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise _explain(str(error), name) from None
    except ValueError as error:
        raise BodyError(f"{name} is not valid JSON: {error}", code="invalid_json") from None
    if issubclass(struct_type, Body):
        cast(Body, body).check()
    ignored = [shorten(field, 100) for field in fields if field not in known]
    return body, tuple(ignored[:MAX_IGNORED])


def check_depth(value: object, limit: int, name: str) -> None:
    """Raise ValueError where lists and objects are nested deeper than `limit`."""
    layer = [value]
    for _ in range(limit):
        layer = [item for holder in layer for item in _items(holder)]
        if not layer:
            return
    raise ValueError(f"{name} is nested more than {limit} deep")


def shorten(text: str, limit: int) -> str:
    """Return a text cut to `limit` characters."""
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


@lru_cache(maxsize=64)
def _known_fields(struct_type: type[msgspec.Struct]) -> frozenset[str]:
    fields = frozenset(struct_type.__struct_encode_fields__)
    return fields | struct_type.refusals().keys() if issubclass(struct_type, Body) else fields


@lru_cache(maxsize=64)
def _refusals(struct_type: type[Body]) -> Mapping[str, Refusal]:
    return struct_type.refusals()


def _refuse(fields: Mapping[str, msgspec.Raw], struct_type: type[msgspec.Struct]) -> None:
    if not issubclass(struct_type, Body):
        return
    for name, refusal in _refusals(struct_type).items():
        if name not in fields:
            continue
        value = msgspec.json.decode(fields[name])
        reason = None if value is None else refusal(value)
        if reason is not None:
            raise BodyError(f"{name}: {reason}", name, "unsupported_parameter")


def _explain(message: str, name: str) -> BodyError:
    """Turn msgspec's words, `... - at `$.messages[0].role``, into ours."""
    path = ""
    if found := _WHERE.search(message):
        path = found[2].removeprefix("$").removeprefix(".")
        message = message[: found.start()]
        if found[1]:
            message = f"{message} as a key"
    if missing := _MISSING.match(message):
        path = f"{path}.{missing[1]}".removeprefix(".")
        return BodyError(f"{path} is required", path, "missing_required_parameter")
    if _PARTS_HINT.search(path):
        message = f"{message}; the model takes text parts alone"
    message = message.replace("`", "")
    if not path:
        return BodyError(f"{name} is invalid: {message[:1].lower()}{message[1:]}")
    return BodyError(f"{path}: {message[:1].lower()}{message[1:]}", path)
