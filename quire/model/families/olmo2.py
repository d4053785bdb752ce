"""OLMo 2 (2024): norms only on the outputs of the branches and over all of q and k; rotation in f32."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import gemma2
from quire.model.families.blocks import assemble, read_attention, read_head_dim, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope

MODEL_TYPE = "olmo2"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an OLMo 2 model."""
    norm = read_rms_norm(config, late_cast=True)
    rope = read_rope(config, read_head_dim(config), is_f32=True)
    attention = read_attention(config, rope, has_bias=config.boolean("attention_bias"))
    layer = LayerSpec(replace(attention, qk_norm=norm, qk_norm_over="all"), read_mlp(config), attn_out=norm, mlp_out=norm)
    return assemble(config, [layer] * config.integer("num_hidden_layers"), norm)


PAGE = FamilyPage(("Olmo2ForCausalLM",), read_spec, gemma2.find_sources)
