"""Common parts of the cases of `quire bench kernels`: the shapes of a model, options of the kernels, and their data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from quire.contracts.mixer_spec import GatedDeltaSpec, Mamba2Spec
from quire.contracts.model_spec import NO_ATTENTION, NO_MLP, LayerSpec, ModelSpec, MoeSpec

MAX_OUT_BYTES = 256 << 20
"""Cases with larger results are skipped: no step computes logits of so many rows."""
_NOISE_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """The experts of a layer, of which a token uses top_k; inner_size: intermediate size of each."""

    num_experts: int
    top_k: int
    inner_size: int


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The properties of a model that determine the sizes of its kernels' work.

    linears  name -> (outputs, inputs)
    mixture  None: there is no layer of gated experts
    mixers   gated delta nets and Mamba 2 layers, each kind once
    """

    linears: dict[str, tuple[int, int]]
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mixture: MixtureShape | None = None
    mixers: tuple[GatedDeltaSpec | Mamba2Spec, ...] = ()


QWEN3_0_6B = ModelShapes(
    linears={
        "q": (2048, 1024),
        "k, v": (1024, 1024),
        "o": (1024, 2048),
        "gate, up": (3072, 1024),
        "down": (1024, 3072),
        "head": (151936, 1024),
    },
    hidden_size=1024,
    vocab_size=151936,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
)


def shapes_of(spec: ModelSpec) -> ModelShapes:
    """Return the shapes of a model: of its first layer with attention, the first with a feed-forward block, and the first
    with experts, if there is one."""
    mixtures = [layer for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    attention = next((layer.attention for layer in spec.layers if layer.attention != NO_ATTENTION), NO_ATTENTION)
    q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    linears: dict[str, tuple[int, int]] = {}
    if attention != NO_ATTENTION:
        linears = {"q": (q_size, spec.hidden_size), "k, v": (kv_size, spec.hidden_size), "o": (spec.hidden_size, q_size)}
    with_mlp = next((layer for layer in spec.layers if layer.mlp != NO_MLP), None)
    linears |= {} if with_mlp is None else _mlp_shapes(with_mlp, spec.hidden_size)
    if mixtures:
        linears |= _mlp_shapes(mixtures[0], spec.hidden_size)
    linears["head"] = (spec.vocab_size, spec.hidden_size)
    heads = attention.num_heads, attention.num_kv_heads, attention.head_dim
    mixers = dict.fromkeys(one.mixer for one in spec.layers if isinstance(one.mixer, GatedDeltaSpec | Mamba2Spec))
    return ModelShapes(linears, spec.hidden_size, spec.vocab_size, *heads, _mixture_shape(mixtures), tuple(mixers))


def _mixture_shape(mixtures: list[LayerSpec]) -> MixtureShape | None:
    for layer in mixtures:
        if isinstance(layer.mlp, MoeSpec) and layer.mlp.expert.is_gated:
            return MixtureShape(layer.mlp.num_experts, layer.mlp.top_k, layer.mlp.expert.intermediate_size)
    return None


def _mlp_shapes(layer: LayerSpec, hidden_size: int) -> dict[str, tuple[int, int]]:
    mlp, prefix = (layer.mlp.expert, "expert ") if isinstance(layer.mlp, MoeSpec) else (layer.mlp, "")
    first = "gate, up" if mlp.is_gated else "up"
    inner = mlp.intermediate_size
    return {prefix + first: (inner, hidden_size), f"{prefix}down": (hidden_size, inner)}


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of the kernel calls.

    working_set_bytes  minimum size of all copies of a kernel's data, so that no call finds its data in the caches
    rows               rows M of linear layers, norms and sampling
    lengths            cached tokens of attention, and prompt lengths of prefill
    """

    native: ModuleType
    isa: str
    num_threads: int
    working_set_bytes: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    def copies_for(self, num_bytes: int) -> int:
        """Return how many copies of a call's data are needed."""
        return max(1, -(-self.working_set_bytes // num_bytes))


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel at one shape.

    num_bytes       minimum number of bytes that a call reads and writes, everything counted once
    num_operations  multiplications and additions of a call; 0 if they do not limit it
    peak_kind       "f32", "bf16" or "u8": the type in which it multiplies
    run             run(copy) calls the kernel on copy 0 <= copy < num_copies
    """

    kernel: str
    number_format: str
    shape: str
    num_bytes: int
    num_operations: int
    peak_kind: str
    num_copies: int
    run: Callable[[int], object]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return repeated normal noise: kernel times do not depend on it, and drawing gigabytes would take long."""
    count = math.prod(shape)
    base = torch.randn(min(count, _NOISE_ELEMENTS), generator=torch.Generator().manual_seed(0)).to(dtype)
    return base.repeat(-(-count // len(base)))[:count].view(shape)
