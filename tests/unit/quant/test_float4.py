"""NVFP4 and MXFP4: every code, scales that divide or are powers of two, and tensors that do not fit."""

import numpy as np
import pytest
import torch

from quire.base.errors import ModelFormatError
from quire.quant.config import read_quantization
from quire.quant.readers import gather_weights

ROWS, COLUMNS = 6, 64
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _weight(kind, parts):
    strategy, group_size = {"nvfp4": ("tensor_group", 16), "mxfp4": ("group", 32)}[kind]
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group_size}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    config = read_quantization({"format": f"{kind}-pack-quantized", "config_groups": groups}, "config.json")
    tensors = {f"m.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    return gather_weights(tensors, config)["m.weight"]


def _parts(kind):
    """Return parts and the weight they stand for."""
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.arange(ROWS * COLUMNS) % 16).reshape(ROWS, COLUMNS)
    packed = torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))
    if kind == "nvfp4":
        scale, whole = torch.from_numpy(rng.random((ROWS, 4)) * 10).to(torch.float8_e4m3fn), np.float32(0.37)
        parts = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([whole])}
        return parts, torch.from_numpy(E2M1[codes] * np.repeat(scale.float().numpy() / whole, 16, 1))
    powers = rng.integers(100, 140, (ROWS, 2))
    parts = {"weight_packed": packed, "weight_scale": torch.from_numpy(powers.astype(np.uint8))}
    return parts, torch.from_numpy(E2M1[codes] * np.repeat(np.float32(2) ** (powers - 127).astype(np.float32), 32, 1))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_weight_is_exact(kind):
    parts, expected = _parts(kind)
    stored = _weight(kind, {**parts, "input_global_scale": torch.ones(1)})
    assert stored.shape == (ROWS, COLUMNS)
    weight = stored.load()
    assert set(weight.codes.unique().tolist()) <= set(weight.levels)
    assert len(weight.levels) == 15
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("nvfp4", {"weight_global_scale": None}, r"m\.weight_global_scale is missing"),
        ("nvfp4", {"weight_scale": torch.ones(6, 4)}, r"m\.weight_scale has .* torch\.float32"),
        ("nvfp4", {"weight_global_scale": torch.zeros(1)}, r"weight_global_scale is 0\.0, expected a positive"),
        ("nvfp4", {"weight_packed": torch.zeros(6, 30, dtype=torch.uint8)}, r"m has 60 input columns, which group_size 16"),
        ("nvfp4", {"weight_packed": torch.zeros(0, 32, dtype=torch.uint8)}, r"weight_packed has no values"),
        ("mxfp4", {"weight_scale": torch.zeros(6, 3, dtype=torch.uint8)}, r"m\.weight_scale has \[6, 3\]"),
        ("mxfp4", {"weight_scale": torch.full((6, 2), 255, dtype=torch.uint8)}, r"weight_scale holds .* not finite"),
        ("mxfp4", {"weight_global_scale": torch.ones(1)}, r"weight_global_scale .* in mxfp4-pack-quantized"),
    ],
)
def test_weight_is_refused_when_its_parts_do_not_fit(kind, changes, message):
    with pytest.raises(ModelFormatError, match=message):
        _weight(kind, {**_parts(kind)[0], **changes}).load()


def test_pairs_of_deepseek_v4_are_exact_beside_float8_and_other_tensors_named_scale():
    parts, expected = _parts("mxfp4")
    scale = parts["weight_scale"].view(torch.float8_e8m0fnu)
    tensors = {"e.weight": parts["weight_packed"].view(torch.int8), "e.scale": scale}
    codes = (torch.arange(64).view(8, 8) - 32.0).to(torch.float8_e4m3fn)
    tensors |= {"m.weight": codes, "m.scale": torch.full((2, 2), 0.5).to(torch.float8_e8m0fnu), "norm.scale": torch.ones(3)}
    config = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [4, 4], "expert_dtype": "fp4"}
    found = gather_weights(tensors, read_quantization(config, "config.json"))
    assert torch.equal(found["e.weight"].load().dequantize(), expected)
    assert torch.equal(found["m.weight"].load(), codes.float() / 2)
    assert torch.equal(found["norm.scale"], torch.ones(3))
    tensors["e.scale"] = scale[:, :1]
    with pytest.raises(ModelFormatError, match=r"e\.scale has \[6, 1\]"):
        gather_weights(tensors, read_quantization(config, "config.json"))
