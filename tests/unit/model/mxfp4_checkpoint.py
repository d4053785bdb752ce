"""A small random gpt-oss with experts in MXFP4, and the dense checkpoint of the same numbers."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_checkpoint import write_checkpoint
from tests.unit.quant import packers

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def write_mxfp4(tmp_path, **changes):
    """Write both and return their folders, the quantised one first."""
    quantised, dense = (write_checkpoint(tmp_path / kind, "gpt_oss", **SIZES, **changes) for kind in ("quantised", "dense"))
    config = json.loads((dense / "config.json").read_text())
    stored, numbers, rng = {}, {}, np.random.default_rng(0)
    for name, tensor in load_file(dense / "model.safetensors").items():
        if not name.endswith("_up_proj") and not name.endswith("experts.down_proj"):
            stored[name] = numbers[name] = tensor
            continue
        num_experts, num_inputs, num_rows = tensor.shape
        powers = rng.integers(120, 125, (num_experts, num_rows, num_inputs // 32))
        blocks, scales, weight = packers.mxfp4(rng.integers(0, 16, num_experts * num_rows * num_inputs), powers)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = weight.transpose(1, 2).contiguous().to(getattr(torch, config["torch_dtype"]))
    for folder, tensors, extra in ((quantised, stored, {"quantization_config": QUANTIZATION}), (dense, numbers, {})):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **extra}))
    return quantised, dense
