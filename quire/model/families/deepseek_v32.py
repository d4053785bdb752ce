"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer that chooses the keys of each query."""

from __future__ import annotations

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.latent import find_sources, interleaved, read_indexer, read_latent_attention
from quire.model.families.mixtures import read_sigmoid_moe, read_sparse_layers
from quire.model.families.page import FamilyPage

MODEL_TYPE = "deepseek_v32"
GLM_MODEL_TYPE = "glm_moe_dsa"

_INDEXED_LAYER_TYPES = {"indexed_attention", "deepseek_sparse_attention"}
"""Names of the same layers in the configurations of different releases of transformers."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a DeepSeek-V3.2 or GLM-5 model, which rotate the heads of the indexer in different ways."""
    types = set(config.strings("indexer_types") or ["full"])
    if types != {"full"}:
        raise UnsupportedError(f"indexer_types {sorted(types)} are not supported; supported: full")
    if others := set(config.strings("layer_types") or []) - _INDEXED_LAYER_TYPES:
        raise UnsupportedError(
            f"layer_types of a {config.model_type!r} model may be {' or '.join(sorted(_INDEXED_LAYER_TYPES))}, got "
            f"{', '.join(sorted(others))}"
        )
    norm, dense = read_rms_norm(config), read_mlp(config, has_bias=config.boolean("mlp_bias"))
    attention = interleaved(read_latent_attention(config))
    attention = read_indexer(config, attention, is_interleaved=config.model_type == GLM_MODEL_TYPE)
    is_sparse = read_sparse_layers(config)
    moe = read_sigmoid_moe(config) if any(is_sparse) else dense
    layers = [LayerSpec(attention, moe if sparse else dense, attn_in=norm, mlp_in=norm) for sparse in is_sparse]
    return assemble(config, layers, norm, has_own_layer_types=True)


PAGE = FamilyPage(("DeepseekV32ForCausalLM",), read_spec, find_sources)
GLM_PAGE = FamilyPage(("GlmMoeDsaForCausalLM",), read_spec, find_sources)
