"""Mixture-of-experts feed-forward: route each token to its top experts, run each expert on its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import MoeSpec
from quire.kernels.reference.activation import apply_gate


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """router [E], gate_up [E, 2 * I], down [E, N]; None: none."""

    router: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None


def mixture_of_experts(
    x: Tensor, spec: MoeSpec, router: Tensor, gate_up: Tensor, down: Tensor, biases: ExpertBiases | None = None
) -> Tensor:
    """Apply a mixture of experts to each row.

    x        [T, N]
    router   [E, N]
    gate_up  [E, 2 * I, N], the gate rows first
    down     [E, N, I]
    Returns  [T, N] in x's dtype; a row depends on no other row
    """
    biases = biases or ExpertBiases()
    probabilities = F.linear(x, router, biases.router).float().softmax(-1)
    weights, chosen = probabilities.topk(spec.top_k, dim=-1)
    if spec.is_renormalized:
        weights = weights / weights.sum(-1, keepdim=True)
    if not spec.is_weight_f32:
        weights = weights.to(x.dtype)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        gate, up = _linear(x[rows], gate_up, biases.gate_up, expert).chunk(2, dim=-1)
        y = _linear(apply_gate(gate, up, spec.expert), down, biases.down, expert) * weights[rows, slots, None]
        out.index_add_(0, rows, y.to(out.dtype))
    return out


def _linear(x: Tensor, weights: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    """Return the product with an expert's weight. Its bias is added to what the product was rounded to."""
    y = F.linear(x, weights[expert])
    return y if biases is None else y + biases[expert]
