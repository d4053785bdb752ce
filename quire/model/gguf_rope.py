"""Rotary embeddings in GGUF files: scaling by keys, or divisors of the frequencies as tensors. No torch."""

from __future__ import annotations

import math
import struct

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.gguf_file import GgufTensor
from quire.model.gguf_keys import GgufKeys
from quire.model.gguf_names import ROPE_FACTORS

DEFAULT_ROPE_BASE = 10000.0
_MAX_ROPE_FACTORS = 1 << 16


def read_rope_scaling(keys: GgufKeys, rotated: int) -> dict[str, object]:
    """Return the rope_scaling of a config.json, empty where there is none.

    rotated  elements of a head that are rotated
    Raises ModelFormatError or UnsupportedError.
    """
    kind = keys.raw("rope.scaling.type")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or None
    kind = ("none" if factor is None else "linear") if kind is None else kind
    divisors = [read_rope_factors(keys, name, rotated // 2) for name in ROPE_FACTORS]
    if any(divisors):
        if kind not in ("none", "longrope") or (kind == "none" and factor not in (None, 1.0)):
            raise UnsupportedError(
                f"{keys.file.path}: rope.scaling.type {kind!r} together with {ROPE_FACTORS} is not supported"
            )
        return _divided_rope(keys, *divisors)
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedError(f"{keys.file.path}: rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.required("rope.scaling.original_context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _divided_rope(
    keys: GgufKeys, always: list[float] | None, short: list[float] | None, long: list[float] | None
) -> dict[str, object]:
    """Return the scaling of frequencies that are divided each by its own number: the same for every length, or by length."""
    if always is not None:
        short = long = always
    if short is None or long is None:
        raise ModelFormatError(f"{keys.file.path} must hold rope_factors_short.weight and rope_factors_long.weight, or neither")
    context_length = keys.required("context_length")
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "short_factor": short,
        "long_factor": long,
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length") or context_length,
    }


def read_rope_factors(keys: GgufKeys, name: str, count: int) -> list[float] | None:
    """Return the divisors of `count` frequencies, None where the file has no such tensor. Raises ModelFormatError."""
    tensor = keys.file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type_name != "F32" or tensor.shape != (count,) or count > _MAX_ROPE_FACTORS:
        raise ModelFormatError(f"{keys.file.path}: {name} must be F32 [{count}], got {tensor.type_name} {list(tensor.shape)}")
    values = list(struct.unpack(f"<{count}f", _read_bytes(tensor)))
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ModelFormatError(f"{keys.file.path}: {name} must hold positive numbers")
    return values


def _read_bytes(tensor: GgufTensor) -> bytes:
    try:
        with tensor.path.open("rb") as stream:
            stream.seek(tensor.start)
            found = stream.read(tensor.num_bytes)
    except OSError as error:
        raise ModelFormatError(f"{tensor.path} cannot be read: {error}") from error
    if len(found) != tensor.num_bytes:
        raise ModelFormatError(f"{tensor.path} became shorter while it was read")
    return found
