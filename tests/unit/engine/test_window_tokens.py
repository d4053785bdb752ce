"""Tokens of models with a window group are those of the same models with one group, however the blocks are used."""

import pytest

from quire import LLM, SamplingParams
from quire.worker import memory, parallel_launch, pipeline_build
from tests.thread_workers import ThreadWorkers
from tests.tiny_checkpoint import write_checkpoint

FAMILIES = ["gemma2", "mistral", "gpt_oss"]  # windows of 11 or 13 tokens
PROMPTS = [[7 * n % 290 for n in range(start, start + length)] for start, length in ((3, 37), (90, 45), (200, 61))]
NUM_TOKENS = 30
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
SETTINGS = {
    "batched": {},
    "chunks of 1": {"long_prefill_token_threshold": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "preempted": {"num_kv_blocks": 10},
    "drafts": {"speculative_config": NGRAM},
    "draft trees": {"speculative_config": {"method": "suffix", "suffix_decoding_use_tree_spec": True, "adaptive": False}},
}
RANKS = {
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks with draft trees": {"tensor_parallel_size": 2, **SETTINGS["draft trees"]},
    "two stages": {"pipeline_parallel_size": 2},
    "two stages with drafts": {"pipeline_parallel_size": 2, "speculative_config": NGRAM},
    "two stages, preempted": {"pipeline_parallel_size": 2, "num_kv_blocks": 10},
}
ONE_GROUP = {
    "tiers": {"kv_host_bytes": 1 << 24},
    "layer skipping": {
        "speculative_config": {"method": "self", "skipped_layers": [1], "num_speculative_tokens": 2, "adaptive": False}
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("windows") / request.param, request.param)


def make_engine(folder, **options):
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 23, "num_kv_blocks": 60, "max_model_len": 128, **options}
    return LLM(str(folder), skip_tokenizer_init=True, device="cpu", **{"block_size": 16, **options})


def greedy(llm, prompts, num_tokens=NUM_TOKENS):
    """Return the outputs of prompts, and how many of their tokens came from cached prefixes."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], [output.metrics.num_cached_tokens for output in outputs]


def generate(folder, **options):
    """Return the tokens of the prompts twice, the second time with cached prefixes, and of three choices; and the engine."""
    llm = make_engine(folder, **options)
    choices = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    found = [greedy(llm, PROMPTS)[0], greedy(llm, PROMPTS)[0]]
    outputs = llm.generate([{"prompt_token_ids": PROMPTS[1]}], choices, use_tqdm=False)
    found.append([list(choice.token_ids) for choice in outputs[0].outputs])
    llm.close()
    return found, llm.llm_engine


@pytest.fixture(scope="module")
def expected(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "limits_windows", lambda *_: False)
        found, engine = generate(folder)
    assert engine.scheduler.kv.windows is None
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_one_group(folder, expected, setting):
    found, engine = generate(folder, **SETTINGS[setting])
    windows = engine.scheduler.kv.windows
    assert windows is not None
    assert windows.pool.num_blocks < 60
    assert (setting == "preempted") == (engine.scheduler.num_preemptions > 0)
    assert found == expected


@pytest.mark.covering
@pytest.mark.parametrize("setting", RANKS)
def test_ranks_and_stages_give_the_tokens_of_one_group(folder, expected, monkeypatch, setting):
    monkeypatch.setattr(parallel_launch, "spawn_workers", ThreadWorkers)
    monkeypatch.setattr(pipeline_build, "spawn_workers", ThreadWorkers)
    found, engine = generate(folder, num_threads=2, **RANKS[setting])
    assert engine.scheduler.kv.windows is not None
    assert ("preempted" in setting) == (engine.scheduler.num_preemptions > 0)
    assert found == expected


@pytest.mark.parametrize("setting", ONE_GROUP)
def test_tokens_are_the_same_where_windows_are_not_limited(folder, expected, setting):
    found, engine = generate(folder, **ONE_GROUP[setting])
    assert engine.scheduler.kv.windows is None
    assert engine.report.memory.kv.window_tokens is None
    assert found == expected


@pytest.mark.one_in(3)
def test_torch_gives_the_same_tokens_with_small_blocks(folder, expected):
    found, engine = generate(folder, block_size=4, num_kv_blocks=120)
    assert engine.scheduler.kv.windows.pool.num_blocks < 60
    assert found[0] == expected[0]
    assert found[1] == expected[1]


LONG = [[(11 * n + 5 * start) % 290 for n in range(200)] for start in range(5)]
LONG_OPTIONS = {"max_num_seqs": 1, "max_model_len": 256, "num_kv_blocks": 100}


@pytest.fixture(scope="module")
def cold_tokens(folder):
    """Return what follows the first long prompt, and what follows it with four tokens more, without cached prefixes."""
    llm = make_engine(folder, **LONG_OPTIONS, enable_prefix_caching=False)
    found = greedy(llm, [LONG[0], LONG[0] + [1, 2, 3, 4]])[0]
    llm.close()
    return found


def test_a_hit_needs_only_the_blocks_of_the_last_window(folder, cold_tokens):
    """Twelve full blocks are hit, although the pool of the window group has eight."""
    llm = make_engine(folder, **LONG_OPTIONS)
    assert llm.llm_engine.scheduler.kv.windows.pool.num_blocks == 8
    assert greedy(llm, LONG[:1]) == (cold_tokens[:1], [0])
    assert greedy(llm, LONG[:1]) == (cold_tokens[:1], [192])
    assert greedy(llm, [LONG[0] + [1, 2, 3, 4]]) == (cold_tokens[1:], [192])
    llm.close()


def test_tokens_are_the_same_when_the_last_window_was_reused(folder, cold_tokens):
    """Other prompts write to all window blocks of a prompt whose full blocks are still cached."""
    llm = make_engine(folder, **LONG_OPTIONS)
    assert greedy(llm, LONG[:1]) == (cold_tokens[:1], [0])
    greedy(llm, LONG[1:])
    assert llm.llm_engine.scheduler.kv.pool.num_free == 100
    tokens, (num_cached,) = greedy(llm, LONG[:1])
    assert tokens == cold_tokens[:1]
    assert num_cached < 192
    assert greedy(llm, LONG[:1]) == (cold_tokens[:1], [192])
    llm.close()
