"""Gemma 3, text: Gemma 2 with q and k norms instead of the cap, five layers with a window for each without, two rotary bases.

A multimodal checkpoint (model type "gemma3") is served as the language model in it; its images are not.
"""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_head_dim, read_is_sliding, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.gemma2 import find_sources
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_layer_rope

MODEL_TYPE = "gemma3_text"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Gemma 3 text model."""
    config.refuse_other("attn_logit_softcapping", None)
    norm = read_rms_norm(config, offset=1, late_cast=True)
    mlp = read_mlp(config, "hidden_activation")
    window, pattern = (
        config.nullable_integer("sliding_window"),
        config.integer("sliding_window_pattern", "_sliding_window_pattern"),
    )
    is_sliding = read_is_sliding(config, lambda index: (index + 1) % pattern != 0)
    if any(is_sliding) and window is None:
        raise config.error("sliding_window", None, "an integer >= 1, as some layers have a window")
    head_dim, has_bias = read_head_dim(config), config.boolean("attention_bias")
    full = replace(
        read_attention(config, read_layer_rope(config, head_dim, "full_attention"), has_bias),
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        qk_norm=norm,
    )
    sliding = replace(full, window=window, rope=read_layer_rope(config, head_dim, "sliding_attention"))
    layers = [LayerSpec(sliding if slides else full, mlp, norm, norm, norm, norm) for slides in is_sliding]
    return assemble(
        config,
        layers,
        norm,
        max_positions=config.integer("max_position_embeddings"),
        embed_scale=config.integer("hidden_size") ** 0.5,
        is_embed_scale_cast=True,
        final_softcap=config.nullable_number("final_logit_softcapping"),
    )


PAGE = FamilyPage(("Gemma3ForCausalLM",), read_spec, find_sources)
