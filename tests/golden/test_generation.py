"""Greedy tokens of the engine against transformers: 64 steps (32 of torch's, which are slow), batched, alone, in chunks, over
cached prefixes, preempted and with drafts.

Transformers sees each output whole, in one pass: where it chooses every token of it in its turn, it would have generated it.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.native import load_native
from quire.model.build import build_model
from quire.model.decoder import Decoder
from quire.model.native_decoder import NativeDecoder
from tests.golden.dense_cases import COMPOSED
from tests.golden.greedy import greedy_choices
from tests.golden.make_checkpoints import STRUCTURES, TORCH_CASES, case_params, cases_by_type, reference_model

pytestmark = pytest.mark.golden

VOCAB_SIZE = 131
# The native kernels take blocks of a multiple of 16 tokens; torch runs all others. Then steps at first, and steps over what is
# cached: more than the blocks and the windows, and the tokens are those of the first time.
BLOCKS = {
    "native": pytest.param(
        16,
        60,
        NativeDecoder,
        64,
        20,
        marks=pytest.mark.skipif(load_native() is None, reason="the native kernels are not built"),
    ),
    "torch": (4, 120, Decoder, 32, 12),
}
# Longer than a block of 4 or 16, than the windows, and than the original length of the scaled ropes (32), where
# transformers switches in mid-sequence and quire does not.
PROMPTS = [torch.randint(3, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (37, 45, 61)]


@pytest.fixture
def folder(checkpoint, case, tmp_path):
    """The checkpoint of a case, with room for the longest sequence: "dynamic" rope changes with each step beyond it."""
    folder = shutil.copytree(checkpoint(case, "v5"), tmp_path / case)
    config = json.loads((folder / "config.json").read_text())
    if config.get("max_position_embeddings", 128) < 128:
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    return folder


def generate(llm, num_steps, prompts=PROMPTS):
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, min_tokens=num_steps, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], outputs


@pytest.fixture
def decoders(monkeypatch):
    """What engines run from now on, in the order in which they are made."""
    built = []

    def build(*args):
        built.append(build_model(*args))
        return built[-1]

    monkeypatch.setattr("quire.worker.build.build_model", build)
    return built


@pytest.mark.covering
@pytest.mark.parametrize(("block_size", "num_blocks", "kind", "num_steps", "num_cached_steps"), BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("case", case_params())
def test_greedy_tokens_are_those_of_transformers(
    folder, case, decoders, block_size, num_blocks, kind, num_steps, num_cached_steps
):
    model = reference_model(folder)
    options = {"block_size": block_size, "num_kv_blocks": num_blocks, "max_num_seqs": 4, "max_num_batched_tokens": 23}
    llm = LLM(str(folder), skip_tokenizer_init=True, **options)
    assert [type(decoder) for decoder in decoders] == [Decoder if case in TORCH_CASES else kind]
    found, _ = generate(llm, num_steps)
    assert [len(token_ids) for token_ids in found] == [num_steps] * len(PROMPTS)
    assert [greedy_choices(model, *pair, allows_end=False) for pair in zip(PROMPTS, found, strict=True)] == found
    again, outputs = generate(llm, num_cached_steps)
    assert again == [token_ids[:num_cached_steps] for token_ids in found]
    assert all(output.metrics.num_cached_tokens > 30 for output in outputs)
    llm.close()


# One case of each type; types that differ in their wrapper or in numbers only are left out.
FAMILY_CASES = tuple({names[0]: None for names in cases_by_type().values() if names[0] in (*STRUCTURES, *COMPOSED)})
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False, "prompt_lookup_min": 1}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", case_params(FAMILY_CASES))
def test_greedy_tokens_are_the_same_alone_and_in_small_chunks_with_drafts_and_preempted(folder, case):
    options = {"skip_tokenizer_init": True, "max_num_seqs": 4}
    llm = LLM(str(folder), **options, num_kv_blocks=60, max_num_batched_tokens=64, enable_prefix_caching=False)
    alone = [generate(llm, 64, [prompt])[0][0] for prompt in PROMPTS]
    llm.close()
    for chunk in (1, 7):
        llm = LLM(str(folder), **options, num_kv_blocks=14, long_prefill_token_threshold=chunk, speculative_config=DRAFTS)
        found, outputs = generate(llm, 64)
        assert found == alone
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert llm.llm_engine.stats.num_accepted_tokens > 0
        llm.close()
