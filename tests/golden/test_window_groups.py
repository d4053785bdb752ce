"""Models whose layers with a window have a pool of blocks of their own: greedy tokens are those of transformers however the
blocks are used. The pool is so small that blocks which leave the window are written again by other tokens."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.native import load_native
from tests.golden.greedy import greedy_choices
from tests.golden.make_checkpoints import reference_model

pytestmark = pytest.mark.golden

NUM_STEPS = 40
PROMPTS = [torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (37, 45, 61)]
CASES = ["mistral-window", "gemma2", "gemma3", "gpt-oss", "mimo-v2-flash"]
DECODERS = {
    "native": pytest.param(16, 60, marks=pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")),
    "torch": (4, 120),
}
SETTINGS = {
    "chunks of 1": {"long_prefill_token_threshold": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "whole": {"max_num_batched_tokens": 160},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "tree drafts": {"speculative_config": {"method": "suffix", "suffix_decoding_use_tree_spec": True}},
    "int8": {"kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module")
def expected(checkpoint, tmp_path_factory):
    """Return a function case -> folder and tokens of its prompts, which transformers would choose."""
    found = {}

    def find(case):
        if case not in found:
            folder = shutil.copytree(checkpoint(case, "v5"), tmp_path_factory.mktemp("windows") / case)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
            llm = engine(folder, 16, 60, max_num_seqs=1)
            tokens = generate(llm, PROMPTS)
            llm.close()
            model = reference_model(folder)
            chosen = [greedy_choices(model, *pair, allows_end=False) for pair in zip(PROMPTS, tokens, strict=True)]
            assert chosen == tokens
            found[case] = folder, tokens
        return found[case]

    return find


def engine(folder, block_size, num_blocks, **options):
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 23, "num_kv_blocks": num_blocks, "max_model_len": 128, **options}
    llm = LLM(str(folder), skip_tokenizer_init=True, device="cpu", block_size=block_size, **options)
    memory = llm.llm_engine.report.memory
    assert memory.kv.window_tokens is not None
    return llm


def generate(llm, prompts, num_tokens=NUM_STEPS, **params):
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, detokenize=False, **params)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]


@pytest.mark.covering
@pytest.mark.parametrize(("block_size", "num_blocks"), DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers_when_batched_and_cached(expected, case, block_size, num_blocks):
    folder, tokens = expected(case)
    llm = engine(folder, block_size, num_blocks)
    windows = llm.llm_engine.scheduler.kv.windows
    assert 0 < windows.pool.num_blocks < num_blocks
    assert generate(llm, PROMPTS) == tokens
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=9, min_tokens=9, detokenize=False))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [found[:9] for found in tokens]
    assert all(output.metrics.num_cached_tokens > 30 for output in outputs)
    llm.close()


@pytest.mark.covering
@pytest.mark.parametrize(("block_size", "num_blocks"), DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "int8"])
def test_tokens_are_those_of_transformers_in_every_setting(expected, case, setting, block_size, num_blocks):
    folder, tokens = expected(case)
    llm = engine(folder, block_size, num_blocks, **SETTINGS[setting])
    assert generate(llm, PROMPTS) == tokens
    llm.close()


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_same_after_preemption(expected, case):
    folder, tokens = expected(case)
    llm = engine(folder, 16, 12)
    assert generate(llm, PROMPTS) == tokens
    assert llm.llm_engine.scheduler.num_preemptions > 0
    llm.close()


@pytest.mark.parametrize("case", ["gemma2", "gpt-oss"])
def test_choices_share_the_window_blocks_of_the_prompt(expected, case):
    folder, tokens = expected(case)
    llm = engine(folder, 16, 60)
    sampling = SamplingParams(temperature=1.0, top_k=1, n=3, max_tokens=NUM_STEPS, min_tokens=NUM_STEPS, detokenize=False)
    (output,) = llm.generate([PROMPTS[1]], sampling, use_tqdm=False)
    assert [list(choice.token_ids) for choice in output.outputs] == [tokens[1]] * 3
    llm.close()


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("case", ["gemma3", "mistral-window"])
def test_an_int8_cache_gives_the_same_tokens_alone_and_batched(expected, case):
    folder, _ = expected(case)
    alone = engine(folder, 16, 60, max_num_seqs=1, **SETTINGS["int8"])
    tokens = generate(alone, PROMPTS)
    alone.close()
    batched = engine(folder, 16, 60, **SETTINGS["int8"])
    assert generate(batched, PROMPTS) == tokens
    batched.close()
