"""KvSpec: the shape of the paged key-value cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.contracts.model_spec import DTYPE_BYTES, Dtype, ModelSpec

KvDtype = Dtype | Literal["int8", "fp8"]

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvSpec:
    """The cache of one model: per layer K and V of [num_blocks, kv_heads, block_size, head_dim].

    dtype         "int8" and "fp8" (e4m3): with a scale in f32 per token and head
    layer_shapes  (kv_heads, head_dim) of each layer
    """

    block_size: int
    dtype: KvDtype
    layer_shapes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spec: ModelSpec, block_size: int, dtype: KvDtype) -> KvSpec:
        """Return the cache shape that a model needs."""
        shapes = tuple((layer.attention.num_kv_heads, layer.attention.head_dim) for layer in spec.layers)
        return cls(block_size, dtype, shapes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        if self.dtype in ("int8", "fp8"):
            return sum(2 * heads * (dim + _SCALE_BYTES) for heads, dim in self.layer_shapes)
        return sum(2 * heads * dim for heads, dim in self.layer_shapes) * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.bytes_per_token * self.block_size
