"""MPT (MosaicML, 2023): LayerNorm, no biases at all, perhaps clipped projections, and ALiBi."""

from __future__ import annotations

from collections.abc import Collection

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.model.families.blocks import alibi_slopes, assemble, read_layer_norm
from quire.model.families.config_view import ConfigView, is_number
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, join_qkv, rename

MODEL_TYPE = "mpt"
_TOP = {"embed": "wte", "final_norm": "norm_f", "lm_head": "lm_head"}
_LAYER = {"attn_in": "norm_1", "mlp_in": "norm_2", "o": "attn.out_proj", "up": "ffn.up_proj", "down": "ffn.down_proj"}
_SUPPORTED = {"alibi": True, "attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False}
"""Options of attention, each with the value that is supported, which is that of an absent one."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an MPT model."""
    options = config.table("attn_config")
    wrong = [name for name, value in _SUPPORTED.items() if options.get(name) not in (None, value)]
    wrong += [name for name in ("logit_scale", "emb_scale") if config.raw(name)]
    if wrong or not config.boolean("no_bias"):
        name = f"attn_config.{wrong[0]}" if wrong else "no_bias false"
        raise UnsupportedError(f"{name} is not supported in a {config.model_type!r} model; supported: {_SUPPORTED}, no biases")
    hidden_size, num_heads = config.integer("d_model", "hidden_size"), config.integer("n_heads", "num_attention_heads")
    if hidden_size % num_heads:
        raise config.error("d_model", hidden_size, f"a multiple of n_heads ({num_heads})")
    head_dim = hidden_size // num_heads
    attention = AttentionSpec(
        num_heads,
        num_heads,
        head_dim,
        _number(config, options, "softmax_scale") or head_dim**-0.5,
        clip_qkv=_number(config, options, "clip_qkv"),
        alibi_slopes=alibi_slopes(num_heads, _number(config, options, "alibi_bias_max") or 8.0),
    )
    norm = read_layer_norm(config, "layer_norm_epsilon", has_bias=False)
    mlp = MlpSpec(config.integer("expansion_ratio") * hidden_size, "gelu", is_gated=False)
    layers = [LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm)] * config.integer("n_layers", "num_hidden_layers")
    return assemble(config, layers, norm, hidden_size=hidden_size, max_positions=config.integer("max_seq_len"))


def _number(config: ConfigView, options: dict[str, object], name: str) -> float | None:
    """Return a positive number of the options of attention, None where it is null or absent."""
    value = options.get(name)
    if value is None:
        return None
    if not is_number(value) or value <= 0:  # type: ignore[operator]
        raise config.error(f"attn_config.{name}", value, "a positive number")
    return float(value)  # type: ignore[arg-type]


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: rows of Wqkv are q, k, v."""
    sources = rename(spec, _LAYER, _TOP, layers="blocks")
    join_qkv(sources, spec, "blocks.{}.attn.Wqkv")
    return sources


PAGE = FamilyPage(("MptForCausalLM", "MPTForCausalLM"), read_spec, find_sources, prefixes=("transformer.",))
