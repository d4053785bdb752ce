"""DeepSeek-V3 and R1 (2024), and Kimi K2: multi-head latent attention, sigmoid scores in groups with a correction."""

from __future__ import annotations

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.latent import find_sources, interleaved, read_latent_attention
from quire.model.families.mixtures import read_sigmoid_moe, read_sparse_layers
from quire.model.families.page import FamilyPage

MODEL_TYPE = "deepseek_v3"
KIMI_MODEL_TYPE = "kimi_k2"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a DeepSeek-V3 model."""
    norm, dense = read_rms_norm(config), read_mlp(config)
    attention = interleaved(read_latent_attention(config), config.boolean("rope_interleave"))
    is_sparse = read_sparse_layers(config)
    moe = read_sigmoid_moe(config) if any(is_sparse) else dense
    layers = [LayerSpec(attention, moe if sparse else dense, attn_in=norm, mlp_in=norm) for sparse in is_sparse]
    return assemble(config, layers, norm)


PAGE = FamilyPage(("DeepseekV3ForCausalLM",), read_spec, find_sources)
