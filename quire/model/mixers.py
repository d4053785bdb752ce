"""Mixers with a recurrent state, which stand in the place of attention in some layers, or next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.mixer_spec import (
    GatedDeltaSpec,
    GatedNormSpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Scales,
    Mamba2Spec,
    MixerSpec,
    ShortConvSpec,
)
from quire.contracts.model_spec import NormSpec
from quire.kernels.cpu.recurrent import recur
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.norm import normalize_unweighted
from quire.kernels.reference.recurrent import Recurrence, StateRows, causal_conv, gated_delta_inputs

Parameters = Mapping[str, Tensor]


class MixerInputs(Protocol):
    """What a mixer computes with, besides its spec: its parameters, and the states of the sequences of a step.

    parameters  of the layer, by their canonical names in it
    """

    @property
    def parameters(self) -> Parameters: ...

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Return a linear layer of x [T, N]."""
        ...

    def adapted(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """Return the product y of a linear layer with what LoRA adapters add for its input x; may change y."""
        ...

    def convolve(self, x: Tensor) -> Tensor:
        """Return the causal convolution of x [T, C] with conv.weight and conv.bias; its state is the first one."""
        ...

    def recur(self, inputs: Recurrence) -> Tensor:
        """Return the outputs [T, Hv, Dv] of a recurrence, whose state is the last one."""
        ...

    def unit(self, x: Tensor, eps: float) -> Tensor:
        """Return x [..., N] over the root of its mean square, in f32."""
        ...


@dataclass(frozen=True, slots=True)
class HostMixerInputs:
    """Implements MixerInputs on a CPU.

    states  the layer's tensors of a KvPool's states; without any, all sequences must start
    starts  S + 1 offsets of the runs
    adapt   see `adapted`; None: there are no adapters
    """

    parameters: Parameters
    states: Sequence[Tensor]
    starts: list[int]
    rows: StateRows
    adapt: Callable[[Tensor, Tensor, str], Tensor] | None = None

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See MixerInputs."""
        return self.adapted(F.linear(x, self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias")), x, name)

    def adapted(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """See MixerInputs."""
        return y if self.adapt is None else self.adapt(y, x, name)

    def convolve(self, x: Tensor) -> Tensor:
        """See MixerInputs."""
        weight, bias = self.parameters["conv.weight"][:, 0], self.parameters.get("conv.bias")
        return causal_conv(x, weight, bias, self.states[0], self.starts, self.rows)

    def recur(self, inputs: Recurrence) -> Tensor:
        """See MixerInputs."""
        pool = self.states[-1]
        return recur(inputs, pool.view(len(pool), *inputs.state_shape), self.starts, self.rows)

    def unit(self, x: Tensor, eps: float) -> Tensor:
        """See MixerInputs."""
        return normalize_unweighted(x, NormSpec("rms", eps))


def run_mixer(
    x: Tensor,
    spec: MixerSpec,
    parameters: Parameters,
    states: Sequence[Tensor],
    step: AttentionMetadata,
    adapt: Callable[[Tensor, Tensor, str], Tensor] | None = None,
) -> Tensor:
    """Return what a layer's mixer makes of the tokens of a step [T, H], and keep the states that the step asks for.

    parameters  of the layer, by their canonical names in it
    states      the layer's tensors of a KvPool's states; without any, all sequences must start
    adapt       see HostMixerInputs
    """
    rows = step.states
    if rows is None:
        rows = StateRows.none(len(step.context_lens))
        states = [x.new_zeros((0, *one.shape), dtype=torch.float32 if one.is_f32 else x.dtype) for one in spec.state_shapes]
    return mix(x, spec, HostMixerInputs(parameters, states, step.query_starts, rows, adapt))


def mix(x: Tensor, spec: MixerSpec, own: MixerInputs) -> Tensor:
    """Return what a mixer makes of the tokens of a step [T, H]."""
    return _RUNS[type(spec)](x, spec, own)


def _gated_delta(x: Tensor, spec: GatedDeltaSpec, own: MixerInputs) -> Tensor:
    key_size = spec.num_k_heads * spec.k_dim
    qkv = own.convolve(own.linear(x, "delta.qkv"))
    q, k, v = F.silu(qkv).split((key_size, key_size, spec.num_v_heads * spec.v_dim), -1)
    q, k = (part.view(len(x), spec.num_k_heads, spec.k_dim) for part in (q, k))
    v = v.view(len(x), spec.num_v_heads, spec.v_dim)
    beta = own.linear(x, "delta.b").sigmoid()
    beta = beta if spec.write_scale == 1.0 else beta * spec.write_scale
    y = own.recur(gated_delta_inputs((q, k, v), _delta_decay(x, spec, own), beta)).to(x.dtype)
    z = own.linear(x if spec.gate_rank is None else own.linear(x, "delta.z_in"), "delta.z").view_as(y)
    norm = _gated_norm if spec.gate_rank is None else _sigmoid_gated_norm
    return own.linear(norm(own.unit(y, spec.norm_eps), z, own.parameters["delta.norm.weight"]).flatten(1), "delta.o")


def _delta_decay(x: Tensor, spec: GatedDeltaSpec, own: MixerInputs) -> Tensor:
    """Return the logarithm of the decay [T, heads] or, of each row of the state, [T, heads, k_dim], f32."""
    rate = -own.parameters["delta.a.log"].float().flatten().exp()
    if spec.gate_rank is None:
        return rate * F.softplus(own.linear(x, "delta.a").float() + own.parameters["delta.a.step"])
    steps = own.linear(own.linear(x, "delta.a_in"), "delta.a").float() + own.parameters["delta.a.step"].float()
    return rate[:, None] * F.softplus(steps).view(len(x), spec.num_v_heads, spec.k_dim)


def _gated_norm(unit: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Return a normalised value f32, rounded and weighed, times SiLU of the gate in f32."""
    return (weight * unit.to(gate.dtype) * F.silu(gate.float())).to(gate.dtype)


def _sigmoid_gated_norm(unit: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Return a normalised value f32, weighed, times the sigmoid of the gate, all in f32."""
    return (weight.float() * unit * gate.float().sigmoid()).to(gate.dtype)


def _short_conv(x: Tensor, spec: ShortConvSpec, own: MixerInputs) -> Tensor:
    b, c, inner = own.linear(x, "conv.in").split(spec.channels, -1)
    y = own.convolve(b * inner)
    return own.linear(c * y, "conv.out")


def _mamba2(x: Tensor, spec: Mamba2Spec, own: MixerInputs) -> Tensor:
    z, xbc, steps = _project(x, spec, own)
    num_tokens, group_size = len(x), spec.num_groups * spec.state_size
    xbc = F.silu(own.convolve(xbc))
    inner, b, c = (part.float() for part in xbc.split((spec.channels, group_size, group_size), -1))
    inner = inner.reshape(num_tokens, spec.num_heads, spec.head_dim)
    b, c = (part.reshape(num_tokens, spec.num_groups, spec.state_size) for part in (b, c))
    steps = F.softplus(steps + own.parameters["mamba.step"]).clamp(spec.min_step, spec.max_step).float()
    decay = (-own.parameters["mamba.log"].float().exp() * steps).exp()
    y = own.recur(Recurrence(c, b, inner * steps[..., None], decay))
    y = (y + own.parameters["mamba.skip"][:, None] * inner).flatten(1)
    y = y * F.silu(z) if spec.norm is None else _group_norm(y, z, spec.norm, own)
    return own.linear(y.to(x.dtype), "mamba.out")


def _project(x: Tensor, spec: Mamba2Spec, own: MixerInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return z, what the convolution reads, and the steps, before their bias."""
    scales, group_size = spec.scales, spec.num_groups * spec.state_size
    sizes = (spec.channels, spec.conv_channels, spec.num_heads)
    if scales == Mamba2Scales():
        z, xbc, steps = own.linear(x, "mamba.in").split(sizes, -1)
        return z, xbc, steps
    vector = _scale_vector(scales, (spec.channels, group_size, spec.num_heads), x.dtype, x.device)
    z, xbc, steps = (own.linear(x * scales.input, "mamba.in") * vector).split(sizes, -1)
    return z, xbc, steps


@lru_cache
def _scale_vector(scales: Mamba2Scales, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the factor of each row of the input projection; made once, as a CUDA graph copies nothing from the host.

    sizes  rows of z and of x, of B and of C, and of the steps
    """
    channels, group_size, num_heads = sizes
    factors = (scales.z, scales.x, scales.b, scales.c, scales.step)
    counts = torch.tensor((channels, channels, group_size, group_size, num_heads))
    return torch.tensor(factors, dtype=dtype).repeat_interleave(counts).to(device)


def _group_norm(y: Tensor, gate: Tensor, spec: GatedNormSpec, own: MixerInputs) -> Tensor:
    """Return the RMS norm of y [T, C] f32 in groups, weighed, with its gate before or after it, in f32."""
    gate = F.silu(gate.float())
    y = y * gate if spec.order == "gate_first" else y
    y = own.parameters["mamba.norm.weight"] * own.unit(y.unflatten(-1, (spec.num_groups, -1)), spec.eps).flatten(1)
    return y if spec.order == "gate_first" else y * gate


def _mamba1(x: Tensor, spec: Mamba1Spec, own: MixerInputs) -> Tensor:
    inner, z = own.linear(x, "mamba.in").split(spec.channels, -1)
    inner = F.silu(own.convolve(inner))
    read = own.linear(inner, "mamba.x").split((spec.step_rank, spec.state_size, spec.state_size), -1)
    if spec.norm_eps is not None:
        weights = [own.parameters.get(f"mamba.{name}_norm.weight") for name in ("step", "b", "c")]
        normed = [own.unit(part, spec.norm_eps).to(x.dtype) for part in read]
        read = [part if weight is None else weight * part for part, weight in zip(normed, weights, strict=True)]
    steps, b, c = read
    steps = F.softplus(own.linear(steps, "mamba.step")).float()
    rates, wide = -own.parameters["mamba.log"].float().exp().T, inner.float()
    one_head = Recurrence(c.float()[:, None], b.float()[:, None], (steps * wide)[:, None], steps[:, None], rates=rates[None])
    y = own.recur(one_head)[:, 0]
    y = (y + wide * own.parameters["mamba.skip"].float()) * F.silu(z)
    return own.linear(y.to(x.dtype), "mamba.out")


def _lightning(x: Tensor, spec: LightningSpec, own: MixerInputs) -> Tensor:
    qkv = F.silu(own.linear(x, "delta.qkv")).view(len(x), len(spec.decays), 3, spec.head_dim).float()
    q, k, v = (part.contiguous() for part in qkv.unbind(2))
    y = own.recur(Recurrence(q, k, v, torch.tensor(spec.decays).repeat(len(x), 1))).flatten(1).to(x.dtype)
    y = own.parameters["delta.norm.weight"] * own.unit(y, spec.norm_eps).to(x.dtype)
    return own.linear(own.linear(x, "delta.z").sigmoid() * y, "delta.o")


_RUNS: dict[type, Callable[..., Tensor]] = {
    GatedDeltaSpec: _gated_delta,
    ShortConvSpec: _short_conv,
    Mamba2Spec: _mamba2,
    Mamba1Spec: _mamba1,
    LightningSpec: _lightning,
}
