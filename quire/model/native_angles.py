"""NativeAngles: the tables of cosines and sines that the native kernels rotate heads with."""

from __future__ import annotations

import torch

from quire.contracts.model_spec import RopeSpec
from quire.kernels.reference.rope import cos_sin, inverse_frequencies


class NativeAngles:
    """Cosine and sine [positions, dim / 2] f32 of one rope; rounded to the model's dtype where the model does that."""

    def __init__(self, rope: RopeSpec, max_model_len: int, dtype: torch.dtype) -> None:
        self._rope, self._dtype = rope, dtype
        self._frequencies = inverse_frequencies(rope, max_model_len)
        self.cos = self.sin = torch.empty(0, rope.dim // 2)
        self.count = 0

    def extend(self, count: int) -> None:
        """Make the tables anew, for positions below `count`."""
        self.count = count
        cos, sin = cos_sin(self._rope, self._frequencies, torch.arange(count), self._dtype)
        self.cos, self.sin = cos[:, 0].float().contiguous(), sin[:, 0].float().contiguous()
