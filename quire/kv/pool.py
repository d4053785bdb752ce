"""KvPool: the memory of the paged key-value cache of one worker, and of the recurrent states of its sequences."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.contracts.kv_spec import QUANTIZED_KV_BITS, KvSpec
from quire.kernels.cpu.pages import ask_for_huge_pages, drop_pages

_MIN_HUGE_BYTES = 1 << 24


class KvPool:
    """Per layer one K and one V tensor of [num_blocks, kv_heads, block_size, head_dim], on the CPU or, for torch, on a device.

    A quantised layer has scales [num_blocks, kv_heads, block_size] f32 for K and V; those of other layers are empty, and there
    are none where no layer is quantised. Where keys and values are joined (KvSpec.is_joined), v is k, with the same scales; but
    with an indexer (KvSpec.index_dims) V has its keys, [num_blocks, 1, block_size, index_dim]. Of codes of four bits the tensor
    is u8 [num_blocks, kv_heads, block_size, head_dim / 2]. How the values of a block lie in it is the kernels' affair: the
    shape says how many there are.

    The layers of the window group (KvSpec.is_windowed) have num_window_blocks in place of num_blocks. Where blocks or slots of
    both groups are named together, the blocks of the window group come after the others: window block w is num_blocks + w.

    states has for each layer the tensors of recurrent states, [num_states, ...]; empty where the model has none. Which row
    holds what is decided by the worker and the scheduler.

    On the CPU the memory is mapped at once but taken from the system only as blocks are first written, or by a PageSupply
    before.
    """

    def __init__(
        self, spec: KvSpec, num_blocks: int, num_states: int = 0, device: torch.device | None = None, num_window_blocks: int = 0
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        is_windowed = spec.is_windowed or (False,) * len(spec.layer_shapes)
        shapes = [
            (num_window_blocks if flag else num_blocks, heads, spec.block_size, dim)
            for (heads, dim), flag in zip(spec.layer_shapes, is_windowed, strict=True)
        ]
        self._is_windowed = is_windowed
        num_parts = 1 if spec.is_joined and not spec.index_dims else 2
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.scales: list[tuple[Tensor, Tensor]] = []
        for layer, shape in enumerate(shapes):
            dtype = spec.dtype_of(layer)
            if dtype in QUANTIZED_KV_BITS:
                parts = [_zeros_of_codes(shape, bits) for bits in QUANTIZED_KV_BITS[dtype][:num_parts]]
                num_scales = shape[:3]
            else:
                value_shape = (*shape[:3], spec.value_size(layer))
                parts = [_zeros(each, getattr(torch, dtype), device) for each in (shape, value_shape)[:num_parts]]
                num_scales = (0, *shape[1:3])
            scales = [_mapped_zeros(num_scales, torch.float32) for _ in parts]
            self.k.append(parts[0])
            self.v.append(parts[-1])
            self.scales.append((scales[0], scales[-1]))
        if spec.dtype in QUANTIZED_KV_BITS:
            self.states: list[tuple[Tensor, ...]] = []
            return
        self.scales = []
        dtype = getattr(torch, spec.dtype)
        self.states = [
            tuple(_mapped_zeros((num_states, *one.shape), torch.float32 if one.is_f32 else dtype) for one in layer)
            for layer in spec.state_shapes
        ]

    def arrays(self) -> list[Tensor]:
        """Return all tensors of KV of all layers that have any; each has its blocks one after the other."""
        return _filled_once([*self.k, *self.v, *(scale for pair in self.scales for scale in pair)])

    def drop(self) -> None:
        """Give the memory of all blocks and states back to the system; they become zeros. Only for pools on the CPU."""
        for array in (*self.arrays(), *(state for layer in self.states for state in layer)):
            if array.numel() > 0:
                drop_pages(array)

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks, (source, target) pairs, in every layer of their group; all sources are read before any target is
        written."""
        for is_windowed in (False, True):
            first = self.num_blocks if is_windowed else 0
            pairs = [pair for pair in copies if (pair[0] >= self.num_blocks) is is_windowed]
            if not pairs:
                continue
            sources = torch.tensor([source - first for source, _ in pairs])
            targets = torch.tensor([target - first for _, target in pairs])
            for cache in self._arrays_of(is_windowed):
                cache[targets] = cache[sources]

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy rows of the recurrent states, (source, target) pairs, in every layer."""
        for states in self.states if copies else ():
            for pool in states:
                for source, target in copies:
                    pool[target] = pool[source]

    def _arrays_of(self, is_windowed: bool) -> list[Tensor]:
        """Return the tensors of KV of one group."""
        layers = [index for index, flag in enumerate(self._is_windowed) if flag is is_windowed and self.k[index].numel() > 0]
        arrays = [cache[index] for cache in (self.k, self.v) for index in layers]
        return _filled_once([*arrays, *(scale for index in layers if self.scales for scale in self.scales[index])])

    def split_slots(self, sources: Tensor, targets: Tensor) -> list[tuple[bool, Tensor, Tensor]]:
        """Return which of some moves of tokens from slot to slot are in the window group, and which not, with the group's own
        slots."""
        if self.spec.window_tokens is None:
            return [(False, sources, targets)]
        first = self.num_blocks * self.spec.block_size
        is_windowed = sources >= first
        return [
            (False, sources[~is_windowed], targets[~is_windowed]),
            (True, sources[is_windowed] - first, targets[is_windowed] - first),
        ]


def _filled_once(arrays: Sequence[Tensor]) -> list[Tensor]:
    """Return those that are not empty, each once."""
    return list({array.data_ptr(): array for array in arrays if array.numel() > 0}.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    return _mapped_zeros(shape, dtype) if device is None else torch.zeros(shape, dtype=dtype, device=device)


def _zeros_of_codes(shape: tuple[int, ...], bits: int) -> Tensor:
    if bits == 8:
        return _mapped_zeros(shape, torch.int8)
    return _mapped_zeros((*shape[:-1], shape[-1] // 2), torch.uint8)


def _mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take no memory until they are written; torch.zeros would write, and so take, all of it now.

    Large ones ask for huge pages: a token's keys and values are spread over many places.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    if num_bytes < _MIN_HUGE_BYTES:
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(mapped)
    return torch.frombuffer(mapped, dtype=dtype).view(shape)
