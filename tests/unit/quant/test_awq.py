"""AWQ, "gemm": the interleaved outputs, zero points, and tensors that do not fit."""

import numpy as np
import pytest
import torch

from quire.base.errors import ModelFormatError
from quire.quant.config import AwqConfig
from quire.quant.readers import gather_weights
from tests.unit.quant import packers

ROWS, COLUMNS, GROUP = 40, 64, 16


def _weight(parts, group_size=GROUP, has_zero_point=True):
    tensors = {f"m.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    return gather_weights(tensors, AwqConfig(group_size, has_zero_point))["m.weight"]


def _random(group_size=GROUP):
    rng = np.random.default_rng(0)
    shape = (ROWS, COLUMNS // group_size)
    scales = rng.standard_normal(shape).astype(np.float16)
    return rng.integers(0, 16, (ROWS, COLUMNS)), rng.integers(0, 16, shape), scales


@pytest.mark.parametrize("group_size", [GROUP, None])
def test_weight_is_exact(group_size):
    codes, zeros, scales = _random(group_size or COLUMNS)
    stored = _weight(packers.awq(codes, zeros, scales), group_size)
    assert stored.shape == (ROWS, COLUMNS)
    weight = stored.load()
    assert weight.levels == tuple(range(-8, 8))
    assert torch.equal(weight.dequantize(), packers.affine(codes, zeros, scales, np.arange(COLUMNS) // (group_size or COLUMNS)))


def test_second_slot_of_a_word_is_the_third_output():
    codes, zeros, scales = _random()
    word = int(packers.awq(codes, zeros, scales)["qweight"][0, 0])
    assert [(word >> shift) & 15 for shift in (0, 4, 8, 12, 16)] == codes[[0, 2, 4, 6, 1], 0].tolist()


def test_zero_points_are_eight_when_none_are_stored():
    codes, zeros, scales = _random()
    zeros[:] = 8
    weight = _weight(packers.awq(codes, zeros, scales) | {"qzeros": None}, has_zero_point=False).load()
    assert weight.offset is None
    assert torch.equal(weight.dequantize(), packers.affine(codes, zeros, scales, np.arange(COLUMNS) // GROUP))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"qzeros": None}, r"m\.qzeros is missing"),
        ({"qzeros": torch.zeros(4, 4, dtype=torch.int32)}, r"m\.qzeros has \[4, 4\] .* expected one of shape \[4, 5\]"),
        ({"scales": torch.zeros(4, 39)}, r"m\.scales has \[4, 39\] .* expected one of shape \[4, 40\]"),
        ({"qweight": torch.zeros(64, 5, dtype=torch.int64)}, r"m\.qweight has .* torch\.int64, expected one of torch\.int32"),
        ({"qweight": torch.zeros(60, 5, dtype=torch.int32)}, r"m has 60 input columns, which group_size 16 .* not divide"),
    ],
)
def test_weight_is_refused_unread_when_its_parts_do_not_fit(changes, message):
    with pytest.raises(ModelFormatError, match=message):
        _weight(packers.awq(*_random()) | changes)


@pytest.mark.parametrize("stored", [0, 7, 9, None])
def test_zero_points_are_refused_when_the_config_has_none(stored):
    codes, zeros, scales = _random()
    zeros[:] = zeros if stored is None else stored
    with pytest.raises(ModelFormatError, match=r"m\.qzeros holds .* zero_point .* false"):
        _weight(packers.awq(codes, zeros, scales), has_zero_point=False).load()


def test_stored_zero_points_are_accepted_when_the_config_has_none_and_all_are_the_middle():
    codes, zeros, scales = _random()
    zeros[:] = 8
    weight = _weight(packers.awq(codes, zeros, scales), has_zero_point=False).load()
    assert weight.offset is None
    assert torch.equal(weight.dequantize(), packers.affine(codes, zeros, scales, np.arange(COLUMNS) // GROUP))
