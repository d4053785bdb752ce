"""Blocks of a pool on a GPU are copied to pages of the host tier and back, whatever else touches them meanwhile."""

import random

import pytest
import torch

from quire.contracts.kv_spec import KvSpec
from quire.kv import device_pages
from quire.kv.device_pages import DevicePages
from quire.kv.device_pool import DeviceKvPool
from quire.kv.tiers.host_slab import HostSlab

SPECS = {
    "float32": KvSpec(4, "float32", ((1, 16), (2, 8))),
    "bfloat16": KvSpec(4, "bfloat16", ((2, 16), (0, 0))),
    "int8": KvSpec(4, "int8", ((1, 16), (2, 16))),
    "fp8": KvSpec(4, "fp8", ((2, 16),)),
    "4-bit": KvSpec(4, "turboquant_4bit", ((2, 16),)),
    "k8v4": KvSpec(4, "k8v4", ((2, 16),)),
    "mixed": KvSpec(4, "k8v4", ((2, 16),) * 3, layer_dtypes=("bfloat16", "k8v4", "bfloat16")),
    "latent": KvSpec(4, "bfloat16", ((1, 24), (1, 24)), is_joined=True),
    "latent int8": KvSpec(4, "int8", ((1, 24),), is_joined=True),
    "indexed": KvSpec(4, "float32", ((1, 24),), is_joined=True, index_dims=(8,)),
}


class LateStream:
    """Runs work when it is waited for, or told to."""

    def __init__(self):
        self.queue = []

    def run(self, work, after):
        self.queue.append(LateMark(self, work, list(after)))
        return self.queue[-1]

    def run_first(self):
        mark = self.queue.pop(0)
        for other in mark.after:
            other.wait()
        mark.work()
        mark.is_done = True


class LateMark:
    """The end of late work."""

    seconds = 0.25

    def __init__(self, stream, work, after):
        self.stream, self.work, self.after, self.is_done = stream, work, after, False

    def wait(self):
        while not self.is_done:
            self.stream.run_first()

    synchronize = wait


def make_pages(spec, device, num_blocks=6, num_slots=5, make_stream=None):
    pool = DeviceKvPool(spec, num_blocks, device)
    generator = torch.Generator().manual_seed(1)
    pool.memory.view(torch.int32).copy_(
        torch.randint(-(2**31), 2**31 - 1, pool.memory.shape, generator=generator, dtype=torch.int32)
    )
    slab = HostSlab(None, num_slots, page_bytes=spec.bytes_per_block)
    return pool, slab, DevicePages(pool, slab, make_stream)


def bytes_of(pool, block):
    """Return the bytes of a block, layer by layer."""
    parts = [part for part in pool.tensors() if part.numel()]
    return torch.cat([part[block].contiguous().view(torch.uint8).flatten().cpu() for part in parts])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_loaded_blocks_have_the_bytes_of_saved_ones(spec, device):
    pool, slab, pages = make_pages(spec, device)
    before = [bytes_of(pool, block) for block in range(6)]
    pages.move(1, [(4, 2), (0, 3)], [])
    pages.move(2, [(1, 0)], [(2, 1), (3, 5), (0, 4)])
    pages.settle()
    assert pages.take_done() == (1, 2)
    assert [torch.equal(bytes_of(pool, block), before[old]) for block, old in enumerate((0, 4, 2, 3, 1, 0))] == [True] * 6
    assert len(slab.page(0)) == spec.bytes_per_block == len(before[0])
    assert torch.equal(torch.from_numpy(slab.page(2).copy()), before[4])


def test_numbers_lie_where_kernels_are_compiled_for_however_many_pages_are_copied(device, monkeypatch):
    launched, launch_of = [], device_pages.copy_pages_launch
    monkeypatch.setattr(device_pages, "copy_pages_launch", lambda *given: launched.append(given[3:5]) or launch_of(*given))
    pages = make_pages(SPECS["float32"], device)[2]
    for count in (1, 2, 3):
        pages.move(count, [(block, block) for block in range(count)], [])
    assert [len(blocks) for blocks, _ in launched] == [1, 2, 3]
    assert {part.data_ptr() % 16 for parts in launched for part in parts} == {0}


def test_copies_that_are_late_give_what_copies_at_once_give(device, monkeypatch):
    """Pages are the word that a block holds. Steps write blocks, and read them, after they have told so."""
    monkeypatch.setattr(device_pages, "staged_pages", lambda *_: (2, 2))
    rng, spec = random.Random(3), KvSpec(1, "float32", ((1, 1),))
    streams = []

    def make_stream():
        streams.append(LateStream())
        return streams[-1]

    pool, slab, pages = make_pages(spec, device, num_blocks=8, num_slots=6, make_stream=make_stream)
    key = pool.caches[0].k[:, 0, 0, 0]
    key.copy_(torch.arange(8.0))
    blocks, slots = [float(block) for block in range(8)], {}
    told, most_late, next_value = [], 0, 100.0
    for step_id in range(60):
        saved = rng.sample(range(8), rng.randint(0, 3))
        saves = list(zip(saved, rng.sample(range(6), len(saved)), strict=True))
        slots.update({slot: blocks[block] for block, slot in saves})
        sources = rng.sample(sorted(slots), rng.randint(0, min(3, len(slots))))
        loads = list(zip(sources, rng.sample(range(8), len(sources)), strict=True))
        for slot, block in loads:
            blocks[block] = slots[slot]
        if saves or loads:
            pages.move(step_id, saves, loads)
            told.append(step_id)
        for block in rng.sample(range(8), 2):
            pages.use([block])
            assert float(key[block]) == blocks[block]
            key[block] = blocks[block] = next_value
            next_value += 1
        for stream in streams:
            if stream.queue and rng.random() < 0.4:
                stream.run_first()
        for done in pages.take_done():
            assert done == told.pop(0)
        most_late = max(most_late, len(told))
    assert most_late > 1
    pages.settle()
    assert list(pages.take_done()) == told
    assert key.tolist() == blocks
    assert {slot: float(slab.page(slot).view("float32")[0]) for slot in slots} == slots
    assert slab.save_s > 1 < slab.load_s
