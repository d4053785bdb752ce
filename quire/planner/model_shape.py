"""ModelShape: the sizes of a model that decide bytes and operations of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.base.errors import ConfigError
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec, MoeSpec

_SCALE_BYTES = 4
KV_FORMATS: dict[str, tuple[float, bool]] = {
    "float32": (4.0, False),
    "bfloat16": (2.0, False),
    "float16": (2.0, False),
    "int8": (1.0, True),
    "fp8": (1.0, True),
}
"""Bytes per element of each KV format, and whether each token and head has a scale in f32 (one for K, one for V)."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """The layers of one window.

    window              a token attends to itself and the window - 1 tokens before; None: to all before it
    num_layers          how many layers there are of it
    num_kv_rows         rows of K and of V of a token, over all of its layers: kv heads times layers
    num_kv_elements     elements of K and V of a token, over all of its layers
    num_query_elements  elements of the queries of a token, over all of its layers
    """

    window: int | None
    num_layers: int
    num_kv_rows: int
    num_kv_elements: int
    num_query_elements: int

    def kv_bytes(self, kv_format: str) -> float:
        """Return the bytes of K and V of one token over these layers."""
        width, has_scales = KV_FORMATS[kv_format]
        return self.num_kv_elements * width + (2 * self.num_kv_rows * _SCALE_BYTES if has_scales else 0)


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

    @classmethod
    def of(cls, name: str, report: ModelReport, weight_bytes: Mapping[str, int], copy_bytes: int = 0) -> ModelShape:
        """Return the shape of an inspected model; weight_bytes: of all weights, by precision."""
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
            attention=_attention_groups(spec),
            experts=_expert_groups(report),
            state_bytes=report.memory.kv.bytes_per_state,
            copy_bytes=copy_bytes,
        )

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> ModelShape:
        """Return the shape that to_dict wrote. Raises KeyError or TypeError for other dicts."""
        return cls(
            **{
                **figures,
                "attention": tuple(AttentionGroup(**one) for one in figures["attention"]),
                "experts": tuple(ExpertGroup(**one) for one in figures["experts"]),
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

    def kv_bytes_per_token(self, kv_format: str) -> float:
        """Return the bytes of K and V of a token over all layers, which quire's pool reserves, windows or not."""
        return sum(group.kv_bytes(kv_format) for group in self.attention)

    def kv_bytes_of(self, num_tokens: int, kv_format: str) -> float:
        """Return the bytes of K and V that a sequence of so many tokens can still attend to: windows are counted."""
        lengths = (num_tokens if group.window is None else min(num_tokens, group.window) for group in self.attention)
        return sum(length * group.kv_bytes(kv_format) for length, group in zip(lengths, self.attention, strict=True))


def _attention_groups(spec: ModelSpec) -> tuple[AttentionGroup, ...]:
    layers = [layer.attention for layer in spec.layers if layer.attention.num_kv_heads]
    groups = []
    for window in dict.fromkeys(one.window for one in layers):
        of_window = [one for one in layers if one.window == window]
        groups.append(
            AttentionGroup(
                window,
                len(of_window),
                sum(one.num_kv_heads for one in of_window),
                sum(2 * one.num_kv_heads * one.head_dim for one in of_window),
                sum(one.num_heads * one.head_dim for one in of_window),
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
