"""Engines with context-parallel ranks, or homes of sequences, give tokens and log probabilities of one rank, bit for bit."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

from quire import LLM
from quire.base.errors import ConfigError
from quire.base.threads import num_usable_cores
from quire.cli.main import main
from quire.contracts.config import EngineConfig
from quire.engine.inspect import inspect_model
from quire.kernels.native import load_native
from quire.worker import parallel_build, parallel_launch
from quire.worker.context_parallel import check_context_parallel, check_dp_attention
from tests.thread_workers import as_threads
from tests.unit.model.test_indexed_attention import spec_of as indexed_spec
from tests.unit.worker import rank_outputs
from tests.unit.worker.rank_outputs import cases_of, outputs_of

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

_RNG = random.Random(5)
_PHRASE = [_RNG.randrange(5, 4000) for _ in range(9)]
PROMPTS = [{"prompt_token_ids": [_RNG.randrange(5, 4000) for _ in range(length)]} for length in (250, 20, 508)]
PROMPTS.append({"prompt_token_ids": 30 * _PHRASE})
KINDS = {name: rank_outputs.KINDS[name] for name in ("greedy", "log-probabilities", "choices")}
GREEDY = KINDS["greedy"]
DCP, PCP = "decode_context_parallel_size", "prefill_context_parallel_size"
LAYOUTS = {
    "tokens-2": {"tensor_parallel_size": 2, DCP: 2},
    "tokens-3": {"tensor_parallel_size": 3, DCP: 3},
    "tokens-4": {"tensor_parallel_size": 4, DCP: 4},
    "tokens-2-of-4": {"tensor_parallel_size": 4, DCP: 2},
    "rows-2": {PCP: 2},
    "rows-3": {PCP: 3},
    "rows-2-of-2": {PCP: 2, "tensor_parallel_size": 2},
    "rows-3-of-2": {PCP: 3, "tensor_parallel_size": 2, "tensor_parallel_shares": (2, 1)},
    "homes-2-of-2": {"tensor_parallel_size": 4, "enable_dp_attention": True, "dp_attention_size": 2},
    "homes-2": {"tensor_parallel_size": 2, "enable_dp_attention": True},
    "homes-3": {"tensor_parallel_size": 3, "enable_dp_attention": True, "tensor_parallel_shares": (3, 1, 2)},
}
EXPERTS = {"model": "demo-moe", "enable_expert_parallel": True, "num_redundant_experts": 2}


@pytest.fixture(autouse=True)
def thread_workers(monkeypatch):
    """Let workers be threads; returns the groups that were made."""
    return as_threads(monkeypatch, (parallel_launch, "spawn_workers"))


def _engine(**options):
    size = options.get("tensor_parallel_size", 1) * options.get(PCP, 1)
    defaults = {"model": "demo", "num_threads": min(size, num_usable_cores()), "max_num_seqs": 8, "num_kv_blocks": 192}
    return LLM(**{**defaults, **options})


def _outputs(llm, prompts=PROMPTS, **params):
    return outputs_of(llm, prompts, **{"max_tokens": 10, "ignore_eos": True, **params})


@functools.cache
def _plain_outputs(*kinds, **options):
    """Return the outputs of one rank by kind."""
    one = _engine(**options)
    found = {name: _outputs(one, **KINDS[name]) for name in kinds}
    one.close()
    return found


QUICK = ("tokens-2", "rows-2", "rows-2-of-2", "homes-2")


@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in QUICK], ids=QUICK)
def test_greedy_tokens_are_those_of_one_rank(layout):
    one, ranks = _engine(), _engine(**layout)
    assert _outputs(ranks, PROMPTS[:2], **GREEDY) == _outputs(one, PROMPTS[:2], **GREEDY)
    one.close()
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("layout", cases_of(LAYOUTS))
def test_outputs_are_those_of_one_rank(layout):
    ranks = _engine(**layout)
    for name, expected in _plain_outputs(*KINDS).items():
        assert _outputs(ranks, **KINDS[name]) == expected, name
        assert _outputs(ranks, **KINDS[name]) == expected, f"{name} over cached prefixes"
    assert ranks.llm_engine.scheduler.prefix_cache_hits > 0
    ranks.close()


OPTIONS = {
    "chunked": {"max_num_batched_tokens": 100},
    "int8-cache": {"kv_cache_dtype": "int8", "quantization": "int8"},
    "4-bit-cache": {"kv_cache_dtype": "turboquant_4bit", "kv_cache_dtype_skip_layers": (-1,)},
    "float32": {"dtype": "float32"},
    "blocks-of-64": {"block_size": 64, "num_kv_blocks": 60},
    "mixture-of-experts": {"model": "demo-moe"},
    "no-prefix-cache": {"enable_prefix_caching": False},
}


TOKENS, ROWS, GROUPS, HOMES = "tokens-3", "rows-2", "rows-2-of-2", "homes-3"
DRAFTS = {
    "ngram": (TOKENS, {"method": "ngram", "num_speculative_tokens": 4}),
    "suffix": (TOKENS, {"method": "suffix"}),
    "draft-model": (TOKENS, {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}),
    "eagle3": (TOKENS, {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 4}),
    "mtp": (TOKENS, {"method": "mtp", "model": "demo-mtp"}),
    "suffix-tree": (ROWS, {"method": "suffix", "suffix_decoding_use_tree_spec": True}),
    "rows-draft-model": (ROWS, {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}),
    "lookahead": (ROWS, {"method": "lookahead"}),
    "medusa": (ROWS, {"method": "medusa", "model": "demo-medusa"}),
    "rows-mtp": (ROWS, {"method": "mtp", "model": "demo-mtp"}),
    "groups-mtp": (GROUPS, {"method": "mtp", "model": "demo-mtp"}),
    "groups-suffix-tree": (GROUPS, {"method": "suffix", "suffix_decoding_use_tree_spec": True}),
    "homes-ngram": (HOMES, {"method": "ngram", "num_speculative_tokens": 4}),
    "homes-suffix-tree": (HOMES, {"method": "suffix", "suffix_decoding_use_tree_spec": True}),
    "homes-of-2-suffix-tree": ("homes-2-of-2", {"method": "suffix", "suffix_decoding_use_tree_spec": True}),
    "homes-draft-model": (HOMES, {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}),
    "homes-eagle3": (HOMES, {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 4}),
    "homes-medusa": (HOMES, {"method": "medusa", "model": "demo-medusa"}),
    "homes-self": (HOMES, {"method": "self", "skipped_layers": [1], "num_speculative_tokens": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of(DRAFTS))
def test_outputs_with_drafts_are_those_of_one_rank_without(case):
    layout, drafts = case
    expected = _plain_outputs(*KINDS)
    ranks = _engine(speculative_config={**drafts, "adaptive": False}, **LAYOUTS[layout])
    for name in ("greedy", "log-probabilities"):
        assert _outputs(ranks, **KINDS[name]) == expected[name]
    assert ranks.llm_engine.stats.num_draft_tokens > 0
    ranks.close()


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("options", cases_of(OPTIONS))
@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in (TOKENS, ROWS, GROUPS, HOMES)], ids=[TOKENS, ROWS, GROUPS, HOMES])
def test_outputs_are_those_of_one_rank_with_every_option(options, layout):
    expected = _plain_outputs("greedy", "log-probabilities", **options)
    ranks = _engine(**options, **layout)
    assert {name: _outputs(ranks, **KINDS[name]) for name in expected} == expected
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "num_kv_blocks"), [(TOKENS, 48), (ROWS, 34), ("homes-2", 38)])
def test_outputs_of_preempted_sequences_are_those_of_one_rank(layout, num_kv_blocks):
    one, ranks = _engine(), _engine(num_kv_blocks=num_kv_blocks, **LAYOUTS[layout])
    prompts = [*PROMPTS[:2], {"prompt_token_ids": PROMPTS[3]["prompt_token_ids"][:240]}]
    params = {"temperature": 0.8, "max_tokens": 24}
    assert _outputs(ranks, prompts, **params) == _outputs(one, prompts, **params)
    assert ranks.llm_engine.scheduler.num_preemptions > 0
    one.close()
    ranks.close()


@pytest.mark.parametrize(
    "options",
    cases_of({"2": LAYOUTS["homes-2"], "3": LAYOUTS["homes-3"], "4": LAYOUTS["homes-2-of-2"]}, "2"),
)
def test_homes_share_the_experts(options):
    one, ranks = _engine(model="demo-moe"), _engine(**EXPERTS, **options)
    for prompts, params in ((PROMPTS[:2], GREEDY), (PROMPTS[1:2], KINDS["log-probabilities"])):
        params = {**params, "max_tokens": 3}
        assert _outputs(ranks, prompts, **params) == _outputs(one, prompts, **params)
    assert [s.tokens for s in ranks.llm_engine.stats.experts] == [s.tokens for s in one.llm_engine.stats.experts]
    assert all(sum(s.rank_tokens) == sum(s.tokens) for s in ranks.llm_engine.stats.experts)
    one.close()
    ranks.close()


def test_experts_count_the_tokens_of_all_ranks():
    one, ranks = _engine(model="demo-moe"), _engine(model="demo-moe", **LAYOUTS["rows-2"])
    for llm in (one, ranks):
        _outputs(llm, PROMPTS[:1], max_tokens=2, temperature=0.0)
    assert [s.tokens for s in ranks.llm_engine.stats.experts] == [s.tokens for s in one.llm_engine.stats.experts]
    one.close()
    ranks.close()


def test_the_cache_of_each_rank_has_its_part_of_the_blocks(capsys):
    """The demo model has two key and value heads: four tensor-parallel ranks hold each of them twice."""
    ranks = _engine(**LAYOUTS["tokens-4"])
    config, report = ranks.llm_engine.config, ranks.llm_engine.report
    memories = parallel_build.rank_memories(config, report)
    whole = report.memory.kv.bytes_per_block * report.memory.num_kv_blocks
    assert [memory.kv_bytes for memory in memories] == [whole // 4] * 4
    assert report.memory.kv_bytes == whole
    assert report.memory.num_local_blocks == 48
    ranks.close()
    options = ["inspect", "demo", "-tp", "4", "--kv-cache-memory-bytes", str(64 << 20)]
    shown = []
    for more in ([], ["-dcp", "4"]):
        assert main([*options, *more]) == 0
        shown.append(capsys.readouterr().out)
    sizes = [int(text.split("KV cache ")[1].split(": ")[1].split(" blocks")[0].replace(",", "")) for text in shown]
    assert sizes[1] == 2 * sizes[0]  # no head is held twice
    assert "4 ranks share the tokens of a sequence, 256 in turn" in shown[1]
    assert "1/4 of the tokens of a sequence" in shown[1]
    assert main(["inspect", "demo", "-tp", "2", "--enable-dp-attention", "--num-kv-blocks", "64"]) == 0
    text = capsys.readouterr().out
    assert "2 homes attend to sequences of their own: each holds 32 blocks, 512 tokens" in text
    assert "the sequences at home here: 32 blocks" in text
    assert main(["inspect", "demo", "-pcp", "2"]) == 0
    assert "computes 1/2 of the tokens of a prompt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({DCP: 2}, "decode_context_parallel_size must divide tensor_parallel_size, .* got 2 and 1"),
        ({DCP: 2, "tensor_parallel_size": 3}, "must divide tensor_parallel_size, .* got 2 and 3"),
        ({DCP: 0}, "decode_context_parallel_size must be an integer >= 1, got 0"),
        (
            {**LAYOUTS["tokens-2"], PCP: 2},
            "prefill_context_parallel_size is 2 and decode_context_parallel_size 2: both together",
        ),
        ({PCP: 2, "pipeline_parallel_size": 2}, "prefill_context_parallel_size is 2 and pipeline_parallel_size 2"),
        ({PCP: 2, "kv_host_bytes": 1 << 20}, "kv_host_bytes is 1048576 and prefill_context_parallel_size 2"),
        ({**LAYOUTS["homes-2"], PCP: 2}, "enable_dp_attention is True and prefill_context_parallel_size 2"),
        ({"enable_dp_attention": True}, "enable_dp_attention is True, but tensor_parallel_size is 1"),
        ({**LAYOUTS["homes-2"], "num_kv_blocks": 33}, "num_kv_blocks is 33, .* must be a multiple of 2"),
        ({**LAYOUTS["homes-2"], "kv_host_bytes": 1 << 20}, "kv_host_bytes is 1048576 and enable_dp_attention True"),
        ({PCP: 2, "enable_lora": True}, "prefill_context_parallel_size is 2, but with LoRA adapters"),
        ({**LAYOUTS["tokens-2"], "num_kv_blocks": 48}, "num_kv_blocks is 48, .* must be a multiple of 32"),
        ({**LAYOUTS["tokens-2"], "block_size": 48}, "block_size is 48 .* must be a divisor of 256"),
        (
            {PCP: 2, "speculative_config": {"method": "eagle3", "model": "demo-eagle3"}},
            "prefill_context_parallel_size is 2, but the speculative method 'eagle3' is not supported",
        ),
        (
            {**LAYOUTS["tokens-2"], "speculative_config": {"method": "medusa", "model": "demo-medusa"}},
            "decode_context_parallel_size is 2, but the speculative method 'medusa' is not supported",
        ),
        (
            {**LAYOUTS["tokens-2"], "speculative_config": {"method": ["ngram", "suffix"]}},
            "method is .*'ngram', 'suffix'.* and decode_context_parallel_size 2: draft trees",
        ),
        (
            {**LAYOUTS["tokens-2"], "speculative_config": {"method": "mtp", "model": "demo-mtp", "draft_top_k": 2}},
            "draft_top_k is 2 and decode_context_parallel_size 2: draft trees",
        ),
        (
            {**LAYOUTS["tokens-2"], "speculative_config": {"method": "suffix", "suffix_decoding_use_tree_spec": True}},
            "suffix_decoding_use_tree_spec is True and decode_context_parallel_size 2",
        ),
    ],
)
def test_what_context_parallel_ranks_do_not_run_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**LAYOUTS["tokens-2"], "kv_cache_dtype": "turboquant_4bit"}, "does not support kv_cache_dtype 'turboquant_4bit'"),
        ({**LAYOUTS["rows-2"], "attention_backend": "flashinfer"}, "does not support attention_backend 'flashinfer'"),
        ({**LAYOUTS["tokens-2"], "block_size": 48}, "block_size is 48 .* must be a divisor of 256"),
        ({**LAYOUTS["tokens-2"], "num_kv_blocks": 12}, "num_kv_blocks is 12, .* must be a multiple of 8"),
        (
            {**LAYOUTS["tokens-2"], "speculative_config": {"method": "mtp", "model": "demo-mtp"}},
            "the speculative method 'mtp' is not supported with it; choose one of ngram, suffix",
        ),
        (
            {**LAYOUTS["rows-2"], "speculative_config": {"method": "medusa", "model": "demo-medusa"}},
            "choose one of ngram, suffix, lookahead, draft_model",
        ),
    ],
)
def test_what_context_parallel_ranks_on_gpus_do_not_run_is_refused(options, message):
    spec = inspect_model(EngineConfig(model="demo")).spec
    check_context_parallel(EngineConfig(model="demo", **LAYOUTS["tokens-2"]), spec, "cuda:0")
    with pytest.raises(ConfigError, match=message):
        check_context_parallel(EngineConfig(model="demo", **options), spec, "cuda:0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LAYOUTS["homes-2-of-2"], "dp_attention_size is 2, but the model runs on cuda:0, where a home is one rank"),
        (
            {**LAYOUTS["homes-2"], "speculative_config": {"method": "eagle3", "model": "demo-eagle3"}},
            "eagle3 reads the inputs of layers, of which a rank on cuda:0",
        ),
        ({**LAYOUTS["homes-2"], "num_kv_blocks": 33}, "num_kv_blocks is 33, .* must be a multiple of 2"),
    ],
)
def test_homes_that_gpus_do_not_run_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        check_dp_attention(EngineConfig(model="demo", **options), inspect_model(EngineConfig(model="demo")).spec, "cuda:0")


@pytest.mark.parametrize("layout", ["tokens-2", "rows-2", "homes-2"])
def test_what_attention_over_the_tokens_of_other_ranks_does_not_have_is_refused(layout):
    config = EngineConfig(model="demo", **LAYOUTS[layout])
    check = check_dp_attention if layout == "homes-2" else check_context_parallel
    with pytest.raises(ConfigError, match=r"is \w+, but the indexer of a 'deepseek_v32' model chooses among the keys of all"):
        check(config, indexed_spec("float32"), "cpu")
    if layout != "rows-2":
        spec = inspect_model(config).spec
        gated = replace(spec.layers[0], attention=replace(spec.layers[0].attention, has_output_gate=True))
        with pytest.raises(ConfigError, match="the attention of a '.*' model has an output gate"):
            check(config, replace(spec, layers=(gated,)), "cpu")


def test_a_norm_over_all_heads_is_refused_where_ranks_of_a_home_divide_them():
    config = EngineConfig(model="demo", **LAYOUTS["homes-2-of-2"])
    spec = inspect_model(config).spec
    layer = spec.layers[0]
    attention = replace(layer.attention, qk_norm=layer.attn_in, qk_norm_over="all")
    with pytest.raises(ConfigError, match="dp_attention_size is 2, but the model .* norms q and k over all heads"):
        check_dp_attention(config, replace(spec, layers=(replace(layer, attention=attention),)), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tokens-2", ROWS])
@pytest.mark.parametrize("level", [1, 2])
def test_pools_are_dropped_and_outputs_stay_when_ranks_sleep(layout, level):
    drafts = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 2, "adaptive": False}
    ranks = _engine(**LAYOUTS[layout], speculative_config=drafts)
    expected = _outputs(ranks, PROMPTS[:3], **GREEDY)
    executor = ranks.llm_engine.runner.executor
    pools = [executor.target.kv, *ranks.llm_engine.speculator.pools]
    assert len(pools) == 2
    assert all(any(array.any() for array in pool.arrays()) for pool in pools)
    ranks.sleep(level)
    assert level == 2 or not any(array.any() for pool in pools for array in pool.arrays())
    del executor, pools
    ranks.wake_up()
    assert _outputs(ranks, PROMPTS[:3], **GREEDY) == expected
    ranks.close()
