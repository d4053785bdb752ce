"""Layers with a window keep the KV of their window only, in a pool of their own: tokens are those of the CPU's engine."""

import pytest

from quire import LLM
from quire.worker.device import memory
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.test_device_engine import DEVICE, greedy, tokens

pytestmark = pytest.mark.usefixtures("few_programs")
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 4, "num_kv_blocks": 40, "max_model_len": 64}
PROMPTS = [[7 * n % 290 for n in range(start, start + length)] for start, length in ((3, 21), (90, 6))]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
SUFFIX = {"method": "suffix", "suffix_decoding_use_tree_spec": True, "adaptive": False}
SETTINGS = {
    "batched": {},
    "preempted": {"num_kv_blocks": 9},
    "drafts": {"speculative_config": NGRAM},
    "draft trees": {"speculative_config": SUFFIX},
    "int8": {"kv_cache_dtype": "int8"},
    "blocks of a tile": {"block_size": 64},
    "in order": {"deterministic": True},
}


@pytest.fixture(scope="module", params=["gemma2", pytest.param("mistral", marks=pytest.mark.slow), "gpt_oss"])
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("windows") / request.param, request.param)


def generate(folder, device, num_tokens=8, **options):
    """Return the tokens of the prompts, twice, and the engine: the second time with cached prefixes."""
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 12}
    llm = LLM(str(folder), device=device, **OPTIONS | sizes | options)
    found = [tokens(llm.generate(PROMPTS, greedy(num_tokens), use_tqdm=False)) for _ in range(2)]
    llm.close()
    return found, llm.llm_engine
