"""Nemotron-H and Nemotron 3 (NVIDIA, 2025): a layer is Mamba 2, attention, a feed-forward block or a mixture."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.mixer_spec import Mamba2Spec
from quire.contracts.model_spec import NO_ATTENTION, NO_MLP, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec
from quire.model.families.blocks import assemble, read_activation, read_attention
from quire.model.families.config_view import ConfigView
from quire.model.families.mamba_blocks import MAMBA2_NAMES, Mamba2Keys, mixer_sources, read_mamba2
from quire.model.families.mixtures import LEAST_SUM, read_groups
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Source, Sources, rename
from quire.model.parameters import parameter_shapes

MODEL_TYPE = "nemotron_h"

_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_TYPE_KEYS = ("layers_block_type", "layer_types")
_KEYS = Mamba2Keys(
    num_heads=("mamba_num_heads",),
    num_groups=("n_groups", "mamba_n_groups"),
    state_size=("ssm_state_size",),
    conv_size=("conv_kernel", "mamba_d_conv"),
    conv_bias=("use_conv_bias", "mamba_conv_bias"),
    activation="mamba_hidden_act",
    norm_eps="layer_norm_epsilon",
)
_TOP = {"embed": "embeddings", "final_norm": "norm_f", "lm_head": "lm_head"}
_LAYER = {name: f"mixer.{name}_proj" for name in ("q", "k", "v", "o", "up", "down")}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Nemotron-H model. As in transformers, steps are at least time_step_min."""
    norm = NormSpec("rms", config.number("layer_norm_epsilon"), late_cast=True)
    kinds = _read_kinds(config)
    makers = {
        "linear_attention": lambda: LayerSpec(NO_ATTENTION, NO_MLP, attn_in=norm, mixer=_read_mixer(config)),
        "full_attention": lambda: LayerSpec(replace(read_attention(config), rope=None), NO_MLP, attn_in=norm),
        "mlp": lambda: LayerSpec(NO_ATTENTION, _read_mlp(config, config.integer("intermediate_size")), mlp_in=norm),
        "moe": lambda: LayerSpec(NO_ATTENTION, _read_moe(config), mlp_in=norm),
    }
    layers = {kind: makers[kind]() for kind in dict.fromkeys(kinds)}
    return assemble(config, [layers[kind] for kind in kinds], norm, has_own_layer_types=True)


def _read_kinds(config: ConfigView) -> list[str]:
    pattern = config.raw("hybrid_override_pattern")
    if pattern is not None and not any(config.has(key) for key in _TYPE_KEYS):
        if not isinstance(pattern, str) or not pattern or not {*pattern} <= {*_KINDS}:
            raise config.error("hybrid_override_pattern", pattern, f"a string of {', '.join(_KINDS)}")
        return [_KINDS[letter] for letter in pattern]
    key = next((key for key in _TYPE_KEYS if config.has(key)), _TYPE_KEYS[0])
    kinds = [_OLD_NAMES.get(name, name) for name in config.strings(key) or []]
    unknown = sorted({*kinds} - {*_KINDS.values()})
    if unknown or not kinds:
        raise UnsupportedError(
            f"{key} {unknown} are not supported in a 'nemotron_h' model; supported: {', '.join(_KINDS.values())}"
        )
    return kinds


def _read_mixer(config: ConfigView) -> Mamba2Spec:
    mixer, has_bias = read_mamba2(config, config.integer("mamba_head_dim"), _KEYS), config.boolean("use_bias")
    min_step = config.number("time_step_min", "mamba_dt_min", is_positive=False)
    return replace(mixer, min_step=min_step, has_in_bias=has_bias, has_out_bias=has_bias)


def _read_mlp(config: ConfigView, size: int) -> MlpSpec:
    return MlpSpec(size, read_activation(config, "mlp_hidden_act"), is_gated=False, has_bias=config.boolean("mlp_bias"))


def _read_moe(config: ConfigView) -> MoeSpec:
    num_experts, num_chosen = config.integer("n_routed_experts", "num_local_experts"), config.integer("num_experts_per_tok")
    if num_chosen > num_experts:
        raise config.error("num_experts_per_tok", num_chosen, f"at most the number of experts ({num_experts})")
    latent_size = config.nullable_integer("moe_latent_size")
    moe = MoeSpec(
        num_experts,
        num_chosen,
        replace(_read_mlp(config, config.integer("moe_intermediate_size")), has_bias=False),
        is_renormalized=config.boolean("norm_topk_prob"),
        is_weight_f32=True,
        scoring="sigmoid",
        has_correction=True,
        least_sum=LEAST_SUM,
        routed_scale=config.number("routed_scaling_factor"),
        is_router_f32=True,
        is_sum_f32=True,
        shared=_read_mlp(config, config.integer("moe_shared_expert_intermediate_size")),
        latent_size=latent_size,
        has_latent_bias=latent_size is not None and config.boolean("mlp_bias"),
    )
    return replace(moe, groups=read_groups(config, moe, num_best=2))


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = rename(spec, _LAYER, _TOP) | mixer_sources(spec, parameter_shapes(spec), MAMBA2_NAMES, "mixer")
    for index, layer in enumerate(spec.layers):
        name = "mlp_in" if layer.is_mlp_only else "attn_in"
        sources[f"layers.{index}.{name}.weight"] = Source.of(f"layers.{index}.norm.weight")
        if isinstance(layer.mlp, MoeSpec):
            sources |= {f"layers.{index}.{ours}": source for ours, source in _find_moe(layer.mlp, index, stored).items()}
    return sources


def _find_moe(moe: MoeSpec, index: int, stored: Collection[str]) -> Sources:
    block = f"layers.{index}.mixer"
    sources = {
        "router.weight": Source.of(f"{block}.gate.weight"),
        "correction.bias": Source.of(f"{block}.gate.e_score_correction_bias"),
    }
    for ours, name in (("gate_up", "up_proj"), ("down", "down_proj")):
        joined, parts = f"{block}.experts.{name}", [(f"{block}.experts.{one}.{name}.weight",) for one in range(moe.num_experts)]
        sources[f"experts.{ours}.weight"] = Source.of(joined) if joined in stored else Source.stack(parts)
    modules = {"shared.up": "shared_experts.up_proj", "shared.down": "shared_experts.down_proj"}
    kinds = ("weight", "bias") if moe.shared is not None and moe.shared.has_bias else ("weight",)
    sources |= {f"{ours}.{kind}": Source.of(f"{block}.{theirs}.{kind}") for ours, theirs in modules.items() for kind in kinds}
    if moe.latent_size is not None:
        kinds = ("weight", "bias") if moe.has_latent_bias else ("weight",)
        latent = {"latent_in": "fc1_latent_proj", "latent_out": "fc2_latent_proj"}
        sources |= {
            f"{ours}.{kind}": Source.of(f"{block}.{theirs}.{kind}") for ours, theirs in latent.items() for kind in kinds
        }
    return sources


PAGE = FamilyPage(("NemotronHForCausalLM",), read_spec, find_sources, prefixes=("backbone.", "model."))
