"""KV tiers on a GPU: an engine with them gives the tokens of one without, and loads what the pool has lost."""

import pytest
import torch

from quire import LLM
from quire.base.errors import ConfigError, UnsupportedError
from quire.engine import remote_prefill
from tests.device_ranks import one_launch_at_a_time
from tests.golden.make_checkpoints import make_checkpoint
from tests.prefill_thread import PrefillThread
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.test_device_engine import DEVICE, greedy, tokens

pytestmark = pytest.mark.usefixtures("few_programs")
SIZES = {"block_size": 4, "num_kv_blocks": 4, "max_model_len": 16, "max_num_seqs": 2, "max_num_batched_tokens": 16}
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "device": DEVICE, **SIZES}
PROMPTS = [[(7 * n + 31 * k) % 290 for n in range(13)] for k in range(2)]
TIER = {"kv_host_bytes": 1 << 20, "kv_save": "all"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "adaptive": False}
SETTINGS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "4-bit": {"kv_cache_dtype": "turboquant_4bit"},
    "k8v4": {"kv_cache_dtype": "k8v4"},
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


def test_pages_are_found_on_disk_after_a_restart(folder, tmp_path):
    disk = {"kv_disk_dir": str(tmp_path / "tier"), "kv_disk_bytes": 64 << 20, "kv_save": "all"}
    found = []
    for _ in range(2):
        llm = LLM(str(folder), **OPTIONS, **disk)
        found.append(run(llm, PROMPTS[:1]))
        llm.close()
    assert found[0][0] == found[1][0]
    assert (found[0][1], found[1][1]) == ([0], [12])


@pytest.mark.slow
def test_pages_outlive_a_sleep_of_level_1(folder):
    llm = LLM(str(folder), **OPTIONS | TIER)
    expected, _ = run(llm, PROMPTS)
    llm.sleep(1)
    llm.wake_up()
    assert run(llm, PROMPTS) == (expected, [12, 12])
    with pytest.raises(UnsupportedError, match="a host tier on a GPU"):
        llm.sleep(2)
    llm.close()


def test_prompts_are_computed_by_a_prefill_engine(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_prefill, "_MAX_SLOWDOWN", 1e9)
    monkeypatch.setattr(remote_prefill, "_MIN_WAIT_S", 60.0)
    one_launch_at_a_time(monkeypatch)
    llm = LLM(str(folder), **OPTIONS)
    expected, _ = run(llm, PROMPTS)
    llm.close()
    peer = PrefillThread(model=str(folder), prefill_listen=f"unix:{tmp_path}/pages", kv_host_bytes=1 << 20, **OPTIONS)
    with peer:
        decode = {"role": "decode", "prefill_urls": (peer.address,), "prefill_min_tokens": 8, "kv_host_bytes": 1 << 20}
        llm = LLM(str(folder), **OPTIONS, **decode)
        found, cached = run(llm, PROMPTS)
        outcomes = llm.llm_engine.stats.tiers[-1].outcomes
        llm.close()
    assert found == expected
    assert cached == [12, 12]
    assert outcomes == {"complete": 2}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        pytest.param(
            {"tensor_parallel_size": 2},
            "kv_host_bytes is 1048576 and tensor_parallel_size 2.*one GPU",
            marks=pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two devices before anything else"),
        ),
        ({"kv_host_bytes": 100}, "kv_host_bytes is 100, but a page"),
        ({"kv_host_bytes": 1 << 60}, "kv_host_bytes.*are available"),
    ],
)
def test_unsupported_options_are_refused(folder, options, match):
    with pytest.raises(ConfigError, match=match):
        LLM(str(folder), **OPTIONS | TIER | options)
