"""DeviceKvPool: the paged key-value cache on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.contracts.kv_spec import KvSpec
from quire.kernels.triton.attention import KvCache
from quire.kernels.triton.kv_move import move_tokens_launch

_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class DeviceKvPool:
    """Per layer a KvCache whose k and v are [num_blocks, kv_heads, block_size, head_dim]; quantised ones have scales.

    The memory is taken at once and not written: nothing reads what no token was stored in.
    """

    def __init__(self, spec: KvSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = device
        dtype = _DTYPES.get(spec.dtype) or getattr(torch, spec.dtype)
        self.caches: list[KvCache] = []
        for heads, dim in spec.layer_shapes:
            shape = (num_blocks, heads, spec.block_size, dim)
            k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            if spec.dtype in _DTYPES:
                scales = (torch.empty(shape[:3], dtype=torch.float32, device=device) for _ in range(2))
                self.caches.append(KvCache(k, v, *scales))
            else:
                self.caches.append(KvCache(k, v))

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks [N] i64 in every layer, all on the device; all sources are read before any target is written."""
        for cache in self.caches:
            for part in cache:
                if part is not None:
                    # Seen as bytes: not every operation knows float8.
                    seen = part.view(torch.uint8) if part.itemsize == 1 else part
                    seen[targets] = seen[sources]

    def move_tokens(self, sources: Tensor, targets: Tensor, starts: Tensor) -> None:
        """Move single tokens from slot to slot in every layer, all on the device; see move_tokens_launch."""
        for cache in self.caches:
            move_tokens_launch(cache, sources, targets, starts).run()
