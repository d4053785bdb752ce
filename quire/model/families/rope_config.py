"""Read rotary embeddings from config.json: both styles, every scaling, everything resolved into a RopeSpec.

Styles: `rope_theta` and `rope_scaling` (transformers 4), or `rope_parameters`, flat or one object per layer type
(transformers 5). A non-empty `rope_scaling` replaces `rope_parameters`, as it does in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from quire.base.errors import UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.model_spec import QueryScaling, RopeSpec
from quire.model.families.config_view import ConfigView, is_number

logger = get_logger(__name__)

LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")
_ALPHA_TYPES = ("hunyuan_v1_dense",)
"""Model types whose "dynamic" rope has a fixed stretch where it names an alpha."""
_OLD_NAMES = {
    ("gpt_neox", "rope_theta"): ("rotary_emb_base",),
    ("gpt_neox", "partial_rotary_factor"): ("rotary_pct",),
    ("gpt_neox_japanese", "rope_theta"): ("rotary_emb_base",),
    ("gpt_neox_japanese", "partial_rotary_factor"): ("rotary_pct",),
    ("stablelm", "partial_rotary_factor"): ("rope_pct",),
}
"""Further names of a value in files of a model type."""
_LARGEST = 1e15
"""More than any parameter is; positions, factors and their products stay numbers."""
_MIN_BETA, _MAX_BETA = 1e-6, 1e6
_ALL_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_PHI3_NAMES = {"su": "longrope", "yarn": "longrope"}
_REFUSED_KEYS = ("mrope_section",)
_MSCALES = ("short_mscale", "long_mscale")
_MROPE_TYPES = ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types whose positions have three parts, which are the same for all tokens of text."""
_KNOWN_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor"),
    *("long_factor", "partial_rotary_factor", "llama_4_scaling_beta", "alpha", "max_position_embeddings", *_MSCALES),
}


class _Parameters:
    """One object of rope parameters, read with the checks of ConfigView."""

    def __init__(self, config: ConfigView, key: str, values: Mapping[str, object]) -> None:
        self._config, self._key, self._values = config, key, values

    def number(self, name: str, default: float | None = None, is_required: bool = True) -> float | None:
        """Return a positive number, or the default where it is null or absent."""
        value = self._values.get(name)
        if value is None and (default is not None or not is_required):
            return default
        if not is_number(value) or not 0 < value <= _LARGEST:
            raise self._config.error(f"{self._key}.{name}", value, f"a positive number, at most {_LARGEST:.0e}")
        return float(value)

    def required(self, name: str) -> float:
        """Return a positive number that must be there."""
        value = self.number(name)
        assert value is not None
        return value

    def divisors(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` positive numbers."""
        values = self._values.get(name)
        if not isinstance(values, list) or not all(is_number(v) and v > 0 for v in values):
            raise self._config.error(f"{self._key}.{name}", values, "a list of positive numbers")
        if len(values) != count:
            raise self._config.error(f"the length of {self._key}.{name}", len(values), f"half the rotated size ({count})")
        return tuple(float(value) for value in values)


def read_rope(
    config: ConfigView, head_dim: int, *, is_f32: bool = False, can_be_partial: bool = False, rotary_dim: int | None = None
) -> RopeSpec:
    """Return the rotary embedding of a model whose layers all share one. Raises ModelFormatError or UnsupportedError.

    rotary_dim  how many values are rotated where partial_rotary_factor does not say it
    """
    values, scaling = config.table("rope_parameters"), config.table("rope_scaling")
    key, values = ("rope_scaling", scaling) if scaling else ("rope_parameters", values)
    nested = [name for name in values if name in LAYER_TYPES]
    if nested:
        raise config.error(key, nested, f"one object for all layers in a {config.model_type!r} model, not one per layer type")
    theta = _inner_or_outer(config, key, values, "rope_theta")
    theta = config.number("rope_theta") if values.get("rope_theta") is None else theta
    partial = _inner_or_outer(config, key, values, "partial_rotary_factor")
    partial = config.raw("partial_rotary_factor") if partial is None else partial
    if partial is not None and (isinstance(partial, bool) or not is_number(partial) or not 0 < partial <= 1):
        raise config.error("partial_rotary_factor", partial, "a number above 0 and at most 1")
    if partial is None and rotary_dim is not None:
        partial = rotary_dim / head_dim
    if can_be_partial and partial is not None:
        values = {**values, "partial_rotary_factor": partial}
    elif partial not in (None, 1):
        raise UnsupportedError(f"partial_rotary_factor {partial!r} is not supported in a {config.model_type!r} model")
    return _resolve(config, key, {**values, "rope_theta": theta}, head_dim, is_f32=is_f32)


def read_score_scaling(config: ConfigView) -> float:
    """Return what scores are multiplied by beside their scale: the square of YaRN's temperature for `mscale_all_dim`, in models
    with multi-head latent attention."""
    scaling = config.table("rope_scaling")
    key, values = ("rope_scaling", scaling) if scaling else ("rope_parameters", config.table("rope_parameters"))
    parameters = _Parameters(config, key, values)
    if not values.get("mscale_all_dim") or _read_kind(config, key, values) == "default":
        return 1.0
    factor = parameters.required("factor")
    return _temperature(factor, parameters.required("mscale_all_dim")) ** 2


def _inner_or_outer(config: ConfigView, key: str, values: Mapping[str, object], name: str) -> object:
    """Return a value of the rope parameters or of config.json itself; where both have one, the former, as transformers does."""
    aliases = [alias for alias in (name, *_OLD_NAMES.get((config.model_type, name), ())) if config.has(alias)]
    outer = config.raw(*aliases) if aliases else None
    inner = values.get(name)
    if inner is None or outer is None:
        return outer if inner is None else inner
    if inner != outer:
        logger.info("%s is %r, and %s.%s, which is used, is %r", name, outer, key, name, inner)
    return inner


def read_query_scaling(config: ConfigView) -> QueryScaling | None:
    """Return the scaling of queries by position that the rope parameters have beside the rope (Ministral 3); None: none."""
    values, scaling = config.table("rope_parameters"), config.table("rope_scaling")
    key, values = ("rope_scaling", scaling) if scaling else ("rope_parameters", values)
    parameters = _Parameters(config, key, values)
    beta = parameters.number("llama_4_scaling_beta", is_required=False)
    if beta is None:
        return None
    return QueryScaling(beta, int(parameters.required("original_max_position_embeddings")))


def read_layer_rope(
    config: ConfigView, head_dim: int, layer_type: LayerType, *, is_f32: bool = False, can_be_partial: bool = False
) -> RopeSpec:
    """Return the rotary embedding of one layer type (Gemma 3); a `rope_scaling` is for layers of full attention only."""
    nested, scaling = config.table("rope_parameters"), config.table("rope_scaling")
    if nested and not any(name in LAYER_TYPES for name in nested):
        raise config.error("rope_parameters", sorted(nested), f"an object with the keys {LAYER_TYPES}")
    values = nested.get(layer_type) or {}
    if not isinstance(values, dict):
        raise config.error(f"rope_parameters.{layer_type}", values, "an object")
    if layer_type == "full_attention":
        values = {**values, **scaling}
    base = config.number("rope_theta" if layer_type == "full_attention" else "rope_local_base_freq")
    is_proportional = values.get("rope_type") == "proportional"
    if not is_proportional and not can_be_partial and values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedError(f"partial_rotary_factor is not supported in a {config.model_type!r} model")
    theta = base if values.get("rope_theta") is None else values["rope_theta"]
    # transformers reads `truncate` next to the layer types, never inside one.
    values = {**values, "rope_theta": theta, "truncate": nested.get("truncate", True)}
    return _resolve(config, f"rope_parameters.{layer_type}", values, head_dim, is_f32=is_f32)


def read_named_rope(config: ConfigView, key: str, values: Mapping[str, object], head_dim: int) -> RopeSpec:
    """Return the rotary embedding that an object under a key describes, for families with keys of their own."""
    return _resolve(config, key, values, head_dim)


def _resolve(config: ConfigView, key: str, values: Mapping[str, object], head_dim: int, *, is_f32: bool = False) -> RopeSpec:
    kind = _read_kind(config, key, values)
    _check_keys(config, key, values)
    parameters = _Parameters(config, key, values)
    if kind == "proportional":
        return _proportional(config, key, parameters, head_dim)
    dim = int(head_dim * parameters.number("partial_rotary_factor", 1.0))
    if dim < 2 or dim % 2 or dim > head_dim:
        raise config.error("head_dim", head_dim, f"such that an even number of its elements is rotated, not {dim}")
    theta = parameters.required("rope_theta")
    max_positions = config.integer("max_position_embeddings")
    original_max = _original_max(config, parameters, kind)
    _check_logarithms(config, key, parameters, RopeSpec(dim, theta, kind, original_max=original_max))
    alpha = parameters.number("alpha", is_required=False) if config.model_type in _ALPHA_TYPES and kind == "dynamic" else None
    if alpha is not None and dim > 2:
        return RopeSpec(dim, theta * alpha ** (dim / (dim - 2)), is_f32=is_f32)
    if kind == "default":
        return RopeSpec(dim, theta, is_f32=is_f32)
    if kind in ("linear", "dynamic"):
        factor = parameters.required("factor")
        return RopeSpec(dim, theta, kind, factor, original_max=max_positions, is_f32=is_f32)
    if kind == "llama3":
        return RopeSpec(
            dim,
            theta,
            kind,
            parameters.required("factor"),
            original_max,
            low_freq_factor=parameters.required("low_freq_factor"),
            high_freq_factor=parameters.required("high_freq_factor"),
            is_f32=is_f32,
        )
    factor = parameters.number("factor", is_required=False)
    factor = max_positions / original_max if factor is None else factor
    if kind == "yarn":
        return RopeSpec(
            dim,
            theta,
            kind,
            factor,
            original_max,
            beta_fast=parameters.number("beta_fast", 32.0),
            beta_slow=parameters.number("beta_slow", 1.0),
            truncate=values.get("truncate") is not False,
            attention_factor=_yarn_attention_factor(parameters, values, factor),
            is_f32=is_f32,
        )
    return RopeSpec(
        dim,
        theta,
        "longrope",
        factor,
        original_max,
        attention_factor=_long_attention_factor(key, parameters, factor, original_max),
        short=parameters.divisors("short_factor", dim // 2),
        long=parameters.divisors("long_factor", dim // 2),
        is_f32=is_f32,
    )


def _proportional(config: ConfigView, key: str, parameters: _Parameters, head_dim: int) -> RopeSpec:
    """Return the rope of Gemma 4's layers of full attention, which rotates pairs of the whole head, but not all of them."""
    factor = parameters.number("partial_rotary_factor", 1.0)
    num_pairs = int(factor * head_dim // 2)
    if head_dim % 2 or not 1 <= num_pairs <= head_dim // 2:
        raise config.error(f"{key}.partial_rotary_factor", factor, f"such that 1 to {head_dim // 2} pairs are rotated")
    scale = parameters.number("factor", 1.0)
    return RopeSpec(head_dim, parameters.required("rope_theta"), "proportional", scale, num_pairs=num_pairs)


def _long_attention_factor(key: str, parameters: _Parameters, factor: float, original_max: int) -> float:
    """Return the attention factor of longrope: the configuration's (Phi-3.5-MoE names one for short and one for long contexts),
    or the one that follows from the factor."""
    short, long = (parameters.number(name, is_required=False) for name in _MSCALES)
    if short != long:
        raise UnsupportedError(
            f"{key}: short_mscale ({short}) and long_mscale ({long}) are supported only where they are equal"
        )
    named = parameters.number("attention_factor", is_required=False) if short is None else short
    if named is not None:
        return named
    return math.sqrt(1 + math.log(factor) / math.log(original_max)) if factor > 1 else 1.0


def _read_kind(config: ConfigView, key: str, values: Mapping[str, object]) -> str:
    kind = values.get("rope_type") or values.get("type") or "default"
    if not isinstance(kind, str):
        raise config.error(f"{key}.rope_type", kind, "a string")
    kinds = _ALL_KINDS
    if config.model_type == "phi3":  # whose older checkpoints name it so
        kind, kinds = _PHI3_NAMES.get(kind, kind), ("default", "longrope")
    if config.model_type == "sarvam_mla" and kind == "deepseek_yarn":
        kind = "yarn"
    if config.model_type in ("gemma4_text", "gemma4_unified_text", "lfm3"):
        kinds = (*kinds, "proportional")
    if kind not in kinds:
        raise UnsupportedError(
            f"{key}: rope type {kind!r} is not supported in a {config.model_type!r} model; supported: {kinds}"
        )
    return kind


def _check_logarithms(config: ConfigView, key: str, parameters: _Parameters, rope: RopeSpec) -> None:
    """Refuse numbers of which the formulas of a scaling take a logarithm or an inverse that there is not."""
    if rope.kind == "dynamic" and rope.dim < 4:
        raise config.error("head_dim", rope.dim, "such that 4 of its elements at least are rotated with rope type 'dynamic'")
    if rope.kind == "longrope" and rope.original_max < 2:
        raise config.error("max_position_embeddings", rope.original_max, "at least 2 with rope type 'longrope'")
    if rope.kind != "yarn":
        return
    if rope.theta == 1:
        raise config.error(f"{key}.rope_theta", rope.theta, "another number than 1 with rope type 'yarn'")
    for name in ("beta_fast", "beta_slow"):
        value = parameters.number(name, is_required=False)
        if value is not None and not _MIN_BETA <= value <= _MAX_BETA:
            raise config.error(f"{key}.{name}", value, f"from {_MIN_BETA} to {_MAX_BETA}")


def _check_keys(config: ConfigView, key: str, values: Mapping[str, object]) -> None:
    for name in values:
        if name in ("mrope_section", "mrope_interleaved") and config.model_type in _MROPE_TYPES:
            continue
        is_refused = name in _REFUSED_KEYS or (name in _MSCALES and config.model_type != "phimoe")
        if is_refused and values[name] is not None:
            raise UnsupportedError(f"{key}.{name} is not supported in a {config.model_type!r} model; it would change results")
        if name not in _KNOWN_KEYS:
            logger.info("%s.%s is not known and ignored", key, name)


def _original_max(config: ConfigView, parameters: _Parameters, kind: str) -> int:
    """Return the positions before scaling: the key outside the rope parameters wins, as in transformers (Phi-3)."""
    name = "original_max_position_embeddings"
    if config.raw(name) is not None:
        return config.integer(name, minimum=2)
    value = parameters.number(name, is_required=False) if kind in ("llama3", "yarn", "longrope") else None
    return config.integer("max_position_embeddings") if value is None else max(2, int(value))


def _yarn_attention_factor(parameters: _Parameters, values: Mapping[str, object], factor: float) -> float:
    given = parameters.number("attention_factor", is_required=False)
    if given is not None:
        return given

    if values.get("mscale") and values.get("mscale_all_dim"):
        return _temperature(factor, parameters.required("mscale")) / _temperature(factor, parameters.required("mscale_all_dim"))
    return _temperature(factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
