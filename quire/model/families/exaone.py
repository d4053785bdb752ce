"""EXAONE 3 and 3.5 (LG AI Research, 2024): Llama with names of its own, or under those of Llama."""

from __future__ import annotations

from collections.abc import Collection

from quire.contracts.model_spec import ModelSpec
from quire.model.families import llama
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, rename

MODEL_TYPE = "exaone"
_NAMES = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"}
_TOP = {"embed": "wte", "final_norm": "ln_f", "lm_head": "lm_head"}
_LAYER = {
    "attn_in": "ln_1",
    "mlp_in": "ln_2",
    **{name: f"attn.attention.{name}_proj" for name in "qkv"},
    "o": "attn.attention.out_proj",
    "gate": "mlp.c_fc_0",
    "up": "mlp.c_fc_1",
    "down": "mlp.c_proj",
}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an EXAONE 3 model."""
    return llama.read_spec(config.renamed(_NAMES))


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, _LAYER, _TOP, layers="h") if "wte.weight" in stored else llama.find_sources(spec, stored)


PAGE = FamilyPage(("ExaoneForCausalLM", "LlamaForCausalLM"), read_spec, find_sources, prefixes=("model.", "transformer."))
