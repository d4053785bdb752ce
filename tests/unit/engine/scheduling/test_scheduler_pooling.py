"""Requests for a pooled hidden state among others: computed like any prompt, ended when it is, their blocks left to others."""

import pytest
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.errors import RequestError
from quire.base.ids import RequestId, SequenceId
from quire.contracts.step import StepResult
from quire.engine.scheduling.admission import check_servable


def test_embedding_ends_with_stop_when_its_prompt_is_computed():
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("e", 20, pooling="mean"))
    assert [list(driver.step().num_scheduled_tokens.values()) for _ in range(3)] == [[8], [8], [4]]
    output = driver.outputs[RequestId("e"), 0]
    assert (output.tokens, output.reason, output.stop_reason) == ([], "stop", None)
    assert not driver.scheduler.has_unfinished
    assert driver.scheduler.kv.pool.num_free == driver.config.num_kv_blocks
    driver.check_outputs()
    driver.flush()


def test_embeddings_share_the_budget_of_a_step_with_sequences_that_decode():
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("g", 4, max_tokens=6))
    driver.step()
    driver.add(make_request("e", range(200, 210), pooling="last"))
    driver.add(make_request("f", 6, pooling="mean"))
    plans = [driver.step().num_scheduled_tokens for _ in range(3)]
    assert [list(plan.values()) for plan in plans] == [[1, 7], [1, 3, 4], [1, 2]]
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("pooling, expected", [("last", 12), ("mean", 0)])
def test_cached_prefix_is_used_unless_every_token_is_pooled(pooling, expected):
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("first", 16, max_tokens=1))
    driver.run()
    driver.add(make_request("e", 16, pooling=pooling))
    assert driver.step().starts[0].num_computed_tokens == expected
    assert driver.outputs[RequestId("e"), 0].last.stats.num_cached_tokens == expected
    driver.check_outputs()


def test_blocks_of_an_embedding_serve_later_requests_from_the_cache():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("e", 16, pooling="mean"))
    driver.run()
    driver.add(make_request("g", 17, max_tokens=2))
    assert driver.step().starts[0].num_computed_tokens == 16
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_preempted_embedding_begins_anew(pooling):
    driver = Driver(make_config(num_kv_blocks=6, long_prefill_token_threshold=1))
    driver.add(make_request("g", range(200, 204), max_tokens=12))
    driver.add(make_request("e", 16, pooling=pooling))
    driver.run()
    driver.check_outputs()
    assert driver.outputs[RequestId("e"), 0].last.stats.num_preemptions > 0


def test_embedding_may_fill_the_model_and_the_pool():
    config = make_config(max_model_len=20, block_size=4, num_kv_blocks=5)
    driver = Driver(config)
    driver.add(make_request("e", 20, pooling="last"))
    driver.run()
    driver.check_outputs()
    with pytest.raises(RequestError, match=r"21 tokens.*max_model_len is 20") as raised:
        check_servable(make_request("e", 21, pooling="last"), config)
    assert raised.value.param == "prompt"
    with pytest.raises(RequestError, match=r"21 tokens.*20 tokens \(5 blocks of 4\)"):
        check_servable(make_request("e", 21, pooling="last"), make_config(block_size=4, num_kv_blocks=5))
    with pytest.raises(RequestError, match="0 tokens"):
        check_servable(make_request("e", 0, pooling="last"), config)


def test_embedding_is_aborted_between_its_chunks():
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("e", 20, pooling="mean"))
    driver.step()
    (update,) = driver.abort("e")
    assert (update.finish_reason, update.pooled) == ("abort", None)
    assert driver.step() is None
    driver.flush()


def test_lower_priority_value_is_embedded_first():
    driver = Driver(make_config(policy="priority", max_num_seqs=1))
    driver.add(make_request("late", 4, pooling="last", priority=1))
    driver.add(make_request("soon", 4, pooling="last", priority=-1))
    assert driver.step().starts[0].request.request_id == "soon"
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize(
    "prompt, sampled, pooled, message",
    [
        (4, {}, {}, "no pooled vector where one was due"),
        (12, {}, {SequenceId(0): (1.0,)}, "a pooled vector where none was due"),
        (4, {SequenceId(0): (1,)}, {SequenceId(0): (1.0,)}, "a token where none was due"),
    ],
    ids=["missing", "early", "token"],
)
def test_embedding_fails_when_the_worker_returns_something_else(prompt, sampled, pooled, message):
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("e", prompt, pooling="last"))
    plan = driver.schedule()
    driver.commit(plan, StepResult(plan.step_id, sampled, {}, {}, {}, pooled))
    update = driver.outputs[RequestId("e"), 0].last
    assert update.finish_reason == "error"
    assert message in update.error


def test_generating_request_fails_when_the_worker_returns_a_vector():
    driver = Driver(make_config())
    driver.add(make_request("g", 4))
    plan = driver.schedule()
    driver.commit(plan, StepResult(plan.step_id, {SequenceId(0): (1,)}, {}, {}, {}, {SequenceId(0): (1.0,)}))
    assert "a pooled vector where none was due" in driver.outputs[RequestId("g"), 0].last.error
