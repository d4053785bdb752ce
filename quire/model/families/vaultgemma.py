"""VaultGemma (Google, 2025): Gemma 2 without the norms on the outputs of the blocks."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import ModelSpec
from quire.model.families import gemma2
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "vaultgemma"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a VaultGemma model."""
    spec = gemma2.read_spec(config)
    changed = {layer: replace(layer, attn_out=None, mlp_out=None) for layer in spec.layers}
    return replace(spec, layers=tuple(changed[layer] for layer in spec.layers))


PAGE = FamilyPage(("VaultGemmaForCausalLM",), read_spec, gemma2.find_sources)
