"""Greedy tokens of the engine against transformers: 64 steps, batched, in chunks, over cached prefixes."""

from __future__ import annotations

import pytest
import torch

from quire import LLM, SamplingParams
from tests.golden.make_checkpoints import CASES, reference_model

pytestmark = pytest.mark.golden

NUM_STEPS = 64
VOCAB_SIZE = 131
# Longer than a block of 4 or 16, than the windows, and than the original length of the scaled ropes (32), where
# transformers switches in mid-sequence and quire does not.
PROMPTS = [torch.randint(3, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (37, 45, 61)]


def expected_tokens(folder, prompt):
    model = reference_model(folder)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_STEPS, min_new_tokens=NUM_STEPS, do_sample=False, use_cache=True
        )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(checkpoint, case):
    folder = checkpoint(case, "v5")
    expected = [expected_tokens(folder, prompt) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, min_tokens=NUM_STEPS, detokenize=False)
    llm = LLM(str(folder), block_size=4, num_kv_blocks=120, max_num_seqs=4, max_num_batched_tokens=23)
    for _ in range(2):  # the second time over cached prefixes
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(output.metrics.num_cached_tokens > 30 for output in outputs)
    llm.close()
