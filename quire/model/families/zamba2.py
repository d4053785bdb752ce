"""Zamba 2 (Zyphra, 2024): Mamba 2, and before it in some layers one of a few shared transformer blocks with adapters."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.mixer_spec import GatedNormSpec, Mamba2Spec
from quire.contracts.model_spec import NO_ATTENTION, NO_MLP, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, SharedBlockSpec
from quire.model.families.blocks import assemble, read_activation, read_attention, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mamba_blocks import MAMBA2_NAMES
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import TOP, Source, Sources, rename
from quire.model.parameters import parameter_shapes

MODEL_TYPE = "zamba2"

_OLD_NAMES = {"mamba": "linear_attention"}
_KINDS = ("linear_attention", "hybrid")
_DEFAULT_HYBRID = (*range(6, 43, 6), 47, 51)
_LONG_CONTEXT = 16384
_NORM_EPS = 1e-5
"""Of the gated norm, whatever the file says: transformers has it as a constant."""
_BLOCK = {
    "attn_in": "input_layernorm",
    "mlp_in": "pre_ff_layernorm",
    "down": "feed_forward.down_proj",
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
}
_TOP = {**TOP, "final_norm": "final_layernorm"}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Zamba 2 model."""
    norm, mixer, kinds = read_rms_norm(config), _read_mixer(config), _read_kinds(config)
    rank = config.integer("adapter_rank")
    block = SharedBlockSpec(norm, rank if config.boolean("use_shared_attention_adapter") else None, rank)
    config.integer("num_mem_blocks")
    mlp_size = config.nullable_integer("intermediate_size") or 4 * config.integer("hidden_size")
    mlp = MlpSpec(mlp_size, read_activation(config), has_bias=config.boolean("add_bias_linear"))
    hybrid = LayerSpec(_read_attention(config), mlp, attn_in=norm, mlp_in=norm, mixer=mixer, shared_block=block)
    plain = LayerSpec(NO_ATTENTION, NO_MLP, attn_in=norm, mixer=mixer)
    max_positions = _LONG_CONTEXT if config.boolean("use_long_context") else config.integer("max_position_embeddings")
    layers = [hybrid if kind == "hybrid" else plain for kind in kinds]
    return assemble(config, layers, norm, has_own_layer_types=True, max_positions=max_positions)


def _read_kinds(config: ConfigView) -> list[str]:
    key, num_layers = ("layers_block_type" if config.has("layers_block_type") else "layer_types"), _num_layers(config)
    given = config.strings(key)
    if given is None:
        return ["hybrid" if index in _DEFAULT_HYBRID else "linear_attention" for index in range(num_layers)]
    kinds = [_OLD_NAMES.get(kind, kind) for kind in given]
    unknown = sorted({*kinds} - {*_KINDS})
    if unknown:
        raise UnsupportedError(f"{key} {unknown} are not supported in a 'zamba2' model; supported: {', '.join(_KINDS)}")
    if len(kinds) != num_layers:
        raise config.error(f"the length of {key}", len(kinds), f"num_hidden_layers ({num_layers})")
    return kinds


def _num_layers(config: ConfigView) -> int:
    return config.integer("num_hidden_layers")


def _read_attention(config: ConfigView) -> AttentionSpec:
    """Return attention over twice the hidden size, whose scale is that of half a head."""
    width, num_heads = 2 * config.integer("hidden_size"), config.integer("num_attention_heads")
    if width % num_heads:
        raise config.error("num_attention_heads", num_heads, f"a divisor of 2 * hidden_size ({width})")
    head_dim = width // num_heads
    given = config.raw("attention_head_dim", "head_dim")
    if given is not None and given != head_dim:
        raise config.error("attention_head_dim", given, f"2 * hidden_size / num_attention_heads ({head_dim})")
    rope = read_rope(config, head_dim)
    attention = read_attention(config, rope)
    return replace(
        attention, head_dim=head_dim, scale=(head_dim / 2) ** -0.5, rope=rope if config.boolean("use_mem_rope") else None
    )


def _read_mixer(config: ConfigView) -> Mamba2Spec:
    channels = int(config.number("mamba_expand") * config.integer("hidden_size"))
    num_heads, num_groups = config.integer("n_mamba_heads"), config.integer("mamba_ngroups")
    if channels % num_heads:
        raise config.error("n_mamba_heads", num_heads, f"a divisor of the {channels} channels of the mixer")
    if num_heads % num_groups:
        raise config.error("mamba_ngroups", num_groups, f"a divisor of n_mamba_heads ({num_heads})")
    has_bias = config.boolean("add_bias_linear")
    return Mamba2Spec(
        num_heads,
        channels // num_heads,
        num_groups,
        config.integer("mamba_d_state"),
        conv_size=config.integer("mamba_d_conv", minimum=2),
        norm=GatedNormSpec(num_groups, _NORM_EPS),
        min_step=config.number("time_step_min", is_positive=False),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
    )


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: a shared block in the first layer that has it, with the adapters of all.

    A file may store a copy for each layer, which transformers takes where the configuration does not tie the embeddings.
    """
    sources, shapes = rename(spec, {}, _TOP), parameter_shapes(spec)
    hybrid = [index for index, layer in enumerate(spec.layers) if layer.shared_block is not None]
    num_blocks = _num_blocks(stored, hybrid)
    for index, layer in enumerate(spec.layers):
        own, place = f"layers.{index}", f"layers.{index}.mamba"
        if layer.shared_block is None:
            sources[f"{own}.attn_in.weight"] = Source.of(f"{own}.input_layernorm.weight")
        else:
            place = f"{own}.mamba_decoder.mamba"
            use = hybrid.index(index)
            has_own = f"{own}.shared_transformer.input_layernorm.weight" in stored
            block = f"layers.{index if has_own else hybrid[use % num_blocks]}.shared_transformer"
            sources |= {f"{own}.{name}": source for name, source in _find_block(layer, block, use).items()}
            sources[f"{own}.mixer_in.weight"] = Source.of(f"{own}.mamba_decoder.input_layernorm.weight")
            sources[f"{own}.block_out.weight"] = Source.of(f"{own}.linear.weight")
        sources |= {f"{own}.{ours}": Source.of(f"{place}.{theirs}") for ours, theirs in MAMBA2_NAMES.items()}
    return {name: source for name, source in sources.items() if name in shapes}


def _num_blocks(stored: Collection[str], hybrid: list[int]) -> int:
    """Return how many blocks there are: a block has adapters of the layers that share it, the use-th layer at `use`."""
    name = "layers.{}.shared_transformer.feed_forward.gate_up_proj_adapter_list.{}.0.weight"
    first = hybrid[0] if hybrid else 0
    return next((use for use in range(1, len(hybrid)) if name.format(first, use) in stored), max(len(hybrid), 1))


def _find_block(layer: LayerSpec, block: str, use: int) -> Sources:
    assert isinstance(layer.mlp, MlpSpec)
    sources = {
        f"{ours}.{kind}": Source.of(f"{block}.{name}.{kind}") for ours, name in _BLOCK.items() for kind in ("weight", "bias")
    }
    for name in ("q", "k", "v"):
        for part, number in (("in", 0), ("out", 1)):
            stored = f"{block}.self_attn.linear_{name}_adapter_list.{use}.{number}.weight"
            sources[f"adapters.{name}_{part}.weight"] = Source.of(stored)
    size, module = layer.mlp.intermediate_size, f"{block}.feed_forward.gate_up_proj"
    for name, rows in (("gate", (0, size)), ("up", (size, 2 * size))):
        sources |= {f"{name}.{kind}": Source.of(f"{module}.{kind}", rows) for kind in ("weight", "bias")}
        sources[f"adapters.{name}_in.weight"] = Source.of(f"{module}_adapter_list.{use}.0.weight")
        sources[f"adapters.{name}_out.weight"] = Source.of(f"{module}_adapter_list.{use}.1.weight", rows)
    return sources


_ADAPTERS = re.compile(r"layers\.\d+\.shared_transformer\..*_adapter_list\..*")
"""A copy of a block may have the adapters of other layers."""

PAGE = FamilyPage(("Zamba2ForCausalLM",), read_spec, find_sources, spare=_ADAPTERS)
