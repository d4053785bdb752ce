"""Features that the GPU kernels do not support: one list for the decoder and for the table of models."""

from __future__ import annotations

from quire.contracts.model_spec import NO_ATTENTION, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.model.reference_only import reference_only_layer

MAX_TAPS = 4
"""Of a causal convolution of the GPU kernels."""


def device_refusal(spec: ModelSpec) -> str | None:
    """Return why the GPU kernels cannot run a model, or None where they can."""
    if all(layer.attention == NO_ATTENTION for layer in spec.layers):
        return "a model without attention"
    return next((reason for layer in spec.layers if (reason := _refusal(layer)) is not None), None)


def _refusal(layer: LayerSpec) -> str | None:
    if isinstance(layer.mlp, MlpSpec) and layer.mlp.clamp is not None:
        return "a clamped gate outside of a mixture of experts"
    if isinstance(layer.mlp, MoeSpec) and layer.mlp.expert.activation == "xielu":
        return "xielu in a mixture of experts"
    if isinstance(layer.mlp, MoeSpec) and layer.mlp.weighs_inputs:
        return "a mixture whose weights multiply the experts' inputs"
    if not layer.attention.is_causal:
        return "attention in both directions"
    if layer.attention.latent is not None and layer.attention.latent.indexer is not None:
        return "an indexer of keys"
    if layer.mixer is not None and layer.mixer.conv_size > MAX_TAPS:
        return f"a convolution of more than {MAX_TAPS} taps"
    rope = layer.attention.rope
    if layer.attention.query_scaling is not None and rope is not None and rope.depends_on_length:
        return "queries scaled by position with a rope that depends on the length"
    return reference_only_layer(layer) or _native_only(layer)


def _native_only(layer: LayerSpec) -> str | None:
    """Return what a layer has that the native CPU kernels run, but those of GPUs do not."""
    attention = layer.attention
    has = {
        "per-layer inputs": layer.per_layer_gate is not None,
        "layers that read the keys and values of another layer": attention.kv_source is not None,
        "values that are normalised": attention.v_norm is not None,
        "values that are made by the keys' projection": attention.is_v_from_k,
        "a learned factor on the output of a layer": layer.has_scale,
        "experts in a latent space": isinstance(layer.mlp, MoeSpec) and layer.mlp.latent_size is not None,
        "a shared expert without a gate": _has_plain_shared_expert(layer),
    }
    return next((name for name, is_so in has.items() if is_so), None)


def _has_plain_shared_expert(layer: LayerSpec) -> bool:
    return isinstance(layer.mlp, MoeSpec) and layer.mlp.shared is not None and not layer.mlp.shared.is_gated
