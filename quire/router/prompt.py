"""ParsedBody: what the router reads in the body of a request: the model, and the start of the prompt in chunks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.router.block_index import chain_keys
from quire.router.kv_events import TokenId
from quire.router.paths import STREAMED_UNASKED
from quire.serving.errors import invalid

MAX_CHUNKS = 4096
"""Of one prompt that are looked up; what is longer differs seldom only after them."""
_BYTES_PER_TOKEN = 4
"""Of text, about; only the proportions between predictions matter."""
_PREFIX_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input", "query", "documents", "text_1", "text_2")
"""Fields of the prompt, in the order in which chat templates write them: what differs later shares what stands before it."""
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request, as far as the choice of a backend needs it.

    num_bytes     of the fields that make the prompt
    keys          one for each whole chunk, which depends on all chunks before it, too
    affinity      requests with the same one are kept together where nothing else decides
    token_ids     the prompt, where the client sent tokens or a backend was asked for them; None for other text
    """

    num_bytes: int
    keys: tuple[int, ...]
    affinity: bytes
    chunk_tokens: int
    token_ids: tuple[int, ...] | None = None
    _block_keys: dict[tuple[int, bool], list[int]] = field(default_factory=dict[tuple[int, bool], list[int]], compare=False)

    def block_keys(self, block_size: int, *, is_separate: bool) -> list[int]:
        """Return the keys of its whole blocks, as in BlockIndex; none without tokens."""
        key = (block_size, is_separate)
        if key not in self._block_keys:
            self._block_keys[key] = chain_keys(self.token_ids or (), block_size, is_separate=is_separate)
        return self._block_keys[key]

    @property
    def num_tokens(self) -> int:
        """Return about how many tokens it has."""
        return len(self.token_ids) if self.token_ids is not None else self.num_bytes // _BYTES_PER_TOKEN + 1


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A JSON body, decoded no further than needed.

    fields  the values as the bytes that came
    """

    fields: dict[str, msgspec.Raw]
    model: str | None

    def is_streaming(self, path: str) -> bool:
        """Return whether the answer is a stream; path: without Azure's prefix."""
        stream = _value(self.fields, "stream", bool)
        return path in STREAMED_UNASKED if stream is None else stream

    def with_model(self, model: str) -> bytes:
        """Return the body as bytes with another model; everything else stays byte for byte."""
        return msgspec.json.encode({**self.fields, "model": model})

    def text_of(self, name: str) -> str | None:
        """Return a field that is a string; None for anything else."""
        return _value(self.fields, name, str)

    def id_of(self, name: str) -> str | None:
        """Return a field that is an id, or an object with one; None for anything else."""
        found = _value(self.fields, name, str | _WithId)
        return found.id if isinstance(found, _WithId) else found

    def prompt(self, chunk_bytes: int, salt: bytes) -> Prompt:
        """Return the prompt in chunks.

        salt  separates prompts that no backend lets share a prefix cache: those of other models and keys
        """
        parts = [name.encode() + bytes(self.fields[name]) for name in _PREFIX_FIELDS if name in self.fields]
        data = b"\0".join(parts)
        tail = min(len(data) // chunk_bytes, MAX_CHUNKS) * chunk_bytes
        keys: list[int] = []
        key = hashlib.blake2b(salt, digest_size=16).digest()
        for begin in range(0, tail, chunk_bytes):
            key = hashlib.blake2b(data[begin : begin + chunk_bytes], digest_size=16, key=key).digest()
            keys.append(int.from_bytes(key, "big"))
        named = self.text_of("prompt_cache_key") or self.text_of("user")
        affinity = b"named" + named.encode() if named else data[: 4 * chunk_bytes]
        return Prompt(len(data), tuple(keys), salt + affinity, max(chunk_bytes // _BYTES_PER_TOKEN, 1), self._token_ids())

    def _token_ids(self) -> tuple[int, ...] | None:
        found = _value(self.fields, "prompt", list[TokenId])
        return None if found is None else tuple(found)


class _WithId(msgspec.Struct):
    id: str


def parse_body(body: bytes) -> ParsedBody:
    """Return what a body says. Raises ApiError 400 for what is no JSON object, and for a model that is no string."""
    try:
        fields = _decode_fields(body)
    except msgspec.DecodeError as error:
        kind = "is not a JSON object" if isinstance(error, msgspec.ValidationError) else "is not valid JSON"
        raise invalid(f"the body {kind}: {error}", code="invalid_json") from None
    except UnicodeDecodeError:
        raise invalid("the body is not valid JSON: it is not UTF-8", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    model = fields.get("model")
    if model is not None and bytes(model) != b"null":
        name = _value(fields, "model", str)
        if not name:
            raise invalid(
                f"model must be a string that is not empty, got {bytes(model)[:100].decode(errors='replace')}", "model"
            )
    else:
        name = None
    return ParsedBody(fields, name)


def _value(fields: dict[str, msgspec.Raw], name: str, kind: Any) -> Any:
    """Return a field of the given type; None where it is absent, or something else, which is the backend's to refuse."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
