"""LFM2 (Liquid AI): gated short convolutions, and attention with norms on heads in some layers; dense or with experts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.mixer_spec import ShortConvSpec
from quire.contracts.model_spec import NO_ATTENTION, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec
from quire.model.families.blocks import assemble, read_attention
from quire.model.families.config_view import ConfigView
from quire.model.families.layer_kinds import read_layer_kinds
from quire.model.families.mixtures import MixtureNames, find_mixture_sources
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, rename

MODEL_TYPE = "lfm2"
MOE_MODEL_TYPE = "lfm2_moe"

_TOP = {"embed": "embed_tokens", "final_norm": "embedding_norm", "lm_head": "lm_head"}
_LAYER = {
    "attn_in": "operator_norm",
    "mlp_in": "ffn_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "conv": "conv.conv",
    "conv.in": "conv.in_proj",
    "conv.out": "conv.out_proj",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
_MIXTURE = MixtureNames(block="feed_forward", correction=("expert_bias",), expert=("w1", "w3", "w2"))
_LEAST_SUM = 1e-6


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a dense LFM2 model."""
    mlp = MlpSpec(_read_inner_size(config), "silu")
    return _read(config, [mlp] * config.integer("num_hidden_layers"))


def read_moe_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an LFM2 mixture of experts, whose first layers are dense."""
    num_experts, num_chosen = config.integer("num_experts"), config.integer("num_experts_per_tok")
    if num_chosen > num_experts:
        raise config.error("num_experts_per_tok", num_chosen, f"at most num_experts ({num_experts})")
    moe = MoeSpec(
        num_experts,
        num_chosen,
        MlpSpec(config.integer("moe_intermediate_size"), "silu"),
        scoring="sigmoid",
        has_correction=config.boolean("use_expert_bias"),
        is_renormalized=config.boolean("norm_topk_prob"),
        least_sum=_LEAST_SUM,
        is_score_f32=False,
        routed_scale=config.number("routed_scaling_factor"),
    )
    if config.strings("layer_types") is None:
        raise config.error("layer_types", None, "a list of 'conv' and 'full_attention', one for each layer")
    dense, num_dense = MlpSpec(config.integer("intermediate_size"), "silu"), config.integer("num_dense_layers", minimum=0)
    return _read(config, [dense if index < num_dense else moe for index in range(config.integer("num_hidden_layers"))])


def _read_inner_size(config: ConfigView) -> int:
    """Return the width of the feed-forward block, which the configuration gives before it is adjusted."""
    size = config.integer("block_ff_dim") if config.has("block_ff_dim") else config.integer("intermediate_size")
    if not config.boolean("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    multiplier, multiple = config.nullable_number("block_ffn_dim_multiplier"), config.integer("block_multiple_of")
    if multiplier is None:
        return size
    return multiple * -(-int(multiplier * size) // multiple)


def _read(config: ConfigView, mlps: list[MlpSpec | MoeSpec]) -> ModelSpec:
    norm = NormSpec("rms", config.number("norm_eps"))
    attention = replace(read_attention(config), qk_norm=norm)
    conv = ShortConvSpec(
        config.integer("hidden_size"), config.integer("conv_L_cache", minimum=2), has_bias=config.boolean("conv_bias")
    )
    attended = None if config.raw("full_attn_idxs") is None else config.integers("full_attn_idxs")
    kinds = read_layer_kinds(config, "conv", lambda index: attended is not None and index not in attended, "full_attn_idxs")
    layers = [
        LayerSpec(NO_ATTENTION, mlp, attn_in=norm, mlp_in=norm, mixer=conv)
        if is_conv
        else LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm)
        for is_conv, mlp in zip(kinds, mlps, strict=True)
    ]
    spec = assemble(config, layers, norm, has_own_layer_types=True)
    return replace(spec, is_tied=config.boolean("tie_embedding")) if config.has("tie_embedding") else spec


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return rename(spec, _LAYER, _TOP) | find_mixture_sources(spec, stored, _MIXTURE)


PAGE = FamilyPage(("Lfm2ForCausalLM",), read_spec, find_sources)
MOE_PAGE = FamilyPage(("Lfm2MoeForCausalLM",), read_moe_spec, find_sources)
