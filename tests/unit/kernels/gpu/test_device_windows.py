"""Layers with a window keep the KV of their window only, in a pool of their own: tokens are those of the CPU's engine."""

from dataclasses import replace

import pytest
import torch

from quire import LLM, EngineConfig
from quire.base.errors import ConfigError
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kv.device_pool import DeviceKvPool
from quire.model.config_reader import read_model_spec
from quire.worker import memory as worker_memory
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.memory import DeviceUsage, plan_device_memory
from quire.worker.device.staged_call import ChangeCounts
from quire.worker.step_executor import Moves
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.test_device_engine import DEVICE, greedy, tokens

pytestmark = pytest.mark.usefixtures("few_programs")
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 4, "num_kv_blocks": 40, "max_model_len": 64}
PROMPTS = [[7 * n % 290 for n in range(start, start + length)] for start, length in ((3, 15), (90, 5))]  # a window has 13
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
SUFFIX = {"method": "suffix", "suffix_decoding_use_tree_spec": True, "adaptive": False}
SETTINGS = {
    "batched": {},
    "preempted": {"num_kv_blocks": 7},
    "drafts": {"speculative_config": NGRAM},
    "draft trees": {"speculative_config": SUFFIX},
    "int8": {"kv_cache_dtype": "int8"},
    "blocks of a tile": {"block_size": 64},
    "in order": {"deterministic": True},
}


@pytest.fixture(
    scope="module", params=["gemma2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mistral", "gpt_oss"))]
)
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("windows") / request.param, request.param)


def generate(folder, device, num_tokens=5, **options):
    """Return the tokens of the prompts, twice, and the engine: the second time with cached prefixes."""
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    llm = LLM(str(folder), device=device, **OPTIONS | sizes | options)
    found = [tokens(llm.generate(PROMPTS, greedy(num_tokens), use_tqdm=False)) for _ in range(2)]
    llm.close()
    return found, llm.llm_engine


@pytest.fixture(scope="module")
def expected(folder):
    """The tokens of the CPU's engine with one group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_memory, "limits_windows", lambda *_: False)
        return generate(folder, "cpu")[0]


@pytest.mark.parametrize(
    "setting", [name if name == "preempted" else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_tokens_are_those_of_one_group_on_the_cpu(folder, expected, setting):
    options = SETTINGS[setting]
    found, engine = generate(folder, DEVICE, **options)
    memory = engine.report.memory
    assert engine.scheduler.kv.windows is not None
    assert 0 < memory.num_window_blocks <= memory.num_kv_blocks
    assert (setting == "preempted") == (engine.scheduler.num_preemptions > 0)
    assert found == expected


def test_window_blocks_are_divided_from_other_blocks_in_changes():
    """Window block w of the scheduler is block 100 + w in copies, and in moves the slots after those of 100 blocks of 4."""
    moves = Moves([9, 409, 10, 410, 33, 401], [8, 408, 9, 409, 32, 400], [0, 4, 6])
    found = BlockTableUpdates.split([], [(1, 2), (103, 104)], moves, [], 100, 4)
    assert (found.block_copies, found.window_copies) == ([(1, 2)], [(3, 4)])
    assert found.moves == Moves([9, 10, 33], [8, 9, 32], [0, 2, 3])
    assert found.window_moves == Moves([9, 10, 1], [8, 9, 0], [0, 2, 3])
    assert ChangeCounts.of(found)[:7] == (0, 1, 3, 2, 0, 1, 3)
    assert BlockTableUpdates.split([], [(103, 104)], None, [], None, 4).block_copies == [(103, 104)]


def test_copies_and_moves_change_the_layers_of_their_group_alone(device):
    kv = KvSpec(4, "float32", ((1, 8),) * 2, window_tokens=5, is_windowed=(False, True))
    pool = DeviceKvPool(kv, 3, device, num_window_blocks=2)
    for cache in pool.caches:
        cache.k.copy_(torch.arange(cache.k.numel(), device=device).view(cache.k.shape))
        cache.v.copy_(cache.k)
    before = [cache.k.clone() for cache in pool.caches]
    pool.copy_blocks(torch.tensor([0], device=device), torch.tensor([1], device=device), is_windowed=True)
    assert torch.equal(pool.caches[0].k, before[0])
    assert torch.equal(pool.caches[1].k[1], before[1][0])
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    pool.move_tokens(torch.tensor([9], device=device), torch.tensor([8], device=device), starts)
    assert torch.equal(pool.caches[0].v[2, 0, 0], before[0][2, 0, 1])
    assert torch.equal(pool.caches[1].v[0], before[1][0])


@pytest.mark.parametrize("block_size", [4, 64])
@pytest.mark.parametrize("is_short", [True, False])
def test_attention_reads_nothing_of_blocks_before_the_window(device, block_size, is_short):
    """Their entries of the table name a block of NaN, which the sequence no longer holds."""
    window, length, count = 9, 150, 1 if is_short else 20
    spec = AttentionSpec(2, 1, 16, 0.25, window=window)
    num_blocks = -(-length // block_size)
    k, v = (torch.randn(num_blocks + 1, 1, block_size, 16, generator=torch.manual_seed(seed)) for seed in (1, 2))
    q = torch.randn(count, 2, 16, generator=torch.manual_seed(3))
    slots = torch.zeros(count, dtype=torch.int64)
    tables = torch.arange(num_blocks)[None].clone()
    whole = AttentionMetadata(slots, [0, count], [length], tables.clone())
    tables[0, : (length - count - window + 1) // block_size] = num_blocks
    k[num_blocks], v[num_blocks] = torch.nan, torch.nan
    cache = KvCache(k.to(device), v.to(device))
    found = [
        attend(q.to(device), cache, DeviceAttentionMetadata.of(replace(whole, block_tables=one), device), spec)
        for one in (whole.block_tables, tables)
    ]
    assert torch.isfinite(found[1]).all()
    assert torch.equal(found[0], found[1])


def test_a_gpu_uses_the_memory_that_windows_leave_for_cached_prefixes():
    """Blocks of 16: a sequence needs 256 of the full group and 6 of the window group, and a step of 32 tokens 2 more."""
    kv = KvSpec(16, "float32", ((2, 8),) * 6, window_tokens=64, is_windowed=(True,) * 5 + (False,))
    config = EngineConfig(model="-", max_num_seqs=2, gpu_memory_utilization=1.0)
    block = 2048

    def plan(num_bytes, **options):
        return plan_device_memory(replace(config, **options), kv, DeviceUsage(num_bytes, 0, 0, 0), 4096, 32)

    small, large = plan(100 * 6 * block), plan(1000 * 6 * block)
    assert (small.num_kv_blocks, small.num_window_blocks) == (100 + 74 * 5, 26)
    assert (large.num_kv_blocks, large.num_window_blocks) == (512 + 893, 26 + 893)  # 5358 blocks of layers are left, 893 * 6
    assert large.kv_bytes == 1000 * 6 * block
    assert plan(1000 * 6 * block, num_kv_blocks=50).num_window_blocks == 26
    with pytest.raises(ConfigError, match="asked for"):
        plan(10 * 6 * block, num_kv_blocks=50)


def test_a_library_of_attention_keeps_one_group(tmp_path):
    config = EngineConfig(model="-", attention_backend="flash_attn")
    spec = read_model_spec(write_checkpoint(tmp_path / "gemma2", "gemma2"))
    assert not worker_memory.limits_windows(config, spec, 64)
    assert worker_memory.limits_windows(replace(config, attention_backend="triton"), spec, 64)
