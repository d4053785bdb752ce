"""ParallelModel: Medusa's blocks and output heads, by the native kernels where they are there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.model.heads.head_spec import ParallelHead
from quire.model.native_weights import WeightPacker

Linear = tuple[Tensor, Tensor | None]


class ParallelModel:
    """Says what stands at several places ahead, all from one hidden state.

    native  the extension module; None: torch computes
    """

    def __init__(self, head: ParallelHead, native: ModuleType | None) -> None:
        self.num_heads, self.vocab_size = len(head.heads), len(head.heads[0])
        self._native = native
        outputs: list[Linear] = [(weight, None) for weight in head.heads]
        packer = None if native is None else WeightPacker(native, head.heads[0].dtype)

        def keep(linear: Linear) -> Any:
            return linear if packer is None else packer.pack(linear[0], linear[1])

        self._blocks = [[keep(linear) for linear in block] for block in head.blocks]
        self._outputs = [keep(linear) for linear in outputs]
        self._hidden_size = head.heads[0].shape[1]

    def speak(self, hidden: Tensor, count: int) -> list[Tensor]:
        """Return what the first `count` heads say of hidden [S, H] f32: logits [S, V'] f32 each."""
        found: list[Tensor] = []
        for block, output in zip(self._blocks[:count], self._outputs, strict=False):
            x = hidden
            for linear in block:
                x = x + F.silu(self._apply(linear, x, self._hidden_size))
            found.append(self._apply(output, x, self.vocab_size))
        return found

    def _apply(self, linear: Any, x: Tensor, size: int) -> Tensor:
        native = self._native
        if native is None:
            weight, bias = linear
            return F.linear(x.to(weight.dtype), weight, bias).float()
        out = torch.empty(len(x), size)
        x = x.contiguous()
        threads = torch.get_num_threads()
        native.linear(linear, None, x.data_ptr(), x.stride(0), len(x), out.data_ptr(), size, num_threads=threads)
        return out
