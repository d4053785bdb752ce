"""Small random checkpoints with quantised weights, of every form that the device runs."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_checkpoint import write_checkpoint
from tests.unit.quant import packers

SIZES = {"intermediate_size": 64, "moe_intermediate_size": 32, "hidden_size": 64, "head_dim": 16}


def compressed(layout, **weights):
    weights = {"num_bits": 8, "type": "int", "symmetric": True, **weights}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


CONFIGS = {
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": True,
        "sym": False,
        "checkpoint_format": "gptq_v2",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "int8": compressed("int-quantized", strategy="channel"),
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
    "fp8-rows": compressed("float-quantized", type="float", strategy="channel"),
    "fp8-tensor": compressed("float-quantized", type="float", strategy="tensor"),
    "fp8-small": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]},
}
BLOCKS = {"fp8": (32, 32), "fp8-small": (16, 16), "fp8-rows": (1, 1 << 16), "fp8-tensor": (1 << 16, 1 << 16)}


def quantise(method, weight, seed):
    """Return the stored parts of a weight [O, K] in a format, and the numbers they stand for."""
    rows, columns = weight.shape
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    if method in BLOCKS:
        high, wide = (min(side, size) for side, size in zip(BLOCKS[method], weight.shape, strict=True))
        scale = torch.rand(-(-rows // high), -(-columns // wide), generator=generator) + 0.5
        codes = weight.to(torch.float8_e4m3fn)
        whole = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        name = "weight_scale_inv" if CONFIGS[method]["quant_method"] == "fp8" else "weight_scale"
        return {"weight": codes, name: scale.view(1) if method == "fp8-tensor" else scale}, codes.float() * whole
    if method == "int8":
        codes = torch.from_numpy(rng.integers(-128, 128, (rows, columns)).astype(np.int8))
        scale = torch.rand(rows, 1, generator=generator) / 64
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale
    codes, zeros = rng.integers(0, 16, (rows, columns)), rng.integers(0, 16, (rows, columns // 32))
    scales = (rng.random((rows, columns // 32)) / 16).astype(np.float16)
    groups = np.arange(columns) // 32
    if method == "awq":
        return packers.awq(codes, zeros, scales), packers.affine(codes, zeros, scales, groups)
    groups = np.random.default_rng(columns).permutation(groups)
    return packers.gptq(codes, zeros, scales, 4, True, groups), packers.affine(codes, zeros, scales, groups)


def write(tmp_path, family, method, **changes):
    """Write a quantised checkpoint and the dense one of its numbers; return both folders."""
    quantised, dense = (write_checkpoint(tmp_path / kind, family, **SIZES, **changes) for kind in ("quantised", "dense"))
    stored, numbers = {}, {}
    for index, (name, tensor) in enumerate(load_file(dense / "model.safetensors").items()):
        numbers[name] = tensor
        module, _, kind = name.rpartition(".")
        if kind != "weight" or "_proj" not in module:
            stored[name] = tensor
            continue
        parts, numbers[name] = quantise(method, tensor, index)
        stored |= {f"{module}.{part}": value for part, value in parts.items()}
    config = json.loads((dense / "config.json").read_text())
    for folder, tensors, extra in ((quantised, stored, {"quantization_config": CONFIGS[method]}), (dense, numbers, {})):
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **extra}))
    return quantised, dense
