"""Where KV compression works together with tiers and prefill engines, and where it is refused."""

from dataclasses import replace

import pytest

from quire import LLM, RequestError, SamplingParams
from quire.contracts.config import EngineConfig
from quire.engine import remote_prefill
from quire.engine.kv_compression import bounds_refusal, compression_refusal
from quire.engine.request_factory import RequestFactory, RequestRules
from quire.kernels.native import load_native
from quire.worker.inspect import inspect_model
from tests.prefill_thread import PrefillThread
from tests.tiny_checkpoint import write_checkpoint

PROMPTS = [[(7 * n + 3 * n * n) % 290 for n in range(start, start + 120)] for start in (3, 90, 40)]
METHODS = (
    {"method": "streaming", "budget_tokens": 64},
    {"method": "key_norm", "budget_tokens": 96, "recent_tokens": 20},
    {"method": "snapkv", "budget_tokens": 96, "recent_tokens": 24},
)
needs_native = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("compression") / "qwen3", "qwen3"))


def start(folder, **options):
    return LLM(
        folder, skip_tokenizer_init=True, device="cpu", num_threads=1, **{"max_num_seqs": 4, "num_kv_blocks": 30, **options}
    )


def run(llm, prompts=PROMPTS):
    """Return the tokens of each method and prompt, one after the other, and how many prompt tokens were cached."""
    tokens, cached = [], []
    for fields in (*METHODS, None):
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False, kv_compression=fields)
        for prompt in prompts:
            output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
            tokens.append(list(output.outputs[0].token_ids))
            cached.append(output.metrics.num_cached_tokens)
    return tokens, cached


@needs_native
def test_tiers_keep_what_was_computed_before_the_first_eviction(folder):
    cold = start(folder, enable_prefix_caching=False)
    expected, cached = run(cold)
    cold.close()
    assert not any(cached)
    llm = start(
        folder, num_kv_blocks=12, max_num_seqs=1, kv_host_bytes=1 << 22, kv_save="all"
    )  # the prompts do not fit together
    found, cached = run(llm)
    assert found == expected
    assert llm.llm_engine.scheduler.kv.host_tier.stats.num_loaded > 0
    assert min(cached[3:]) >= 80  # of 120 tokens; snapkv computes the last 24 again
    llm.close()


@needs_native
def test_prompts_may_be_computed_by_a_prefill_engine(folder, monkeypatch):
    for name, value in (("_MAX_SLOWDOWN", 1e9), ("_MIN_WAIT_S", 60.0), ("_UNKNOWN_WAIT_S", 60.0)):
        monkeypatch.setattr(remote_prefill, name, value)
    sizes = {"num_threads": 1, "max_num_seqs": 4, "num_kv_blocks": 30, "skip_tokenizer_init": True, "device": "cpu"}
    plain = start(folder)
    expected = run(plain, PROMPTS[:1])[0]
    plain.close()
    with PrefillThread(model=folder, prefill_listen="tcp://127.0.0.1:0", **sizes) as peer:
        llm = start(folder, role="decode", prefill_urls=(peer.address,), prefill_min_tokens=32)
        assert run(llm, PROMPTS[:1])[0] == expected
        assert llm.llm_engine.stats.tiers[-1].outcomes["complete"] == 1
        llm.close()


@pytest.mark.parametrize("dtype", ["int8", "fp8", "k8v4", "turboquant_4bit"])
@needs_native
def test_quantised_caches_are_compressed_where_keys_can_be_read(folder, dtype):
    llm = start(folder, kv_cache_dtype=dtype, dtype="bfloat16")
    methods = METHODS[:1] if dtype == "turboquant_4bit" else METHODS
    for fields in (*methods, {"method": "bounds", "gap": 0.5}):
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False, kv_compression=fields)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert together == alone
    if methods is not METHODS:
        with pytest.raises(RequestError, match="'turboquant_4bit', whose keys are rotated; 'streaming' is"):
            run(llm)
    llm.close()


REFUSED = {
    "windows": ("mistral", {}, METHODS[0], "with sliding windows"),
    "ranks": ("qwen3", {"tensor_parallel_size": 2}, METHODS[0], "with tensor-parallel or context-parallel ranks or"),
    "bounds, context": (
        "qwen3",
        {"prefill_context_parallel_size": 2},
        {"method": "bounds"},
        "method 'bounds' is not supported with context-parallel ranks or enable_dp_attention",
    ),
    "bounds, trees": (
        "qwen3",
        {"speculative_config": {"method": "suffix", "suffix_decoding_use_tree_spec": True}},
        {"method": "bounds"},
        "with drafts that form trees",
    ),
    "stages": ("qwen3", {"pipeline_parallel_size": 2}, METHODS[0], "with tensor-parallel or context-parallel ranks or"),
    "drafts": (
        "qwen3",
        {"speculative_config": {"method": "self", "skipped_layers": [1], "num_speculative_tokens": 2}},
        METHODS[0],
        "with drafts of method 'self'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compressed_is_refused_with_the_reason(tmp_path, case):
    family, options, fields, message = REFUSED[case]
    folder = write_checkpoint(tmp_path / family, family)
    config = EngineConfig(model=str(folder), device="cpu", skip_tokenizer_init=True, num_kv_blocks=30, **options)
    factory = RequestFactory(RequestRules.of(inspect_model(config), config), None)
    with pytest.raises(RequestError, match=message) as caught:
        factory.make("a", 0, {"prompt_token_ids": [1]}, SamplingParams(kv_compression=fields))
    assert caught.value.param == "kv_compression"
    assert factory.make("a", 0, {"prompt_token_ids": [1]}, SamplingParams()).params.kv_compression is None


@pytest.mark.parametrize("device", ["cuda:0", "interpreter"])
def test_executors_of_gpus_do_not_compress(folder, device):
    config = EngineConfig(model=folder, device="cpu", skip_tokenizer_init=True, num_kv_blocks=30)
    report = replace(inspect_model(config), device=device)
    assert compression_refusal(report, config) == bounds_refusal(report, config) == "on a GPU"
