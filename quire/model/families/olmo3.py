"""OLMo 3: OLMo 2 with a window on three of four layers; only layers without one have scaled ropes."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import gemma2
from quire.model.families.blocks import (
    assemble,
    read_attention,
    read_head_dim,
    read_is_sliding,
    read_mlp,
    read_rms_norm,
    window_of,
)
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_layer_rope

MODEL_TYPE = "olmo3"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an OLMo 3 model."""
    norm, mlp, head_dim = read_rms_norm(config, late_cast=True), read_mlp(config), read_head_dim(config)
    is_sliding = read_is_sliding(config, lambda index: (index + 1) % 4 != 0)
    window = window_of(config, is_sliding)
    rope = read_layer_rope(config, head_dim, "full_attention", is_f32=True)
    full = replace(read_attention(config, rope, has_bias=config.boolean("attention_bias")), qk_norm=norm, qk_norm_over="all")
    near = replace(full, window=window or None, rope=read_layer_rope(config, head_dim, "sliding_attention", is_f32=True))
    layers = [LayerSpec(near if slides else full, mlp, attn_out=norm, mlp_out=norm) for slides in is_sliding]
    return assemble(config, layers, norm)


PAGE = FamilyPage(("Olmo3ForCausalLM",), read_spec, gemma2.find_sources)
