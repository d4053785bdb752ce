import pytest

from quire.base.errors import ConfigError, InvariantError
from quire.base.ids import BlockId
from quire.engine.scheduling.block_pool import BlockPool


def ids(*numbers):
    return tuple(BlockId(number) for number in numbers)


def test_allocate_takes_the_longest_free_first():
    pool = BlockPool(4)
    assert pool.allocate(3) == ids(0, 1, 2)
    pool.free(ids(1))
    assert pool.allocate(2) == ids(3, 1)


def test_allocate_returns_none_and_changes_nothing_when_full():
    pool = BlockPool(3)
    pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert list(pool.iter_free()) == list(ids(2))


def test_allocate_returns_nothing_when_nothing_is_asked():
    pool = BlockPool(1)
    pool.allocate(1)
    assert pool.allocate(0) == ()


def test_free_gives_the_tail_of_a_table_back_first():
    pool = BlockPool(3)
    table = pool.allocate(3)
    assert table is not None
    pool.free(table)
    assert list(pool.iter_free()) == list(ids(2, 1, 0))


def test_blocks_are_reused_first_in_their_order_when_nobody_can_find_their_content():
    pool = BlockPool(5, is_kept=lambda block_id: block_id == 1)
    table = pool.allocate(3)
    assert table is not None
    pool.free(table)
    assert list(pool.iter_free()) == list(ids(0, 2, 3, 4, 1))


def test_shared_block_stays_until_its_last_holder_frees_it():
    pool = BlockPool(2)
    pool.allocate(1)
    pool.share(ids(0))
    pool.free(ids(0))
    assert (pool.num_refs(BlockId(0)), pool.num_free) == (1, 1)
    pool.free(ids(0))
    assert (pool.num_refs(BlockId(0)), pool.num_free) == (0, 2)


def test_share_takes_a_free_block_out_of_the_middle_of_the_list():
    pool = BlockPool(3)
    pool.share(ids(1))
    assert list(pool.iter_free()) == list(ids(0, 2))
    assert pool.allocate(3) is None
    pool.free(ids(1))
    assert list(pool.iter_free()) == list(ids(0, 2, 1))


def test_on_reuse_is_told_of_allocated_blocks_alone():
    told: list[BlockId] = []
    pool = BlockPool(3, on_reuse=told.append)
    pool.share(ids(0))
    pool.free(ids(0))
    assert told == []
    pool.allocate(2)
    assert told == list(ids(1, 2))


def test_free_raises_when_nobody_holds_the_block():
    with pytest.raises(InvariantError, match="block 0"):
        BlockPool(1).free(ids(0))


def test_pool_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="got 0"):
        BlockPool(0)


def test_taking_a_block_back_touches_its_neighbours_alone():
    """O(1) whatever the size of the pool: after a share, only the two neighbours of the block have other links."""

    def links(pool):
        return [(block.prev, block.next) for block in pool.blocks]

    pool = BlockPool(1000)
    before = links(pool)
    pool.share(ids(500))
    changed = [index for index, (old, new) in enumerate(zip(before, links(pool), strict=True)) if old != new]
    assert changed == [499, 500, 501]
