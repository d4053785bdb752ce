"""Models with a window group give the tokens of one process with tensor-parallel ranks and pipeline stages as processes."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.kernels.native import load_native
from tests.tiny_checkpoint import write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")]

PROMPTS = [[7 * n % 290 for n in range(start, start + length)] for start, length in ((3, 37), (90, 45), (100, 200))]


def generate(folder, **options):
    """Return the tokens of the prompts twice, the second time with cached prefixes."""
    llm = LLM(str(folder), skip_tokenizer_init=True, device="cpu", max_num_seqs=3, max_num_batched_tokens=23, **options)
    assert llm.llm_engine.scheduler.kv.windows is not None
    params = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=30, ignore_eos=True, detokenize=False)
    found = []
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        found.append([list(choice.token_ids) for output in outputs for choice in output.outputs])
    assert outputs[2].metrics.num_cached_tokens > 150
    llm.close()
    return found


@pytest.mark.parametrize("family", ["gemma2", "mistral", "gpt_oss"])
def test_two_processes_give_the_tokens_of_one(tmp_path, family):
    folder = write_checkpoint(tmp_path / family, family)
    expected = generate(folder, num_kv_blocks=60)
    assert generate(folder, num_kv_blocks=60, num_threads=2, tensor_parallel_size=2) == expected
    assert generate(folder, num_kv_blocks=60, num_threads=2, pipeline_parallel_size=2) == expected
