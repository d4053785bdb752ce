"""Checks whether a head can be trained for a model, before text is generated, which takes long."""

from __future__ import annotations

from quire.base.errors import ConfigError, UnsupportedError
from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec
from quire.training.config import DraftTraining
from quire.training.heads import aux_hidden_state_layers


def check_trainable(spec: ModelSpec, options: DraftTraining) -> None:
    """Raise UnsupportedError for a model that heads of this kind do not support, ConfigError for layers that do not exist."""
    if spec.embed_scale != 1.0 or spec.num_learned_positions:
        raise UnsupportedError("draft heads are not trained for models with scaled embeddings or learned positions (yet)")
    layer, num_layers = spec.layers[-1], len(spec.layers)
    wanted = aux_hidden_state_layers(options, num_layers)
    if any(not 0 <= one < num_layers for one in wanted):
        raise ConfigError(f"aux_hidden_state_layers {wanted}: the model {options.model} has the layers 0 to {num_layers - 1}")
    if options.kind == "medusa":
        return
    mlp = layer.mlp
    if not isinstance(mlp, MlpSpec) or not mlp.is_gated or mlp.activation != "silu" or layer.attention.rope is None:
        raise UnsupportedError(
            f"heads of kind {options.kind} are trained for models with rope and a SiLU-gated feed-forward block only; medusa "
            "heads for others too"
        )
    has = _beyond_training(spec, layer) if options.kind == "mtp" else None
    if has is not None:
        raise UnsupportedError(
            f"a layer for multi-token prediction is one of the model's own kind, and is not trained for models with {has} "
            "(yet); take kind eagle3 or medusa"
        )


def _beyond_training(spec: ModelSpec, layer: LayerSpec) -> str | None:
    """Return a feature of the model's layers that DraftLayer lacks, None if there is none."""
    attention, rope, mlp = layer.attention, layer.attention.rope, layer.mlp
    norms = (layer.attn_in, layer.mlp_in, spec.final_norm)
    has = {
        "norms after a block, or none before it": layer.attn_out or layer.mlp_out or None in norms,
        "norms other than RMSNorm": any(norm is not None and (norm.kind != "rms" or norm.offset) for norm in norms),
        "scaled or partial rope": rope is None or rope.kind != "default" or rope.dim != attention.head_dim,
        "biases of the attention's output or the feed-forward block": attention.has_o_bias or getattr(mlp, "has_bias", False),
        "attention sinks": attention.has_sinks,
        "latent attention": attention.latent is not None,
        "norms after the rotation, or queries scaled by position": (
            attention.is_qk_norm_last or attention.query_scaling is not None
        ),
        "queries and keys that are normed together": attention.qk_norm is not None and attention.qk_norm_over != "head",
        "scaled attention, residuals or logits": (
            attention.scale != attention.head_dim**-0.5
            or attention.softcap is not None
            or layer.residual_scale != 1.0
            or spec.logit_scale != 1.0
            or spec.final_softcap is not None
        ),
    }
    return next((name for name, is_so in has.items() if is_so), None)
