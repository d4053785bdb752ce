"""Engines that sleep give their memory back, refuse requests, and give the same tokens after they have woken up."""

import asyncio
import mmap
import threading

import numpy as np
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.errors import ConfigError, RequestError, UnsupportedError, WorkerError
from quire.engine.scheduling.invariants import check_invariants
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from tests.steps import hold_after
from tests.tiny_checkpoint import write_checkpoint

PROMPTS = [[5, 9, 31, 7] * 10, [11, 12, 13]]
OPTIONS = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 4000, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
needs_native = pytest.mark.skipif(load_native() is None, reason="the native extension is not built")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("sleep") / "qwen3", "qwen3")


def tokens_of(llm, prompts=PROMPTS):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def resident_bytes(pool: KvPool):
    """Return how much of a pool's memory the system holds, by the page table of this process."""
    size = mmap.PAGESIZE
    total = 0
    with open("/proc/self/pagemap", "rb") as pagemap:
        for array in pool.arrays():
            first, last = array.data_ptr() // size, -(-(array.data_ptr() + array.nbytes) // size)
            pagemap.seek(8 * first)
            entries = np.frombuffer(pagemap.read(8 * (last - first)), dtype=np.uint64)
            total += size * int((entries >> np.uint64(63)).sum())
    return total


def test_kv_memory_goes_back_to_the_system_when_the_engine_sleeps(folder):
    llm = LLM(str(folder), block_size=64, **OPTIONS)
    expected = tokens_of(llm)
    pool = llm.llm_engine.runner.executor.target.kv
    for array in pool.arrays():
        array.fill_(7)
    num_bytes = sum(array.nbytes for array in pool.arrays())
    assert resident_bytes(pool) >= num_bytes
    llm.sleep()
    assert resident_bytes(pool) < num_bytes / 8
    assert not any(array.any() for array in pool.arrays())
    assert llm.is_sleeping
    llm.wake_up()
    assert tokens_of(llm) == expected
    llm.close()


@pytest.mark.covering
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, marks=[pytest.mark.slow, needs_native]),
        pytest.param({"pipeline_parallel_size": 2}, marks=[pytest.mark.slow, needs_native]),
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_tokens_are_the_same_when_the_engine_has_slept(folder, level, options):
    llm = LLM(str(folder), **OPTIONS, **options)
    try:
        expected = tokens_of(llm)
        for _ in range(2):
            llm.sleep(level)
            llm.sleep(level)  # without an effect
            with pytest.raises(WorkerError, match="asleep"):
                tokens_of(llm)
            llm.wake_up()
            llm.wake_up()
            assert tokens_of(llm) == expected
    finally:
        llm.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_windows_start_anew_when_the_engine_has_slept(tmp_path, kind):
    llm = LLM(str(write_checkpoint(tmp_path / kind, kind)), **OPTIONS)
    expected = tokens_of(llm)
    for level in (1, 2):
        llm.sleep(level)
        check_invariants(llm.llm_engine.scheduler)
        llm.wake_up()
        assert tokens_of(llm) == expected
    llm.close()


@pytest.mark.parametrize(
    ("level", "ranks"),
    [
        (1, {}),
        (2, {}),
        pytest.param(2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=[needs_native, pytest.mark.slow]),
    ],
)
def test_prefix_cache_is_emptied_and_the_host_tier_keeps_its_pages(folder, level, ranks):
    llm = LLM(str(folder), **OPTIONS, **ranks, kv_host_bytes=1 << 22, kv_save="all")
    engine = llm.llm_engine
    expected = tokens_of(llm)
    llm.sleep(level)
    assert len(engine.scheduler.kv.index) == 0
    assert len(engine.scheduler.kv.host_tier) == 2
    llm.wake_up()
    output = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == expected[0]
    assert output.metrics.num_cached_tokens == 32, "loaded from the host tier"
    llm.close()


def test_engine_stays_asleep_and_says_why_when_the_checkpoint_has_gone(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "qwen3")
    llm = LLM(str(folder), **OPTIONS)
    expected = tokens_of(llm)
    llm.sleep(2)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    with pytest.raises(Exception, match="safetensors|weights"):
        llm.wake_up()
    assert llm.is_sleeping
    with pytest.raises(ConfigError, match="asleep"):
        _ = llm.llm_engine.speculator
    weights.write_bytes(content)
    llm.wake_up()
    assert tokens_of(llm) == expected
    llm.close()


@pytest.mark.parametrize(("arguments", "field"), [((3,), "level"), ((True,), "level"), ((1, "keep"), "mode")])
def test_other_levels_and_modes_are_refused(folder, arguments, field):
    llm = LLM(str(folder), **OPTIONS)
    with pytest.raises(RequestError) as caught:
        llm.sleep(*arguments)
    assert caught.value.param == field
    assert not llm.is_sleeping
    llm.close()


def test_level_that_an_engine_cannot_undo_is_refused(folder, tmp_path):
    llm = LLM(str(write_checkpoint(tmp_path / "moe", "qwen3_moe")), **OPTIONS, save_expert_load=str(tmp_path / "load.json"))
    with pytest.raises(UnsupportedError, match="save_expert_load"):
        llm.sleep(2)
    llm.sleep(1)
    llm.close()


@pytest.mark.parametrize(("mode", "reason", "num_tokens"), [("abort", "abort", None), ("wait", "length", 60)])
def test_running_requests_are_aborted_or_finished_before_the_engine_sleeps(folder, mode, reason, num_tokens):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
    is_asked = threading.Event()

    async def go():
        llm = AsyncLLM(str(folder), **OPTIONS)
        hold_after(llm, 5, is_asked)
        found = []
        try:

            async def read():
                async for output in llm.generate([5, 9, 31, 7], params):
                    found.append(output)
                    begun.set()

            begun = asyncio.Event()
            reader = asyncio.create_task(read())
            await begun.wait()
            asleep = asyncio.create_task(llm.sleep(1, mode))
            await asyncio.sleep(0)
            is_asked.set()
            with pytest.raises(WorkerError, match="asleep"):
                async for _ in llm.generate([1, 2], params):
                    pass
            await asyncio.wait_for(asyncio.gather(reader, asleep), 30)
            assert await llm.is_sleeping()
            await llm.wake_up()
            assert not await llm.is_sleeping()
            async for output in llm.generate([1, 2], GREEDY):
                last = output
            assert last.outputs[0].finish_reason == "length"
        finally:
            llm.close()
        return found

    found = asyncio.run(go())
    assert found[-1].outputs[0].finish_reason == reason
    if num_tokens is not None:
        assert sum(len(output.outputs[0].token_ids) for output in found) == num_tokens
