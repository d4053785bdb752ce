"""RMSNorm and LayerNorm with the rounding points of the checkpoints' own code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import NormSpec


def normalize(x: Tensor, spec: NormSpec, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Normalise x over its last dimension.

    x             [..., N], any float dtype
    weight, bias  [N], dtype of x; bias only for kind "layer" with has_bias
    Returns       [..., N] in x's dtype; sums are in f32
    """
    if spec.kind == "layer":
        return F.layer_norm(x, weight.shape, weight, bias, spec.eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.eps)
    if spec.late_cast:
        return (wide * (weight.float() + spec.offset)).to(x.dtype)
    return (weight + spec.offset if spec.offset else weight) * wide.to(x.dtype)
