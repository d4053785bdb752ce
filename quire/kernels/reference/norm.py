"""RMSNorm and LayerNorm with the rounding points of the checkpoints' own code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import NormSpec


def normalize(x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Normalise x over its last dimension.

    x             [..., N], any float dtype
    weight, bias  [N], dtype of x, or [H, N] for heads x [T, H, N]; weight None without has_weight; bias only for kind "layer"
                  with has_bias
    Returns       [..., N] in x's dtype; sums are in f32
    """
    if spec.kind == "layer":
        return _layer_norm(x, spec, weight, bias)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.eps)
    if weight is None:
        return wide.to(x.dtype)
    if spec.late_cast:
        return (wide * (weight.float() + spec.offset)).to(x.dtype)
    return (weight + spec.offset if spec.offset else weight) * wide.to(x.dtype)


def _layer_norm(x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None and (weight.dim() > 1 or spec.late_cast):
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = (weight.float() + spec.offset) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.eps))
        return (wide if bias is None else wide + bias.float()).to(x.dtype)
    weight = weight + spec.offset if weight is not None and spec.offset else weight
    return F.layer_norm(x, x.shape[-1:], weight, bias, spec.eps)
