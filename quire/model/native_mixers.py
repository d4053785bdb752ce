"""NativeMixerBuilder: packs a mixer with a recurrent state for the native kernels, or the part of it that a rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.mixer_spec import (
    GatedDeltaSpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Scales,
    Mamba2Spec,
    MixerSpec,
    ShortConvSpec,
)
from quire.contracts.model_spec import NO_ATTENTION, LayerSpec, NormSpec
from quire.model.mixer_shards import mixer_heads
from quire.model.native_weights import NativeWeight
from quire.parallel.shards import HeadRange, ShardRange

_KINDS: dict[type, int] = {GatedDeltaSpec: 0, ShortConvSpec: 1, Mamba2Spec: 2, Mamba1Spec: 3}
_MAX_TAPS, _MAX_STATE_ROWS = 8, 256
"""See csrc/recurrence.h."""


def mixer_refusal(layer: LayerSpec) -> str | None:
    """Return why the native kernels cannot run a layer with a mixer, or None if they can."""
    mixer = layer.mixer
    if mixer is None:
        return None
    if layer.attention != NO_ATTENTION and layer.attn_out is not None:
        return "a norm on the output of attention next to a recurrent mixer"
    if isinstance(mixer, LightningSpec):
        return "lightning attention"
    taps, rows = mixer.conv_size, 1
    if isinstance(mixer, GatedDeltaSpec):
        rows = mixer.k_dim
    elif not isinstance(mixer, ShortConvSpec):
        rows = mixer.state_size
    if taps > _MAX_TAPS or rows > _MAX_STATE_ROWS:
        return f"recurrent layers of more than {_MAX_TAPS} taps or {_MAX_STATE_ROWS} rows of a state"
    return None


def mixer_ranges(spec: MixerSpec, own: HeadRange | None) -> dict[str, list[ShardRange]]:
    """Return name of a linear layer -> the rows of it that a rank has; layers that ranks have whole, and the last one, are left
    out.

    own  see LayerShard.mixer_heads; None: all
    """
    own = _all_heads(spec) if own is None else own
    if isinstance(spec, GatedDeltaSpec):
        keys, values = _scaled(own.kv_heads, spec.k_dim), _scaled(own.heads, spec.v_dim)
        num_keys = spec.num_k_heads * spec.k_dim
        decays = _scaled(own.heads, 1 if spec.gate_rank is None else spec.k_dim)
        channels = [keys, _moved(keys, num_keys), _moved(values, 2 * num_keys)]
        return {"delta.qkv": channels, "delta.z": [values], "delta.b": [own.heads], "delta.a": [decays]}
    if isinstance(spec, Mamba2Spec):
        values, steps = _scaled(own.heads, spec.head_dim), _moved(own.heads, spec.channels + spec.conv_channels)
        return {"mamba.in": [*(_moved(part, spec.channels) for part in _mamba2_channels(spec, own)), values, steps]}
    if isinstance(spec, Mamba1Spec):
        return {"mamba.in": [own.heads, _moved(own.heads, spec.channels)], "mamba.step": [own.heads]}
    return {"conv.in": [_moved(own.heads, place * spec.channels) for place in range(3)]}


def _all_heads(spec: MixerSpec) -> HeadRange:
    return mixer_heads(spec, rank=0, shares=(1.0,))


def _mamba2_channels(spec: Mamba2Spec, own: HeadRange) -> list[ShardRange]:
    """Return the channels of the convolution that a rank has."""
    keys, num_keys = _scaled(own.kv_heads, spec.state_size), spec.num_groups * spec.state_size
    return [_scaled(own.heads, spec.head_dim), _moved(keys, spec.channels), _moved(keys, spec.channels + num_keys)]


class SetsNorm(Protocol):
    """What sets a native norm: see NativeModelBuilder."""

    def __call__(self, norm: Any, spec: NormSpec | None, name: str, size: int) -> None: ...


@dataclass(frozen=True, slots=True)
class NativeMixerBuilder:
    """Builds the mixer of a layer.

    pack        packs a linear layer whole, by its name
    pack_parts  packs some rows of one after another
    vector      takes another parameter by its name, None: there is none
    """

    native: ModuleType
    pack: Callable[[str], NativeWeight]
    pack_parts: Callable[[str, Sequence[ShardRange]], list[NativeWeight]]
    vector: Callable[[str], Tensor | None]
    set_norm: SetsNorm

    def build(self, spec: MixerSpec, prefix: str, heads: HeadRange | None) -> Any:
        """Return a native mixer, without its last projection, and without the factor on its input.

        heads  see LayerShard.mixer_heads; None: all
        """
        mixer = self.native.Mixer(_KINDS[type(spec)])
        own = _all_heads(spec) if heads is None else heads
        mixer.taps = spec.conv_size
        if isinstance(spec, GatedDeltaSpec):
            self._build_delta(mixer, spec, prefix, own)
        elif isinstance(spec, Mamba2Spec):
            self._build_mamba2(mixer, spec, prefix, own)
        elif isinstance(spec, Mamba1Spec):
            self._build_mamba1(mixer, spec, prefix, own.heads)
        else:
            mixer.v_dim = own.heads.size
            mixer.first_value, mixer.total_values = own.heads.start, spec.channels
            self._add_parts(mixer, f"{prefix}conv.in", mixer_ranges(spec, own)["conv.in"])
            self._set_conv(mixer, prefix, [own.heads])
        return mixer

    def _build_delta(self, mixer: Any, spec: GatedDeltaSpec, prefix: str, own: HeadRange) -> None:
        _set_heads(mixer, own, spec.k_dim, spec.v_dim, spec.num_v_heads)
        mixer.write_scale = spec.write_scale
        ranges = mixer_ranges(spec, own)
        self._add_parts(mixer, f"{prefix}delta.qkv", ranges["delta.qkv"])
        self._set_conv(mixer, prefix, ranges["delta.qkv"])
        z, a, b = (self.pack_parts(f"{prefix}delta.{name}", ranges[f"delta.{name}"])[0] for name in "zab")
        if spec.gate_rank is not None:
            mixer.low_z, mixer.low_a = z, a
            z, a = (self.pack(f"{prefix}delta.{name}_in") for name in ("z", "a"))
        for weight in (z, b, a):
            mixer.add(weight)
        self._set(mixer, "step", self._found(f"{prefix}delta.a.step"), ranges["delta.a"][0])
        self._set(mixer, "rates", -self._found(f"{prefix}delta.a.log").flatten().exp(), own.heads)
        self.set_norm(mixer.norm, NormSpec("rms", spec.norm_eps), f"{prefix}delta.norm", spec.v_dim)

    def _build_mamba2(self, mixer: Any, spec: Mamba2Spec, prefix: str, own: HeadRange) -> None:
        _set_heads(mixer, own, spec.state_size, spec.head_dim, spec.num_heads)
        self._add_parts(mixer, f"{prefix}mamba.in", mixer_ranges(spec, own)["mamba.in"])
        self._set_conv(mixer, prefix, _mamba2_channels(spec, own))
        scales = spec.scales
        if scales != Mamba2Scales():
            mixer.part_scales = [scales.x, scales.b, scales.c, scales.z, scales.step]
        mixer.min_step, mixer.max_step = spec.min_step, spec.max_step
        self._set(mixer, "step", self._found(f"{prefix}mamba.step"), own.heads)
        self._set(mixer, "rates", -self._found(f"{prefix}mamba.log").exp(), own.heads)
        self._set(mixer, "skip", self._found(f"{prefix}mamba.skip"), own.heads)
        if spec.norm is None:
            return
        mixer.is_gate_first = spec.norm.order == "gate_first"
        self.set_norm(mixer.norm, NormSpec("rms", spec.norm.eps, has_weight=False), "", spec.channels // spec.norm.num_groups)
        weight = self._found(f"{prefix}mamba.norm.weight")
        self._set(mixer, "norm_weight", weight, ShardRange(0, spec.channels))

    def _build_mamba1(self, mixer: Any, spec: Mamba1Spec, prefix: str, own: ShardRange) -> None:
        mixer.k_dim, mixer.v_dim = spec.state_size, own.size
        mixer.first_value, mixer.total_values = own.start, spec.channels
        self._add_parts(mixer, f"{prefix}mamba.in", [own, _moved(own, spec.channels)])
        self._set_conv(mixer, prefix, [own])
        mixer.read = self.pack(f"{prefix}mamba.x")
        mixer.step_up = self.pack_parts(f"{prefix}mamba.step", [own])[0]
        self._set(mixer, "rates", -self._found(f"{prefix}mamba.log").exp()[own.start : own.stop].T)
        self._set(mixer, "skip", self._found(f"{prefix}mamba.skip"), own)
        if spec.norm_eps is None:
            return
        norm = NormSpec("rms", spec.norm_eps, has_weight=spec.has_norm_weight)
        for name, size in (("step", spec.step_rank), ("b", spec.state_size), ("c", spec.state_size)):
            self.set_norm(getattr(mixer, f"{name}_norm"), norm, f"{prefix}mamba.{name}_norm", size)

    def _add_parts(self, mixer: Any, name: str, ranges: Sequence[ShardRange]) -> None:
        for weight in self.pack_parts(name, ranges):
            mixer.add(weight)

    def _set_conv(self, mixer: Any, prefix: str, channels: Sequence[ShardRange]) -> None:
        weight, bias = self._found(f"{prefix}conv.weight")[:, 0], self.vector(f"{prefix}conv.bias")
        self._set(mixer, "conv_weight", torch.cat([weight[part.start : part.stop] for part in channels]).T)
        if bias is not None:
            self._set(mixer, "conv_bias", torch.cat([bias.float()[part.start : part.stop] for part in channels]))

    def _found(self, name: str) -> Tensor:
        found = self.vector(name)
        if found is None:
            raise InvariantError(f"{name} is missing")
        return found.float()

    def _set(self, mixer: Any, name: str, values: Tensor, rows: ShardRange | None = None) -> None:
        own = (values if rows is None else values[rows.start : rows.stop]).contiguous()
        mixer.set(name, own.data_ptr(), own.numel())


def _set_heads(mixer: Any, own: HeadRange, k_dim: int, v_dim: int, num_heads: int) -> None:
    mixer.k_heads, mixer.v_heads, mixer.k_dim, mixer.v_dim = own.kv_heads.size, own.heads.size, k_dim, v_dim
    mixer.first_value, mixer.total_values = own.heads.start * v_dim, num_heads * v_dim


def _scaled(part: ShardRange, size: int) -> ShardRange:
    return ShardRange(part.start * size, part.stop * size)


def _moved(part: ShardRange, offset: int) -> ShardRange:
    return ShardRange(part.start + offset, part.stop + offset)
