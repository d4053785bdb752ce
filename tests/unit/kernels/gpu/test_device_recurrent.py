"""Models with a recurrent state on the device give the greedy tokens of the CPU."""

import math

import pytest
import torch

pytest.importorskip("transformers", reason="the golden checkpoints are made by transformers")

from quire import LLM
from quire.base.errors import ConfigError
from quire.kv import device_pages
from quire.model.checkpoint import distinct_shapes, open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.device_weights import load_on_device, tensors_of
from quire.model.parameters import parameter_shapes
from quire.quant.policy import DEVICE_POLICIES, parameter_quantizer
from tests.golden.make_checkpoints import make_checkpoint
from tests.unit.kernels.gpu.test_device_engine import DEVICE, OPTIONS, greedy, outputs_of, tokens
from tests.unit.kernels.gpu.test_device_pages import LateStream

# The third one begins as the first one does, and starts from its checkpoint.
FIRST = torch.randint(3, 131, (21,), generator=torch.Generator().manual_seed(37)).tolist()
PROMPTS = [FIRST, FIRST[:6], [*FIRST[:17], 5, 6]]
SIZES = {"max_model_len": 48, "max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 16}
QUICK = ("qwen3-next", "falcon-h1")
SLOW = (
    *("qwen3-5", "qwen3-5-moe", "qwen3-next-dense", "lfm2", "lfm2-moe", "lfm2-plain", "bamba", "bamba-options"),
    *("granite-hybrid", "granite-hybrid-dense", "jamba", "jamba-dense", "falcon-h1-norm", "falcon-h1-gate"),
    *("nemotron-h", "nemotron-h-options", "kimi-linear", "mamba", "mamba2", "zamba2", "olmo-hybrid"),
)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("few_programs")]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_greedy_tokens_are_the_cpus(case, tmp_path):
    folder = make_checkpoint(case, tmp_path / case)
    expected, _ = outputs_of(folder, PROMPTS, greedy(4), "cpu", **SIZES)
    found, _ = outputs_of(folder, PROMPTS, greedy(4), DEVICE, **SIZES)
    assert tokens(found) == tokens(expected)


@pytest.mark.parametrize("policy", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_layers_share_the_weights_of_a_block_on_the_device(policy, device, tmp_path):
    folder = make_checkpoint("zamba2", tmp_path / "zamba2")
    spec = read_model_spec(folder)
    shapes, hybrid = parameter_shapes(spec), [i for i, layer in enumerate(spec.layers) if layer.shared_block is not None]
    quantize = policy and parameter_quantizer(opened := open_parameters(folder, spec), spec, DEVICE_POLICIES[policy])
    weights = load_on_device(opened if policy else open_parameters(folder, spec), spec, device, quantize)
    first, other = (list(tensors_of(weights.linears[f"layers.{index}.qkv.weight"][0])) for index in (hybrid[0], hybrid[2]))
    assert [part.data_ptr() for part in first] == [part.data_ptr() for part in other]
    own = {tensor.data_ptr(): tensor.numel() for tensor in weights.all_tensors() if tensor.numel()}
    if policy is None:
        assert sum(own.values()) == sum(map(math.prod, distinct_shapes(folder, spec, shapes).values()))
    assert sum(own.values()) < 0.9 * sum(map(math.prod, shapes.values()))


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("case", ["qwen3-5", "lfm2", "bamba"])
@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": DRAFTS},
        {"num_kv_blocks": 3},
        {"deterministic": True},
        {"async_scheduling": False},
        {"cpu_offload_gb": 1},
    ],
    ids=["drafts", "preempted", "batch-invariant", "synchronous", "offloaded"],
)
def test_tokens_do_not_depend_on_how_they_are_computed(case, options, tmp_path):
    folder = make_checkpoint(case, tmp_path / case)
    expected, _ = outputs_of(folder, PROMPTS, greedy(12), "cpu", **SIZES)
    found, _ = outputs_of(folder, PROMPTS, greedy(12), DEVICE, **{**SIZES, **options})
    assert tokens(found) == tokens(expected)


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("case", ["qwen3-next", "mamba"])
def test_states_from_the_host_tier_give_the_same_tokens(case, is_late, tmp_path, monkeypatch):
    if is_late:
        monkeypatch.setattr(device_pages, "HostCopyStream", LateStream)
    llm = LLM(
        str(make_checkpoint(case, tmp_path / case)),
        device=DEVICE,
        **{**OPTIONS, **SIZES, "num_kv_blocks": 3, "kv_host_bytes": 1 << 20, "kv_save": "all"},
    )
    prompts = [FIRST, [*FIRST[5:20], *FIRST[:18]]]  # the second one takes all blocks
    expected = [tokens(llm.generate([prompt], greedy(4), use_tqdm=False)) for prompt in prompts]
    found = [llm.generate([prompt], greedy(4), use_tqdm=False) for prompt in prompts]
    tier = llm.llm_engine.scheduler.kv.host_tier
    llm.close()
    assert [tokens(outputs) for outputs in found] == expected
    assert [outputs[0].metrics.num_cached_tokens for outputs in found] == [16, 32]
    assert tier.stats.num_loaded > 1
    assert tier.find_problem() is None


@pytest.mark.slow
def test_states_leave_the_device_while_the_engine_sleeps(tmp_path):
    options = {**OPTIONS, **SIZES, "max_num_seqs": 1, "cpu_offload_gb": 1}
    llm = LLM(str(make_checkpoint("lfm2", tmp_path / "lfm2")), device=DEVICE, **options)
    expected = tokens(llm.generate(PROMPTS[1:2], greedy(2), use_tqdm=False))
    states = llm.llm_engine.runner.executor.kv_pool.states
    assert any(states)
    for level in (1, 2):
        llm.sleep(level)
        assert not any(part.untyped_storage().nbytes() for layer in states for part in layer)
        llm.wake_up()
        assert tokens(llm.generate(PROMPTS[1:2], greedy(2), use_tqdm=False)) == expected
        states = []
    llm.close()


TWO_RANKS = pytest.param(
    {"tensor_parallel_size": 2},
    id="ranks",
    marks=pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two devices before anything else"),
)


@pytest.mark.parametrize("options", [pytest.param({"kv_cache_dtype": "int8"}, id="cache"), TWO_RANKS])
def test_options_that_such_models_do_not_have_are_refused(options, tmp_path):
    folder = make_checkpoint("lfm2", tmp_path / "lfm2")
    with pytest.raises(ConfigError, match=f"{next(iter(options))} .*recurrent state"):
        outputs_of(folder, PROMPTS, greedy(4), DEVICE, max_model_len=64, **options)
