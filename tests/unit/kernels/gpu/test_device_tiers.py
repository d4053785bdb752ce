"""KV tiers on a GPU: an engine with them gives the tokens of one without, and loads what the pool has lost."""

import threading
from dataclasses import replace

import pytest

from quire import LLM
from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.engine import remote_prefill
from quire.kernels.native import load_native
from quire.kv import device_pages
from quire.kv.device_pages import HostCopyStream
from quire.worker import parallel_launch
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.leader_executor import LeaderGpuExecutor
from quire.worker.inspect import inspect_model
from quire.worker.tiers import tier_fingerprint, transfer_fingerprint
from tests.device_ranks import one_launch_at_a_time
from tests.golden.make_checkpoints import make_checkpoint
from tests.prefill_thread import PrefillThread
from tests.thread_workers import ThreadWorkers
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU
from tests.unit.kernels.gpu.test_device_engine import DEVICE, greedy, tokens
from tests.unit.kernels.gpu.test_device_pages import LateStream

needs_ranks = pytest.mark.skipif(
    HAS_GPU or load_native() is None, reason="several ranks on one machine are interpreted, over gloo and the native extension"
)

pytestmark = pytest.mark.usefixtures("few_programs")
SIZES = {"block_size": 4, "num_kv_blocks": 4, "max_model_len": 16, "max_num_seqs": 2, "max_num_batched_tokens": 16}
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "device": DEVICE, **SIZES}
PROMPTS = [[(7 * n + 31 * k) % 290 for n in range(13)] for k in range(2)]
TIER = {"kv_host_bytes": 1 << 20, "kv_save": "all"}
RANKS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "adaptive": False}
SETTINGS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "4-bit": {"kv_cache_dtype": "turboquant_4bit"},
    "k8v4": {"kv_cache_dtype": "k8v4"},
    "k8v4 but for a layer": {"kv_cache_dtype": "k8v4", "kv_cache_dtype_skip_layers": (0,)},
    "drafts": {"speculative_config": NGRAM},
    "one by one": {"async_scheduling": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiers") / "qwen3", "qwen3", head_dim=16)


def run(llm, prompts=PROMPTS):
    """Return the tokens of the prompts, one after the other, and the cached tokens of each."""
    outputs = [llm.generate([prompt], greedy(2), use_tqdm=False)[0] for prompt in prompts]
    return tokens(outputs), [output.metrics.num_cached_tokens for output in outputs]


def check_prompts(folder, **options):
    """Run two prompts twice, in a pool that holds one of them: the second time they come from the tier."""
    llm = LLM(str(folder), **OPTIONS | TIER | options)
    expected, cold = run(llm)
    found, cached = run(llm)
    tier = llm.llm_engine.scheduler.kv.host_tier
    stats = llm.llm_engine.stats.tiers[0]
    llm.close()
    assert found == expected
    assert (cold, cached) == ([0, 0], [12, 12])
    assert stats.num_loaded == tier.stats.num_host_hits == 6
    assert tier.find_problem() is None


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_those_of_an_engine_without_tiers(folder, options):
    check_prompts(folder, **options)


def test_layers_with_a_window_keep_all_tokens_with_tiers(tmp_path):
    check_prompts(write_checkpoint(tmp_path / "gemma2", "gemma2"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v32"])
def test_latent_rows_and_keys_of_an_indexer_are_saved(tmp_path, family):
    check_prompts(make_checkpoint(family, tmp_path / family))


@pytest.mark.slow
def test_tokens_are_those_of_an_engine_without_tiers_when_sequences_run_together_and_are_preempted(folder):
    prompts = [PROMPTS[k % 2][: 9 + k] for k in range(5)]
    roomy = LLM(str(folder), **OPTIONS | {"num_kv_blocks": 40, "max_model_len": 32})
    expected = tokens(roomy.generate(prompts, greedy(7), use_tqdm=False))
    roomy.close()
    llm = LLM(str(folder), **OPTIONS | TIER | {"num_kv_blocks": 7, "max_num_seqs": 3, "max_model_len": 32})
    for _ in range(2):
        assert tokens(llm.generate(prompts, greedy(7), use_tqdm=False)) == expected
    assert llm.llm_engine.scheduler.kv.host_tier.stats.num_loaded > 0
    assert llm.llm_engine.scheduler.num_preemptions > 0
    llm.close()


def check_sleep(folder, level, **ranks):
    llm, prompts = LLM(str(folder), **OPTIONS | TIER | ranks), [PROMPTS[0][:5]]
    expected, _ = run(llm, prompts)
    llm.sleep(level)
    llm.wake_up()
    assert run(llm, prompts) == (expected, [4])
    llm.close()


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_pages_outlive_a_sleep(folder, level):
    check_sleep(folder, level)


def check_prefill_engine(folder, tmp_path, monkeypatch, **options):
    monkeypatch.setattr(remote_prefill, "_MAX_SLOWDOWN", 1e9)
    monkeypatch.setattr(remote_prefill, "_MIN_WAIT_S", 60.0)
    one_launch_at_a_time(monkeypatch)
    llm = LLM(str(folder), **OPTIONS)
    expected, _ = run(llm, PROMPTS)
    llm.close()
    options = {**OPTIONS, "kv_host_bytes": 1 << 20, **options}
    with PrefillThread(model=str(folder), prefill_listen=f"unix:{tmp_path}/pages", **options) as peer:
        decode = {"role": "decode", "prefill_urls": (peer.address,), "prefill_min_tokens": 8}
        llm = LLM(str(folder), **options, **decode)
        found, cached = run(llm, PROMPTS)
        outcomes = llm.llm_engine.stats.tiers[-1].outcomes
        llm.close()
    assert found == expected
    assert cached == [12, 12]
    assert outcomes == {"complete": 2}


def test_prompts_are_computed_by_a_prefill_engine(folder, tmp_path, monkeypatch):
    check_prefill_engine(folder, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_host_bytes": 100}, "kv_host_bytes is 100, but a page"),
        ({"kv_host_bytes": 1 << 60}, "kv_host_bytes.*are available"),
    ],
)
def test_unsupported_options_are_refused(folder, options, match):
    with pytest.raises(ConfigError, match=match):
        LLM(str(folder), **OPTIONS | TIER | options)


@pytest.fixture
def rank_threads(monkeypatch):
    """Let the ranks of an engine be threads. Copies are late where there is one rank, and on all ranks but the leader."""
    one_launch_at_a_time(monkeypatch)
    monkeypatch.setattr(parallel_launch, "spawn_workers", ThreadWorkers)
    lock, open_host_tier = threading.Lock(), GpuStepExecutor.open_host_tier

    def open_with_streams(executor, *arguments):
        with lock, monkeypatch.context() as patch:
            patch.setattr(
                device_pages, "HostCopyStream", HostCopyStream if isinstance(executor, LeaderGpuExecutor) else LateStream
            )
            open_host_tier(executor, *arguments)

    monkeypatch.setattr(GpuStepExecutor, "open_host_tier", open_with_streams)


@pytest.mark.slow
@needs_ranks
@pytest.mark.parametrize("sizes", [RANKS, STAGES])
def test_pages_outlive_a_sleep_without_the_ranks(folder, rank_threads, sizes):
    check_sleep(folder, 2, **sizes)


@needs_ranks
@pytest.mark.parametrize(
    "sizes", [pytest.param({}, marks=pytest.mark.slow), RANKS, pytest.param(STAGES, marks=pytest.mark.slow)]
)
def test_pages_are_found_on_disk_after_a_restart_where_each_rank_has_a_share_of_them(folder, tmp_path, rank_threads, sizes):
    disk = {"kv_disk_dir": str(tmp_path / "tier"), "kv_disk_bytes": 64 << 20, "kv_save": "all"}
    disk |= {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (-1,)}  # shares of stages have different sizes
    params, found = replace(greedy(1), logprobs=1), []
    for _ in range(2):
        llm = LLM(str(folder), **OPTIONS, **disk, **sizes)
        (output,) = llm.generate([PROMPTS[0][:5]], params, use_tqdm=False)
        found.append((output.metrics.num_cached_tokens, output.outputs[0].cumulative_logprob))
        llm.close()
    assert found == [(0, found[0][1]), (4, pytest.approx(found[0][1], abs=1e-4))]


@pytest.mark.slow
@needs_ranks
@pytest.mark.parametrize("sizes", [RANKS, STAGES])
def test_ranks_of_prefill_and_decode_engines_give_the_tokens_of_one_rank(folder, tmp_path, monkeypatch, rank_threads, sizes):
    """Their copies are late, so that one rank loads and saves after the other has."""
    check_prefill_engine(folder, tmp_path, monkeypatch, num_kv_blocks=7, kv_save="all", **sizes)


@needs_ranks
def test_pages_of_another_number_of_ranks_are_never_read(folder):
    prints = []
    for options in ({}, RANKS, {**RANKS, "tensor_parallel_shares": (3, 1)}, STAGES):
        config = EngineConfig(model=str(folder), **OPTIONS, kv_host_bytes=1 << 20, **options)
        report = inspect_model(config)
        prints.append((tier_fingerprint(config, report)["page"], transfer_fingerprint(config, report)["page"]))
    assert len(set(prints)) == 4


@needs_ranks
def test_pages_of_stages_whose_layers_have_other_formats_are_never_read(folder):
    """The report has the layers of the last stage: the others' formats must be told apart, too."""
    prints = []
    for layers in ((0,), (1,), (0, -1)):
        kept = {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": layers}
        config = EngineConfig(model=str(folder), **OPTIONS, **STAGES, **kept, kv_host_bytes=1 << 20)
        prints += [str(fingerprint(config, inspect_model(config))) for fingerprint in (tier_fingerprint, transfer_fingerprint)]
    assert len(set(prints)) == 6
