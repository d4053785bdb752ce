"""LFM3 (Liquid AI, 2026): LFM2 with norms on the outputs of the blocks, a window on some layers, and gates of heads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.mixer_spec import ShortConvSpec
from quire.contracts.model_spec import NO_ATTENTION, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from quire.model.families.blocks import assemble, read_attention, window_of
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import LAYER_TYPES, LayerType, read_layer_rope
from quire.model.families.sources import Piece, Source, Sources, rename

MODEL_TYPE = "lfm3"

_CONV = "conv"
_TOP = {"embed": "embed_tokens", "final_norm": "embedding_norm", "lm_head": "lm_head"}
_LAYER = {
    **{"attn_in": "operator_norm", "attn_out": "post_operator_norm", "mlp_in": "ffn_norm", "mlp_out": "post_ffn_norm"},
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},
    **{"conv": "conv.conv", "conv.in": "conv.in_proj", "conv.out": "conv.out_proj"},
    **{"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"},
}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an LFM3 model."""
    norm = NormSpec("rms", config.number("norm_eps"))
    after = norm if config.boolean("use_sandwich_norm") else None
    mlp = MlpSpec(config.integer("intermediate_size"), "silu")
    conv = ShortConvSpec(
        config.integer("hidden_size"), config.integer("conv_L_cache", minimum=2), has_bias=config.boolean("conv_bias")
    )
    kinds = _read_kinds(config)
    window = window_of(config, [kind == "sliding_attention" for kind in kinds])
    attention = {kind: _read_attention(config, kind, window, norm) for kind in LAYER_TYPES if kind in kinds}
    layers = [
        LayerSpec(NO_ATTENTION, mlp, attn_in=norm, attn_out=after, mlp_in=norm, mlp_out=after, mixer=conv)
        if kind == _CONV
        else LayerSpec(attention[kind], mlp, attn_in=norm, attn_out=after, mlp_in=norm, mlp_out=after)
        for kind in kinds
    ]
    return assemble(config, layers, norm, has_own_layer_types=True)


def _read_kinds(config: ConfigView) -> list[str]:
    num_layers, kinds = config.integer("num_hidden_layers"), config.strings("layer_types")
    if kinds is None:
        window = [index % 4 == 0 and index > 0 for index in range(num_layers)]
        return ["full_attention" if i % 4 == 2 else "sliding_attention" if window[i] else _CONV for i in range(num_layers)]
    if unknown := {*kinds} - {_CONV, *LAYER_TYPES}:
        raise UnsupportedError(
            f"layer_types {sorted(unknown)} are not supported in a 'lfm3' model; supported: {', '.join((_CONV, *LAYER_TYPES))}"
        )
    if len(kinds) != num_layers:
        raise config.error("the length of layer_types", len(kinds), f"num_hidden_layers ({num_layers})")
    return kinds


def _read_attention(config: ConfigView, kind: LayerType, window: int, norm: NormSpec) -> AttentionSpec:
    rope = replace(read_layer_rope(config, config.integer("head_dim"), kind), is_f32=True)
    attention = read_attention(config, rope, config.boolean("attention_bias"))
    return replace(
        attention,
        window=window if kind == "sliding_attention" else None,
        qk_norm=norm,
        has_output_gate=config.boolean("use_attention_gate"),
    )


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored. A gate of a head becomes one of each of its values."""
    sources = rename(spec, _LAYER, _TOP)
    for index, layer in enumerate(spec.layers):
        if layer.attention.has_output_gate:
            names = [f"layers.{index}.self_attn.{name}.weight" for name in ("gate_proj", "g_proj")]
            name = next((name for name in names if name in stored), names[0])
            heads = [Piece(name, (head, head + 1)) for head in range(layer.attention.num_heads)]
            pieces = tuple(piece for piece in heads for _ in range(layer.attention.head_dim))
            sources[f"layers.{index}.attn_gate.weight"] = Source((pieces,))
    return sources


PAGE = FamilyPage(("Lfm3ForCausalLM",), read_spec, find_sources)
