"""The slab of the host tier gives back the bytes of blocks, of every array of the pool."""

import errno
import mmap

import pytest
import torch

from quire.contracts.kv_spec import KvSpec
from quire.kv.pool import KvPool
from quire.kv.tiers.host_slab import HostSlab


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_loaded_blocks_have_the_bytes_of_saved_ones(dtype):
    pool = KvPool(KvSpec(4, dtype, ((1, 3), (2, 4))), num_blocks=6)
    generator = torch.Generator().manual_seed(1)
    for array in pool.arrays():
        array.copy_(torch.randint(-100, 100, array.shape, generator=generator))
    before = [array.clone() for array in pool.arrays()]
    slab = HostSlab(pool, 3)
    assert slab.page_bytes == pool.spec.bytes_per_block
    slab.move([(4, 2), (0, 1)], [])
    for array in pool.arrays():
        array[4] = 1
    slab.move([], [(2, 5), (1, 4)])
    for array, old in zip(pool.arrays(), before, strict=True):
        assert torch.equal(array[5], old[4])
        assert torch.equal(array[4], old[0])
        assert torch.equal(array[:4], old[:4])


def test_saves_come_before_loads():
    pool = KvPool(KvSpec(2, "float32", ((1, 2),)), num_blocks=3)
    pool.k[0][0] = 7
    slab = HostSlab(pool, 1)
    slab.move([(0, 0)], [(0, 2)])
    assert float(pool.k[0][2].mean()) == 7
    assert len(slab.page(0)) == slab.page_bytes


def test_memory_is_taken_where_the_system_has_no_huge_pages(monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, "no huge pages")

    monkeypatch.setattr(mmap, "mmap", Memory)
    slab = HostSlab(KvPool(KvSpec(16, "float32", ((8, 128),)), num_blocks=300), 1)
    assert not slab.page(0).any()
