"""Golden checkpoints on the device give the greedy tokens of the CPU, which tests/golden compares with transformers."""

import pytest
import torch

pytest.importorskip("transformers", reason="the golden checkpoints are made by transformers")

from quire import EngineConfig
from quire.base.errors import ConfigError, UnsupportedError
from quire.engine.inspect import inspect_model
from quire.model.config_reader import read_model_spec
from quire.model.device_refusal import device_refusal
from tests.golden.make_checkpoints import CASES, DENSE_CASES, INDEXED_CASES, make_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU
from tests.unit.kernels.gpu.test_device_engine import DEVICE, greedy, outputs_of, tokens

# One is longer than windows, a chunk, and the original length of the scaled ropes (32); one decodes beside its chunks.
PROMPTS = [torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (37, 6)]
QUICK = ("llama-llama3", "gpt2-scaled", "deepseek-v3")
IN_THE_INTERPRETER = (
    *QUICK, "llama-mqa", "llama-linear", "llama-dynamic", "llama-yarn-mscale", "mistral-window", "qwen2-window", "qwen3-bias",
    "gemma", "gemma2", "gemma3-multimodal", "phi3-window", "phi3-longrope", "olmo2-bias", "granite-bias", "mixtral-window",
    "qwen3-moe-mlp-only", "gpt-oss", "qwen2-moe-window", "olmoe-renorm", "flex-olmo", "glm4-moe", "minimax-m2", "hunyuan-moe",
    "ernie4-5-moe-bias", "phimoe", "granitemoe-shared", "dots1-window", "solar-open", "exaone-moe",
    "smollm3-window", "olmo-clip", "cohere", "cohere2", "glm4", "hunyuan-dense", "nemotron", "phi", "gpt-neox", "apertus",
    "nanochat", "mistral3-ministral3", "llama4-dense", "stablelm-parallel", "opt", "deepseek-v2", "mistral4", "minicpm3",
    "glm4-moe-lite", "llama4-moe", "afmoe", "hy-v3", "mellum", "sarvam-moe", "cohere2-moe", "granitemoe-swa", "falcon-new",
    "gpt-bigcode", "gpt-neo", "laguna", "mimo-v2-flash", "minimax-m3", "bloom", "mpt", "dbrx", *INDEXED_CASES,
)  # fmt: skip
"""Every family and kind of rope once, of further dense families those with options of their own; a GPU, which is not as slow,
takes all cases."""


@pytest.mark.golden
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    "case",
    [
        case if case in QUICK else pytest.param(case, marks=pytest.mark.slow)
        for case in ((*CASES, *DENSE_CASES) if HAS_GPU else IN_THE_INTERPRETER)
    ],
)
def test_greedy_tokens_are_the_cpus(case, tmp_path):
    folder = make_checkpoint(case, tmp_path / case)
    if refusal := device_refusal(read_model_spec(folder)):
        pytest.skip(f"no GPU kernels for {refusal}")
    options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 24}
    expected, _ = outputs_of(folder, PROMPTS, greedy(4), "cpu", **options)
    found, _ = outputs_of(folder, PROMPTS, greedy(4), DEVICE, **options)
    assert tokens(found) == tokens(expected)


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("case", ["phi3-longrope", "llama-dynamic"])
def test_sequences_that_outgrow_the_short_rope_have_the_cpus_tokens(case, tmp_path):
    folder = make_checkpoint(case, tmp_path / case)
    prompts = [PROMPTS[0][:length] for length in (29, 31, 37)]
    options = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    expected, _ = outputs_of(folder, prompts, greedy(5), "cpu", **options)
    found, _ = outputs_of(folder, prompts, greedy(5), DEVICE, **options)
    assert tokens(found) == tokens(expected)


@pytest.mark.golden
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    "case",
    ["gemma4", *(pytest.param(f"gemma4-{one}", marks=pytest.mark.slow) for one in ("dense", "unified", "moe", "moe-shared"))],
)
@pytest.mark.parametrize("options", [{}, pytest.param({"deterministic": True}, marks=pytest.mark.slow)], ids=["", "in-order"])
def test_tokens_of_gemma4_are_the_cpus(case, options, tmp_path):
    folder = make_checkpoint(case, tmp_path / case)
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 24}
    expected, _ = outputs_of(folder, PROMPTS, greedy(4), "cpu", **sizes)
    found, _ = outputs_of(folder, PROMPTS, greedy(4), DEVICE, **sizes, **options)
    assert tokens(found) == tokens(expected)


def test_every_family_is_compared():
    families = {case.partition("-")[0] for case in CASES if case != "deepseek-v4"} | {"qwen3-moe", "qwen2-moe"}
    assert [family for family in families if not any(case.startswith(family) for case in IN_THE_INTERPRETER)] == []


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.covering
@pytest.mark.parametrize("case", [*INDEXED_CASES, "minimax-m3"])
@pytest.mark.parametrize(
    "options",
    [
        {"long_prefill_token_threshold": 3},
        {"block_size": 4, "num_kv_blocks": 12},
        {"speculative_config": {"method": "suffix", "suffix_decoding_use_tree_spec": True, "adaptive": False}},
        {"deterministic": True},
    ],
    ids=["chunks", "preempted", "draft-trees", "in-order"],
)
def test_tokens_of_an_indexer_do_not_depend_on_how_they_are_computed(case, options, tmp_path):
    if case == "minimax-m3" and "speculative_config" in options:  # which verifies chains
        options = {"speculative_config": {"method": "suffix", "suffix_decoding_use_tree_spec": False, "adaptive": False}}
    folder = make_checkpoint(case, tmp_path / case)
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 24}
    expected, _ = outputs_of(folder, PROMPTS, greedy(6), "cpu", **sizes)
    found, _ = outputs_of(folder, PROMPTS, greedy(6), DEVICE, **sizes, num_times=2, **options)
    assert tokens(found) == tokens(expected)


def test_what_a_gpu_does_not_run_is_refused_at_inspection(tmp_path):
    folder = make_checkpoint("gemma3n", tmp_path / "gemma3n")
    with pytest.raises(UnsupportedError, match=r"deterministic is not supported with several residual streams"):
        inspect_model(EngineConfig(model=str(folder), device=DEVICE, deterministic=True))


def test_an_indexer_needs_whole_keys_on_one_gpu(tmp_path):
    folder = str(make_checkpoint("deepseek-v32", tmp_path / "deepseek-v32"))
    with pytest.raises(ConfigError, match="an indexer of keys needs the model's own"):
        inspect_model(EngineConfig(model=folder, device=DEVICE, kv_cache_dtype="int8"))
    if torch.cuda.device_count() != 1:  # otherwise it is refused for want of devices
        with pytest.raises(ConfigError, match="an indexer of keys .* runs on one rank"):
            inspect_model(EngineConfig(model=folder, device=DEVICE, tensor_parallel_size=2))
