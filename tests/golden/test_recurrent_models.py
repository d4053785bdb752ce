"""Models with a recurrent state against transformers: logits, and greedy tokens however a sequence is computed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers.models.minimax import modeling_minimax
from transformers.models.minimax_m2 import modeling_minimax_m2

from quire.base.environment import environment_with_quire
from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.engine import remote_prefill
from quire.kernels.native import load_native
from quire.model.build import build_model, load_model, whole_prompt_logits
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.worker import parallel_launch, pipeline_build
from quire.worker.inspect import inspect_model
from tests.golden.engines import cpu_engine, generate_tokens
from tests.golden.greedy import greedy_choices
from tests.golden.make_checkpoints import reference_model
from tests.golden.recurrent_cases import CASES, WRAPPED
from tests.ports import free_port
from tests.prefill_thread import PrefillThread
from tests.thread_workers import ThreadWorkers

pytestmark = pytest.mark.golden

VOCAB_SIZE, NUM_TOKENS = 131, 64
BF16_SHARE = 1.25
"""Of the error of transformers in bfloat16: sums of states over several tokens have another order there."""
ROUNDED_STATES = ("jamba", "jamba-dense", "mamba", "mamba-options", "falcon-mamba", "minimax")
"""Whose states transformers rounds before it multiplies them by C; quire does not, nor do the kernels of mamba-ssm."""
TORCH_CASES = ("minimax",)
"""Which no native kernel runs."""
TOLERANCE = 1e-4
OWN_TOLERANCES = {"zamba2": 1e-3}
"""Whose blocks without residual connections amplify rounding: transformers in f32 differs by 4e-4 from itself in f64."""
FAST_GENERATED = ("qwen3-next", "lfm2", "nemotron-h", "falcon-h1")
SLOW_GENERATED = (
    *("qwen3-5", "lfm2-moe", "bamba", "granite-hybrid", "jamba", "mamba", "falcon-mamba", "mamba2", "kimi-linear"),
    *("falcon-h1-norm", "nemotron-h-options", "zamba2", "lfm3", "olmo-hybrid", "minimax"),
)
GENERATED_CASES = (*FAST_GENERATED, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_GENERATED))
# More than a KV block, less than one, and just one token.
PROMPTS = [torch.randint(3, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (37, 1, 16, 50)]
OPTIONS = {
    "batched": {},
    "alone": {"max_num_seqs": 1},
    "chunks of 1": {"long_prefill_token_threshold": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "preempted": {"num_kv_blocks": 14},
    "preempted without a cache": {"num_kv_blocks": 14, "enable_prefix_caching": False},
    "drafts": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False, "prompt_lookup_min": 1}
    },
}


def generate(llm, prompts, num_tokens=NUM_TOKENS, **params):
    return generate_tokens(llm, prompts, num_tokens, **params)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return a function: case -> the greedy output of each prompt, each of whose tokens transformers chooses too."""
    found = {}

    def find(case):
        if case not in found:
            folder = checkpoint(case)
            found[case] = [choices[0] for choices in generate(cpu_engine(folder), PROMPTS)]
            model = reference_model(folder)
            for prompt, output in zip(PROMPTS, found[case], strict=True):
                assert greedy_choices(model, prompt, output, allows_end=False) == output
        return found[case]

    return find


@pytest.mark.covering
@pytest.mark.parametrize("style", ["v5", "v4"])
@pytest.mark.parametrize("case", [*CASES, *WRAPPED])
def test_f32_logits_are_those_of_transformers(checkpoint, case, style):
    folder = checkpoint(case, style)
    prompt = torch.randint(0, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(70)).tolist()
    with torch.inference_mode():
        want = reference_model(checkpoint(case))(torch.tensor([prompt])).logits[0]
    assert (whole_prompt_logits(load_model(folder), prompt) - want).abs().max() <= OWN_TOLERANCES.get(case, TOLERANCE)
    spec = read_model_spec(folder)
    native = build_model(spec, open_parameters(folder, spec), 128, 16)
    assert isinstance(native, NativeDecoder) == (load_native() is not None and case not in TORCH_CASES)
    assert (whole_prompt_logits(native, prompt) - want).abs().max() <= OWN_TOLERANCES.get(case, TOLERANCE)


def test_minimax_rotates_a_part_of_each_head_as_minimax_m2_does(checkpoint, tmp_path, monkeypatch):
    """transformers rotates whole heads of MiniMax, the published files (rotary_dim) and its MiniMax-M2 a half."""
    folder = shutil.copytree(checkpoint("minimax", "v4"), tmp_path / "half")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rotary_dim": 8}))
    model = reference_model(checkpoint("minimax"))
    rope = {**model.config.rope_parameters, "partial_rotary_factor": 0.5}
    monkeypatch.setattr(model.config, "rope_parameters", rope)
    model.model.rotary_emb = modeling_minimax_m2.MiniMaxM2RotaryEmbedding(model.config)
    monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", modeling_minimax_m2.apply_rotary_pos_emb)
    with torch.inference_mode():
        want = model(torch.tensor([PROMPTS[0]])).logits[0]
    assert (whole_prompt_logits(load_model(folder), PROMPTS[0]) - want).abs().max() <= TOLERANCE
    assert (whole_prompt_logits(load_model(checkpoint("minimax")), PROMPTS[0]) - want).abs().max() > 10 * TOLERANCE


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES)
def test_bf16_logits_round_where_transformers_rounds(checkpoint, case):
    folder = checkpoint(case)
    exact, rounded, ours = reference_model(folder), reference_model(folder, torch.bfloat16), load_model(folder, "bfloat16")
    for length in (1, 37):
        prompt = PROMPTS[0][:length]
        with torch.inference_mode():
            want, near = (model(torch.tensor([prompt])).logits[0].float() for model in (exact, rounded))
        found = whole_prompt_logits(ours, prompt).float()
        if length == 1:
            assert case in ROUNDED_STATES or torch.equal(found, near)
            continue
        assert (found - want).abs().mean() <= BF16_SHARE * (near - want).abs().mean()


@pytest.mark.covering
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("case", GENERATED_CASES)
def test_greedy_tokens_are_the_same_however_they_are_computed(checkpoint, expected, case, how):
    llm = cpu_engine(checkpoint(case), **OPTIONS[how])
    assert [choices[0] for choices in generate(llm, PROMPTS)] == expected(case)
    scheduler = llm.llm_engine.scheduler
    assert (scheduler.num_preemptions > 0) == ("preempted" in how)
    if how == "drafts":
        assert llm.llm_engine.stats.num_accepted_tokens > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", GENERATED_CASES)
def test_cached_prefixes_and_forks_give_the_same_tokens(checkpoint, expected, case):
    llm, outputs = cpu_engine(checkpoint(case)), expected(case)
    generate(llm, PROMPTS)
    scheduler = llm.llm_engine.scheduler
    num_hits = scheduler.prefix_cache_hits
    assert [choices[0] for choices in generate(llm, PROMPTS)] == outputs
    assert scheduler.prefix_cache_hits - num_hits == 32 + 48  # whole blocks before the last token
    turns = [prompt + output[:40] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    assert [choices[0] for choices in generate(llm, turns, 24)] == [output[40:] for output in outputs]
    fresh = cpu_engine(checkpoint(case), enable_prefix_caching=False)
    forks = generate(fresh, PROMPTS, 20, n=3, temperature=1.0, top_k=1)
    assert forks == [[output[:20]] * 3 for output in outputs]


GROUPS = {
    "ranks": {"tensor_parallel_size": 2, "tensor_parallel_shares": (2, 1), "num_kv_blocks": 8},
    "stages": {"pipeline_parallel_size": 2, "num_kv_blocks": 6},
    "stages of ranks": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_kv_blocks": 8},
}


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize(
    ("case", "group"),
    [
        ("qwen3-next", "ranks"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("jamba", "ranks"), ("lfm2", "stages"), ("bamba", "stages of ranks"))
        ),
    ],
)
def test_ranks_and_stages_give_the_same_tokens(monkeypatch, checkpoint, expected, case, group):
    monkeypatch.setattr(parallel_launch, "spawn_workers", ThreadWorkers)
    monkeypatch.setattr(pipeline_build, "spawn_workers", ThreadWorkers)
    outputs = expected(case)
    # Few blocks: a sequence is preempted. The second time prefixes come from the cache; some drafts are rejected.
    llm = cpu_engine(checkpoint(case), **GROUPS[group], **OPTIONS["drafts"])
    for prompts, count in ((PROMPTS, 24), (PROMPTS[3:], 8)):
        wanted = [output[:count] for output in outputs[-len(prompts) :]]
        assert [choices[0] for choices in generate(llm, prompts, count)] == wanted
    scheduler, stats = llm.llm_engine.scheduler, llm.llm_engine.stats
    assert scheduler.num_preemptions > 0
    assert scheduler.prefix_cache_hits > 0
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert generate(llm, PROMPTS[1:2], 8, n=3, temperature=1.0, top_k=1) == [[outputs[1][:8]] * 3]
    llm.close()


TIERS = {
    "one process": {},
    "drafts": OPTIONS["drafts"],
    "small host tier": {"kv_save": "write_through"},
    "ranks": {"tensor_parallel_size": 2, "tensor_parallel_shares": (2, 1)},
    "stages": {"pipeline_parallel_size": 2},
    "stages of ranks": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("qwen3-next", "one process"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("lfm2", "drafts"),
                ("falcon-h1", "small host tier"),
                ("mamba", "one process"),
                ("mamba2", "drafts"),
                ("zamba2", "one process"),
                ("nemotron-h", "one process"),
                ("kimi-linear", "drafts"),
                ("qwen3-next", "ranks"),
                ("falcon-mamba", "ranks"),
                ("lfm2", "stages"),
                ("bamba", "stages of ranks"),
            )
        ),
    ],
)
def test_states_from_tiers_give_the_same_tokens(monkeypatch, tmp_path, checkpoint, expected, case, how):
    monkeypatch.setattr(parallel_launch, "spawn_workers", ThreadWorkers)
    monkeypatch.setattr(pipeline_build, "spawn_workers", ThreadWorkers)
    tiers = {"kv_disk_dir": str(tmp_path / "tier"), "kv_disk_bytes": 64 << 20, "kv_host_bytes": 4 << 20, "kv_save": "all"}
    tiers |= {"num_kv_blocks": 14, **TIERS[how]}
    if how == "small host tier":
        tiers["kv_host_bytes"] = 300_000
    # Ranks and stages in threads of one process, and torch, are slow.
    outputs, hits, num_tokens = expected(case), [], 4 if "rank" in how or how == "stages" or case == "zamba2" else NUM_TOKENS
    for _ in range(2):  # a cold engine, whose sequences are preempted, and one that finds the pages on disk
        llm = cpu_engine(checkpoint(case), **tiers)
        for _ in range(2 if num_tokens == NUM_TOKENS else 1):
            assert [choices[0] for choices in generate(llm, PROMPTS, num_tokens)] == [output[:num_tokens] for output in outputs]
        hits.append(llm.llm_engine.scheduler.prefix_cache_hits)
        tier = llm.llm_engine.scheduler.kv.host_tier
        assert tier.find_problem() is None
        llm.close()
    # Whole blocks before the last token; pages that have to be read again are computed where the disk is slow.
    assert hits[1] >= (32 if how == "small host tier" else 80)
    assert tier.stats.num_disk_hits > 1


@pytest.mark.slow
@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("how", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_that_a_launcher_has_started_share_the_pages_of_states(monkeypatch, checkpoint, expected, how):
    options = {how: 2, "num_kv_blocks": 60, "num_threads": 1, "kv_host_bytes": 4 << 20, "kv_save": "all"}
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code = f"from tests.golden.engines import cpu_engine; cpu_engine({str(checkpoint('qwen3-next'))!r}, **{options!r})"
    environment = environment_with_quire() | told | {"RANK": "1", "LOCAL_RANK": "1"}
    worker = subprocess.Popen([sys.executable, "-c", code], env=environment)
    for name, value in (told | {"RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    llm = cpu_engine(checkpoint("qwen3-next"), **options)
    for _ in range(2):
        assert [choices[0] for choices in generate(llm, PROMPTS)] == expected("qwen3-next")
        llm.sleep(1)  # empties the prefix cache
        llm.wake_up()
    assert llm.llm_engine.scheduler.prefix_cache_hits >= 80
    llm.close()
    assert worker.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("case", ["qwen3-next", "mamba"])
def test_prompts_of_another_engine_give_the_same_tokens(monkeypatch, tmp_path, checkpoint, expected, case):
    monkeypatch.setattr(remote_prefill, "_MAX_SLOWDOWN", 1e9)
    monkeypatch.setattr(remote_prefill, "_MIN_WAIT_S", 60.0)
    outputs, sizes = expected(case), {"max_num_seqs": 3, "num_kv_blocks": 60, "kv_host_bytes": 8 << 20}
    roles = {"role": "decode", "prefill_min_tokens": 16, **sizes}
    peer = PrefillThread(
        model=str(checkpoint(case)), skip_tokenizer_init=True, device="cpu", prefill_listen=f"unix:{tmp_path}/pages", **sizes
    )
    with peer:
        llm = cpu_engine(checkpoint(case), prefill_urls=(peer.address,), **roles)
        for _ in range(2):  # the second time everything is in the pool
            assert [choices[0] for choices in generate(llm, PROMPTS)] == outputs
        found, stats = llm.llm_engine.stats.tiers[-1], llm.llm_engine.scheduler
        assert found.outcomes["complete"] == 2
        assert found.num_hits == found.num_loaded > 0
        assert stats.prefix_cache_hits == 2 * 80  # whole blocks before the last token, also the first time
        assert stats.kv.host_tier.num_pinned == 0
        llm.close()


def test_memory_plan_counts_the_states(checkpoint):
    spec = read_model_spec(checkpoint("qwen3-next"))
    report = inspect_model(engine_config(checkpoint("qwen3-next"), max_num_seqs=3))
    delta = spec.layers[0].mixer
    one = 3 * (6 * 12 * 20 * 4 + delta.conv_channels * 3 * 4)
    assert report.memory.kv.bytes_per_state == one
    assert report.memory.num_states == 3 * 2 + report.memory.num_state_checkpoints
    assert report.memory.state_bytes == one * report.memory.num_states
    assert f"{report.memory.num_states:,} recurrent states" in report.memory.describe()
    assert report.memory.kv.bytes_per_token == 2 * 2 * 16 * 4  # of the one layer with attention


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_states_start_anew_when_the_engine_has_slept(checkpoint, expected, level):
    llm = cpu_engine(checkpoint("falcon-h1"))
    for _ in range(2):
        assert [choices[0] for choices in generate(llm, PROMPTS)] == expected("falcon-h1")
        llm.sleep(level)
        llm.wake_up()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 7}, "tensor_parallel_size must be at most"),
        ({"tensor_parallel_size": 2, "enable_dp_attention": True}, "enable_dp_attention is True"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        ({"kv_host_bytes": 16_000}, "a KV block and a state take [0-9]* bytes of kv_host_bytes, which is 16000"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype 'int8'"),
        ({"kv_cache_dtype": "turboquant_4bit"}, "kv_cache_dtype 'turboquant_4bit'"),
        ({"speculative_config": {"method": "lookahead"}}, "method 'lookahead' is not supported"),
        ({"speculative_config": {"method": "self", "skipped_layers": [1]}}, "method 'self' is not supported"),
        ({"speculative_config": {"method": ["ngram", "suffix"]}}, "method has 2 values"),
        ({"speculative_config": {"method": "suffix", "suffix_decoding_use_tree_spec": True}}, "suffix_decoding_use_tree_spec"),
    ],
)
def test_what_a_recurrent_state_does_not_allow_is_refused_by_name(checkpoint, options, named):
    with pytest.raises(ConfigError, match=named):
        inspect_model(engine_config(checkpoint("qwen3-next"), **options))


def test_draft_model_with_a_recurrent_state_is_refused(checkpoint):
    folder = checkpoint("lfm2")
    drafts = {"method": "draft_model", "model": str(folder)}
    with pytest.raises(ConfigError, match="model: .*recurrent state"):
        inspect_model(engine_config(folder, speculative_config=drafts))


def engine_config(folder, **options):
    return EngineConfig(model=str(folder), skip_tokenizer_init=True, device="cpu", **options)
