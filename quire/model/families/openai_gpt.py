"""GPT (Radford et al., 2018), the first: GPT-2 whose norms stand after the sums, so that what a block reads is its residual."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.model.families.blocks import assemble, read_layer_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.gpt2 import find_linears
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, rename

MODEL_TYPE = "openai-gpt"
_TOP = {"embed": "tokens_embed", "pos": "positions_embed", "lm_head": "lm_head"}
_ACTIVATIONS = {"gelu": "gelu_tanh", "silu": "silu", "swish": "silu", "relu": "relu"}
"""By their names in this type only: its gelu is that of tanh."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a GPT model: the norm at the end of a layer is that of the next one's input."""
    name, hidden_size, num_heads = config.string("afn"), config.integer("n_embd"), config.integer("n_head")
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"afn {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    if hidden_size % num_heads:
        raise config.error("n_embd", hidden_size, f"a multiple of n_head ({num_heads})")
    head_dim, norm = hidden_size // num_heads, read_layer_norm(config, "layer_norm_epsilon")
    attention = AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, has_qkv_bias=True, has_o_bias=True)
    attention = replace(attention, is_softmax_f32=False)
    mlp = MlpSpec(4 * hidden_size, _ACTIVATIONS[name], is_gated=False, has_bias=True)
    layer = LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm, kept=(1.0, 1.0))
    layers, positions = [layer] * config.integer("n_layer"), config.integer("n_positions")
    layers[0] = replace(layer, attn_in=None)
    return assemble(config, layers, norm, hidden_size=hidden_size, max_positions=positions, num_learned_positions=positions)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = rename(spec, {"mlp_in": "ln_1"}, _TOP, layers="h") | find_linears(spec)
    ends = rename(spec, {"mlp_in": "ln_2"}, {}, layers="h")
    for index in range(1, len(spec.layers) + 1):
        name = "final_norm" if index == len(spec.layers) else f"layers.{index}.attn_in"
        sources |= {f"{name}.{kind}": ends[f"layers.{index - 1}.mlp_in.{kind}"] for kind in ("weight", "bias")}
    return sources


PAGE = FamilyPage(
    ("OpenAIGPTLMHeadModel",),
    read_spec,
    find_sources,
    prefixes=("transformer.",),
    ignored=re.compile(r"position_ids|h\.\d+\.attn\.bias"),
)
