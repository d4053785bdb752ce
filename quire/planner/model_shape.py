"""ModelShape: the sizes of a model that decide bytes and operations of its steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.base.errors import ConfigError
from quire.contracts.kv_spec import KvSpec, head_dims_of
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import DTYPE_BYTES, AttentionSpec, Dtype, ModelSpec, MoeSpec

_SCALE_BYTES = 4
_ATTENTION_MODULES = [["q"], ["k"], ["v"], ["kv_b"], ["o"], ["attn_gate"]]
KV_FORMATS: dict[str, tuple[float, bool]] = {
    "float32": (4.0, False),
    "bfloat16": (2.0, False),
    "float16": (2.0, False),
    "int8": (1.0, True),
    "fp8": (1.0, True),
    "k8v4": (0.75, True),
    "turboquant_4bit": (0.5, True),
}
"""Bytes per element of each KV format, the mean of K and V, and whether each token and head has a scale in f32 (one for K, one
for V)."""


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """What layers of kv_cache_dtype_skip_layers have of a group: they keep K and V in the model's dtype.

    num_rows, num_elements  as those of the group, which count them too
    element_bytes           of the model's dtype
    """

    num_rows: int = 0
    num_elements: int = 0
    element_bytes: float = 0.0


def _kv_bytes(num_rows: int, num_elements: int, kv_format: str, kept: KeptLayers, is_joined: bool) -> float:
    width, has_scales = KV_FORMATS["int8" if is_joined and kv_format == "k8v4" else kv_format]
    scale_bytes = (1 if is_joined else 2) * (num_rows - kept.num_rows) * _SCALE_BYTES if has_scales else 0
    return (num_elements - kept.num_elements) * width + scale_bytes + kept.num_elements * kept.element_bytes


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """The layers of one window.

    window              a token attends to itself and the window - 1 tokens before; None: to all before it
    num_layers          how many layers there are of it
    num_kv_rows         rows of K and of V of a token, over all of its layers: kv heads times layers
    num_kv_elements     elements of K and V of a token, over all of its layers
    num_query_elements  elements of the queries of a token, over all of its layers
    is_joined           a row is both K and V, see KvSpec
    """

    window: int | None
    num_layers: int
    num_kv_rows: int
    num_kv_elements: int
    num_query_elements: int
    kept: KeptLayers = KeptLayers()
    is_joined: bool = False

    def kv_bytes(self, kv_format: str) -> float:
        """Return the bytes of K and V of one token over these layers."""
        return _kv_bytes(self.num_kv_rows, self.num_kv_elements, kv_format, self.kept, self.is_joined)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """What a KV pool keeps of one token: the layers of a KV cache group that have a cache of their own.

    window_tokens  the group keeps only so many last tokens of a sequence; None: the full group, which keeps all
    num_rows       rows of K and of V, over all of its layers
    num_elements   elements of K and V, over all of its layers
    is_joined      a row is both K and V, see KvSpec
    """

    window_tokens: int | None
    num_rows: int
    num_elements: int
    kept: KeptLayers = KeptLayers()
    is_joined: bool = False

    def kv_bytes(self, kv_format: str) -> float:
        """Return the bytes of K and V of one token over these layers."""
        return _kv_bytes(self.num_rows, self.num_elements, kv_format, self.kept, self.is_joined)


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The layers of one kind of mixture: num_parameters are those of all experts of all of these layers."""

    num_experts: int
    top_k: int
    num_parameters: int

    def share_read(self, num_tokens: int) -> float:
        """Return the expected share of experts that a step of so many tokens reads, if tokens choose experts evenly."""
        return 1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens if num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model.

    dtype              of weights and activations as the checkpoint has them
    num_parameters     all weights
    num_embed          weights of an embedding that is only looked up; 0 where it is the output head, too
    num_head           weights of the output head
    weight_bytes       bytes of all weights by precision ("bfloat16", "int8", "int4", "fp8", ...)
    state_bytes        recurrent state of one sequence; 0: there is none
    copy_bytes         copies of weights that are held in addition where they are not quantised: of the output head, on a CPU
    caches             what the pools keep, see KvSpec: the full group, and the window group where the engine may have one.
                       Empty: every layer of `attention` keeps all tokens
    head_dims          sizes of the heads that have keys and values, each once; empty in older records
    num_attention      weights of attention that ranks divide by heads, which homes hold whole; 0 in older records
    """

    name: str
    dtype: str
    num_parameters: int
    num_embed: int
    num_head: int
    num_layers: int
    hidden_size: int
    max_positions: int
    num_kv_heads: int
    weight_bytes: dict[str, int]
    attention: tuple[AttentionGroup, ...]
    experts: tuple[ExpertGroup, ...] = ()
    state_bytes: int = 0
    copy_bytes: int = 0
    caches: tuple[CacheGroup, ...] = ()
    head_dims: tuple[int, ...] = ()
    num_attention: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        report: ModelReport,
        weight_bytes: Mapping[str, int],
        copy_bytes: int = 0,
        kept_layers: Collection[int] = (),
        is_gpu: bool = False,
    ) -> ModelShape:
        """Return the shape of an inspected model.

        weight_bytes  of all weights, by precision
        kept_layers   that keep K and V in the model's dtype, whatever the KV format is
        is_gpu        the cache is that of a GPU, see KvSpec.on_device
        """
        spec = report.spec
        head = spec.vocab_size * spec.hidden_size
        heads = [layer.attention.num_kv_heads for layer in spec.layers if layer.attention.num_kv_heads]
        return cls(
            name=name,
            dtype=spec.dtype,
            num_parameters=report.num_parameters,
            num_embed=0 if spec.is_tied else math.prod(report.parameters.get("embed.weight", (0,))),
            num_head=head,
            num_layers=len(spec.layers),
            hidden_size=spec.hidden_size,
            max_positions=spec.max_positions,
            num_kv_heads=min(heads, default=1),
            weight_bytes=dict(weight_bytes),
            attention=_attention_groups(spec, kept_layers),
            experts=_expert_groups(report),
            state_bytes=report.memory.kv.bytes_per_state,
            copy_bytes=copy_bytes,
            caches=_cache_groups(spec, kept_layers, is_gpu),
            head_dims=head_dims_of(spec),
            num_attention=sum(
                math.prod(shape) for name, shape in report.parameters.items() if name.split(".")[2:3] in _ATTENTION_MODULES
            ),
        )

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> ModelShape:
        """Return the shape that to_dict wrote. Raises KeyError or TypeError for other dicts."""
        return cls(
            **{
                **figures,
                "attention": tuple(AttentionGroup(**_with_kept(one)) for one in figures["attention"]),
                "experts": tuple(ExpertGroup(**one) for one in figures["experts"]),
                "caches": tuple(CacheGroup(**_with_kept(one)) for one in figures.get("caches", ())),
                "head_dims": tuple(figures.get("head_dims", ())),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the shape as JSON has it."""
        return asdict(self)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of its attention, each once, in the order of `attention`."""
        return tuple(group.window for group in self.attention)

    @property
    def num_expert_parameters(self) -> int:
        """Weights of all experts."""
        return sum(group.num_parameters for group in self.experts)

    @property
    def num_active_body(self) -> float:
        """Weights that every token is multiplied with, without the output head."""
        dense = self.num_parameters - self.num_embed - self.num_head - self.num_expert_parameters
        return dense + sum(group.num_parameters * group.top_k / group.num_experts for group in self.experts)

    def check_precision(self, precision: str) -> str:
        """Return the precision, the model's own for "auto". Raises ConfigError with those that there are."""
        wanted = self.dtype if precision == "auto" else precision
        if wanted not in self.weight_bytes:
            raise ConfigError(f"--quantization must be auto or one of {', '.join(self.weight_bytes)}, got {precision!r}")
        return wanted

    def read_bytes(self, precision: str, num_tokens: int) -> float:
        """Return the bytes of weights that a step of so many tokens reads: of a mixture, the experts that are chosen."""
        per_weight = self.weight_bytes[precision] / self.num_parameters
        dense = self.num_parameters - self.num_embed - self.num_expert_parameters
        return per_weight * (dense + sum(group.num_parameters * group.share_read(num_tokens) for group in self.experts))

    @property
    def full_cache(self) -> CacheGroup:
        """What the pool of the full group keeps of a token, where there is a window group."""
        return self.caches[0] if self.caches else self._whole_cache

    @property
    def window_cache(self) -> CacheGroup | None:
        """What the pool of the window group keeps of a token; None: the engine has no such group."""
        return self.caches[1] if len(self.caches) > 1 else None

    @property
    def _whole_cache(self) -> CacheGroup:
        groups = self.attention
        sizes = (sum(one.num_kv_rows for one in groups), sum(one.num_kv_elements for one in groups))
        return CacheGroup(None, *sizes, is_joined=any(one.is_joined for one in groups))

    @property
    def longest_window(self) -> int | None:
        """The largest window of a layer; None: no layer has one."""
        return max((window for window in self.windows if window is not None), default=None)

    def kv_bytes_per_token(self, kv_format: str) -> float:
        """Return the bytes of K and V of a token over all layers."""
        return sum(cache.kv_bytes(kv_format) for cache in self.caches or (self._whole_cache,))

    def kv_bytes_of(self, num_tokens: int, kv_format: str) -> float:
        """Return the bytes of K and V that a sequence of so many tokens can still attend to: windows are counted."""
        if self.caches:
            kept = ((cache, cache.window_tokens) for cache in self.caches)
        else:
            kept = ((group, group.window) for group in self.attention)
        return sum(
            one.kv_bytes(kv_format) * (num_tokens if window is None else min(num_tokens, window)) for one, window in kept
        )


def _with_kept(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a group with its KeptLayers; older records have none."""
    return {**figures, "kept": KeptLayers(**figures.get("kept", {}))}


def _kept_of(shapes: Sequence[tuple[int, int]], dtype: Dtype, is_joined: bool) -> KeptLayers:
    """Return the kept layers of a group by their (kv heads, head size)."""
    if not shapes:
        return KeptLayers()
    num_elements = sum((1 if is_joined else 2) * heads * dim for heads, dim in shapes)
    return KeptLayers(sum(heads for heads, _ in shapes), num_elements, DTYPE_BYTES[dtype])


def _num_stored(one: AttentionSpec) -> int:
    """Return how many values the cache of a layer holds of a token: rows as key and value, or as both at once, see KvSpec."""
    size = one.num_kv_heads * one.head_dim
    if one.latent is None:
        return 2 * size
    return size if one.latent.indexer is None else size + one.latent.indexer.key_size


def _cache_groups(spec: ModelSpec, kept_layers: Collection[int], is_gpu: bool) -> tuple[CacheGroup, ...]:
    """Return the KV cache groups that an engine has for a model, by the rules of KvSpec."""
    limits_windows = spec.implementation == "quire" and spec.is_causal and not spec.has_recurrent_state
    kv = (KvSpec.on_device if is_gpu else KvSpec.of)(spec, 64 if is_gpu else 16, spec.dtype, limits_windows)
    flags = kv.is_windowed or (False,) * len(kv.layer_shapes)
    groups: list[CacheGroup] = []
    for is_windowed in (False, True):
        of_group = {i: shape for i, (shape, flag) in enumerate(zip(kv.layer_shapes, flags, strict=True)) if flag is is_windowed}
        shapes = list(of_group.values())
        kept = _kept_of([shape for i, shape in of_group.items() if i in kept_layers], spec.dtype, kv.is_joined)
        if not is_windowed or kv.window_tokens is not None:
            window = kv.window_tokens if is_windowed else None
            num_elements = sum(heads * (dim + kv.value_size(i)) for i, (heads, dim) in of_group.items())
            groups.append(CacheGroup(window, sum(heads for heads, _ in shapes), num_elements, kept, kv.is_joined))
    return tuple(groups)


def _attention_groups(spec: ModelSpec, kept_layers: Collection[int]) -> tuple[AttentionGroup, ...]:
    layers = [layer.attention for layer in spec.layers if layer.attention.num_kv_heads]
    kept = [
        one.attention
        for i, one in enumerate(spec.layers)
        if (i if one.attention.kv_source is None else one.attention.kv_source) in kept_layers
    ]
    is_joined = any(one.latent is not None for one in layers)
    groups = []
    for window in dict.fromkeys(one.window for one in layers):
        of_window = [one for one in layers if one.window == window]
        groups.append(
            AttentionGroup(
                window,
                len(of_window),
                sum(one.num_kv_heads for one in of_window),
                sum(_num_stored(one) for one in of_window),
                sum(one.num_heads * one.head_dim for one in of_window),
                _kept_of([(one.num_kv_heads, one.head_dim) for one in kept if one.window == window], spec.dtype, is_joined),
                is_joined,
            )
        )
    return tuple(groups)


def _expert_groups(report: ModelReport) -> tuple[ExpertGroup, ...]:
    sizes: dict[tuple[int, int], int] = {}
    for name, shape in report.parameters.items():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None) if ".experts." in name else None
        mlp = None if layer is None else report.spec.layers[layer].mlp
        if isinstance(mlp, MoeSpec):
            key = (mlp.num_experts, mlp.top_k)
            sizes[key] = sizes.get(key, 0) + math.prod(shape)
    return tuple(ExpertGroup(num_experts, top_k, size) for (num_experts, top_k), size in sizes.items())


def usual_weight_bytes(num_parameters: int, dtype: str = "bfloat16") -> dict[str, int]:
    """Return the bytes of weights by precision where only their number is known: 4 bits have a 2-byte scale per 64."""
    widths = {dtype: float(DTYPE_BYTES[dtype]), "int8": 1.0, "int4": 0.5 + 2 / 64, "fp8": 1.0}
    return {precision: round(num_parameters * width) for precision, width in widths.items()}


def blocks_of(lengths: Sequence[int], block_size: int) -> tuple[int, int]:
    """Return the blocks that sequences of these lengths take, and the slots of them that hold no token."""
    num_blocks = sum(-(-length // block_size) for length in lengths)
    return num_blocks, num_blocks * block_size - sum(lengths)
