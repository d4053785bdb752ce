"""EAGLE heads: version 1 (2 has the same weights), and version 3 as its authors store it and as `speculators` does."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.contracts.model_spec import ModelSpec
from quire.model.families.sources import PRE_NORM_LAYER
from quire.model.heads.head_spec import LayerHead
from quire.model.heads.stored import HeadFolder, body_shapes, layer_sources, read_body

_REFUSED = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting", "quantization_config")
_OWN = ("fc", "input_norm", "layers.", "midlayer.")


def read_eagle1(folder: HeadFolder, target: ModelSpec) -> LayerHead:
    """Return an EAGLE-1 head. Raises ModelFormatError or UnsupportedError."""
    folder.refuse(_REFUSED)
    body = read_body(folder, folder.config, target, target.vocab_size)
    layer = replace(body.layers[0], attn_in=None)
    body = replace(body, layers=(layer,))
    sources = {**layer_sources(layer, "layers.0."), "fuse.weight": "fc.weight"}
    shapes = body_shapes(body, body.hidden_size)
    shapes |= {"fuse.weight": (body.hidden_size, 2 * body.hidden_size), "fuse.bias": (body.hidden_size,)}
    if "fc.bias" in folder.tensors:
        sources["fuse.bias"] = "fc.bias"
    elif folder.flag("bias", True):
        raise ModelFormatError(f"{folder.folder}: there is no fc.bias, and config.json does not say that bias is false")
    if "embed_tokens.weight" in folder.tensors:
        sources["embed.weight"] = "embed_tokens.weight"
    return LayerHead(
        entry="joined",
        body=body,
        aux_hidden_state_layers=(),
        embed_norm=None,
        feature_norm=None,
        has_final_norm=False,
        is_residual_normed=False,
        recycles_normed=True,
        parameters=folder.take(sources, shapes, body.dtype, _OWN),
    )


def read_eagle3(folder: HeadFolder, target: ModelSpec) -> LayerHead:
    """Return an EAGLE-3 head. Raises ModelFormatError or UnsupportedError."""
    folder.refuse(_REFUSED)
    nested = folder.table("transformer_layer_config")
    values = {**folder.config, **nested} if nested else folder.config
    names = set(folder.tensors)
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    draft_vocab = folder.integer("draft_vocab_size", target.vocab_size)
    body = read_body(folder, values, target, draft_vocab)
    layer = body.layers[0]
    hidden = body.hidden_size
    aux_hidden_state_layers = _aux_hidden_state_layers(folder, len(target.layers))
    layer_names = {**PRE_NORM_LAYER, "attn_in": "hidden_norm"}
    sources = {
        **layer_sources(layer, prefix, layer_names),
        "embed_norm.weight": f"{prefix}input_layernorm.weight",
        "fuse.weight": "fc.weight",
        "final_norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    shapes = body_shapes(body, 2 * hidden)
    shapes |= {"fuse.weight": (hidden, len(aux_hidden_state_layers) * hidden), "embed_norm.weight": (hidden,)}
    if "embed_tokens.weight" in names:
        sources["embed.weight"] = "embed_tokens.weight"
        shapes["embed.weight"] = (target.vocab_size, hidden)
    return LayerHead(
        entry="beside",
        body=body,
        aux_hidden_state_layers=aux_hidden_state_layers,
        embed_norm=layer.attn_in,
        feature_norm=None,
        has_final_norm=True,
        is_residual_normed=folder.flag("norm_before_residual", False),
        recycles_normed=False,
        parameters=folder.take(sources, shapes, body.dtype, _OWN),
        vocabulary=_vocabulary(folder, draft_vocab, target.vocab_size),
    )


def default_aux_hidden_state_layers(num_layers: int) -> tuple[int, ...]:
    """Return EAGLE-3's layers; of a model with few layers, the last three, or all."""
    wanted = (2, num_layers // 2, num_layers - 3)
    if wanted[0] < wanted[1] < wanted[2]:
        return wanted
    return tuple(range(max(0, num_layers - 3), num_layers))


def _aux_hidden_state_layers(folder: HeadFolder, num_layers: int) -> tuple[int, ...]:
    stated = folder.config.get("eagle_aux_hidden_state_layer_ids")
    stated = folder.table("eagle_config").get("eagle_aux_hidden_state_layer_ids") if stated is None else stated
    if stated is None:
        return default_aux_hidden_state_layers(num_layers)
    is_fine = isinstance(stated, list) and len(stated) > 0 and all(isinstance(layer, int) for layer in stated)
    if not is_fine or list(stated) != sorted(set(stated)) or not 0 <= stated[0] <= stated[-1] < num_layers:
        raise ModelFormatError(
            f"{folder.folder}: eagle_aux_hidden_state_layer_ids must be layers from 0 to {num_layers - 1}, low to high, "
            f"got {stated!r}"
        )
    return tuple(stated)


def _vocabulary(folder: HeadFolder, draft_vocab: int, vocab_size: int) -> Tensor | None:
    """Return the model's token for each token of the head's vocabulary, from the offsets `d2t`, checked against the mask
    `t2d`."""
    offsets = folder.tensors.get("d2t")
    if offsets is None:
        if draft_vocab != vocab_size:
            raise ModelFormatError(f"{folder.folder}: the head says {draft_vocab} of {vocab_size} tokens, but has no d2t")
        return None
    found = offsets.to(torch.int64) + torch.arange(len(offsets))
    if len(found) != draft_vocab or bool((found < 0).any()) or bool((found >= vocab_size).any()):
        raise ModelFormatError(f"{folder.folder}: d2t must give each of {draft_vocab} drafts a token below {vocab_size}")
    mask = folder.tensors.get("t2d")
    if mask is not None and not torch.equal(mask.bool().nonzero().flatten(), found):
        raise ModelFormatError(f"{folder.folder}: t2d and d2t contradict each other; the head is damaged")
    return found.to(torch.int32)
