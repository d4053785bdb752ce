"""The users that a plan says fit: an engine runs so many at the same time, and no more."""

import math

import pytest

from quire import EngineConfig, SamplingParams
from quire.engine.llm_engine import LLMEngine
from quire.planner.memory import users_that_fit

NUM_TOKENS, BLOCK_SIZE, NUM_BLOCKS = 60, 16, 124


def run_users(model, num_users, kv_format):
    """Return the most sequences that run at the same time, and the preemptions, where users need NUM_TOKENS each."""
    engine = LLMEngine(
        EngineConfig(
            model=str(model),
            device="cpu",
            num_threads=1,
            max_num_seqs=64,
            block_size=BLOCK_SIZE,
            num_kv_blocks=NUM_BLOCKS,
            kv_cache_dtype=kv_format,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0, detokenize=False)
    for user in range(num_users):
        prompt = [(7 * user + place) % 290 for place in range(NUM_TOKENS - 12)]
        engine.add_request(str(user), {"prompt_token_ids": prompt}, params)
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, engine.scheduler.num_running)
    preemptions = engine.scheduler.num_preemptions
    engine.close()
    return most, preemptions


@pytest.mark.parametrize("kv_format", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_planned_users_run_together_and_a_tenth_more_do_not(tiny_model, kv_format):
    users = users_that_fit(NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS)
    assert users == 31
    assert run_users(tiny_model, users, kv_format) == (users, 0)
    more = math.ceil(1.1 * users)
    most, preemptions = run_users(tiny_model, more, kv_format)
    assert preemptions > 0 or most < more
