"""What the GPU kernels do not run: one list for the decoder, which refuses it, and for the table of models."""

from __future__ import annotations

from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec, MoeSpec


def device_refusal(spec: ModelSpec) -> str | None:
    """Return why the GPU kernels cannot run a model, or None where they can."""
    return next((reason for layer in spec.layers if (reason := _refusal(layer)) is not None), None)


def ranks_refusal(spec: ModelSpec) -> str | None:
    """Return why tensor-parallel ranks on GPUs cannot run a model that one GPU runs, or None where they can."""
    if spec.has_head_bias:
        return "a bias of the LM head"
    for layer in spec.layers:
        attention = layer.attention
        if attention.qk_norm is not None and attention.qk_norm_over == "each":
            return "a norm of q and k with weights of its own for each head"
        if isinstance(layer.mlp, MoeSpec) and (layer.mlp.shared is not None or not layer.mlp.is_plain_softmax):
            return "a mixture with shared experts, or with another routing than a plain softmax,"
    return None


def _refusal(layer: LayerSpec) -> str | None:
    if isinstance(layer.mlp, MlpSpec) and layer.mlp.clamp is not None:
        return "a clamped gate outside of a mixture of experts"
    if isinstance(layer.mlp, MoeSpec) and layer.mlp.expert.activation == "xielu":
        return "xielu in a mixture of experts"
    if isinstance(layer.mlp, MoeSpec) and layer.mlp.weighs_inputs:
        return "a mixture whose weights multiply the experts' inputs"
    if not layer.attention.is_causal:
        return "attention in both directions"
    if layer.attention.latent is not None:
        return "multi-head latent attention"
    rope = layer.attention.rope
    if layer.attention.query_scaling is not None and rope is not None and rope.depends_on_length:
        return "queries scaled by position with a rope that depends on the length"
    return None
