"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer that chooses the keys of each query, of which GLM-5.2 shares some."""

from __future__ import annotations

import re

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.latent import find_sources, interleaved, read_indexer, read_latent_attention
from quire.model.families.mixtures import read_sigmoid_moe, read_sparse_layers
from quire.model.families.page import FamilyPage

MODEL_TYPE = "deepseek_v32"
GLM_MODEL_TYPE = "glm_moe_dsa"

_LETTERS = {"F": "full", "S": "shared"}
_INDEXED_LAYER_TYPES = {"indexed_attention", "deepseek_sparse_attention"}
"""Names of the same layers in the configurations of different releases of transformers."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a DeepSeek-V3.2 or GLM-5 model, which rotate the heads of the indexer in different ways."""
    if others := set(config.strings("layer_types") or []) - _INDEXED_LAYER_TYPES:
        raise UnsupportedError(
            f"layer_types of a {config.model_type!r} model may be {' or '.join(sorted(_INDEXED_LAYER_TYPES))}, got "
            f"{', '.join(sorted(others))}"
        )
    norm, dense = read_rms_norm(config), read_mlp(config, has_bias=config.boolean("mlp_bias"))
    attention = interleaved(read_latent_attention(config))
    full, shared = (
        read_indexer(config, attention, is_interleaved=config.model_type == GLM_MODEL_TYPE, is_shared=is_shared)
        for is_shared in (False, True)
    )
    is_sparse = read_sparse_layers(config)
    moe = read_sigmoid_moe(config) if any(is_sparse) else dense
    layers = [
        LayerSpec(shared if is_shared else full, moe if sparse else dense, attn_in=norm, mlp_in=norm)
        for sparse, is_shared in zip(is_sparse, _read_is_shared(config, len(is_sparse)), strict=True)
    ]
    return assemble(config, layers, norm, has_own_layer_types=True)


def _read_is_shared(config: ConfigView, num_layers: int) -> list[bool]:
    """Return for each layer whether it attends to the keys that an earlier one has chosen (GLM-5.2): from `indexer_types`, or
    else `index_topk_pattern`, or else in runs of `index_topk_freq` layers, which have one indexer each."""
    key = "index_topk_pattern" if config.has("index_topk_pattern") and not config.has("indexer_types") else "indexer_types"
    given = config.raw(key)
    types = [_LETTERS.get(letter, letter) for letter in given] if isinstance(given, str) else config.strings(key)
    if types is None:
        frequency, offset = (
            config.integer(name, minimum=0) if config.has(name) else default
            for name, default in (("index_topk_freq", 1), ("index_skip_topk_offset", 2))
        )
        types = ["shared" if max(i - offset + 1, 0) % max(frequency, 1) else "full" for i in range(num_layers)]
    if len(types) != num_layers or types[0] != "full" or set(types) - {"full", "shared"}:
        raise config.error(key, given, f"'full' or 'shared' for each of the {num_layers} layers, the first 'full'")
    if "shared" in types and config.model_type != GLM_MODEL_TYPE:
        raise UnsupportedError(f"{key} 'shared' is not supported in a {config.model_type!r} model; supported: 'full'")
    return [name == "shared" for name in types]


PAGE = FamilyPage(("DeepseekV32ForCausalLM",), read_spec, find_sources)
GLM_PAGE = FamilyPage(
    ("GlmMoeDsaForCausalLM",), read_spec, find_sources, spare=re.compile(r"layers\.\d+\.self_attn\.indexer\..*")
)
