"""GPT-J: parallel blocks over one LayerNorm, adjacent pairs of a part of each head rotated, biases but for attention."""

from __future__ import annotations

import re
from collections.abc import Collection

from quire.contracts.model_spec import AttentionSpec, LayerSpec, ModelSpec, RopeSpec
from quire.model.families import gpt2
from quire.model.families.blocks import assemble, read_layer_norm, read_sizes
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, pair_halves, rename

MODEL_TYPE = "gptj"


_TOP = {"embed": "wte", "final_norm": "ln_f", "lm_head": "lm_head"}
_LAYER = {
    "attn_in": "ln_1",
    **{name: f"attn.{name}_proj" for name in "qkv"},
    "o": "attn.out_proj",
    "up": "mlp.fc_in",
    "down": "mlp.fc_out",
}
IGNORED = re.compile(r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)")
"""Masks and tables of old checkpoints."""
_THETA = 10000.0


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a GPT-J model."""
    hidden_size, num_heads, head_dim = read_sizes(config, ("n_embd", "hidden_size"), ("n_head", "num_attention_heads"))
    rotated = config.nullable_integer("rotary_dim")
    rotated = head_dim if rotated is None else rotated
    if rotated % 2 or rotated > head_dim:
        raise config.error("rotary_dim", rotated, f"an even number of at most {head_dim}")
    norm, mlp = read_layer_norm(config, "layer_norm_epsilon"), gpt2.read_feed_forward(config, hidden_size)
    attention = AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, RopeSpec(rotated, _THETA))
    layer = LayerSpec(attention, mlp, attn_in=norm, is_parallel=True)
    return assemble(
        config,
        [layer] * config.integer("n_layer", "num_hidden_layers"),
        norm,
        hidden_size=hidden_size,
        max_positions=config.integer("n_positions", "max_position_embeddings"),
        has_head_bias=True,
    )


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return pair_halves(spec, rename(spec, _LAYER, _TOP, layers="h"))


PAGE = FamilyPage(
    ("GPTJForCausalLM",),
    read_spec,
    find_sources,
    prefixes=("transformer.",),
    ignored=IGNORED,
)
