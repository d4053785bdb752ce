"""Multi-token prediction: the layer after the last one, in Qwen's layout (`mtp.*`), DeepSeek's (`model.layers.N.*`), or MiMo's
(`model.mtp_layers.0.*`)."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.heads.head_spec import LayerHead
from quire.model.heads.stored import HeadFolder, body_shapes, layer_sources

MIMO_PREFIX = "model.mtp_layers.0."
MIMO_MODULES = {
    "fuse": "input_proj",
    "embed_norm": "token_layernorm",
    "feature_norm": "hidden_layernorm",
    "final_norm": "final_layernorm",
}
"""Stored names, after the prefix, of a LayerHead's parameters outside its layer."""


def read_mtp(folder: HeadFolder, target: ModelSpec) -> LayerHead:
    """Return the first module for multi-token prediction; its layer has the same kind as the model's.

    Raises ModelFormatError or UnsupportedError.
    """
    if any(name.startswith("mtp.") for name in folder.tensors):
        return _read(folder, target, _qwen_names())
    if any(name.startswith(MIMO_PREFIX) for name in folder.tensors):
        return _read_mimo(folder, target)
    prefix = f"model.layers.{len(target.layers)}."
    stored = [name for name in folder.tensors if re.fullmatch(r"model\.layers\.\d+\.eh_proj\.weight", name)]
    if stored:
        prefix = min(stored, key=lambda name: int(name.split(".")[2])).removesuffix("eh_proj.weight")
        if any(name.startswith(f"{prefix}self_attn.kv_a_") for name in folder.tensors):
            raise UnsupportedError(f"{folder.folder}: {prefix}self_attn is a latent attention, which heads cannot have (yet)")
        if any(name.startswith(f"{prefix}mlp.experts.") for name in folder.tensors):
            raise UnsupportedError(f"{folder.folder}: {prefix}mlp is a mixture of experts, which heads cannot have (yet)")
        return _read(folder, target, _deepseek_names(prefix))
    raise ModelFormatError(
        f"{folder.folder} has no layer for multi-token prediction: none of mtp.*, {MIMO_PREFIX}* and {prefix}eh_proj is "
        "stored; "
        "give a model that has one, or as `model` the folder of a head that was trained for it"
    )


def _qwen_names() -> dict[str, str]:
    return {
        "fuse": "mtp.fc",
        "embed_norm": "mtp.pre_fc_norm_embedding",
        "feature_norm": "mtp.pre_fc_norm_hidden",
        "layer": "mtp.layers.0.",
        "final_norm": "mtp.norm",
        "embed": "mtp.embed_tokens",
        "lm_head": "mtp.lm_head",
    }


def _deepseek_names(prefix: str) -> dict[str, str]:
    return {
        "fuse": f"{prefix}eh_proj",
        "embed_norm": f"{prefix}enorm",
        "feature_norm": f"{prefix}hnorm",
        "layer": prefix,
        "final_norm": f"{prefix}shared_head.norm",
        "embed": f"{prefix}embed_tokens",
        "lm_head": f"{prefix}shared_head.head",
    }


def _mimo_names() -> dict[str, str]:
    return {name: MIMO_PREFIX + module for name, module in (*MIMO_MODULES.items(), ("layer", ""))}


def _read_mimo(folder: HeadFolder, target: ModelSpec) -> LayerHead:
    """Return a module as MiMo stores it: the state comes before the embedding, and the layer is Qwen2's, perhaps with norms of
    queries and keys. Embedding and output are the model's, whatever is stored."""
    attention, layer = f"{MIMO_PREFIX}self_attn.", _layer_of(target)
    biases = {name for name in folder.tensors if name.startswith(attention) and name.endswith("_proj.bias")}
    has_bias = any(bool(folder.tensors[name].any()) for name in biases)
    tensors = {name: tensor for name, tensor in folder.tensors.items() if has_bias or name not in biases}
    is_normed = f"{attention}q_norm.weight" in tensors
    own = replace(layer.attention, qk_norm=layer.attention.qk_norm if is_normed else None, has_qkv_bias=has_bias)
    head = _read(replace(folder, tensors=tensors), target, _mimo_names(), replace(layer, attention=own))
    fuse = torch.cat(head.parameters["fuse.weight"].chunk(2, 1)[::-1], 1)
    return replace(head, parameters={**head.parameters, "fuse.weight": fuse})


def _layer_of(target: ModelSpec) -> LayerSpec:
    """Return a layer without a window: modules attend to all earlier tokens, even if some of the model's layers have a
    window."""
    return next((layer for layer in reversed(target.layers) if layer.attention.window is None), target.layers[-1])


def _read(folder: HeadFolder, target: ModelSpec, names: dict[str, str], layer: LayerSpec | None = None) -> LayerHead:
    layer = layer or _layer_of(target)
    hidden, norm = target.hidden_size, target.final_norm
    body = replace(target, layers=(layer,), is_tied=False)
    sources = layer_sources(layer, names["layer"])
    for name in ("fuse", "embed_norm", "feature_norm", "final_norm"):
        sources[f"{name}.weight"] = f"{names[name]}.weight"
    for name in ("embed", "lm_head"):
        if name in names and f"{names[name]}.weight" in folder.tensors:
            sources[f"{name}.weight"] = f"{names[name]}.weight"
    shapes = body_shapes(body, hidden)
    shapes |= {"fuse.weight": (hidden, 2 * hidden), "embed_norm.weight": (hidden,), "feature_norm.weight": (hidden,)}
    own = tuple(f"{stem}." for name, stem in names.items() if name != "layer")
    return LayerHead(
        entry="joined",
        body=body,
        aux_hidden_state_layers=(),
        embed_norm=norm,
        feature_norm=norm,
        has_final_norm=True,
        is_residual_normed=False,
        recycles_normed=True,
        parameters=folder.take(sources, shapes, body.dtype, (*own, names["layer"])),
    )
