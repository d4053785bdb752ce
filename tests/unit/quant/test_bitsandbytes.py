"""bitsandbytes: tables of 4-bit codes with plain and nested scales, int8 by row, and JSON that lies."""

import json

import numpy as np
import pytest
import torch

from quire.base.errors import ModelFormatError
from quire.quant.config import BitsAndBytesConfig
from quire.quant.readers import gather_weights
from tests.unit.quant import packers

STATE = "weight.quant_state.bitsandbytes__"


def _weight(parts):
    tensors = {f"m.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    return gather_weights(tensors, BitsAndBytesConfig())["m.weight"]


def _json(values):
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return torch.tensor(list(text), dtype=torch.uint8)


def _four_bit(rows=24, columns=44, block=64, kind="nf4", is_nested=False):
    """Return parts and the weight they stand for."""
    rng = np.random.default_rng(rows * columns)
    codes = rng.integers(0, 16, rows * columns)
    table = np.sort(rng.standard_normal(16)).astype(np.float32)
    num_blocks = -(-rows * columns // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    parts = {"weight": packers.halves(codes)[:, None], "weight.quant_map": torch.from_numpy(table)}
    scale = rng.random(num_blocks).astype(np.float32)
    if is_nested:
        nested_block, offset = 4, 0.25
        nested_codes, nested_table = rng.integers(0, 256, num_blocks), rng.standard_normal(256).astype(np.float32)
        outer = rng.random(-(-num_blocks // nested_block)).astype(np.float32)
        scale = nested_table[nested_codes] * outer[np.arange(num_blocks) // nested_block] + np.float32(offset)
        state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": offset}
        parts["weight.absmax"] = torch.from_numpy(nested_codes.astype(np.uint8))
        parts["weight.nested_absmax"] = torch.from_numpy(outer)
        parts["weight.nested_quant_map"] = torch.from_numpy(nested_table)
    else:
        parts["weight.absmax"] = torch.from_numpy(scale)
    parts[STATE + kind] = _json(state)
    expected = (table[codes] * scale[np.arange(rows * columns) // block]).reshape(rows, columns)
    return parts, torch.from_numpy(expected), state


@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind, shape", [("nf4", (24, 44)), ("fp4", (8, 64)), ("nf4", (5, 7)), ("nf4", (64, 64))])
def test_four_bit_weight_is_exact(kind, shape, is_nested):
    parts, expected, _ = _four_bit(*shape, kind=kind, is_nested=is_nested)
    stored = _weight(parts)
    assert stored.shape == shape
    assert torch.equal(stored.load(), expected)


@pytest.mark.parametrize("has_format", [False, True])
def test_int8_weight_is_exact(has_format):
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (6, 10)).astype(np.int8)
    largest = rng.random(6).astype(np.float32)
    parts = {"weight": torch.from_numpy(codes), "SCB": torch.from_numpy(largest)}
    if has_format:
        parts["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    weight = _weight(parts).load()
    assert torch.equal(weight.dequantize(), torch.from_numpy(codes.astype(np.float32) * (largest / np.float32(127))[:, None]))
    parts["weight_format"] = torch.tensor(1, dtype=torch.uint8)
    with pytest.raises(ModelFormatError, match="weight_format is not 0"):
        _weight(parts).load()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"shape": [24, 46]}, r"m\.weight has \[528, 1\] .* expected one of shape \[552, 1\]"),
        ({"shape": [1 << 30, 1 << 30]}, r"m\.weight has \[528, 1\]"),
        ({"shape": [-24, -44]}, "shape must be two positive sizes"),
        ({"shape": [24, 44, 1]}, "shape must be two positive sizes"),
        ({"shape": [24.0, 44]}, "shape must be two positive sizes"),
        ({"shape": [True, 1056]}, "shape must be two positive sizes"),
        ({"shape": None}, "shape must be two positive sizes"),
        ({"shape": [1 << 70, 1]}, "shape must be two positive sizes"),
        ({"blocksize": 32}, r"m\.weight\.absmax has \[17\] .* expected one of shape \[33\]"),
        ({"blocksize": 0}, "blocksize must be an integer from 1"),
        ({"blocksize": 1 << 40}, "blocksize must be an integer from 1"),
        ({"blocksize": "64"}, "blocksize must be an integer from 1"),
        ({"quant_type": "fp4"}, "quant_type must be nf4, got 'fp4'"),
        ({"nested_blocksize": 256, "nested_offset": 0.0}, r"absmax has \[17\] of torch\.float32, expected .*uint8"),
        ({"nested_blocksize": 256, "nested_offset": "x"}, "nested_offset must be a finite number"),
        ({"nested_blocksize": 256, "nested_offset": float("nan")}, "nested_offset must be a finite number"),
    ],
)
def test_weight_is_refused_unread_when_its_json_lies(changes, message):
    parts, _, state = _four_bit()
    with pytest.raises(ModelFormatError, match=message):
        _weight({**parts, STATE + "nf4": _json({**state, **changes})})


@pytest.mark.parametrize(
    "text, message",
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 4000, "cannot be read as JSON"),
        (b"[1]", "must be a JSON object"),
        (b" " * 5000, "has 5000 bytes of JSON, expected at most 4096"),
    ],
)
def test_weight_is_refused_when_its_json_is_broken(text, message):
    with pytest.raises(ModelFormatError, match=message):
        _weight({**_four_bit()[0], STATE + "nf4": _json(text)})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({STATE + "nf4": None}, "must have exactly one of"),
        ({STATE + "fp4": _json({})}, "must have exactly one of"),
        ({"weight.quant_map": torch.zeros(15)}, r"m\.weight\.quant_map has \[15\]"),
        ({"weight.absmax": None}, r"m\.weight\.absmax is missing"),
        ({"weight": None}, r"m\.weight is missing"),
        ({"weight": torch.zeros(528, 1)}, r"m\.weight has \[528, 1\] of torch\.float32"),
    ],
)
def test_weight_is_refused_unread_when_its_parts_do_not_fit(changes, message):
    with pytest.raises(ModelFormatError, match=message):
        _weight({**_four_bit()[0], **changes})


def test_nested_scales_are_refused_when_their_counts_lie():
    parts, _, state = _four_bit(is_nested=True)
    with pytest.raises(ModelFormatError, match=r"nested_absmax has \[5\] .* expected one of shape \[2\]"):
        _weight({**parts, STATE + "nf4": _json({**state, "nested_blocksize": 16})})
    with pytest.raises(ModelFormatError, match=r"nested_quant_map has \[255\]"):
        _weight({**parts, "weight.nested_quant_map": torch.zeros(255)})
