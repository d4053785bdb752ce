"""A small random checkpoint in a quantised format, and the dense one of the same numbers."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_checkpoint import write_checkpoint
from tests.unit.quant import packers

GROUP = 8
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
CONFIGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "int8": {"format": "int-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": WEIGHTS}}},
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]},
    "bnb": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}
CONFIGS["gptq"]["checkpoint_format"] = "gptq_v2"


def quantise(method, weight, seed):
    """Return the stored parts of a weight [O, K] in a format, and the numbers they stand for."""
    rows, columns = weight.shape
    rng = np.random.default_rng(seed)
    if method == "fp8":
        codes, scale = weight.to(torch.float8_e4m3fn), torch.rand(-(-rows // 16), -(-columns // 16)) + 0.5
        whole = scale.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * whole
    if method in ("int8", "bnb"):
        codes = torch.from_numpy(rng.integers(-128, 128, (rows, columns)).astype(np.int8))
        scale = torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed)) / 64
        if method == "bnb":
            return {"weight": codes, "SCB": scale.flatten()}, codes.float() * (scale / 127)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale
    codes, zeros = rng.integers(0, 16, (rows, columns)), rng.integers(0, 16, (rows, columns // GROUP))
    scales = (rng.random((rows, columns // GROUP)) / 16).astype(np.float16)
    groups = np.arange(columns) // GROUP
    if method == "awq":
        return packers.awq(codes, zeros, scales), packers.affine(codes, zeros, scales, groups)
    groups = np.random.default_rng(columns).permutation(groups)
    return packers.gptq(codes, zeros, scales, 4, True, groups), packers.affine(codes, zeros, scales, groups)


def write_quantised(tmp_path, family, method, modules="_proj", rename=lambda name: name, quantization=None, **changes):
    """Write a quantised checkpoint and the dense one of its numbers; return both folders.

    quantization  the config that is written, where it is not that of the method
    """
    quantised, dense = (write_checkpoint(tmp_path / kind, family) for kind in ("quantised", "dense"))
    stored, numbers = {}, {}
    for index, (name, tensor) in enumerate(load_file(dense / "model.safetensors").items()):
        module, _, kind = rename(name).rpartition(".")
        numbers[rename(name)] = tensor
        if kind != "weight" or not any(part in module for part in modules.split("|")):
            stored[rename(name)] = tensor
            continue
        parts, numbers[rename(name)] = quantise(method, tensor, index)
        stored |= {f"{module}.{part}": value for part, value in parts.items()}
    config = json.loads((dense / "config.json").read_text()) | changes
    for folder, tensors, extra in (
        (quantised, stored, {"quantization_config": quantization or CONFIGS[method]}),
        (dense, numbers, {}),
    ):
        save_file({name: t.clone().contiguous() for name, t in tensors.items()}, folder / "new")
        (folder / "new").replace(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **extra}))
    return quantised, dense
