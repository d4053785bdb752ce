"""Activations of feed-forward blocks, with the product of gate and up projection."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import Activation
from quire.kernels.triton.activation_kernels import _activate
from quire.kernels.triton.launching import FLOATS, Launch, check_contiguous, check_tensor
from quire.kernels.triton.sizes import ceil_divide

ACTIVATION_KINDS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
_BLOCK = 1024


def activate(gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
    """Return activation(gate) * up, or activation(gate) without an up projection; the activation is rounded first.

    gate, up  [T, I] with contiguous rows; they may be the halves of one projection
    Returns   [T, I] in gate's dtype
    """
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    activate_launch(out, gate, up, activation).run()
    return out


def activate_launch(out: Tensor, gate: Tensor, up: Tensor | None, activation: Activation) -> Launch:
    """Return the launch of `activate`, which writes the contiguous `out`. Raises UnsupportedError for other activations."""
    if activation not in ACTIVATION_KINDS:
        raise UnsupportedError(f"activation must be one of {', '.join(ACTIVATION_KINDS)}, got {activation!r}")
    num_rows, width = gate.shape
    check_tensor("gate", gate, (None, None), *FLOATS)
    check_contiguous("out", out, tuple(gate.shape), gate.dtype)
    if up is not None:
        check_tensor("up", up, tuple(gate.shape), gate.dtype)
    arguments = {
        "gate_ptr": gate,
        "up_ptr": up,
        "out_ptr": out,
        "gate_stride": gate.stride(0),
        "up_stride": 0 if up is None else up.stride(0),
    }
    constants = {"WIDTH": width, "BLOCK": _BLOCK, "KIND": ACTIVATION_KINDS[activation]}
    return Launch(_activate, (num_rows, ceil_divide(width, _BLOCK)), arguments, constants, num_warps=4, num_stages=1)
