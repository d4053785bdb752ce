"""The layout of heads for multi-token prediction: MiMo's, which vLLM and SGLang support for dense models.

Its layer is Qwen2's: queries, keys and values have biases, zero if the model has none, because vLLM leaves missing ones
uninitialised. The norm of queries and keys, which `qk_norm` in a config enables, is supported by vLLM, not by SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.model.heads.mtp import MIMO_MODULES, MIMO_PREFIX

_MODULES = {
    "pre_fc_norm_embedding": MIMO_MODULES["embed_norm"],
    "pre_fc_norm_hidden": MIMO_MODULES["feature_norm"],
    "fc": MIMO_MODULES["fuse"],
    "norm": MIMO_MODULES["final_norm"],
}
_LAYER, _OF_QWEN = "layers.0.", "mtp."
_BIASES = tuple(f"self_attn.{name}_proj.bias" for name in ("q", "k", "v"))


def to_stored(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors to store for the parameters of an MtpHead."""
    stored: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        if name.startswith(_LAYER):
            stored[MIMO_PREFIX + name.removeprefix(_LAYER)] = tensor
        else:
            module = name.removesuffix(".weight")
            stored[f"{MIMO_PREFIX}{_MODULES[module]}.weight"] = _other_half_first(tensor) if module == "fc" else tensor
    for bias in _BIASES:
        weight = stored[MIMO_PREFIX + bias.replace(".bias", ".weight")]
        stored.setdefault(MIMO_PREFIX + bias, torch.zeros(len(weight), dtype=weight.dtype))
    return stored


def from_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a stored MtpHead, also from Qwen's layout, which older versions wrote; tensors of other heads
    are returned unchanged."""
    if any(name.startswith(_OF_QWEN) for name in tensors):
        return {name.removeprefix(_OF_QWEN): tensor for name, tensor in tensors.items()}
    modules = {stored: module for module, stored in _MODULES.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = name.removeprefix(MIMO_PREFIX)
        module = modules.get(own.removesuffix(".weight"))
        if own == name:
            found[name] = tensor
        elif module is None:
            found[_LAYER + own] = tensor
        else:
            found[f"{module}.weight"] = _other_half_first(tensor) if module == "fc" else tensor
    return found


def _other_half_first(weight: Tensor) -> Tensor:
    """Return [H, 2 * H] for an input whose halves, the embedding and the hidden state, are swapped."""
    return torch.cat(weight.chunk(2, 1)[::-1], 1).contiguous()
