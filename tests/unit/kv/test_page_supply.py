"""Pages of a pool are allocated before its blocks are used: some at start, more as blocks are used, none during a step."""

import ctypes
import threading
from mmap import PAGESIZE

import pytest
import torch

from quire import LLM
from quire.contracts.kv_spec import KvSpec
from quire.kv import page_supply
from quire.kv.page_supply import PageSupply
from quire.kv.pool import KvPool
from tests.no_threads import no_threads

NUM_BLOCKS = 2048


@pytest.fixture(params=["bfloat16", "int8"])
def pool(request):
    return KvPool(KvSpec(16, request.param, ((4, 64), (2, 64))), NUM_BLOCKS)


@pytest.fixture
def supply(pool):
    made = PageSupply(pool)
    yield made
    made.close()


def finish():
    """Wait until no supply takes pages any more."""
    for thread in threading.enumerate():
        if thread.name == "kv-pages":
            thread.join()


def num_resident(array):
    """Return how many pages of an array are in memory."""
    first, last = array.data_ptr() // PAGESIZE * PAGESIZE, array.data_ptr() + array.nbytes
    states = (ctypes.c_ubyte * -(-(last - first) // PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(last - first), states) == 0
    return sum(state & 1 for state in states)


def test_start_takes_pages_and_leaves_what_is_in_them(pool, supply):
    pool.k[0][3] = 7
    supply.start()
    finish()
    assert supply.num_ready >= 4096 // 16
    assert all(num_resident(array) >= array[: supply.num_ready].nbytes // PAGESIZE for array in pool.arrays())
    assert (pool.k[0][3] == 7).all()
    assert not pool.k[0][4].any()
    assert not pool.v[1].any()


def test_pools_of_what_drafts_get_pages_for_the_same_blocks(pool):
    other = KvPool(KvSpec(16, "bfloat16", ((2, 32),)), NUM_BLOCKS)
    supply = PageSupply(pool, other)
    supply.start()
    finish()
    assert supply.num_ready >= 4096 // 16
    for array in [*pool.arrays(), *other.arrays()]:
        assert num_resident(array) >= array[: supply.num_ready].nbytes // PAGESIZE
    supply.close()


def test_pages_are_kept_ready_behind_the_last_block_that_is_used(supply):
    supply.start()
    finish()
    at_first = supply.num_ready
    supply.__enter__()
    supply.use(
        (
            1,
            2,
        )
    )
    supply.__exit__()
    finish()
    assert supply.num_ready == at_first
    supply.__enter__()
    supply.use(
        (
            at_first - 1,
            5,
        )
    )
    supply.__exit__()
    finish()
    assert supply.num_ready >= 2 * at_first
    with supply:
        supply.use((NUM_BLOCKS - 1,))
    finish()
    assert supply.num_ready == NUM_BLOCKS


def test_no_page_is_taken_while_a_step_runs(monkeypatch, supply):
    monkeypatch.setattr(page_supply, "_START_S", 0.0)
    is_waiting, is_free = threading.Event(), threading.Event()

    def sleep(_seconds):
        is_waiting.set()
        is_free.wait(60)

    monkeypatch.setattr(page_supply.time, "sleep", sleep)
    supply.__enter__()
    supply.start()
    assert is_waiting.wait(60)
    assert supply.num_ready == 0
    supply.__exit__()
    is_free.set()
    finish()
    assert supply.num_ready > 0


def test_close_ends_what_waits_for_an_idle_machine(supply, monkeypatch):
    monkeypatch.setattr(page_supply, "_START_S", 0.0)
    supply.__enter__()
    supply.start()
    supply.close()
    assert not any(thread.name == "kv-pages" for thread in threading.enumerate())


def test_a_system_that_takes_no_pages_is_asked_once(pool, supply, monkeypatch):
    asked = []
    monkeypatch.setattr(page_supply, "take_pages", lambda address, num_bytes: asked.append(num_bytes))
    supply.start()
    num_asked = len(asked)
    assert 0 < num_asked <= len(list(pool.arrays()))
    with supply:
        supply.use((NUM_BLOCKS - 1,))
    finish()
    assert len(asked) == num_asked


def test_a_step_goes_on_when_there_is_no_thread_for_its_pages(supply):
    supply.start()
    finish()
    with no_threads("kv-pages"):
        supply.use((supply.num_ready - 1,))
    supply.use((NUM_BLOCKS - 1,))
    assert supply.num_ready < NUM_BLOCKS


def test_no_array_is_held_when_the_pool_is_dropped_without_closing():
    pool = KvPool(KvSpec(16, "float32", ((2, 32),)), 64)
    supply = PageSupply(pool)
    supply.start()
    finish()
    assert not any(thread.name == "kv-pages" for thread in threading.enumerate())
    assert torch.equal(pool.k[0], torch.zeros_like(pool.k[0]))


@pytest.mark.parametrize("config", [
    {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 3},
    {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3},
])  # fmt: skip
def test_what_drafts_has_pages_in_its_pools_before_its_first_step_and_they_are_taken_once(config, monkeypatch):
    starts, start = [], PageSupply.start
    monkeypatch.setattr(PageSupply, "start", lambda supply: (starts.append(supply), start(supply)))
    llm = LLM("demo", speculative_config=config, num_kv_blocks=512)
    runner = llm.llm_engine.runner
    finish()
    (pool,) = runner.speculator.pools
    assert all(num_resident(array) >= array[:256].nbytes // PAGESIZE for array in pool.arrays())
    assert len(starts) == 1
    llm.close()
