"""Features that the GPU kernels do not support: one list for the decoder and for the table of models."""

from __future__ import annotations

from quire.base.errors import UnsupportedError
from quire.contracts.mixer_spec import LightningSpec
from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec

MAX_TAPS = 4
"""Of a causal convolution of the GPU kernels."""


def device_refusal(spec: ModelSpec) -> str | None:
    """Return why the GPU kernels cannot run a model, or None where they can."""
    return next((reason for layer in spec.layers if (reason := _refusal(layer)) is not None), None)


def check_on_device(spec: ModelSpec, is_in_order: bool) -> None:
    """Raise UnsupportedError for a model that the GPU kernels cannot run, or not batch-invariantly (is_in_order)."""
    refusal = device_refusal(spec)
    if refusal is not None:
        raise UnsupportedError(f"{refusal} is not supported on a GPU; use device cpu")
    if is_in_order and spec.altup is not None:
        raise UnsupportedError(
            "deterministic is not supported with several residual streams (AltUp) on a GPU; leave it out, or use device cpu"
        )


def _refusal(layer: LayerSpec) -> str | None:
    if layer.attention.shared_kv is not None:
        return layer.attention.chain_reason
    if layer.attention.alibi_scale is not None:
        return "ALiBi of 8 bits"
    if isinstance(layer.mlp, MoeSpec) and layer.mlp.expert.activation == "xielu":
        return "xielu in a mixture of experts"
    if not layer.attention.is_causal:
        return "attention in both directions"
    if layer.kept is not None:
        return "a residual of what blocks read"
    if isinstance(layer.mixer, LightningSpec):
        return "lightning attention"
    if layer.mixer is not None and layer.mixer.conv_size > MAX_TAPS:
        return f"a convolution of more than {MAX_TAPS} taps"
    rope = layer.attention.rope
    if layer.attention.query_scaling is not None and rope is not None and rope.depends_on_length:
        return "queries scaled by position with a rope that depends on the length"
    return None
