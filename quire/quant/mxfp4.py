"""MXFP4 of gpt-oss: the experts of a layer are stored in one tensor of blocks of 32 columns and one of their scales."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.quant.float4 import unpack_float4
from quire.quant.stored_parts import StoredParts
from quire.quant.weight import CodeForm, QuantizedWeight, StoredWeight

_PARTS = re.compile(r"(.+)_(blocks|scales)", re.DOTALL)
_BLOCK_BYTES, _BLOCK_COLUMNS = 16, 32
_U8, _SCALES = (torch.uint8,), (torch.uint8, torch.float8_e8m0fnu)


def gather_experts(tensors: Mapping[str, Tensor | StoredWeight]) -> dict[str, Tensor | StoredWeight]:
    """Return the tensors with every `<stack>_blocks` and `<stack>_scales` replaced by weights `<stack>.<expert>`.

    Blocks are [E, O, K / 32, 16] u8, two values per byte, the low half first; scales [E, O, K / 32] are powers of two.
    Raises ModelFormatError if the two do not match.
    """
    kept: dict[str, Tensor | StoredWeight] = {}
    stacks: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = _PARTS.fullmatch(name)
        if found is not None and isinstance(tensor, Tensor):
            stacks.setdefault(found.group(1), {})[found.group(2)] = tensor
        else:
            kept[name] = tensor
    for name, parts in stacks.items():
        if name in tensors:
            raise ModelFormatError(f"the checkpoint has both {name} and {name}_{next(iter(parts))}; expected one of them")
        kept |= _read_stack(name, {f"{name}_{part}": tensor for part, tensor in parts.items()})
    return kept


def _read_stack(name: str, parts: Mapping[str, Tensor]) -> dict[str, StoredWeight]:
    module, _, stem = name.rpartition(".")
    stored = StoredParts(module, {part.removeprefix(f"{module}."): tensor for part, tensor in parts.items()})
    blocks = stored.take(f"{stem}_blocks", _U8, (None, None, None, _BLOCK_BYTES))
    scales = stored.take(f"{stem}_scales", _SCALES, tuple(blocks.shape[:3]))
    if 0 in blocks.shape:
        raise ModelFormatError(f"{name}_blocks has no values: its shape is {list(blocks.shape)}")
    return {
        f"{name}.{index}": _read_expert(StoredParts(f"{name}.{index}", {"blocks": expert, "scales": scale}))
        for index, (expert, scale) in enumerate(zip(blocks, scales, strict=True))
    }


def _read_expert(parts: StoredParts) -> StoredWeight:
    num_rows, num_groups, _ = parts.take("blocks", _U8, (None, None, _BLOCK_BYTES)).shape

    def load() -> QuantizedWeight:
        scale = parts.scale("scales", parts.take("scales", _SCALES, (num_rows, num_groups)).view(torch.float8_e8m0fnu))
        return unpack_float4(parts.take("blocks", _U8, (None, None, None)).flatten(1), scale)

    return parts.integers((num_rows, num_groups * _BLOCK_COLUMNS), CodeForm.of(4, _BLOCK_COLUMNS), load)
