"""KvPool: the memory of the paged key-value cache of one worker, and of the recurrent states of its sequences."""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch
from torch import Tensor

from quire.contracts.kv_spec import KvSpec

_MIN_HUGE_BYTES = 1 << 24


class KvPool:
    """Per layer one K and one V tensor of [num_blocks, kv_heads, block_size, head_dim], on the CPU or, for torch, on a device.

    An int8 cache has scales [num_blocks, kv_heads, block_size] f32 for K and V of each layer; others have none. How the values
    of a block lie in it is the kernels' affair: the shape says how many there are.

    states has for each layer the tensors of recurrent states, [num_states, ...]; empty where the model has none. Which row
    holds what is decided by the worker and the scheduler.

    On the CPU the memory is mapped at once but taken from the system only as blocks are first written, or by a PageSupply
    before.
    """

    def __init__(self, spec: KvSpec, num_blocks: int, num_states: int = 0, device: torch.device | None = None) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        dtype = getattr(torch, spec.dtype)
        shapes = [(num_blocks, heads, spec.block_size, dim) for heads, dim in spec.layer_shapes]
        self.k: list[Tensor] = [_zeros(shape, dtype, device) for shape in shapes]
        self.v: list[Tensor] = [_zeros(shape, dtype, device) for shape in shapes]
        self.scales: list[tuple[Tensor, Tensor]] = []
        if dtype == torch.int8:
            self.scales = [(_mapped_zeros(s[:3], torch.float32), _mapped_zeros(s[:3], torch.float32)) for s in shapes]

        self.states: list[tuple[Tensor, ...]] = [
            tuple(_mapped_zeros((num_states, *one.shape), torch.float32 if one.is_f32 else dtype) for one in layer)
            for layer in spec.state_shapes
        ]

    def arrays(self) -> list[Tensor]:
        """Return all tensors of KV of all layers that have any; each has its blocks one after the other."""
        arrays = [*self.k, *self.v, *(scale for pair in self.scales for scale in pair)]
        return [array for array in arrays if array.numel() > 0]

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks, (source, target) pairs, in every layer; all sources are read before any target is written."""
        sources = torch.tensor([source for source, _ in copies])
        targets = torch.tensor([target for _, target in copies])
        for cache in self.arrays():
            cache[targets] = cache[sources]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    return _mapped_zeros(shape, dtype) if device is None else torch.zeros(shape, dtype=dtype, device=device)


def _mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take no memory until they are written; torch.zeros would write, and so take, all of it now.

    Large ones ask for huge pages: a token's keys and values are spread over many places.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    if num_bytes < _MIN_HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=dtype).view(shape)
