"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, biases everywhere, an ungated MLP, a tied head; and the first GPT
(2018), whose norms stand after the sums."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from quire.model.families.blocks import assemble, read_activation, read_sizes
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Source, Sources, rename
from quire.model.parameters import parameter_shapes

MODEL_TYPE = "gpt2"
FIRST_MODEL_TYPE = "openai-gpt"
TOP = {"embed": "wte", "pos": "wpe", "final_norm": "ln_f", "lm_head": "lm_head"}
_LAYER = {"attn_in": "ln_1", "mlp_in": "ln_2"}
IGNORED = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|position_ids")
"""Masks of old checkpoints."""
_LINEARS = {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}


def read_feed_forward(config: ConfigView, hidden_size: int, key: str = "n_inner") -> MlpSpec:
    """Return a feed-forward block of the width under `key`, or else of four times the hidden size."""
    inner = config.nullable_integer(key)
    inner = 4 * hidden_size if inner is None else inner
    return MlpSpec(inner, read_activation(config, "activation_function"), is_gated=False, has_bias=True)


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a GPT-2 model."""
    hidden_size, num_heads, head_dim = read_sizes(config, ("n_embd", "hidden_size"), ("n_head", "num_attention_heads"))
    norm = NormSpec("layer", config.number("layer_norm_epsilon"), has_bias=True)
    mlp = read_feed_forward(config, hidden_size)
    scale = head_dim**-0.5 if config.boolean("scale_attn_weights") else 1.0
    is_scaled_by_layer = config.boolean("scale_attn_by_inverse_layer_idx")
    layers = []
    for index in range(config.integer("n_layer", "num_hidden_layers")):
        layer_scale = scale / (index + 1) if is_scaled_by_layer else scale
        attention = AttentionSpec(
            num_heads, num_heads, head_dim, layer_scale, has_qkv_bias=True, has_o_bias=True, is_softmax_f32=False
        )
        layers.append(LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm))
    positions = config.integer("n_positions", "max_position_embeddings")
    return assemble(config, layers, norm, hidden_size=hidden_size, max_positions=positions, num_learned_positions=positions)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: linear weights are [in, out], the columns of c_attn are q, k, v."""
    sources = rename(spec, _LAYER, TOP, layers="h")
    size = spec.hidden_size
    for index in range(len(spec.layers)):
        for kind, is_transposed in (("weight", True), ("bias", False)):
            for part, name in enumerate("qkv"):
                rows = (part * size, (part + 1) * size)
                sources[f"layers.{index}.{name}.{kind}"] = Source.of(f"h.{index}.attn.c_attn.{kind}", rows, is_transposed)
            for name, stored in _LINEARS.items():
                sources[f"layers.{index}.{name}.{kind}"] = Source.of(f"h.{index}.{stored}.{kind}", None, is_transposed)
    return sources


def read_first_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of the first GPT: the norm at the end of a layer is that of the next one's input, and its gelu that of
    tanh."""
    spec = read_spec(config.renamed({"afn": "activation_function"}))
    layer = spec.layers[0]
    if isinstance(layer.mlp, MlpSpec) and layer.mlp.activation == "gelu":
        layer = replace(layer, mlp=replace(layer.mlp, activation="gelu_tanh"))
    return normalize_sums(replace(spec, layers=(layer,) * len(spec.layers)))


def normalize_sums(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a model of equal layers whose norms stand after the sums; that of the last sum is the final norm."""
    layer = replace(spec.layers[0], kept=(1.0, 1.0))
    return replace(spec, layers=(replace(layer, attn_in=None), *[layer] * (len(spec.layers) - 1)))


def find_norms_of_sums(spec: ModelSpec, stored: str) -> Sources:
    """Return where the norms at the ends of layers are stored; `stored` has {} for the number of the layer."""
    names = [*(f"layers.{index}.attn_in" for index in range(1, len(spec.layers))), "final_norm"]
    found = {f"{name}.{kind}": (index, kind) for index, name in enumerate(names) for kind in ("weight", "bias")}
    shapes = parameter_shapes(spec)
    return {name: Source.of(f"{stored.format(index)}.{kind}") for name, (index, kind) in found.items() if name in shapes}


def find_first_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter of the first GPT is stored."""
    sources = find_sources(spec, stored)
    sources |= rename(spec, {"mlp_in": "ln_1"}, {"embed": "tokens_embed", "pos": "positions_embed"}, layers="h")
    return sources | find_norms_of_sums(spec, "h.{}.ln_2")


FIRST_PAGE = FamilyPage(
    ("OpenAIGPTLMHeadModel",), read_first_spec, find_first_sources, prefixes=("transformer.",), ignored=IGNORED
)
PAGE = FamilyPage(
    ("GPT2LMHeadModel",),
    read_spec,
    find_sources,
    prefixes=("transformer.",),
    ignored=IGNORED,
)
