"""The KV pool copies whole blocks in every layer, all sources before any target."""

import os
from pathlib import Path

import pytest
import torch

from quire.contracts.kv_spec import KvSpec
from quire.kv.pool import KvPool


@pytest.mark.parametrize("is_joined", [False, True])
def test_copies_read_all_sources_before_any_target_is_written(is_joined):
    pool = KvPool(KvSpec(2, "float32", ((1, 3), (2, 4)), is_joined=is_joined), num_blocks=4)
    for cache in (*pool.k, *pool.v):
        cache.copy_(torch.arange(4.0).view(4, 1, 1, 1).expand_as(cache))
    pool.copy_blocks(((0, 1), (1, 2)))
    for cache in (*pool.k, *pool.v):
        assert [float(block.mean()) for block in cache] == [0, 0, 1, 3]


def test_bytes_per_token_counts_k_and_v_of_every_layer():
    spec = KvSpec(16, "bfloat16", ((1, 3), (2, 4)))
    assert spec.bytes_per_token == 2 * (3 + 8) * 2
    assert spec.bytes_per_block == 16 * spec.bytes_per_token


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_is_taken_only_as_blocks_are_written():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    pool = KvPool(KvSpec(16, "bfloat16", ((8, 128),) * 4), num_blocks=4096)  # 512 MiB
    assert resident_bytes() - before < 32 << 20
    for cache in pool.k:
        cache[:64] = 1
    assert resident_bytes() - before < 64 << 20
    assert all(float(cache[64:66].abs().sum()) == 0 for cache in pool.k)


@pytest.mark.parametrize("skipped", [(), (1,)], ids=["all-layers", "but-for-layer-1"])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "turboquant_4bit", "k8v4"])
@pytest.mark.parametrize("is_joined", [False, True])
def test_a_quantised_pool_takes_the_bytes_of_its_spec_and_copies_its_scales(dtype, skipped, is_joined):
    spec = KvSpec(16, dtype, ((2, 8), (1, 64)), is_joined=is_joined).with_layers(skipped, "bfloat16")
    one = KvSpec(16, "bfloat16" if skipped else dtype, ((1, 64),), is_joined=is_joined)
    assert spec.part(1, 2).bytes_per_token == one.bytes_per_token
    pool = KvPool(spec, num_blocks=4)
    assert sum(array.nbytes for array in pool.arrays()) == 4 * spec.bytes_per_block
    assert [array.nbytes for array in pool.arrays()] == [
        4 * size * spec.layer_shapes[layer][0] for _, layer, size in spec.block_arrays()
    ]
    for array in pool.arrays():
        array[1] = 7
    pool.copy_blocks(((1, 3),))
    assert all((array[3] == 7).all() and (array[2] == 0).all() for array in pool.arrays())
