"""Which part of a mixer with a recurrent state a tensor-parallel rank has: some heads of the state, or some channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.base.errors import ConfigError
from quire.contracts.mixer_spec import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, MixerSpec, ShortConvSpec
from quire.parallel.shards import OUTPUT_MULTIPLE, HeadRange, ShardRange, head_range, shard_range


def mixer_heads(spec: MixerSpec, rank: int, shares: Sequence[float]) -> HeadRange:
    """Return the value heads of a rank, and the key heads, or groups of B and C, that they read: see head_range.

    Of a short convolution and of Mamba 1 they are channels, and one group that all ranks read.

    Raises ConfigError for more ranks than heads.
    """
    num_heads, num_groups = _counts(spec)
    if len(shares) > num_heads:
        raise ConfigError(
            f"tensor_parallel_size must be at most {num_heads} for a model of recurrent layers with {num_heads} heads, got "
            f"{len(shares)}"
        )
    if isinstance(spec, ShortConvSpec | Mamba1Spec):
        multiple = OUTPUT_MULTIPLE if num_heads >= OUTPUT_MULTIPLE * len(shares) else 1
        return HeadRange(shard_range(num_heads, rank, shares, multiple), ShardRange(0, 1))
    return head_range(num_heads, num_groups, rank, shares)


def _counts(spec: MixerSpec) -> tuple[int, int]:
    if isinstance(spec, GatedDeltaSpec):
        return spec.num_v_heads, spec.num_k_heads
    return (spec.num_heads, spec.num_groups) if isinstance(spec, Mamba2Spec) else (spec.channels, 1)


def mixer_part(spec: MixerSpec, heads: HeadRange) -> MixerSpec:
    """Return the sizes of a rank's part."""
    if isinstance(spec, GatedDeltaSpec):
        return replace(spec, num_v_heads=heads.heads.size, num_k_heads=heads.kv_heads.size)
    if isinstance(spec, Mamba2Spec):
        return replace(spec, num_heads=heads.heads.size, num_groups=heads.kv_heads.size)
    return replace(spec, channels=heads.heads.size)
