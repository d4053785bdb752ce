"""Apertus: Llama with norms on heads and a feed-forward block of xIELU, whose two numbers each layer has learned."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Source, Sources, rename

MODEL_TYPE = "apertus"


_LAYER = PRE_NORM_LAYER | {"attn_in": "attention_layernorm", "mlp_in": "feedforward_layernorm"}
_CONSTANTS = re.compile(r"layers\.\d+\.mlp\.act_fn\.(beta|eps)")
"""Stored next to the learned numbers of xIELU, the same in every checkpoint."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an Apertus model."""
    norm = read_rms_norm(config)
    attention = replace(read_attention(config, has_bias=config.boolean("attention_bias")), qk_norm=norm)
    if config.string("hidden_act") == "xielu":
        mlp = MlpSpec(config.integer("intermediate_size"), "xielu", is_gated=False)
    else:
        mlp = read_mlp(config, is_gated=False)
    return repeat_layer(config, LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm), norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = rename(spec, _LAYER)
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MlpSpec) and layer.mlp.activation == "xielu":
            for name, stored in (("positive", "alpha_p"), ("negative", "alpha_n")):
                sources[f"layers.{index}.xielu_{name}.weight"] = Source.of(f"layers.{index}.mlp.act_fn.{stored}")
    return sources


PAGE = FamilyPage(("ApertusForCausalLM",), read_spec, find_sources, ignored=_CONSTANTS)
