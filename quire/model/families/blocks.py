"""Builders that the families share: attention, MLP, norms and the whole spec from a ConfigView."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict, Unpack

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.contracts.model_spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    PerLayerInputs,
    RopeSpec,
)
from quire.model.families.config_view import ConfigView
from quire.model.families.rope_config import LAYER_TYPES, read_rope

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_LEGACY_LAYER_TYPES = {"attention": "full_attention"}
_MAX_ALIBI_HEADS = 4096


def read_head_dim(config: ConfigView) -> int:
    """Return head_dim; if it is null or has no default, hidden_size / num_attention_heads."""
    head_dim = config.nullable_integer("head_dim")
    if head_dim is not None:
        return head_dim
    return read_sizes(config)[2]


def read_sizes(
    config: ConfigView, hidden: tuple[str, ...] = ("hidden_size",), heads: tuple[str, ...] = ("num_attention_heads",)
) -> tuple[int, int, int]:
    """Return the hidden size, how many heads it is divided among, and the size of one; by names of the first two."""
    hidden_size, num_heads = config.integer(*hidden), config.integer(*heads)
    if hidden_size % num_heads:
        raise config.error(hidden[0], hidden_size, f"a multiple of {heads[0]} ({num_heads})")
    return hidden_size, num_heads, hidden_size // num_heads


def read_attention(config: ConfigView, rope: RopeSpec | None = None, has_bias: bool = False) -> AttentionSpec:
    """Return grouped-query attention with scale head_dim ** -0.5, without a window.

    rope      None: read from the config, one for all layers
    has_bias  on q, k, v and o
    """
    num_heads, head_dim = config.integer("num_attention_heads"), read_head_dim(config)
    num_kv_heads = config.nullable_integer("num_key_value_heads")
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim) if rope is None else rope,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
    )


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """Return the slopes of ALiBi: a geometric series to 2 ** -max_bias; where the heads are no power of two, that of the next
    power, each second one first."""
    if num_heads > _MAX_ALIBI_HEADS:
        raise ModelFormatError(f"the heads of a model with ALiBi must be at most {_MAX_ALIBI_HEADS}, got {num_heads}")
    power = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-max_bias * (index + 1) / power) for index in range(power)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def read_activation(config: ConfigView, key: str = "hidden_act") -> Activation:
    """Return an activation function. Raises UnsupportedError."""
    name = config.string(key)
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"{key} {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_mlp(config: ConfigView, activation: str = "hidden_act", has_bias: bool = False, is_gated: bool = True) -> MlpSpec:
    """Return a feed-forward block; `activation` is the key of its function."""
    return MlpSpec(config.integer("intermediate_size"), read_activation(config, activation), is_gated, has_bias)


def read_rms_norm(config: ConfigView, *, offset: int = 0, late_cast: bool = False) -> NormSpec:
    """Return an RMS norm with the config's epsilon."""
    return NormSpec("rms", config.number("rms_norm_eps"), offset=offset, late_cast=late_cast)


def read_layer_norm(config: ConfigView, key: str = "layer_norm_eps", *, has_bias: bool = True, offset: int = 0) -> NormSpec:
    """Return a LayerNorm with the epsilon under `key`."""
    return NormSpec("layer", config.number(key), offset=offset, has_bias=has_bias)


def repeat_layer(config: ConfigView, layer: LayerSpec, norm: NormSpec, **fields: Unpack[OutsideLayers]) -> ModelSpec:
    """Return the spec of a model with equal layers."""
    return assemble(config, [layer] * config.integer("num_hidden_layers"), norm, **fields)


def window_of(config: ConfigView, is_sliding: Sequence[bool]) -> int:
    """Return the window of sliding-window layers, which is required if there are any; 0 if there are none."""
    window = config.nullable_integer("sliding_window")
    if window is None and any(is_sliding):
        raise config.error("sliding_window", None, "an integer >= 1, as some layers have a window")
    return window or 0


def read_is_sliding(config: ConfigView, default: Callable[[int], bool]) -> list[bool]:
    """Return for each layer whether it has a window: from `layer_types`, or by the family's rule if that is absent."""
    num_layers = config.integer("num_hidden_layers")
    types = config.strings("layer_types")
    if types is None:
        return [default(index) for index in range(num_layers)]
    return [name == "sliding_attention" for name in _check_layer_types(config, types, num_layers)]


def _check_layer_types(config: ConfigView, types: list[str], num_layers: int) -> list[str]:
    types = [_LEGACY_LAYER_TYPES.get(name, name) for name in types]
    if config.model_type == "llama4_text":  # which takes sequences of one chunk at most
        types = ["full_attention" if name == "chunked_attention" else name for name in types]
    unknown = sorted({name for name in types if name not in LAYER_TYPES})
    if unknown:
        raise UnsupportedError(f"layer_types {unknown} are not supported; supported: {', '.join(LAYER_TYPES)}")
    if len(types) != num_layers:
        raise config.error("the length of layer_types", len(types), f"num_hidden_layers ({num_layers})")
    return types


class OutsideLayers(TypedDict, total=False):
    """Fields of a ModelSpec that are the same in most families."""

    embed_scale: float
    is_embed_scale_cast: bool
    num_learned_positions: int
    embed_norm: NormSpec | None
    has_head_bias: bool
    is_residual_f32: bool
    logit_scale: float
    final_softcap: float | None
    hidden_size: int
    max_positions: int
    per_layer_inputs: PerLayerInputs | None


def assemble(
    config: ConfigView,
    layers: Iterable[LayerSpec],
    final_norm: NormSpec,
    *,
    has_own_layer_types: bool = False,
    **fields: Unpack[OutsideLayers],
) -> ModelSpec:
    """Return the spec of a model; equal layers become one object. The eos and bos ids are for the caller to add.

    has_own_layer_types  `layer_types` does not say which layers have a window; the caller has read it
    """
    unique: dict[LayerSpec, LayerSpec] = {}
    shared = tuple(unique.setdefault(layer, layer) for layer in layers)
    types = config.strings("layer_types")
    if types is not None and not has_own_layer_types:
        for index, name in enumerate(_check_layer_types(config, types, len(shared))):
            if (shared[index].attention.window is not None) != (name == "sliding_attention"):
                raise UnsupportedError(
                    f"layer_types[{index}] is {name!r}, which is not what {config.model_type!r} models do with the other keys"
                )
    if "hidden_size" not in fields:
        fields["hidden_size"] = config.integer("hidden_size")
    if "max_positions" not in fields:
        fields["max_positions"] = max(_max_positions(config, layer.attention.rope) for layer in unique)
    return ModelSpec(
        config.model_type,
        config.dtype(),
        config.integer("vocab_size"),
        layers=shared,
        final_norm=final_norm,
        is_tied=config.boolean("tie_word_embeddings"),
        **fields,
    )


def _max_positions(config: ConfigView, rope: RopeSpec | None) -> int:
    """Return the number of positions of the model: linear and YaRN scaling may exceed max_position_embeddings."""
    max_positions = config.integer("max_position_embeddings")
    if rope is not None and rope.kind in ("linear", "yarn"):
        return max(max_positions, int(rope.original_max * rope.factor))
    return max_positions
