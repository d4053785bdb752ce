"""What the pages of models with Mamba layers share: reading their mixers, and how these are stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from quire.contracts.mixer_spec import GatedNormSpec, Mamba1Spec, Mamba2Spec
from quire.contracts.model_spec import ModelSpec
from quire.model.families.blocks import read_activation
from quire.model.families.config_view import ConfigView, is_number
from quire.model.families.sources import Source, Sources

MAMBA2_NAMES = {
    "mamba.in.weight": "in_proj.weight",
    "mamba.in.bias": "in_proj.bias",
    "conv.weight": "conv1d.weight",
    "conv.bias": "conv1d.bias",
    "mamba.step": "dt_bias",
    "mamba.log": "A_log",
    "mamba.skip": "D",
    "mamba.norm.weight": "norm.weight",
    "mamba.out.weight": "out_proj.weight",
    "mamba.out.bias": "out_proj.bias",
}
MAMBA1_NAMES = {
    **{name: MAMBA2_NAMES[name] for name in ("mamba.in.weight", "mamba.in.bias", "conv.weight", "conv.bias")},
    **{name: MAMBA2_NAMES[name] for name in ("mamba.log", "mamba.skip", "mamba.out.weight", "mamba.out.bias")},
    "mamba.x.weight": "x_proj.weight",
    "mamba.step_norm.weight": "dt_layernorm.weight",
    "mamba.b_norm.weight": "b_layernorm.weight",
    "mamba.c_norm.weight": "c_layernorm.weight",
    "mamba.step.weight": "dt_proj.weight",
    "mamba.step.bias": "dt_proj.bias",
}


def mixer_sources(spec: ModelSpec, shapes: Mapping[str, object], names: Mapping[str, str], module: str) -> Sources:
    """Return sources of all parameters of mixers, which a layer holds in `module`; names: ours below a layer -> theirs in it.

    shapes  parameter_shapes of the spec
    """
    sources: Sources = {}
    for index, layer in enumerate(spec.layers):
        if layer.mixer is not None:
            for ours, theirs in names.items():
                if f"layers.{index}.{ours}" in shapes:
                    sources[f"layers.{index}.{ours}"] = Source.of(f"layers.{index}.{module}.{theirs}")
    return sources


class Mamba2Keys(NamedTuple):
    """The keys of a Mamba 2 mixer in config.json; each may have several names."""

    num_heads: tuple[str, ...] = ("mamba_n_heads",)
    num_groups: tuple[str, ...] = ("mamba_n_groups",)
    state_size: tuple[str, ...] = ("mamba_d_state",)
    conv_size: tuple[str, ...] = ("mamba_d_conv",)
    conv_bias: tuple[str, ...] = ("mamba_conv_bias",)
    activation: str = "hidden_act"
    norm_eps: str = "rms_norm_eps"


def read_mamba2(config: ConfigView, head_dim: int, keys: Mamba2Keys | None = None) -> Mamba2Spec:
    """Return a Mamba 2 mixer with a gated norm in as many groups as B and C have, and without limits of steps."""
    keys = keys or Mamba2Keys()
    check_silu(config, keys.activation)
    num_heads, num_groups = config.integer(*keys.num_heads), config.integer(*keys.num_groups)
    if num_heads % num_groups:
        raise config.error(keys.num_groups[0], num_groups, f"a divisor of {keys.num_heads[0]} ({num_heads})")
    return Mamba2Spec(
        num_heads,
        head_dim,
        num_groups,
        config.integer(*keys.state_size),
        conv_size=config.integer(*keys.conv_size, minimum=2),
        norm=GatedNormSpec(num_groups, config.number(keys.norm_eps)),
        has_conv_bias=config.boolean(*keys.conv_bias),
    )


def read_mamba2_head_dim(config: ConfigView, channels: int) -> int:
    """Return `mamba_d_head`, which may be "auto"; all heads have `channels` values together."""
    num_heads = config.integer("mamba_n_heads")
    if channels % num_heads:
        raise config.error("mamba_n_heads", num_heads, f"a divisor of the {channels} channels of the mixer")
    given = config.raw("mamba_d_head")
    if given != "auto" and given != channels // num_heads:
        raise config.error("mamba_d_head", given, f"'auto' or {channels // num_heads}, by the {channels} channels of the mixer")
    return channels // num_heads


def read_step_limits(config: ConfigView) -> tuple[float, float]:
    """Return the least and the largest step of `time_step_limit`; transformers 5 writes infinity as an object."""
    limits = config.raw("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    infinities = (math.inf, "inf", "Infinity", {"__float__": "Infinity"})
    if not isinstance(limits, list) or len(limits) != 2 or not is_number(limits[0]):
        raise config.error("time_step_limit", limits, "two numbers, of which the second may be infinite")
    if not (limits[1] in infinities or (is_number(limits[1]) and limits[1] >= limits[0])):
        raise config.error("time_step_limit", limits, "two numbers in rising order, of which the second may be infinite")
    return float(limits[0]), math.inf if limits[1] in infinities else float(limits[1])


def read_step_rank(config: ConfigView, key: str) -> int:
    """Return the rank of steps of a Mamba mixer, which may be "auto"."""
    return math.ceil(config.integer("hidden_size") / 16) if config.raw(key) == "auto" else config.integer(key)


def read_mamba1(config: ConfigView, step_rank_key: str, *, norm_eps: float | None = None) -> Mamba1Spec:
    """Return the mixer of a model that is all Mamba; norm_eps: of the norms of steps, B and C without weights, if any."""
    check_silu(config, "hidden_act")
    channels = config.nullable_integer("intermediate_size")
    if channels is None:
        channels = int(config.number("expand") * config.integer("hidden_size"))
    return Mamba1Spec(
        channels,
        config.integer("state_size"),
        read_step_rank(config, step_rank_key),
        conv_size=config.integer("conv_kernel", minimum=2),
        norm_eps=norm_eps,
        has_bias=config.boolean("use_bias"),
        has_conv_bias=config.boolean("use_conv_bias"),
    )


def check_silu(config: ConfigView, key: str) -> None:
    """Raise the error for an activation that a mixer does not have."""
    if read_activation(config, key) != "silu":
        raise config.error(key, config.string(key), "'silu', which the Mamba layers have")
