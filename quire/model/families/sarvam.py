"""Sarvam 30B and 105B (2026): GLM-4.5's mixture with the whole head rotated, and DeepSeek-V3's with latent attention."""

from __future__ import annotations

from collections.abc import Collection

from quire.contracts.model_spec import ModelSpec
from quire.model.families import deepseek_v3, glm4_moe, qwen3_moe
from quire.model.families.config_view import ConfigView
from quire.model.families.latent import find_sources as find_latent_sources
from quire.model.families.mixtures import MixtureNames, find_mixture_sources
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, TOP, Sources, join_qkv, rename

MODEL_TYPE = "sarvam_moe"
LATENT_MODEL_TYPE = "sarvam_mla"
_NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias"}
"""In the configurations of its authors."""
_LAYER = {
    **PRE_NORM_LAYER,
    "o": "attention.dense",
    "q_norm": "attention.query_layernorm",
    "k_norm": "attention.key_layernorm",
}
"""Of files of its authors; q, k and v lie in one matrix there."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Sarvam 30B model."""
    return glm4_moe.read_spec(config.renamed(_NAMES))


def read_latent_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Sarvam 105B model."""
    return deepseek_v3.read_spec(config.renamed(_NAMES))


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: with the names of its authors q, k and v lie in one matrix."""
    if "word_embeddings.weight" not in stored:
        return qwen3_moe.find_sources(spec, stored)
    sources = rename(spec, _LAYER, {**TOP, "embed": "word_embeddings"})
    sources |= find_mixture_sources(spec, stored, MixtureNames(correction=("gate.expert_bias",)))
    join_qkv(sources, spec, "layers.{}.attention.query_key_value")
    return sources


PAGE = FamilyPage(("SarvamMoEForCausalLM", "Glm4MoeForCausalLM"), read_spec, find_sources)
LATENT_PAGE = FamilyPage(("SarvamMLAForCausalLM", "DeepseekV3ForCausalLM"), read_latent_spec, find_latent_sources)
