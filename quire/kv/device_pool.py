"""DeviceKvPool: the paged key-value cache on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.contracts.kv_spec import QUANTIZED_KV_BITS, KvSpec
from quire.kernels.triton.attention import KvCache
from quire.kernels.triton.kv_move import move_tokens_launch
from quire.kernels.triton.rotated_codes import PACKED, width_of


class DeviceKvPool:
    """Per layer a KvCache whose k and v are [num_blocks, kv_heads, block_size, head_dim], or head_dim / 2 bytes of codes of
    four bits; quantised ones have scales.

    The memory is taken at once and not written: nothing reads what no token was stored in. Where the spec says that they are
    joined, v is k. The layers of the window group (KvSpec.is_windowed) have num_window_blocks in place of num_blocks.

    states  for each layer the tensors of recurrent states, [num_states, ...]; empty where the model has none
    is_windowed  of each layer
    """

    def __init__(
        self, spec: KvSpec, num_blocks: int, device: torch.device, num_states: int = 0, num_window_blocks: int = 0
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = device
        self.is_windowed = spec.is_windowed or (False,) * len(spec.layer_shapes)
        dtypes, is_quantised = _dtypes_of(spec), spec.dtype in QUANTIZED_KV_BITS
        self.caches: list[KvCache] = []
        for (heads, dim), is_windowed in zip(spec.layer_shapes, self.is_windowed, strict=True):
            shape = (num_window_blocks if is_windowed else num_blocks, heads, spec.block_size)
            parts = [torch.empty(*shape, width_of(dtype, dim), dtype=dtype, device=device) for dtype in dtypes]
            if is_quantised:
                parts += (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
            if spec.is_joined:
                parts[1::2] = parts[::2]
            index_dim = spec.index_dims[len(self.caches)] if spec.index_dims else 0
            index = torch.empty(*shape, index_dim, dtype=dtypes[0], device=device) if index_dim else None
            self.caches.append(KvCache(*parts)._replace(index=index))

        wide = torch.float32 if is_quantised else getattr(torch, spec.dtype)
        self.states = [
            tuple(
                torch.empty(num_states, *one.shape, dtype=torch.float32 if one.is_f32 else wide, device=device) for one in layer
            )
            for layer in spec.state_shapes
        ]

    @property
    def is_packed(self) -> bool:
        """Whether values, or keys and values, are codes of four bits, which fused layers do not read."""
        return any(cache.v.dtype == PACKED for cache in self.caches)

    def copy_states(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole states [N] i64 in every layer, all on the device; all sources are read before any target is written."""
        for layer in self.states:
            for part in layer:
                part[targets] = part[sources]

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all layers, those of recurrent states first."""
        states = [part for layer in self.states for part in layer]
        return [*states, *(part for cache in self.caches for part in self._parts(cache))]

    def _parts(self, cache: KvCache) -> list[Tensor]:
        """Return the tensors of a cache, each once."""
        return [part for part in (cache[::2] if self.spec.is_joined else cache) if part is not None]

    def copy_blocks(self, sources: Tensor, targets: Tensor, is_windowed: bool = False) -> None:
        """Copy whole blocks [N] i64 in every layer of a group, all on the device; all sources are read before any target is
        written."""
        for cache in self._caches_of(is_windowed):
            for part in self._parts(cache):
                # Seen as bytes: not every operation knows float8.
                seen = part.view(torch.uint8) if part.itemsize == 1 else part
                seen[targets] = seen[sources]

    def move_tokens(self, sources: Tensor, targets: Tensor, starts: Tensor, is_windowed: bool = False) -> None:
        """Move single tokens from slot to slot in every layer of a group, all on the device; see move_tokens_launch."""
        for cache in self._caches_of(is_windowed):
            if cache.k.numel() == 0:
                continue
            move_tokens_launch(cache, sources, targets, starts).run()
            if cache.index is not None:
                move_tokens_launch(KvCache(cache.index, cache.index), sources, targets, starts).run()

    def _caches_of(self, is_windowed: bool) -> list[KvCache]:
        """Return the caches of the layers of one group."""
        return [cache for cache, flag in zip(self.caches, self.is_windowed, strict=True) if flag is is_windowed]


def _dtypes_of(spec: KvSpec) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of K and of V."""
    if spec.dtype not in QUANTIZED_KV_BITS:
        dtype = getattr(torch, spec.dtype)
        return dtype, dtype
    wide = torch.float8_e4m3fn if spec.dtype == "fp8" else torch.int8
    k_bits, v_bits = QUANTIZED_KV_BITS[spec.dtype]
    return wide if k_bits == 8 else PACKED, wide if v_bits == 8 else PACKED
