"""Mixture-of-experts feed-forward: route each token to its top experts, run each expert on its tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import MoeSpec
from quire.kernels.reference.activation import ACTIVATIONS


def mixture_of_experts(x: Tensor, spec: MoeSpec, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Apply a mixture of experts to each row.

    x        [T, N]
    router   [E, N]
    gate_up  [E, 2 * I, N], the gate rows first
    down     [E, N, I]
    Returns  [T, N] in x's dtype; a row depends on no other row
    """
    probabilities = F.linear(x, router).float().softmax(-1)
    weights, chosen = probabilities.topk(spec.top_k, dim=-1)
    if spec.is_renormalized:
        weights = weights / weights.sum(-1, keepdim=True)
    if not spec.is_weight_f32:
        weights = weights.to(x.dtype)
    activation = ACTIVATIONS[spec.expert.activation]
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(activation(gate) * up, down[expert]) * weights[rows, slots, None]
        out.index_add_(0, rows, y.to(out.dtype))
    return out
