"""KvSpec: the shape of the paged key-value cache, and of the recurrent states next to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from quire.contracts.mixer_spec import StateShape
from quire.contracts.model_spec import DTYPE_BYTES, Dtype, ModelSpec

KvDtype = Dtype | Literal["int8", "fp8"]

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvSpec:
    """The cache of one model: per layer K and V of [num_blocks, kv_heads, block_size, head_dim].

    dtype         "int8" and "fp8" (e4m3): with a scale in f32 per token and head
    layer_shapes  (kv_heads, head_dim) of each layer; (0, 0) for one without attention, or that reads the cache of
                  another layer
    state_shapes  of the recurrent state of each layer; empty where no layer has one
    """

    block_size: int
    dtype: KvDtype
    layer_shapes: tuple[tuple[int, int], ...]
    state_shapes: tuple[tuple[StateShape, ...], ...] = ()

    @classmethod
    def of(cls, spec: ModelSpec, block_size: int, dtype: KvDtype) -> KvSpec:
        """Return the cache shape that a model needs."""
        attentions = [layer.attention for layer in spec.layers]
        shapes = tuple((0, 0) if one.kv_source is not None else (one.num_kv_heads, one.head_dim) for one in attentions)
        if not spec.has_recurrent_state:
            return cls(block_size, dtype, shapes)
        return cls(block_size, dtype, shapes, tuple(() if one.mixer is None else one.mixer.state_shapes for one in spec.layers))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        if self.dtype in ("int8", "fp8"):
            return sum(2 * heads * (dim + _SCALE_BYTES) for heads, dim in self.layer_shapes)
        return sum(2 * heads * dim for heads, dim in self.layer_shapes) * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers; 0 where none has attention."""
        return self.bytes_per_token * self.block_size

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the recurrent state of one sequence over all layers; 0: there is none."""
        shapes = (shape for layer in self.state_shapes for shape in layer)
        return sum(math.prod(one.shape) * (4 if one.is_f32 else DTYPE_BYTES[self.dtype]) for one in shapes)
