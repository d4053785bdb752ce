"""Youtu-LLM (Tencent, 2025): DeepSeek-V3's latent attention in a dense model with a tied head."""

from __future__ import annotations

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.latent import find_sources, interleaved, read_latent_attention
from quire.model.families.page import FamilyPage

MODEL_TYPE = "youtu"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Youtu model."""
    norm, attention = read_rms_norm(config), interleaved(read_latent_attention(config), config.boolean("rope_interleave"))
    return repeat_layer(config, LayerSpec(attention, read_mlp(config), attn_in=norm, mlp_in=norm), norm)


PAGE = FamilyPage(("YoutuForCausalLM",), read_spec, find_sources)
