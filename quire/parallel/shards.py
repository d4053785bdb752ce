"""Shards: the part of a weight, of attention heads or of experts on each rank. Arithmetic only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from quire.base.errors import ConfigError

OUTPUT_MULTIPLE = 16
"""Rows of a panel of the native kernels: outputs are sharded between panels."""

_MAX_DENOMINATOR = 10**6


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The half-open range [start, stop) of a rank."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class HeadRange:
    """The query heads and the key and value heads of a rank."""

    heads: ShardRange
    kv_heads: ShardRange

    def describe(self) -> str:
        """Return "heads 0 to 7, kv heads 0 to 1"."""
        heads, kv = self.heads, self.kv_heads
        return f"heads {heads.start} to {heads.stop - 1}, kv heads {kv.start} to {kv.stop - 1}"


def shard_range(total: int, rank: int, shares: Sequence[float], multiple: int = 1) -> ShardRange:
    """Return the range of a rank when `total` elements are divided by shares, at multiples of `multiple`.

    Each rank's size is within one multiple of its exact share, and the ranges of all ranks are consecutive. No range is empty
    unless there are fewer multiples than ranks. With equal shares the first ranks get the remainder.
    """
    if not 0 <= rank < len(shares):
        raise ConfigError(f"rank must be from 0 to {len(shares) - 1}, got {rank}")
    sizes = shard_sizes(total, shares, multiple)
    start = sum(sizes[:rank])
    return ShardRange(start, start + sizes[rank])


def shard_sizes(total: int, shares: Sequence[float], multiple: int = 1) -> tuple[int, ...]:
    """Return the sizes of all ranks' ranges: see shard_range."""
    if total < 0 or multiple < 1:
        raise ConfigError(f"a shard needs a total >= 0 and a multiple >= 1, got {total} and {multiple}")
    units = _divide(-(-total // multiple), shares)
    ends = [min(end * multiple, total) for end in itertools.accumulate(units)]
    return tuple(end - start for start, end in itertools.pairwise([0, *ends]))


def _divide(num_units: int, shares: Sequence[float]) -> list[int]:
    """Divide units by the largest remainder, ties to the lowest rank; then move one unit from the largest to each empty
    rank."""
    parts = [_as_fraction(share) for share in shares]
    quotas = [num_units * part / sum(parts) for part in parts]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda rank: counts[rank] - quotas[rank])
    for rank in by_remainder[: num_units - sum(counts)]:
        counts[rank] += 1
    if num_units >= len(counts):
        while 0 in counts:
            giver = max(range(len(counts)), key=lambda rank: (counts[rank] > 1, counts[rank] - quotas[rank], -rank))
            counts[giver] -= 1
            counts[counts.index(0)] += 1
    return counts


def _as_fraction(share: float) -> Fraction:
    """Return a share as a fraction, so that float rounding has no effect and all ranks agree."""
    part = Fraction(share).limit_denominator(_MAX_DENOMINATOR)
    if part <= 0:
        raise ConfigError(f"a share must be a number >= {1 / _MAX_DENOMINATOR}, got {share!r}")
    return part


def head_range(num_heads: int, num_kv_heads: int, rank: int, shares: Sequence[float]) -> HeadRange:
    """Return the heads of a rank; query head h uses key and value head h // (num_heads // num_kv_heads).

    With at least as many kv heads as ranks, each rank has whole kv heads with all their query heads. With fewer, the ranks of
    one kv head each hold its keys and values and divide its query heads.

    Raises ConfigError for more ranks than query heads.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
        raise ConfigError(f"num_heads must be a multiple of num_kv_heads >= 1, got {num_heads} and {num_kv_heads}")
    if len(shares) > num_heads:
        raise ConfigError(
            f"tensor_parallel_size must be at most {num_heads} for a model of {num_heads} attention heads, got {len(shares)}"
        )
    heads_per_kv = num_heads // num_kv_heads
    if len(shares) <= num_kv_heads:
        kv = shard_range(num_kv_heads, rank, shares)
        return HeadRange(ShardRange(kv.start * heads_per_kv, kv.stop * heads_per_kv), kv)
    if not 0 <= rank < len(shares):
        raise ConfigError(f"rank must be from 0 to {len(shares) - 1}, got {rank}")
    starts = _partition(shares, num_kv_heads, heads_per_kv)
    kv_head = max(head for head in range(num_kv_heads) if starts[head] <= rank)
    first, last = starts[kv_head], starts[kv_head + 1]
    own = shard_range(heads_per_kv, rank - first, shares[first:last])
    base = kv_head * heads_per_kv
    return HeadRange(ShardRange(base + own.start, base + own.stop), ShardRange(kv_head, kv_head + 1))


def _partition(shares: Sequence[float], num_groups: int, max_ranks: int) -> list[int]:
    """Divide ranks into contiguous groups of 1 to max_ranks, minimising the largest sum of shares.

    Returns the first rank of each group, and the number of ranks.
    """
    sums = [Fraction(0), *itertools.accumulate(_as_fraction(share) for share in shares)]
    best: list[tuple[Fraction, list[int]] | None] = [(Fraction(0), [0]), *[None] * len(shares)]  # by number of ranks
    for _ in range(num_groups):
        after: list[tuple[Fraction, list[int]] | None] = [None] * len(best)
        for end in range(1, len(best)):
            for start in range(max(0, end - max_ranks), end):
                before = best[start]
                if before is None:
                    continue
                largest = max(before[0], sums[end] - sums[start])
                found = after[end]
                if found is None or largest < found[0]:
                    after[end] = (largest, [*before[1], end])
        best = after
    found = best[-1]
    if found is None:
        raise ConfigError(f"{len(shares)} ranks cannot share {num_groups} kv heads with {max_ranks} query heads each")
    return found[1]
