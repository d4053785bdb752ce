"""Activation functions by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import Activation, AttentionSpec, MlpSpec

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""Those without parameters."""
XIELU_BETA, XIELU_EPS = 0.5, -1e-6


def apply_gate(gate: Tensor, up: Tensor, spec: MlpSpec) -> Tensor:
    """Return the gated activation of gate and up, in their dtype."""
    if spec.sparsity > 0:
        gate = cut_gate(gate, spec.sparsity)
    if spec.clamp is None:
        return ACTIVATIONS[spec.activation](gate) * up
    limit = spec.clamp.limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if spec.clamp.slope is None:
        return ACTIVATIONS[spec.activation](gate) * up
    return (up + 1) * (gate * torch.sigmoid(gate * spec.clamp.slope))


def apply_output_gate(attended: Tensor, gate: Tensor, spec: AttentionSpec) -> Tensor:
    """Return what the heads give [T, H * D] times the gate [T, H * D], or that of each head [T, H], in attended's dtype."""
    if not spec.has_head_gate:
        return attended * torch.sigmoid(gate)
    return (attended.view(*gate.shape, -1) * F.softplus(gate.float()).to(attended.dtype)[..., None]).flatten(1)


def cut_gate(gate: Tensor, sparsity: float) -> Tensor:
    """Return how far each row's values are above its cutoff, 0 below: see MlpSpec.sparsity. In gate's dtype."""
    deviation = gate.std(-1, keepdim=True, unbiased=False)
    return F.relu(gate - (gate.mean(-1, keepdim=True) + deviation * normal_quantile(sparsity).to(gate.dtype)))


def normal_quantile(share: float) -> Tensor:
    """Return the f32 number that a standard normal variable is below with a probability of `share`."""
    return torch.distributions.Normal(0, 1).icdf(torch.tensor(share, dtype=torch.float32))


def apply_xielu(x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Return xIELU of x in its dtype (https://arxiv.org/abs/2411.13010).

    positive, negative  [1], the two parameters as they are stored, before the softplus
    """
    # Numbers, as a CUDA graph copies nothing from the host.
    beta, eps = (float(torch.tensor(number, dtype=x.dtype)) for number in (XIELU_BETA, XIELU_EPS))
    alpha_p, alpha_n = F.softplus(positive), beta + F.softplus(negative)
    rising = alpha_p * x * x + beta * x
    return torch.where(x > 0, rising, (torch.expm1(x.clamp(max=eps)) - x) * alpha_n + beta * x)
