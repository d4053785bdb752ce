"""ParallelModel: Medusa's blocks and output heads, with the native kernels if available."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.base.errors import UnsupportedError
from quire.model.heads.head_spec import ParallelHead
from quire.model.native_weights import WeightPacker
from quire.quant.policy import QuantizationPolicy
from quire.quant.quantize import Scheme, fit_scheme, quantize_weight
from quire.quant.weight import QuantizedWeight


class ParallelModel:
    """Predicts the tokens at several positions ahead from one hidden state.

    native  the extension module; None: torch computes
    policy  how the weights are quantised, natively only. Raises UnsupportedError
    """

    def __init__(self, head: ParallelHead, native: ModuleType | None, policy: QuantizationPolicy | None = None) -> None:
        if policy is not None and native is None:
            raise UnsupportedError("speculative_config: quantization of heads needs the native kernels, which are not there")
        self.num_heads, self.vocab_size = len(head.heads), len(head.heads[0])
        self._head = None if native is not None else head
        self._heads: Any = None
        self._logits = torch.empty(0)
        self._vocabulary = None if head.vocabulary is None else head.vocabulary.to(torch.int32).contiguous()
        self._token_ids: list[int] | None = None if head.vocabulary is None else head.vocabulary.tolist()
        if native is not None:
            packer = WeightPacker(native, head.heads[0].dtype)
            inner, outer = (None, None) if policy is None else (policy.linears, policy.head)
            self._heads = native.ParallelHeads()
            for block, output in zip(head.blocks, head.heads, strict=True):
                blocks = [packer.pack(_quantized(weight, inner), bias) for weight, bias in block]
                self._heads.add(blocks, packer.pack(_quantized(output, outer)))
            self._heads.is_near = packer.is_near

    def logits(self, hidden: Tensor, count: int) -> Tensor:
        """Return the outputs of `count` heads for hidden [S, H] f32: logits [count, S, V'] f32, which the next call
        overwrites."""
        if self._head is not None:
            return torch.stack([_speak(self._head, index, hidden) for index in range(count)])
        size = count * len(hidden) * self.vocab_size
        if len(self._logits) < size:
            self._logits = torch.empty(size)
        hidden = hidden.contiguous()
        self._heads.speak(
            hidden.data_ptr(), hidden.shape[1], len(hidden), count, self._logits.data_ptr(), torch.get_num_threads()
        )
        return self._logits[:size].view(count, len(hidden), self.vocab_size)

    def best(self, hidden: Tensor, num_rows: int, count: int) -> list[list[int]]:
        """Return the best tokens of the first `count` heads, [S][count], in the model's vocabulary; arbitrary if there is none.

        hidden  [S or more, H] f32, contiguous, of which the first num_rows = S are read
        """
        if self._heads is not None:
            places = 0 if self._vocabulary is None else self._vocabulary.data_ptr()
            threads = torch.get_num_threads()
            return self._heads.best(hidden.data_ptr(), hidden.shape[1], num_rows, count, places, threads)
        found: list[list[int]] = self.logits(hidden[:num_rows], count).argmax(-1).T.tolist()
        ids = self._token_ids
        return found if ids is None else [[ids[token] for token in line] for line in found]


def _quantized(weight: Tensor, scheme: Scheme | None) -> Tensor | QuantizedWeight:
    return weight if scheme is None else quantize_weight(weight, fit_scheme(scheme, weight.shape[1]), rounded_to=weight.dtype)


def _speak(head: ParallelHead, index: int, hidden: Tensor) -> Tensor:
    x = hidden
    for weight, bias in head.blocks[index]:
        x = x + F.silu(F.linear(x.to(weight.dtype), weight, bias).float())
    return F.linear(x.to(head.heads[index].dtype), head.heads[index]).float()
