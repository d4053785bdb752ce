"""RMSNorm and LayerNorm with the rounding points of the checkpoints' own code."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import NormSpec


def normalize_unweighted(x: Tensor, spec: NormSpec) -> Tensor:
    """Return x [..., N] normalised, without weight and bias, in f32."""
    wide = x.float()
    if spec.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.eps)


def normalize(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None = None,
    unweighted: Callable[[Tensor, NormSpec], Tensor] = normalize_unweighted,
) -> Tensor:
    """Normalise x over its last dimension.

    x             [..., N], any float dtype
    weight, bias  [N], dtype of x, or [H, N] for heads x [T, H, N]; weight None without has_weight; bias only for kind "layer"
                  with has_bias
    unweighted    as normalize_unweighted, with sums of its own
    Returns       [..., N] in x's dtype; sums are in f32
    """
    if spec.kind == "layer":
        return _layer_norm(x, spec, weight, bias, unweighted)
    wide = unweighted(x, spec)
    if weight is None:
        return wide.to(x.dtype)
    if spec.late_cast:
        return (wide * (weight.float() + spec.offset)).to(x.dtype)
    return (weight + spec.offset if spec.offset else weight) * wide.to(x.dtype)


def _layer_norm(
    x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, unweighted: Callable[[Tensor, NormSpec], Tensor]
) -> Tensor:
    if weight is not None and (weight.dim() > 1 or spec.late_cast):
        wide = (weight.float() + spec.offset) * unweighted(x, spec)
        return (wide if bias is None else wide + bias.float()).to(x.dtype)
    weight = weight + spec.offset if weight is not None and spec.offset else weight
    return F.layer_norm(x, x.shape[-1:], weight, bias, spec.eps)
