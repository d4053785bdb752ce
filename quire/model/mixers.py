"""Mixers with a recurrent state, with the torch reference kernels: what stands in the place of attention in some layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.mixer_spec import GatedDeltaSpec, MixerSpec, ShortConvSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.recurrent import StateRows, causal_conv, gated_delta_rule

Parameters = Mapping[str, Tensor]


def run_mixer(x: Tensor, spec: MixerSpec, parameters: Parameters, states: Sequence[Tensor], step: AttentionMetadata) -> Tensor:
    """Return what a layer's mixer makes of the tokens of a step [T, H], and keep the states that the step asks for.

    parameters  of the layer, by their canonical names in it
    states      the layer's tensors of a KvPool's states; without any, all sequences must start
    """
    rows = step.states
    if rows is None:
        rows = StateRows.none(len(step.context_lens))
        states = [x.new_zeros((0, *one.shape), dtype=torch.float32 if one.is_f32 else x.dtype) for one in spec.state_shapes]
    return _RUNS[type(spec)](x, spec, parameters, states, step.query_starts, rows)


def _linear(x: Tensor, name: str, parameters: Parameters) -> Tensor:
    return F.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def _gated_delta(
    x: Tensor, spec: GatedDeltaSpec, parameters: Parameters, states: Sequence[Tensor], starts: list[int], rows: StateRows
) -> Tensor:
    key_size = spec.num_k_heads * spec.k_dim
    qkv = causal_conv(_linear(x, "delta.qkv", parameters), parameters["conv.weight"][:, 0], None, states[0], starts, rows)
    q, k, v = F.silu(qkv).split((key_size, key_size, spec.num_v_heads * spec.v_dim), -1)
    q, k = (part.view(len(x), spec.num_k_heads, spec.k_dim) for part in (q, k))
    v = v.view(len(x), spec.num_v_heads, spec.v_dim)
    steps = F.softplus(_linear(x, "delta.a", parameters).float() + parameters["delta.a.step"])
    decay = -parameters["delta.a.log"].float().exp() * steps
    beta = _linear(x, "delta.b", parameters).sigmoid()
    y = gated_delta_rule((q, k, v), decay, beta, states[1], starts, rows)
    z = _linear(x, "delta.z", parameters).view_as(y)
    return _linear(_gated_norm(y, z, parameters["delta.norm.weight"], spec.norm_eps).flatten(1), "delta.o", parameters)


def _gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of y, rounded and weighed, times SiLU of the gate in f32."""
    wide = y.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(y.dtype) * F.silu(gate.float())).to(y.dtype)


def _short_conv(
    x: Tensor, spec: ShortConvSpec, parameters: Parameters, states: Sequence[Tensor], starts: list[int], rows: StateRows
) -> Tensor:
    b, c, inner = _linear(x, "conv.in", parameters).split(spec.channels, -1)
    y = causal_conv(b * inner, parameters["conv.weight"][:, 0], parameters.get("conv.bias"), states[0], starts, rows)
    return _linear(c * y, "conv.out", parameters)


_RUNS: dict[type, Callable[..., Tensor]] = {GatedDeltaSpec: _gated_delta, ShortConvSpec: _short_conv}
