"""Medusa heads, in three layouts: `{i}.0.linear`, `medusa_head.{i}.0.linear`, and `blocks.{i}.layers.{j}` with `lm_heads`."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.contracts.medusa_choices import read_choices
from quire.contracts.model_spec import ModelSpec
from quire.model.heads.head_spec import ParallelHead
from quire.model.heads.stored import HeadFolder, check_width

_MAX_CHOICES = 1024
"""Paths of a stored tree; the first of them are drafted."""


def read_medusa(folder: HeadFolder, target: ModelSpec) -> ParallelHead:
    """Return a Medusa head. Raises ModelFormatError.

    The number of outputs is counted from the stored tensors, because published configs have too small numbers.
    """
    tensors = {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in folder.tensors.items()}
    is_blocks = any(name.startswith("blocks.") for name in tensors)
    pattern = r"blocks\.(\d+)\.layers\.(\d+)\.weight" if is_blocks else r"(\d+)\.(\d+)\.linear\.weight"
    places = sorted((int(m[1]), int(m[2])) for name in tensors if (m := re.fullmatch(pattern, name)) is not None)
    outputs = sorted({output for output, _ in places})
    if not outputs or outputs != list(range(len(outputs))):
        raise ModelFormatError(
            f"{folder.folder} holds no Medusa heads, or not all of them: found those with the numbers {outputs}"
        )
    blocks: list[tuple[tuple[Tensor, Tensor | None], ...]] = []
    heads: list[Tensor] = []
    for output in outputs:
        layers = [layer for found, layer in places if found == output]
        stems = [f"blocks.{output}.layers.{layer}" if is_blocks else f"{output}.{layer}.linear" for layer in layers]
        blocks.append(tuple(_block(folder, tensors, stem, target) for stem in stems))
        heads.append(_head(folder, tensors, output, len(layers), is_blocks=is_blocks))
    token_map, sizes = tensors.get("token_map"), {len(head) for head in heads}
    if token_map is None or sizes != {target.vocab_size} or sizes == {len(token_map)}:
        vocabulary = _vocabulary(folder, token_map, target.vocab_size, sizes)
    else:  # of whole outputs, the tokens of the map alone are said
        vocabulary = _vocabulary(folder, token_map, target.vocab_size, {len(token_map)})
        heads = [head[token_map.long()] for head in heads]
    dtype = getattr(torch, target.dtype)
    choices = folder.config.get("medusa_choices")
    if choices is not None:
        choices = read_choices(choices, str(folder.folder / "config.json"), _MAX_CHOICES, ModelFormatError)
        if max(map(len, choices)) > len(heads) or max(map(max, choices)) >= len(heads[0]):
            raise ModelFormatError(
                f"{folder.folder / 'config.json'}: medusa_choices has paths for {max(map(len, choices))} heads, but there are "
                f"{len(heads)} heads of {len(heads[0])} tokens"
            )
    return ParallelHead(tuple(blocks), tuple(head.to(dtype) for head in heads), vocabulary, choices)


def _block(folder: HeadFolder, tensors: dict[str, Tensor], stem: str, target: ModelSpec) -> tuple[Tensor, Tensor | None]:
    weight, bias = tensors[f"{stem}.weight"], tensors.get(f"{stem}.bias")
    check_width(folder, weight.shape[-1], target)
    if weight.shape != (target.hidden_size, target.hidden_size) or (bias is not None and bias.shape != weight.shape[:1]):
        raise ModelFormatError(f"{folder.folder}: {stem} must be square, with a bias of that size or none")
    dtype = getattr(torch, target.dtype)
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _head(folder: HeadFolder, tensors: dict[str, Tensor], output: int, num_layers: int, *, is_blocks: bool) -> Tensor:
    names = (f"lm_heads.{output}.weight", "lm_head.weight") if is_blocks else (f"{output}.{num_layers}.weight",)
    if is_blocks and folder.flag("original_lm_head", False):
        names += ("lm_heads.0.weight",)
    for name in names:
        if name in tensors:
            return tensors[name]
    raise ModelFormatError(f"{folder.folder}: Medusa head {output} has no output weight; expected {' or '.join(names)}")


def _vocabulary(folder: HeadFolder, token_map: Tensor | None, vocab_size: int, sizes: set[int]) -> Tensor | None:
    if len(sizes) != 1:
        raise ModelFormatError(f"{folder.folder}: the Medusa heads say different numbers of tokens: {sorted(sizes)}")
    size = sizes.pop()
    if token_map is None:
        if size != vocab_size:
            raise ModelFormatError(
                f"{folder.folder}: the heads say {size} tokens, the model {vocab_size}, and there is no token_map"
            )
        return None
    if len(token_map) != size or bool((token_map < 0).any()) or bool((token_map >= vocab_size).any()):
        raise ModelFormatError(f"{folder.folder}: token_map must give each of {size} drafts a token below {vocab_size}")
    return token_map.to(torch.int32)
