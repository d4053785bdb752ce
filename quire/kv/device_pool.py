"""DeviceKvPool: the paged key-value cache on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quire.contracts.kv_spec import QUANTIZED_KV_BITS, KvDtype, KvSpec
from quire.kernels.triton.attention import KvCache
from quire.kernels.triton.kv_move import move_tokens_launch
from quire.kernels.triton.page_copy import PageLayout
from quire.kernels.triton.rotated_codes import PACKED, width_of

_ALIGNMENT = 256
"""Bytes; of the tensors in the memory of a pool, as of memory that torch takes."""


class DeviceKvPool:
    """Per layer a KvCache whose k and v are [num_blocks, kv_heads, block_size, head_dim], or head_dim / 2 bytes of codes of
    four bits; quantised ones have scales. Layers may differ, see KvSpec.layer_dtypes.

    The memory is taken at once, in one piece, and not written: nothing reads what no token was stored in. Where the spec says
    that they are joined, v is k. The layers of the window group (KvSpec.is_windowed) have num_window_blocks in place of
    num_blocks.

    memory  f32 words, of all caches
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
        shapes: list[tuple[tuple[int, ...], torch.dtype] | None] = []  # five a layer: k, v, their scales, index
        for layer, ((heads, dim), is_windowed) in enumerate(zip(spec.layer_shapes, self.is_windowed, strict=True)):
            shape = (num_window_blocks if is_windowed else num_blocks, heads, spec.block_size)
            dtypes = kv_dtypes(spec.dtype_of(layer))
            rows = [((*shape, width_of(dtype, dim)), dtype) for dtype in dtypes]
            scales = [(shape, torch.float32) if spec.dtype_of(layer) in QUANTIZED_KV_BITS else None] * 2
            index_dim = spec.index_dims[layer] if spec.index_dims else 0
            own = [*rows, *scales, ((shape[0], 1, shape[2], index_dim), dtypes[0]) if index_dim else None]
            if spec.is_joined:
                own[1] = own[3] = None
            shapes += own
        self.memory, parts = _take(shapes, device)
        self.caches: list[KvCache] = []
        for k, v, k_scales, v_scales, index in zip(*(parts[place::5] for place in range(5)), strict=True):
            assert k is not None
            self.caches.append(KvCache(k, k if v is None else v, k_scales, k_scales if v is None else v_scales, index))

        wide = torch.float32 if spec.dtype in QUANTIZED_KV_BITS else getattr(torch, spec.dtype)
        self.states = [
            tuple(
                torch.empty(num_states, *one.shape, dtype=torch.float32 if one.is_f32 else wide, device=device) for one in layer
            )
            for layer in spec.state_shapes
        ]

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

    def page_layout(self) -> PageLayout:
        """Return where the arrays of a block are, in the memory and in a page, layer by layer; there is no window group."""
        parts = [part for cache in self.caches for part in self._parts(cache) if part.numel() > 0]
        starts = [part.data_ptr() - self.memory.data_ptr() for part in parts]
        return PageLayout.of(starts, [part.nbytes // self.num_blocks for part in parts], self.device)

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


def _take(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype] | None], device: torch.device
) -> tuple[Tensor, list[Tensor | None]]:
    """Return memory for tensors of these shapes and dtypes, and the tensors; None: there is none in this place."""
    sizes = [0 if one is None else math.prod(one[0]) * one[1].itemsize for one in shapes]
    ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    memory = torch.empty((ends[-1] if ends else 0) // 4, dtype=torch.float32, device=device)
    seen = memory.view(torch.uint8)
    tensors: list[Tensor | None] = []
    for one, size, first in zip(shapes, sizes, [0, *ends], strict=False):
        tensors.append(None if one is None else seen[first : first + size].view(one[1]).view(one[0]))
    return memory, tensors


def kv_dtypes(kv_format: KvDtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of K and of V on a GPU."""
    if kv_format not in QUANTIZED_KV_BITS:
        dtype = getattr(torch, kv_format)
        return dtype, dtype
    wide = torch.float8_e4m3fn if kv_format == "fp8" else torch.int8
    k_bits, v_bits = QUANTIZED_KV_BITS[kv_format]
    return wide if k_bits == 8 else PACKED, wide if v_bits == 8 else PACKED
