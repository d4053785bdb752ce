"""GPT-Neo (EleutherAI, 2021) and TinyStories: GPT-2 with a window on every other layer and scores without a scale."""

from __future__ import annotations

import re
from collections.abc import Collection

from quire.contracts.model_spec import AttentionSpec, LayerSpec, ModelSpec
from quire.model.families import gpt2
from quire.model.families.blocks import assemble, read_layer_norm, read_sizes
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, rename

MODEL_TYPE = "gpt_neo"
_LAYER = {
    "attn_in": "ln_1",
    "mlp_in": "ln_2",
    **{name: f"attn.attention.{name}_proj" for name in "qkv"},
    "o": "attn.attention.out_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a GPT-Neo model."""
    hidden_size, num_heads, head_dim = read_sizes(config, heads=("num_heads", "num_attention_heads"))
    mlp = gpt2.read_feed_forward(config, hidden_size, "intermediate_size")
    norm, window = read_layer_norm(config, "layer_norm_epsilon"), config.integer("window_size")
    layers = [
        LayerSpec(
            AttentionSpec(num_heads, num_heads, head_dim, 1.0, window=window if kind == "local" else None, has_o_bias=True),
            mlp,
            attn_in=norm,
            mlp_in=norm,
        )
        for kind in _read_kinds(config)
    ]
    return assemble(config, layers, norm, num_learned_positions=config.integer("max_position_embeddings"))


def _read_kinds(config: ConfigView) -> list[str]:
    """Return "global" or "local" of each layer: `attention_types` says how often a list of them repeats."""
    num_layers, kinds = config.integer("num_layers", "num_hidden_layers"), config.strings("attention_layers")
    if kinds is None:
        kinds = ["global", "local"] * (num_layers // 2) if config.raw("attention_types") is None else _expand(config)
    if len(kinds) != num_layers or not {*kinds} <= {"global", "local"}:
        raise config.error("attention_types", kinds, f"such that it makes {num_layers} times 'global' or 'local'")
    return kinds


def _expand(config: ConfigView) -> list[str]:
    types = config.raw("attention_types")
    is_valid = isinstance(types, list) and all(
        isinstance(item, list) and len(item) == 2 and isinstance(item[0], list) and type(item[1]) is int for item in types
    )
    if not is_valid:
        raise config.error("attention_types", types, "a list of pairs of a list of kinds and how often it repeats")
    return [str(kind) for names, count in types for _ in range(min(count, 10_000)) for kind in names]


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, _LAYER, gpt2.TOP, layers="h")


PAGE = FamilyPage(
    ("GPTNeoForCausalLM",),
    read_spec,
    find_sources,
    prefixes=("transformer.",),
    ignored=re.compile(r"h\.\d+\.attn\.attention\.(bias|masked_bias)"),
)
