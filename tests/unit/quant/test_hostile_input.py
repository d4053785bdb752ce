"""Thousands of random edits of configs and stored tensors: each is read or refused with a QuireError, nothing else."""

import copy
import random

import numpy as np
import pytest
import torch

from quire.base.errors import QuireError
from quire.quant.config import read_quantization
from quire.quant.readers import gather_weights
from tests.unit.quant import packers

JUNK = [
    *(None, True, False, 0, -1, 1, 7, 2**31, 10**40, 1.5, float("nan"), float("inf"), "", "gptq", "\0", "re:(", "re:.*"),
    *([], [1], [-1, 2], [128, 128], ["x"], [None], {}, {"a": 1}, {"quantizer": [1, None]}, [[]], {"": {}}, "x" * 3000),
]
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 8, "dynamic": False}
INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
CONFIGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True, "checkpoint_format": "gptq_v2", "dynamic": {}},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm", "backend": "autoawq"},
    "packed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS, "format": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    },
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 8]},
    "bnb": {"quant_method": "bitsandbytes", "load_in_8bit": True, "bnb_4bit_quant_type": "nf4"},
}
DTYPES = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn, torch.bool]


def _stored(name):
    """Return the stored parts of an 16 x 24 weight."""
    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 16, (16, 24)), rng.integers(0, 16, (16, 3))
    scales = rng.random((16, 3)).astype(np.float16)
    return {
        "gptq": lambda: packers.gptq(codes, zeros, scales, 4, True, np.arange(24) // 8),
        "awq": lambda: packers.awq(codes, zeros, scales),
        "packed": lambda: packers.packed(codes, scales, 4, zeros),
        "fp8": lambda: {"weight": torch.ones(16, 24).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 3)},
        "bnb": lambda: {"weight": torch.ones(16, 24, dtype=torch.int8), "SCB": torch.ones(16)},
    }[name]()


def _places(values):
    """Yield every (container, key) in nested objects and lists."""
    for key, value in list(values.items()) if isinstance(values, dict) else enumerate(values):
        yield values, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_read_or_refused_when_it_is_edited(name):
    rng = random.Random(name)
    assert read_quantization(CONFIGS[name], "config.json") is not None
    messages = []
    for _ in range(1500):
        values = copy.deepcopy(CONFIGS[name])
        for _ in range(rng.randint(1, 3)):
            container, key = rng.choice(list(_places(values)))
            container[key] = copy.deepcopy(rng.choice(JUNK))
        try:
            read_quantization(values, "config.json")
        except QuireError as error:
            messages.append(str(error))
    assert 0 < len(messages) < 1500
    assert max(map(len, messages)) < 1000


def _edited(tensor, rng):
    kind = rng.randrange(6)
    if kind == 0:
        return tensor.to(torch.float32).to(rng.choice(DTYPES))
    if kind == 1:
        return tensor[: rng.randrange(len(tensor) + 1)]
    if kind == 2:
        return torch.cat([tensor.view(torch.uint8)] * 2, -1).view(tensor.dtype)
    if kind == 3:
        return tensor.flatten()
    if kind == 4:
        return tensor.view(torch.uint8).random_(generator=torch.Generator().manual_seed(rng.randrange(1000))).view(tensor.dtype)
    return tensor[..., :0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_weight_is_read_or_refused_when_its_tensors_are_edited(name):
    rng = random.Random(name)
    config = read_quantization(CONFIGS[name], "config.json")
    num_read, messages = 0, []
    for _ in range(400):
        parts = {part: tensor.clone() for part, tensor in _stored(name).items()}
        part = rng.choice(list(parts))
        parts[part] = _edited(parts[part], rng)
        if rng.random() < 0.1:
            del parts[rng.choice(list(parts))]
        try:
            stored = gather_weights({f"m.{part}": tensor for part, tensor in parts.items()}, config).get("m.weight")
            if not isinstance(stored, torch.Tensor) and stored is not None and stored.shape == (16, 24):
                assert stored.load().shape == (16, 24)
                num_read += 1
        except QuireError as error:
            messages.append(str(error))
    assert num_read
    assert messages
    assert all("m." in message or "m has" in message for message in messages)
