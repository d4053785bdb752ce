"""compressed-tensors: packed integers of every width, plain int8, float8, by the scheme of the config."""

import numpy as np
import pytest
import torch

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.quant.config import read_quantization
from quire.quant.readers import gather_weights
from tests.needs_re2 import needs_re2
from tests.unit.quant import packers

ROWS, COLUMNS, GROUP = 33, 96, 32


def _config(layout, group=None, **weights):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, **weights}
    scheme = {"targets": ["Linear"], "weights": weights, **(group or {})}
    values = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": scheme}}
    return read_quantization(values, "config.json")


def _weight(parts, config):
    tensors = {f"m.q_proj.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    return gather_weights(tensors, config)["m.q_proj.weight"]


def _random(bits=4, num_groups=COLUMNS // GROUP, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (ROWS, COLUMNS))
    zeros = rng.integers(0, 1 << bits, (ROWS, num_groups))
    return codes, zeros, rng.standard_normal((ROWS, num_groups)).astype(np.float16)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("is_symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_weight_is_exact(bits, is_symmetric):
    codes, zeros, scales = _random(bits)
    stored_zeros = None if is_symmetric else zeros
    if is_symmetric:
        zeros = np.full_like(zeros, 1 << (bits - 1))
    config = _config("pack-quantized", num_bits=bits, symmetric=is_symmetric)
    stored = _weight(packers.packed(codes, scales, bits, stored_zeros), config)
    assert stored.shape == (ROWS, COLUMNS)
    weight = stored.load()
    assert (weight.offset is None) == is_symmetric
    assert (weight.levels is None) == (bits > 4)
    assert torch.equal(weight.dequantize(), packers.affine(codes, zeros, scales, np.arange(COLUMNS) // GROUP))


def test_packed_weight_is_exact_when_its_scales_are_per_row():
    codes, zeros, scales = _random(num_groups=1)
    config = _config("pack-quantized", strategy="channel", group_size=None, symmetric=False)
    weight = _weight(packers.packed(codes, scales, 4, zeros), config).load()
    assert torch.equal(weight.dequantize(), packers.affine(codes, zeros, scales, np.zeros(COLUMNS, int)))


def test_packed_weight_is_exact_when_bits_do_not_fill_the_last_word():
    rng = np.random.default_rng(2)
    codes, scales = rng.integers(0, 32, (5, 13)), rng.standard_normal((5, 1)).astype(np.float32)
    config = _config("pack-quantized", num_bits=5, strategy="channel", group_size=None)
    weight = _weight(packers.packed(codes, scales, 5), config).load()
    assert torch.equal(weight.dequantize(), packers.affine(codes, np.full((5, 1), 16), scales, np.zeros(13, int)))


def test_columns_follow_the_group_indices_of_older_files():
    codes, zeros, scales = _random()
    groups = np.random.default_rng(1).permutation(np.arange(COLUMNS) // GROUP)
    parts = packers.packed(codes, scales, 4, zeros)
    config = _config("pack-quantized", symmetric=False)
    weight = _weight({**parts, "weight_g_idx": torch.from_numpy(groups.astype(np.int32))}, config).load()
    assert torch.equal(weight.dequantize(), packers.affine(codes, zeros, scales, groups))
    unused = torch.full((COLUMNS,), -1, dtype=torch.int32)
    assert _weight({**parts, "weight_g_idx": unused}, config).load().columns is None


@pytest.mark.parametrize("strategy, num_groups", [("tensor", 0), ("channel", 1), ("group", 3)])
@pytest.mark.parametrize("is_symmetric", [True, False], ids=["sym", "asym"])
def test_int8_weight_is_exact(strategy, num_groups, is_symmetric):
    rng = np.random.default_rng(3)
    codes = rng.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8)
    shape = (ROWS, num_groups) if num_groups else (1,)
    scales = rng.standard_normal(shape).astype(np.float16)
    zeros = np.zeros(shape, np.int8) if is_symmetric else rng.integers(-128, 128, shape).astype(np.int8)
    parts = {"weight": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scales)}
    if not is_symmetric:
        parts["weight_zero_point"] = torch.from_numpy(zeros)
    group_size = GROUP if strategy == "group" else None
    config = _config("int-quantized", num_bits=8, strategy=strategy, group_size=group_size, symmetric=is_symmetric)
    weight = _weight(parts, config).load()
    groups = np.arange(COLUMNS) // (COLUMNS // max(1, num_groups))
    spread = [np.broadcast_to(each, (ROWS, max(1, num_groups))) for each in (zeros, scales)]
    assert torch.equal(weight.dequantize(), packers.affine(codes, *spread, groups))
    assert not weight.is_token_quantized


_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    "inputs, expected",
    [
        (_TOKENS, True),
        ({**_TOKENS, "dynamic": False, "strategy": "tensor"}, False),
        ({**_TOKENS, "symmetric": False}, False),
        ({**_TOKENS, "type": "float"}, False),
        (None, False),
    ],
)
def test_inputs_are_quantised_by_token_only_when_that_is_declared(inputs, expected):
    config = _config("int-quantized", {"input_activations": inputs}, num_bits=8, strategy="channel", group_size=None)
    parts = {"weight": torch.ones(4, 8, dtype=torch.int8), "weight_scale": torch.ones(4, 1), "input_scale": torch.ones(1)}
    assert _weight(parts, config).load().is_token_quantized is expected


@pytest.mark.parametrize(
    "strategy, shape, options",
    [
        ("tensor", (1,), {}),
        ("tensor", (), {}),
        ("channel", (40, 1), {}),
        ("group", (40, 3), {"group_size": 16}),
        ("block", (3, 2), {"block_structure": [16, 32]}),
        ("block", (3, 2), {"block_structure": "16x32"}),
    ],
)
def test_float8_weight_is_exact(strategy, shape, options):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 48, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=generator)
    config = _config("float-quantized", type="float", num_bits=8, strategy=strategy, **{"group_size": None, **options})
    got = _weight({"weight": weight, "weight_scale": scale}, config).load()
    tile = {"tensor": (40, 48), "channel": (1, 48), "group": (1, 16), "block": (16, 32)}[strategy]
    whole = np.repeat(np.repeat(scale.numpy().reshape(-(-40 // tile[0]), -1), tile[0], 0)[:40], tile[1], 1)[:, :48]
    assert torch.equal(got, weight.float() * torch.from_numpy(whole))


@needs_re2
def test_each_module_follows_the_group_that_names_it():
    weights = {"type": "int", "symmetric": True, "strategy": "channel"}
    groups = {
        "a": {"targets": ["Linear"], "weights": {**weights, "num_bits": 4}},
        "b": {"targets": ["re:.*down_proj$"], "weights": {**weights, "num_bits": 8}},
        "c": {"targets": ["m.up_proj"], "weights": {**weights, "num_bits": 2}, "format": "pack-quantized"},
    }
    values = {"config_groups": groups, "format": "pack-quantized", "ignore": ["re:.*head", "m.gate"]}
    config = read_quantization(values, "config.json")
    found = {
        name: config.find_scheme(name) for name in ("m.q", "m.down_proj", "m.down_proj2", "m.up_proj", "lm_head", "m.gate")
    }
    assert {name: scheme and scheme.bits for name, scheme in found.items()} == {
        "m.q": 4,
        "m.down_proj": 8,
        "m.down_proj2": 4,
        "m.up_proj": 2,
        "lm_head": None,
        "m.gate": None,
    }


def _parts(**changes):
    codes, zeros, scales = _random()
    return packers.packed(codes, scales, 4, zeros) | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight_packed": None}, r"weight_packed is missing"),
        ({"weight_scale": None}, r"weight_scale is missing"),
        ({"weight_shape": None}, r"weight_shape is missing"),
        ({"weight_zero_point": None}, r"weight_zero_point is missing"),
        ({"weight_shape": torch.tensor([33, 104])}, r"q_proj has 104 input columns, which group_size 32 .* not divide"),
        ({"weight_shape": torch.tensor([33, 128])}, r"weight_packed has \[33, 12\] .* expected one of shape \[33, 16\]"),
        ({"weight_shape": torch.tensor([34, 96])}, r"weight_packed has \[33, 12\] .* expected one of shape \[34, 12\]"),
        ({"weight_shape": torch.tensor([33, -96])}, r"weight_shape says \[33, -96\]"),
        ({"weight_shape": torch.tensor([1 << 40, 96])}, r"weight_shape says \[1099511627776, 96\]"),
        ({"weight_shape": torch.tensor([33, 96, 1])}, r"weight_shape has \[3\]"),
        ({"weight_scale": torch.ones(33, 2)}, r"weight_scale has \[33, 2\] .* expected one of shape \[33, 3\]"),
        ({"weight_zero_point": torch.zeros(33, 3, dtype=torch.int32)}, r"zero_point has \[33, 3\] .* shape \[5, 3\]"),
        ({"weight_g_idx": torch.zeros(95, dtype=torch.int32)}, r"weight_g_idx has \[95\]"),
        ({"weight": torch.zeros(33, 96)}, r"q_proj\.weight has .* in pack-quantized"),
    ],
)
def test_packed_weight_is_refused_unread_when_its_parts_do_not_fit(changes, message):
    with pytest.raises(ModelFormatError, match=message):
        _weight(_parts(**changes), _config("pack-quantized", symmetric=False))


def test_weight_is_refused_when_its_values_cannot_be():
    config = _config("pack-quantized", symmetric=False)
    with pytest.raises(ModelFormatError, match=r"weight_scale holds values that are not finite"):
        _weight(_parts(weight_scale=torch.full((33, 3), float("nan"))), config).load()
    with pytest.raises(ModelFormatError, match=r"weight_g_idx holds groups from 0 to 3"):
        _weight(_parts(weight_g_idx=torch.arange(96, dtype=torch.int32) // 31), config).load()
    narrow = _config("int-quantized", num_bits=4, strategy="channel", group_size=None)
    with pytest.raises(ModelFormatError, match=r"q_proj\.weight holds 9 to 9, expected -8 to 7"):
        _weight({"weight": torch.full((2, 4), 9, dtype=torch.int8), "weight_scale": torch.ones(2, 1)}, narrow).load()


@needs_re2
def test_module_is_refused_when_the_config_ignores_it():
    values = {"config_groups": {"a": {"targets": ["re:.*down"], "weights": {"num_bits": 4}}}, "format": "pack-quantized"}
    with pytest.raises(ModelFormatError, match=r"m\.q_proj is stored quantised, but .* contradicts itself"):
        _weight(_parts(), read_quantization(values, "config.json"))


def test_zero_points_are_refused_when_the_scheme_is_symmetric():
    with pytest.raises(ModelFormatError, match=r"weight_zero_point .* for a symmetric module"):
        _weight(_parts(), _config("pack-quantized"))


@pytest.mark.parametrize("order", ["group", "dynamic", True, "weight", "static", False, None])
def test_order_of_columns_must_be_stored_when_groups_are_in_activation_order(order):
    codes, zeros, scales = _random()
    config = _config("pack-quantized", symmetric=False, actorder=order)
    parts = packers.packed(codes, scales, 4, zeros)
    unused = {**parts, "weight_g_idx": torch.full((COLUMNS,), -1, dtype=torch.int32)}
    if order in ("group", "dynamic", True):
        with pytest.raises(ModelFormatError, match=r"weight_g_idx is missing although actorder"):
            _weight(parts, config)
        with pytest.raises(ModelFormatError, match=r"weight_g_idx holds -1 everywhere although actorder"):
            _weight(unused, config).load()
        groups = np.random.default_rng(1).permutation(np.arange(COLUMNS) // GROUP)
        parts["weight_g_idx"] = torch.from_numpy(groups)
    else:
        groups = np.arange(COLUMNS) // GROUP
        assert _weight(unused, config).load().columns is None
    assert torch.equal(_weight(parts, config).load().dequantize(), packers.affine(codes, zeros, scales, groups))


def test_order_of_columns_is_refused_when_it_is_not_known():
    with pytest.raises(UnsupportedError, match="actorder 'random' .*supported: group, dynamic"):
        _config("pack-quantized", actorder="random")
