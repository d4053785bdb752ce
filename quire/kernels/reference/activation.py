"""Activation functions by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import Activation, MlpSpec

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def apply_gate(gate: Tensor, up: Tensor, spec: MlpSpec) -> Tensor:
    """Return what a gated block makes of gate and up, in their dtype."""
    if spec.clamp is None:
        return ACTIVATIONS[spec.activation](gate) * up
    limit = spec.clamp.limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * spec.clamp.slope))
