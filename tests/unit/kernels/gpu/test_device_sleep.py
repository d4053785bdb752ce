"""Engines on a device that sleep: the weights and the KV cache leave the device, and tokens after waking up are the same."""

import pytest

from quire import LLM, SamplingParams
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU

pytestmark = pytest.mark.usefixtures("few_programs")
OPTIONS = {
    "device": "cuda" if HAS_GPU else "interpreter",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 16,
    "num_kv_blocks": 40,
    "max_model_len": 96,
    "max_num_seqs": 2,
}
PROMPTS = [[5, 9, 31, 7]]


def tokens_of(llm):
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def num_bytes(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_weights_and_kv_leave_the_device_while_the_engine_sleeps(tmp_path, kind):
    llm = LLM(str(write_checkpoint(tmp_path / kind, kind)), **OPTIONS)
    try:
        expected = tokens_of(llm)
        executor = llm.llm_engine.runner.executor
        weights, pool = executor.decoder.weight_tensors(), executor.kv_pool.tensors()
        held = num_bytes(weights), num_bytes(pool)
        llm.sleep(1)
        assert (num_bytes(weights), num_bytes(pool)) == (0, 0)
        assert executor.sleeping.weights.num_bytes > 0
        llm.wake_up()
        assert (num_bytes(weights), num_bytes(pool)) == held
        assert tokens_of(llm) == expected
        del executor, weights, pool
        llm.sleep(2)
        llm.wake_up()
        assert tokens_of(llm) == expected
    finally:
        llm.close()
