"""Find the quantised weights among the tensors of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.base.logging import get_logger
from quire.quant import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from quire.quant.compressed_config import CompressedTensorsConfig
from quire.quant.config import AwqConfig, BitsAndBytesConfig, Fp8Config, GptqConfig, Mxfp4Config, QuantizationConfig
from quire.quant.stored_parts import StoredParts
from quire.quant.weight import StoredWeight

logger = get_logger(__name__)

Stored = Tensor | StoredWeight

_WEIGHT = "weight"
_ACTIVATION_SCALES = re.compile(
    r".*\.((input|output|q|k|v|kv|prob|activation)_scale|(input|output|k|v)_zero_point|input_scale_ub|input_global_scale)"
)
"""Scales of activations and of the KV cache, which are not used."""


def gather_weights(
    tensors: Mapping[str, Tensor | StoredWeight], config: QuantizationConfig, is_logged: bool = True
) -> dict[str, Tensor | StoredWeight]:
    """Return the tensors with those of each quantised module replaced by one StoredWeight, named `<module>.weight`.

    MXFP4 experts are one StoredWeight each, see `mxfp4.gather_experts`.

    tensors  stored name -> tensor, still in the file; nothing is unpacked here

    Scales of activations are dropped, with a log line (is_logged), like other declared options that are not used.

    Raises ModelFormatError if the tensors of a module do not match each other or the config.
    """
    if isinstance(config, Mxfp4Config):
        return mxfp4.gather_experts(tensors)
    suffix = re.compile(rf"(.+)\.({'|'.join(re.escape(part) for part in _parts_of(config))})", re.DOTALL)
    modules: dict[str, dict[str, Tensor]] = {}
    kept: dict[str, Stored] = {}
    num_dropped = 0
    for name, tensor in tensors.items():
        found = suffix.fullmatch(name)
        if found is not None and isinstance(tensor, Tensor) and _is_part(*found.groups(), tensors):
            modules.setdefault(found.group(1), {})[found.group(2)] = tensor
        elif _ACTIVATION_SCALES.fullmatch(name):
            num_dropped += 1
        else:
            kept[name] = tensor
    if is_logged:
        _log(config, num_dropped)
    for module, parts in modules.items():
        name = f"{module}.{_WEIGHT}"
        plain = kept.get(name)
        if isinstance(plain, Tensor):
            if not _uses_plain_weight(config):
                raise ModelFormatError(f"the checkpoint has both {name} and {module}.{next(iter(parts))}; expected one of them")
            parts[_WEIGHT] = plain
        kept[name] = _read(StoredParts(module, parts), config)
    return kept


def _is_part(module: str, part: str, tensors: Mapping[str, Tensor | StoredWeight]) -> bool:
    """Return whether a part is one: other tensors may be called "scale"."""
    weight = tensors.get(f"{module}.{_WEIGHT}")
    return part != "scale" or (isinstance(weight, Tensor) and weight.dtype in (torch.float8_e4m3fn, torch.int8))


def _log(config: QuantizationConfig, num_dropped: int) -> None:
    """Log what is declared or stored but not used."""
    if isinstance(config, (CompressedTensorsConfig, Fp8Config)):
        for note in config.notes:
            logger.info(note)
    if num_dropped:
        logger.info("%d stored scales of activations and of the KV cache are not used", num_dropped)


def _uses_plain_weight(config: QuantizationConfig) -> bool:
    return not isinstance(config, (GptqConfig, AwqConfig))


def _parts_of(config: QuantizationConfig) -> tuple[str, ...]:
    if isinstance(config, GptqConfig):
        return gptq.PARTS
    if isinstance(config, AwqConfig):
        return awq.PARTS
    if isinstance(config, Fp8Config):
        return fp8.PARTS
    if isinstance(config, BitsAndBytesConfig):
        return bitsandbytes.PARTS
    return compressed_tensors.PARTS


def _read(parts: StoredParts, config: QuantizationConfig) -> StoredWeight:
    if isinstance(config, GptqConfig):
        return gptq.read_gptq(parts, config)
    if isinstance(config, AwqConfig):
        return awq.read_awq(parts, config)
    if isinstance(config, Fp8Config):
        return fp8.read_fp8(parts, config)
    if isinstance(config, BitsAndBytesConfig):
        return bitsandbytes.read_bitsandbytes(parts)
    return compressed_tensors.read_compressed(parts, config)
