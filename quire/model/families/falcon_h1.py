"""Falcon-H1 (TII, 2025): attention and Mamba 2 read the same in each layer, with a multiplier for nearly everything."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.mixer_spec import Mamba2Scales, Mamba2Spec
from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec
from quire.model.families import bamba
from quire.model.families.blocks import assemble, read_attention, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView, is_number
from quire.model.families.mamba_blocks import read_mamba2, read_mamba2_head_dim, read_step_limits
from quire.model.families.page import FamilyPage

MODEL_TYPE = "falcon_h1"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Falcon-H1 model. The multiplier of keys is one of the scores."""
    norm = read_rms_norm(config)
    attention = read_attention(config, has_bias=config.boolean("attention_bias"))
    layer = LayerSpec(
        replace(attention, scale=attention.scale * config.number("key_multiplier")),
        _read_mlp(config),
        attn_in=norm,
        mlp_in=norm,
        mixer=_read_mixer(config),
        attention_in_scale=config.number("attention_in_multiplier"),
        attention_out_scale=config.number("attention_out_multiplier"),
        mixer_out_scale=config.number("ssm_out_multiplier"),
    )
    return assemble(
        config,
        [layer] * config.integer("num_hidden_layers"),
        norm,
        has_own_layer_types=True,
        embed_scale=config.number("embedding_multiplier"),
        logit_scale=config.number("lm_head_multiplier"),
    )


def _read_mlp(config: ConfigView) -> MlpSpec:
    gate_scale, down_scale = _multipliers(config, "mlp_multipliers", 2)
    mlp = read_mlp(config, has_bias=config.boolean("mlp_bias"))
    return replace(mlp, gate_scale=gate_scale, down_scale=down_scale)


def _read_mixer(config: ConfigView) -> Mamba2Spec:
    channels = config.nullable_integer("mamba_d_ssm")
    if channels is None:
        channels = int(config.number("mamba_expand") * config.integer("hidden_size"))
    mixer = read_mamba2(config, read_mamba2_head_dim(config, channels))
    norm, is_norm_first = mixer.norm, config.boolean("mamba_norm_before_gate")
    if not config.boolean("mamba_rms_norm"):
        norm = None
    elif norm is not None and is_norm_first:
        norm = replace(norm, order="norm_first")
    min_step, max_step = read_step_limits(config)
    return replace(
        mixer,
        norm=norm,
        min_step=min_step,
        max_step=max_step,
        has_in_bias=config.boolean("mamba_proj_bias"),
        has_out_bias=config.boolean("projectors_bias"),
        scales=Mamba2Scales(config.number("ssm_in_multiplier"), *_multipliers(config, "ssm_multipliers", 5)),
    )


def _multipliers(config: ConfigView, key: str, count: int) -> list[float]:
    """Return the multipliers under a key, ones where there are none."""
    values = config.raw(key)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count or not all(is_number(value) for value in values):
        raise config.error(key, values, f"{count} numbers")
    return [float(value) for value in values]


PAGE = FamilyPage(("FalconH1ForCausalLM",), read_spec, bamba.find_sources)
