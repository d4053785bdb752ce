"""Read a draft head from its folder, and build the object that runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.contracts.model_spec import ModelSpec
from quire.kernels.native import load_native
from quire.model.build import Model
from quire.model.heads.eagle import read_eagle1, read_eagle3
from quire.model.heads.head_spec import LayerHead, ParallelHead
from quire.model.heads.medusa import read_medusa
from quire.model.heads.mtp import MIMO_PREFIX, read_mtp
from quire.model.heads.native_head import NativeHead
from quire.model.heads.native_vocabulary import NativeVocabulary
from quire.model.heads.reference_head import ReferenceHead
from quire.model.heads.stored import HeadFolder
from quire.model.native_decoder import NativeDecoder
from quire.quant.policy import QuantizationPolicy, parameter_quantizer

HeadModel = NativeHead | ReferenceHead
"""The classes that run a LayerHead, with the same `enter`, `recycled` and `draft`."""

_OF_MTP = ("mtp.", MIMO_PREFIX)
_MEDUSA_NAME = re.compile(r"(?:medusa_heads?\.)?(?:\d+\.0\.linear|blocks\.\d+\.layers\.\d+)\.weight")


def find_head_kind(folder: Path) -> Literal["eagle", "eagle3", "medusa", "mtp"] | None:
    """Return the kind of draft head in a folder, by the names of its tensors; None for a whole model or an unreadable
    folder."""
    try:
        names = set(HeadFolder.open(folder).tensors)
    except ModelFormatError:
        return None
    if "fc.weight" in names:
        return "eagle3" if any(name.endswith("hidden_norm.weight") for name in names) else "eagle"
    if any(name.endswith("layers.0.input_layernorm.weight") and not name.startswith(_OF_MTP) for name in names):
        return None  # a whole model, even if it contains a draft head
    if any(_MEDUSA_NAME.fullmatch(name) for name in names):
        return "medusa"
    predicts = any(name.startswith(_OF_MTP) or name.endswith(".eh_proj.weight") for name in names)
    return "mtp" if predicts else None


def read_layer_head(folder: Path, kind: Literal["eagle", "eagle3", "mtp"], target: ModelSpec) -> LayerHead:
    """Return the head of a folder, for a model. Raises ModelFormatError or UnsupportedError."""
    if target.num_learned_positions:
        raise UnsupportedError("heads that draft are not supported for models with learned positions (yet)")
    opened = HeadFolder.open(folder)
    return {"eagle": read_eagle1, "eagle3": read_eagle3, "mtp": read_mtp}[kind](opened, target)


def read_parallel_head(folder: Path, target: ModelSpec) -> ParallelHead:
    """Return the Medusa head of a folder, for a model. Raises ModelFormatError."""
    return read_medusa(HeadFolder.open(folder), target)


def check_head(folder: HeadFolder, kind: Literal["eagle3", "medusa", "mtp"], target: ModelSpec) -> None:
    """Raise the errors that reading a draft head would raise."""
    {"eagle3": read_eagle3, "medusa": read_medusa, "mtp": read_mtp}[kind](folder, target)


def build_head(
    head: LayerHead, target: Model | NativeVocabulary, max_model_len: int, policy: QuantizationPolicy | None = None
) -> HeadModel:
    """Return the object that runs a draft head next to a model, with native kernels if the model uses them.

    policy  how its weights are quantised, natively only. Raises UnsupportedError
    """
    native = load_native()
    if native is not None and isinstance(target, NativeDecoder | NativeVocabulary):
        quantize = None if policy is None else parameter_quantizer(head.parameters, head.body, policy)
        return NativeHead(native, head, target, max_model_len, quantize)
    if isinstance(target, NativeDecoder | NativeVocabulary):
        raise UnsupportedError("a native model needs the native kernels for its head too")
    if policy is not None:
        raise UnsupportedError("speculative_config: quantization of a head needs the native kernels, which are not there")
    return ReferenceHead(head, target, max_model_len)
