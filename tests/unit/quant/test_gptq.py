"""GPTQ: every width, both formats of zero points, inputs in any order of groups, and tensors that do not fit."""

import numpy as np
import pytest
import torch

from quire.base.errors import ModelFormatError
from quire.quant.config import GptqConfig, GptqScheme
from quire.quant.readers import gather_weights
from tests.unit.quant import packers

ROWS, COLUMNS, GROUP = 64, 96, 32


def _weight(parts, bits=4, group_size=GROUP, is_v2=False, is_symmetric=False):
    config = GptqConfig(GptqScheme(bits, group_size, is_v2, is_symmetric))
    gathered = gather_weights({f"m.q_proj.{part}": tensor for part, tensor in parts.items()}, config)
    assert list(gathered) == ["m.q_proj.weight"]
    return gathered["m.q_proj.weight"]


def _random(bits, group_size=GROUP, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (ROWS, COLUMNS))
    zeros = rng.integers(0, 1 << bits, (ROWS, COLUMNS // group_size))
    scales = rng.standard_normal((ROWS, COLUMNS // group_size)).astype(np.float16)
    return codes, zeros, scales


@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weight_is_exact_when_zero_points_take_every_value(bits, is_v2):
    codes, zeros, scales = _random(bits)
    stored = _weight(packers.gptq(codes, zeros, scales, bits, is_v2), bits, is_v2=is_v2)
    assert stored.shape == (ROWS, COLUMNS)
    weight = stored.load()
    assert (weight.group_size, weight.columns) == (GROUP, None)
    assert torch.equal(weight.dequantize(), packers.affine(codes, zeros, scales, np.arange(COLUMNS) // GROUP))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weight_has_no_offset_when_it_is_symmetric(bits):
    codes, zeros, scales = _random(bits)
    zeros[:] = 1 << (bits - 1)
    weight = _weight(packers.gptq(codes, zeros, scales, bits, is_v2=False), bits).load()
    assert weight.offset is None
    assert weight.levels == (None if bits == 8 else tuple(range(-(1 << (bits - 1)), 1 << (bits - 1))))
    assert torch.equal(weight.dequantize(), packers.affine(codes, zeros, scales, np.arange(COLUMNS) // GROUP))


def test_symmetric_first_format_stores_sevens():
    codes, zeros, scales = _random(4)
    zeros[:] = 8
    assert (packers.gptq(codes, zeros, scales, 4, is_v2=False)["qzeros"] == 0x77777777).all()


def test_columns_are_a_permutation_when_inputs_lie_out_of_group_order():
    codes, zeros, scales = _random(4)
    groups = np.random.default_rng(1).permutation(np.arange(COLUMNS) // GROUP)
    weight = _weight(packers.gptq(codes, zeros, scales, 4, False, groups)).load()
    assert weight.columns is not None
    assert sorted(weight.columns.tolist()) == list(range(COLUMNS))
    expected = packers.affine(codes, zeros, scales, groups)
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.rows(8, 24).dequantize(), expected[8:24])


def test_group_indices_are_dropped_when_they_are_in_order():
    codes, zeros, scales = _random(4)
    assert _weight(packers.gptq(codes, zeros, scales, 4, False, np.arange(COLUMNS) // GROUP)).load().columns is None


def test_one_group_is_the_whole_row_when_there_is_no_group_size():
    codes, zeros, scales = _random(4, COLUMNS)
    weight = _weight(packers.gptq(codes, zeros, scales, 4, False), group_size=None).load()
    assert torch.equal(weight.dequantize(), packers.affine(codes, zeros, scales, np.zeros(COLUMNS, int)))


def _parts(**changes):
    parts = packers.gptq(*_random(4), 4, False, np.arange(COLUMNS) // GROUP) | changes
    return {part: tensor for part, tensor in parts.items() if tensor is not None}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"qzeros": None}, r"q_proj\.qzeros is missing"),
        ({"scales": None}, r"q_proj\.scales is missing"),
        ({"qweight": None}, r"q_proj\.qweight is missing"),
        ({"qweight": torch.zeros(12, 64)}, r"q_proj\.qweight has \[12, 64\] of torch\.float32, expected .*int32"),
        ({"qweight": torch.zeros(12, 64, 1, dtype=torch.int32)}, r"q_proj\.qweight has \[12, 64, 1\]"),
        ({"qweight": torch.zeros(12, 63, dtype=torch.int32)}, r"q_proj\.qweight has \[12, 63\] .* fill words"),
        ({"qzeros": torch.zeros(2, 8, dtype=torch.int32)}, r"q_proj\.qzeros has \[2, 8\] .* expected one of shape \[3, 8\]"),
        ({"qzeros": torch.zeros(3, 9, dtype=torch.int32)}, r"q_proj\.qzeros has \[3, 9\] .* expected one of shape \[3, 8\]"),
        ({"scales": torch.zeros(3, 63)}, r"q_proj\.scales has \[3, 63\] .* expected one of shape \[3, 64\]"),
        ({"scales": torch.zeros(3, 64, dtype=torch.int8)}, r"q_proj\.scales has .* torch\.int8"),
        ({"g_idx": torch.zeros(95, dtype=torch.int32)}, r"q_proj\.g_idx has \[95\] .* expected one of shape \[96\]"),
    ],
)
def test_weight_is_refused_unread_when_its_parts_do_not_fit(changes, message):
    with pytest.raises(ModelFormatError, match=message):
        _weight(_parts(**changes))


@pytest.mark.parametrize("bad, message", [(3, r"from 0 to 3, expected 0 to 2"), (-1, r"from -1 to 2, expected 0 to 2")])
def test_group_index_is_refused_when_it_is_out_of_range(bad, message):
    parts = _parts()
    parts["g_idx"][5] = bad
    with pytest.raises(ModelFormatError, match=rf"q_proj\.g_idx holds groups {message}"):
        _weight(parts).load()


def test_group_index_is_refused_when_groups_are_uneven():
    parts = _parts()
    parts["g_idx"][0] = 1
    with pytest.raises(ModelFormatError, match=r"q_proj\.g_idx gives group 0 31 columns, expected 32"):
        _weight(parts).load()


def test_weight_is_refused_when_group_size_does_not_divide():
    with pytest.raises(ModelFormatError, match=r"q_proj has 96 input columns, which group_size 36 .* does not divide"):
        _weight(_parts(), group_size=36)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weight_is_refused_when_a_scale_is_not_finite(bad):
    parts = _parts()
    parts["scales"][1, 7] = bad
    with pytest.raises(ModelFormatError, match=r"q_proj\.scales holds values that are not finite"):
        _weight(parts).load()


def test_weight_is_refused_when_a_plain_one_is_stored_too():
    with pytest.raises(ModelFormatError, match=r"both m\.q_proj\.weight and m\.q_proj\.qweight"):
        _weight({**_parts(), "weight": torch.zeros(ROWS, COLUMNS)})


def _symmetric(bits, stored, is_v2):
    """Return a symmetric weight whose zero points are all stored as `stored`, and the numbers it stands for."""
    codes, zeros, scales = _random(bits)
    zeros[:] = 1 << (bits - 1)
    parts = packers.gptq(codes, zeros, scales, bits, is_v2=True)
    parts["qzeros"] = packers.stream(np.full(zeros.T.shape, stored), bits)
    weight = _weight(parts, bits, is_v2=is_v2, is_symmetric=True)
    return weight, packers.affine(codes, zeros, scales, np.arange(COLUMNS) // GROUP)


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("is_lowered", [False, True], ids=["as-they-are", "minus-one"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_weight_is_exact_whatever_the_format_says_of_its_zero_points(bits, is_lowered, is_v2):
    weight, expected = _symmetric(bits, (1 << (bits - 1)) - is_lowered, is_v2)
    loaded = weight.load()
    assert loaded.offset is None
    assert torch.equal(loaded.dequantize(), expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_weight_is_refused_when_its_zero_points_are_mixed(bits):
    codes, zeros, scales = _random(bits)
    zeros[:] = 1 << (bits - 1)
    zeros[5, 1] -= 1
    parts = packers.gptq(codes, zeros, scales, bits, is_v2=True)
    middle = 1 << (bits - 1)
    with pytest.raises(ModelFormatError, match=rf"q_proj\.qzeros holds {middle - 1} to {middle}, .*sym .*gptq_v2"):
        _weight(parts, bits, is_symmetric=True).load()
    # The second format says how zero points are stored, whatever else the config says.
    expected = packers.affine(codes, zeros, scales, np.arange(COLUMNS) // GROUP)
    assert torch.equal(_weight(parts, bits, is_v2=True, is_symmetric=True).load().dequantize(), expected)


@pytest.mark.parametrize("stored", [0, 6, 9, 15])
def test_symmetric_weight_is_refused_when_its_zero_points_are_not_the_middle(stored):
    with pytest.raises(ModelFormatError, match=rf"q_proj\.qzeros holds {stored} to {stored}, .*all 7 or all 8"):
        _symmetric(4, stored, is_v2=False)[0].load()


@pytest.mark.parametrize(("is_ordered", "has_indices"), [(True, False), (True, True), (False, False)])
def test_weight_is_refused_when_an_order_is_declared_and_not_stored(is_ordered, has_indices):
    codes, zeros, scales = _random(4)
    groups = np.random.default_rng(0).permutation(np.arange(COLUMNS) // GROUP) if has_indices else None
    parts = packers.gptq(codes, zeros, scales, 4, True, groups)
    stored = {f"m.{part}": tensor for part, tensor in parts.items()}
    config = GptqConfig(GptqScheme(4, GROUP, True), is_ordered=is_ordered)
    if is_ordered and not has_indices:
        with pytest.raises(ModelFormatError, match=r"m\.g_idx is missing.*desc_act"):
            gather_weights(stored, config)
    else:
        assert list(gather_weights(stored, config)) == ["m.weight"]
