"""NativeAngles: the tables of cosines and sines for the native kernels."""

from __future__ import annotations

import torch

from quire.contracts.model_spec import RopeSpec
from quire.kernels.reference.rope import cos_sin, inverse_frequencies


class NativeAngles:
    """Cosine and sine [positions, dim / 2] f32 of one rope; rounded to the model's dtype if the model does that.

    num_short  positions of the short variant of the rope (ModelSpec.rope_switch_len), whose rows follow those of the long one;
               0: there is one variant
    """

    def __init__(self, rope: RopeSpec, max_model_len: int, dtype: torch.dtype, num_short: int = 0) -> None:
        self._rope, self._dtype, self._num_short = rope, dtype, num_short
        self._frequencies = inverse_frequencies(rope, max_model_len)
        self._short_frequencies = inverse_frequencies(rope, rope.original_max) if rope.depends_on_length else self._frequencies
        self.cos = self.sin = torch.empty(0, rope.dim // 2)
        self.count = 0

    def extend(self, count: int) -> None:
        """Recompute the tables for positions below `count`; row count + p is position p of the short variant."""
        self.count = count
        parts = [cos_sin(self._rope, self._frequencies, torch.arange(count), self._dtype)]
        if self._num_short > 0:
            parts.append(cos_sin(self._rope, self._short_frequencies, torch.arange(self._num_short), self._dtype))
        self.cos, self.sin = (torch.cat(tables)[:, 0].float().contiguous() for tables in zip(*parts, strict=True))
