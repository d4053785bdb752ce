"""Mixers with a recurrent state, which stand in the place of attention in some layers, or next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.mixer_spec import (
    GatedDeltaSpec,
    GatedNormSpec,
    Mamba1Spec,
    Mamba2Scales,
    Mamba2Spec,
    MixerSpec,
    ShortConvSpec,
)
from quire.kernels.cpu.recurrent import recur
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.recurrent import Recurrence, StateRows, causal_conv, gated_delta_inputs

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
    beta = _linear(x, "delta.b", parameters).sigmoid()
    y = recur(gated_delta_inputs((q, k, v), _delta_decay(x, spec, parameters), beta), states[1], starts, rows).to(x.dtype)
    z = _linear(x if spec.gate_rank is None else _linear(x, "delta.z_in", parameters), "delta.z", parameters).view_as(y)
    norm = _gated_norm if spec.gate_rank is None else _sigmoid_gated_norm
    return _linear(norm(y, z, parameters["delta.norm.weight"], spec.norm_eps).flatten(1), "delta.o", parameters)


def _delta_decay(x: Tensor, spec: GatedDeltaSpec, parameters: Parameters) -> Tensor:
    """Return the logarithm of the decay [T, heads] or, of each row of the state, [T, heads, k_dim], f32."""
    rate = -parameters["delta.a.log"].float().flatten().exp()
    if spec.gate_rank is None:
        return rate * F.softplus(_linear(x, "delta.a", parameters).float() + parameters["delta.a.step"])
    steps = _linear(_linear(x, "delta.a_in", parameters), "delta.a", parameters).float() + parameters["delta.a.step"].float()
    return rate[:, None] * F.softplus(steps).view(len(x), spec.num_v_heads, spec.k_dim)


def _rms(x: Tensor, eps: float) -> Tensor:
    """Return x divided by the root of its mean square, in f32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of y, rounded and weighed, times SiLU of the gate in f32."""
    return (weight * _rms(y, eps).to(y.dtype) * F.silu(gate.float())).to(y.dtype)


def _sigmoid_gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of y, weighed, times the sigmoid of the gate, all in f32."""
    return (weight.float() * _rms(y, eps) * gate.float().sigmoid()).to(y.dtype)


def _short_conv(
    x: Tensor, spec: ShortConvSpec, parameters: Parameters, states: Sequence[Tensor], starts: list[int], rows: StateRows
) -> Tensor:
    b, c, inner = _linear(x, "conv.in", parameters).split(spec.channels, -1)
    y = causal_conv(b * inner, parameters["conv.weight"][:, 0], parameters.get("conv.bias"), states[0], starts, rows)
    return _linear(c * y, "conv.out", parameters)


def _mamba2(
    x: Tensor, spec: Mamba2Spec, parameters: Parameters, states: Sequence[Tensor], starts: list[int], rows: StateRows
) -> Tensor:
    z, xbc, steps = _project(x, spec, parameters)
    bias, num_tokens, group_size = parameters.get("conv.bias"), len(x), spec.num_groups * spec.state_size
    xbc = F.silu(causal_conv(xbc, parameters["conv.weight"][:, 0], bias, states[0], starts, rows))
    inner, b, c = (part.float() for part in xbc.split((spec.channels, group_size, group_size), -1))
    inner = inner.reshape(num_tokens, spec.num_heads, spec.head_dim)
    b, c = (part.reshape(num_tokens, spec.num_groups, spec.state_size) for part in (b, c))
    steps = F.softplus(steps + parameters["mamba.step"]).clamp(spec.min_step, spec.max_step).float()
    decay = (-parameters["mamba.log"].float().exp() * steps).exp()
    y = recur(Recurrence(c, b, inner * steps[..., None], decay), states[1], starts, rows)
    y = (y + parameters["mamba.skip"][:, None] * inner).flatten(1)
    y = y * F.silu(z) if spec.norm is None else _group_norm(y, z, parameters["mamba.norm.weight"], spec.norm)
    return _linear(y.to(x.dtype), "mamba.out", parameters)


def _project(x: Tensor, spec: Mamba2Spec, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
    """Return z, what the convolution reads, and the steps, before their bias."""
    scales, group_size = spec.scales, spec.num_groups * spec.state_size
    sizes = (spec.channels, spec.conv_channels, spec.num_heads)
    if scales == Mamba2Scales():
        z, xbc, steps = _linear(x, "mamba.in", parameters).split(sizes, -1)
        return z, xbc, steps
    factors = (scales.z, scales.x, scales.b, scales.c, scales.step)
    counts = (spec.channels, spec.channels, group_size, group_size, spec.num_heads)
    vector = torch.tensor(factors, dtype=x.dtype).repeat_interleave(torch.tensor(counts))
    z, xbc, steps = (_linear(x * scales.input, "mamba.in", parameters) * vector).split(sizes, -1)
    return z, xbc, steps


def _group_norm(y: Tensor, gate: Tensor, weight: Tensor, spec: GatedNormSpec) -> Tensor:
    """Return the RMS norm of y [T, C] f32 in groups, weighed, with its gate before or after it, in f32."""
    gate = F.silu(gate.float())
    y = y * gate if spec.order == "gate_first" else y
    y = weight * _rms(y.unflatten(-1, (spec.num_groups, -1)), spec.eps).flatten(1)
    return y if spec.order == "gate_first" else y * gate


def _mamba1(
    x: Tensor, spec: Mamba1Spec, parameters: Parameters, states: Sequence[Tensor], starts: list[int], rows: StateRows
) -> Tensor:
    inner, z = _linear(x, "mamba.in", parameters).split(spec.channels, -1)
    inner = F.silu(causal_conv(inner, parameters["conv.weight"][:, 0], parameters.get("conv.bias"), states[0], starts, rows))
    read = _linear(inner, "mamba.x", parameters).split((spec.step_rank, spec.state_size, spec.state_size), -1)
    if spec.norm_eps is not None:
        weights = [parameters.get(f"mamba.{name}_norm.weight") for name in ("step", "b", "c")]
        normed = [_rms(part, spec.norm_eps).to(x.dtype) for part in read]
        read = [part if weight is None else weight * part for part, weight in zip(normed, weights, strict=True)]
    steps, b, c = read
    steps = F.softplus(F.linear(steps, parameters["mamba.step.weight"]) + parameters["mamba.step.bias"]).float()
    rates, wide = -parameters["mamba.log"].float().exp().T, inner.float()
    one_head = Recurrence(c.float()[:, None], b.float()[:, None], (steps * wide)[:, None], steps[:, None], rates=rates[None])
    y = recur(one_head, states[1][:, None], starts, rows)[:, 0]
    y = (y + wide * parameters["mamba.skip"].float()) * F.silu(z)
    return _linear(y.to(x.dtype), "mamba.out", parameters)


_RUNS: dict[type, Callable[..., Tensor]] = {
    GatedDeltaSpec: _gated_delta,
    ShortConvSpec: _short_conv,
    Mamba2Spec: _mamba2,
    Mamba1Spec: _mamba1,
}
