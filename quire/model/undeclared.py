"""Quantised weights in a checkpoint whose config does not say so: an error that names the format and what to do."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.quant.weight import StoredWeight

_MODELOPT = "hf_quant_config.json"
_FORMATS = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "fp8",
    ".weight_scale": "fp8, compressed-tensors or ModelOpt",
    ".SCB": "bitsandbytes",
    ".absmax": "bitsandbytes",
    "_blocks": "mxfp4",
}
_DTYPES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}


def refuse_modelopt(folder: Path) -> None:
    """Raise UnsupportedError where ModelOpt's own file stands for the quantisation config of a folder that has none."""
    if (folder / _MODELOPT).is_file():
        raise UnsupportedError(
            f"{folder} is quantised by ModelOpt, as its {_MODELOPT} says, which is not supported without a "
            "quantization_config in config.json; take a version in compressed-tensors, fp8, GPTQ or AWQ, or the one that is "
            "not quantised"
        )


def refuse_undeclared(stored: Mapping[str, Tensor | StoredWeight], expected: Container[str], folder: Path) -> None:
    """Raise ModelFormatError where a weight is stored quantised although no config says how.

    expected  names that a model of floats has
    """
    for name, tensor in stored.items():
        if isinstance(tensor, StoredWeight):
            continue
        ending = next((ending for ending in _FORMATS if name not in expected and name.endswith(ending)), None)
        if ending is None and not (name in expected and tensor.dtype in _DTYPES):
            continue
        what = _FORMATS[ending] if ending is not None else _DTYPES[tensor.dtype]
        raise ModelFormatError(
            f"{folder} stores {name} in the form of {what}, but config.json has no quantization_config for it; get "
            "the checkpoint again with all of its files (some have a quantize_config.json), or the one that is not quantised"
        )
