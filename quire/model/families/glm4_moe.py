"""GLM-4.5 and 4.6: DeepSeek-V3's mixture with grouped-query attention, half of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import qwen3_moe
from quire.model.families.blocks import assemble, read_attention, read_head_dim, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import read_sigmoid_moe, read_sparse_layers
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope

MODEL_TYPE = "glm4_moe"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a GLM-4.5 model."""
    norm = read_rms_norm(config)
    rope = read_rope(config, read_head_dim(config), can_be_partial=True)
    attention = replace(read_attention(config, rope), has_qkv_bias=config.boolean("attention_bias"))
    if config.boolean("use_qk_norm"):
        attention = replace(attention, qk_norm=norm)
    dense, moe = read_mlp(config), read_sigmoid_moe(config)
    layers = [
        LayerSpec(attention, moe if is_sparse else dense, attn_in=norm, mlp_in=norm) for is_sparse in read_sparse_layers(config)
    ]
    return assemble(config, layers, norm)


PAGE = FamilyPage(("Glm4MoeForCausalLM",), read_spec, qwen3_moe.find_sources)
