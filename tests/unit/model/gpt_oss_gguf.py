"""The GGUF file of a gpt-oss checkpoint with experts in MXFP4, as the converter of the format writes it."""

import json

import numpy as np
from safetensors.torch import load_file

from tests.gguf_writer import MXFP4, write_gguf
from tests.golden.make_gguf import convert_tensor, metadata_of


def repack_mxfp4(blocks, scales):
    """Return blocks [..., G, 16] u8 and scales [..., G] u8 as a GGUF file has them: the scale before its 16 bytes, whose low
    halves are the first 16 columns and whose high halves are the other 16; in the checkpoint neighbours share a byte."""
    columns = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    halves = columns[..., :16] | columns[..., 16:] << 4
    packed = np.concatenate([scales[..., None], halves], -1)
    shape = (*blocks.shape[:-2], blocks.shape[-2] * 32)
    return MXFP4, shape, packed.tobytes()


def gpt_oss_parts(folder):
    """Return the metadata and the tensors of the GGUF file of a checkpoint, without a tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    stored, tensors = load_file(folder / "model.safetensors"), {}
    for name, tensor in stored.items():
        if name.endswith("_scales"):
            continue
        if not name.endswith("_blocks"):
            tensors |= convert_tensor(name, tensor.float().numpy(), config)
            continue
        blocks, scales = tensor.numpy(), stored[name.replace("_blocks", "_scales")].numpy()
        index = name.split(".")[2]
        parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if "gate_up" in name else {"down": slice(None)}
        for which, rows in parts.items():
            tensors[f"blk.{index}.ffn_{which}_exps.weight"] = repack_mxfp4(blocks[:, rows], scales[:, rows])
    return metadata_of(config), tensors


def convert_gpt_oss(folder, path):
    """Write the GGUF file of a checkpoint; returns `path`."""
    return write_gguf(path, *gpt_oss_parts(folder))
