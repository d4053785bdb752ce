"""MXFP4 of gpt-oss: every code and scale exact, experts one by one, and stacks that do not fit."""

import random

import numpy as np
import pytest
import torch

from quire.base.errors import ModelFormatError, QuireError
from quire.quant.config import Mxfp4Config, has_quantized_form, read_quantization
from quire.quant.readers import gather_weights
from tests.unit.quant import packers

EXPERTS, ROWS, COLUMNS = 3, 16, 64
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def _stack(seed=0):
    """Return stored tensors of a stack of experts, and the numbers they stand for [E, O, K]."""
    rng = np.random.default_rng(seed)
    codes = rng.permutation(np.arange(EXPERTS * ROWS * COLUMNS) % 16)
    powers = rng.integers(90, 160, (EXPERTS, ROWS, COLUMNS // 32))
    powers[0, 0, 0], powers[1, 2, 1] = 0, 250
    blocks, scales, numbers = packers.mxfp4(codes, powers)
    return {"m.up_blocks": blocks, "m.up_scales": scales}, numbers


def _gather(tensors):
    return gather_weights(tensors, read_quantization(CONFIG, "config.json"))


def test_config_is_read_and_says_that_weights_stay_integers():
    config = read_quantization(CONFIG, "config.json")
    assert config == Mxfp4Config()
    assert has_quantized_form(config)


def test_every_expert_is_exact_and_a_weight_of_its_own():
    stored, numbers = _stack()
    found = _gather({**stored, "m.up_bias": torch.ones(3), "n.weight": torch.ones(2)})
    assert list(found) == ["m.up_bias", "n.weight", "m.up.0", "m.up.1", "m.up.2"]
    for expert in range(EXPERTS):
        weight = found[f"m.up.{expert}"]
        assert weight.shape == (ROWS, COLUMNS)
        assert weight.is_integer
        loaded = weight.load()
        assert set(loaded.codes.unique().tolist()) <= set(loaded.levels)
        assert torch.equal(loaded.dequantize(), numbers[expert])


def test_scales_may_be_stored_as_float8():
    stored, numbers = _stack()
    stored["m.up_scales"] = stored["m.up_scales"].view(torch.float8_e8m0fnu)
    assert torch.equal(_gather(stored)["m.up.2"].load().dequantize(), numbers[2])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"m.up_scales": None}, r"m\.up_scales is missing"),
        ({"m.up_blocks": None}, r"m\.up_blocks is missing"),
        ({"m.up_scales": torch.zeros(3, 16, 3, dtype=torch.uint8)}, r"m\.up_scales has \[3, 16, 3\]"),
        ({"m.up_scales": torch.zeros(3, 16, 2)}, r"m\.up_scales has .* torch\.float32"),
        ({"m.up_blocks": torch.zeros(3, 16, 32, dtype=torch.uint8)}, r"m\.up_blocks has \[3, 16, 32\]"),
        ({"m.up_blocks": torch.zeros(3, 16, 2, 8, dtype=torch.uint8)}, r"m\.up_blocks has \[3, 16, 2, 8\]"),
        (
            {"m.up_blocks": torch.zeros(0, 16, 2, 16, dtype=torch.uint8), "m.up_scales": torch.zeros(0, 16, 2).byte()},
            r"m\.up_blocks has no values",
        ),
        ({"m.up": torch.zeros(3, 64, 16)}, r"both m\.up and m\.up_blocks"),
    ],
)
def test_stacks_that_do_not_fit_are_refused_when_they_are_opened(changes, message):
    stored = {name: tensor for name, tensor in {**_stack()[0], **changes}.items() if tensor is not None}
    with pytest.raises(ModelFormatError, match=message):
        _gather(stored)


def test_a_scale_that_is_no_number_is_refused_when_it_is_read():
    stored, _ = _stack()
    stored["m.up_scales"][1, 3, 0] = 255
    found = _gather(stored)
    found["m.up.0"].load()
    with pytest.raises(ModelFormatError, match=r"m\.up\.1\.scales holds values that are not finite"):
        found["m.up.1"].load()


def test_edited_tensors_are_read_or_refused():
    rng, num_refused = random.Random(0), 0
    for _ in range(300):
        stored = {name: tensor.clone() for name, tensor in _stack()[0].items()}
        name = rng.choice(list(stored))
        tensor = stored[name]
        edits = (
            tensor[:1],
            tensor[..., :1],
            tensor[:, :0],
            tensor.flatten(),
            tensor.float(),
            tensor.int(),
            tensor.view(torch.int8),
        )
        stored[name] = rng.choice(edits)
        try:
            assert all(weight.load().shape == (ROWS, COLUMNS) for weight in _gather(stored).values())
        except QuireError:
            num_refused += 1
    assert num_refused > 200
