"""OPT and BioGPT (2022): LayerNorm, learned positions whose table has two more rows first, biases everywhere, a tied head;
OPT-350m, whose norms stand after the sums, runs by torch on a CPU."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from quire.model.families.blocks import read_activation, read_head_dim, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.gpt2 import find_norms_of_sums, normalize_sums
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Piece, Source, Sources, rename

MODEL_TYPE = "opt"
BIOGPT_MODEL_TYPE = "biogpt"

_TOP = {"embed": "embed_tokens", "lm_head": "lm_head"}
_LAYER = {
    "attn_in": "self_attn_layer_norm",
    "mlp_in": "final_layer_norm",
    **{name: f"self_attn.{name}_proj" for name in "qkv"},
    "o": "self_attn.out_proj",
    "up": "fc1",
    "down": "fc2",
}
_EPS = 1e-5
_FIRST_POSITION = 2


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an OPT model. With embeddings of another size than the hidden one, what projects them is multiplied
    into embedding and head."""
    num_heads, is_norm_first = config.integer("num_attention_heads"), config.boolean("do_layer_norm_before")
    if is_norm_first:
        config.refuse_other("_remove_final_layer_norm", False)
    has_bias, has_weight = config.boolean("enable_bias"), config.boolean("layer_norm_elementwise_affine")
    head_dim = read_head_dim(config)
    norm = NormSpec("layer", _EPS, has_bias=has_weight, has_weight=has_weight)
    mlp = MlpSpec(config.integer("ffn_dim"), read_activation(config, "activation_function"), is_gated=False, has_bias=has_bias)
    attention = AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, has_qkv_bias=has_bias, has_o_bias=has_bias)
    layer = LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm)
    positions = config.integer("max_position_embeddings")
    spec = repeat_layer(config, layer, norm, num_learned_positions=positions, max_positions=positions)
    if config.nullable_integer("word_embed_proj_dim") not in (None, spec.hidden_size):
        config.refuse_other("tie_word_embeddings", True)
        spec = replace(spec, is_tied=False)
    return spec if is_norm_first else normalize_sums(spec)


def read_biogpt_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a BioGPT model, which scales embeddings."""
    spec = read_spec(config.renamed({"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}))
    return replace(spec, embed_scale=math.sqrt(spec.hidden_size)) if config.boolean("scale_embedding") else spec


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    last = "layer_norm" if "layer_norm.weight" in stored else "final_layer_norm"
    sources = rename(spec, _LAYER, {**_TOP, "final_norm": last})
    if spec.layers[0].kept is not None:
        sources |= rename(spec, {"mlp_in": _LAYER["attn_in"]}) | find_norms_of_sums(spec, f"layers.{{}}.{_LAYER['mlp_in']}")
    if "project_in.weight" in stored and not spec.is_tied:
        head = "lm_head.weight" if "lm_head.weight" in stored else "embed_tokens.weight"
        sources["embed.weight"] = replace(sources["embed.weight"], factor=Piece("project_in.weight", is_transposed=True))
        sources["lm_head.weight"] = replace(Source.of(head), factor=Piece("project_out.weight"))
    rows = (_FIRST_POSITION, _FIRST_POSITION + spec.num_learned_positions)
    return sources | {"pos.weight": Source.of("embed_positions.weight", rows)}


PAGE = FamilyPage(("OPTForCausalLM",), read_spec, find_sources, prefixes=("model.decoder.", "decoder."))
BIOGPT_PAGE = FamilyPage(
    ("BioGptForCausalLM",), read_biogpt_spec, find_sources, prefixes=("biogpt.",), head="output_projection"
)
