"""Shards: every item belongs to one rank, sizes follow the shares, and no rank is empty without need."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import ConfigError
from quire.parallel.shards import ShardRange, head_range, shard_range, shard_sizes

shares_of_ranks = st.lists(st.one_of(st.integers(1, 9), st.floats(0.05, 20)), min_size=1, max_size=9)


@given(total=st.integers(0, 5000), shares=shares_of_ranks, multiple=st.sampled_from([1, 2, 16, 128]))
def test_ranges_cover_everything_once_at_multiples(total, shares, multiple):
    ranges = [shard_range(total, rank, shares, multiple) for rank in range(len(shares))]
    assert ranges[0].start == 0
    assert ranges[-1].stop == total
    for before, after in itertools.pairwise(ranges):
        assert before.stop == after.start
        assert before.stop % multiple == 0 or before.stop == total
    if -(-total // multiple) >= len(shares):
        assert all(part.size > 0 for part in ranges)


@given(total=st.integers(0, 5000), shares=shares_of_ranks, multiple=st.sampled_from([1, 16]))
def test_sizes_are_within_a_multiple_of_exact_shares(total, shares, multiple):
    exact = total * np.array(shares) / sum(shares)
    if exact.min() < multiple:
        return  # a rank that would be empty is given one, at the cost of others
    sizes = shard_sizes(total, shares, multiple)
    # One multiple for the rounding, and one as the last multiple may be cut short.
    assert np.abs(sizes - exact).max() <= 2 * multiple
    assert multiple != 1 or np.abs(sizes - exact).max() < 1


@pytest.mark.parametrize(
    "total, shares, multiple, sizes",
    [
        (8, (1, 1, 1), 1, (3, 3, 2)),
        (49 * 16, (1, 1, 1), 16, (17 * 16, 16 * 16, 16 * 16)),
        (40, (1, 1), 16, (32, 8)),
        (9, (2, 1), 1, (6, 3)),
        (8, (5, 3), 1, (5, 3)),
        (8, (1, 1, 6), 1, (1, 1, 6)),
        (8, (0.1, 0.1, 100.0), 1, (1, 1, 6)),
        (2, (1, 1, 1, 1), 1, (1, 1, 0, 0)),
        (0, (1, 1), 16, (0, 0)),
        (7, (0.1, 0.2), 1, (2, 5)),
    ],
    ids=str,
)
def test_known_shards(total, shares, multiple, sizes):
    assert shard_sizes(total, shares, multiple) == sizes


HEADS = [(num_kv, group) for num_kv in (1, 2, 4, 7, 8) for group in (1, 2, 3, 7, 8)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("num_kv, group", HEADS, ids=str)
def test_heads_of_all_ranks_are_all_heads_and_lie_by_their_kv_heads(num_kv, group):
    num_heads = num_kv * group
    for num_ranks in range(1, min(num_heads, 12) + 1):
        for shares in ((1.0,) * num_ranks, tuple(range(1, num_ranks + 1))):
            ranges = [head_range(num_heads, num_kv, rank, shares) for rank in range(num_ranks)]
            assert [head for own in ranges for head in range(own.heads.start, own.heads.stop)] == list(range(num_heads))
            for own in ranges:
                assert own.heads.size > 0
                used = {head // group for head in range(own.heads.start, own.heads.stop)}
                assert used == set(range(own.kv_heads.start, own.kv_heads.stop))


def test_ranks_of_one_kv_head_divide_its_query_heads():
    ranges = [head_range(14, 2, rank, (1.0,) * 4) for rank in range(4)]
    assert [(own.heads.size, own.kv_heads) for own in ranges] == [
        (4, ShardRange(0, 1)),
        (3, ShardRange(0, 1)),
        (4, ShardRange(1, 2)),
        (3, ShardRange(1, 2)),
    ]


def test_larger_rank_has_a_kv_head_of_its_own():
    ranges = [head_range(8, 2, rank, (2, 1, 1)) for rank in range(3)]
    assert [own.kv_heads.start for own in ranges] == [0, 1, 1]
    assert [own.heads.size for own in ranges] == [4, 2, 2]
    ranges = [head_range(8, 2, rank, (1, 1, 2)) for rank in range(3)]
    assert [own.kv_heads.start for own in ranges] == [0, 0, 1]


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: head_range(4, 2, 0, (1.0,) * 5), "tensor_parallel_size"),
        (lambda: head_range(5, 2, 0, (1.0,) * 1), "num_kv_heads"),
        (lambda: head_range(8, 2, 4, (1.0,) * 4), "rank"),
        (lambda: shard_range(8, 2, (1, 1)), "rank"),
        (lambda: shard_range(8, 0, (1, 0)), "share"),
        (lambda: shard_range(-1, 0, (1, 1)), "total"),
        (lambda: shard_range(8, 0, (1, 1), 0), "multiple"),
    ],
)
def test_what_cannot_be_is_refused(call, named):
    with pytest.raises(ConfigError, match=named):
        call()
