"""AsyncStepDriver: steps in flight, over an executor on the CPU that samples as one of a GPU does."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from quire.base.errors import InvariantError
from quire.base.ids import RequestId, SequenceId
from quire.contracts.config import EngineConfig
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.step import AheadRunner, SequenceStart, StepPlan
from quire.sampling.sampler import sample
from quire.worker.async_driver import AsyncStepDriver
from quire.worker.build import build_runner
from quire.worker.step_executor import NO_FAILURES, UNKNOWN

FIRST, SECOND = SequenceId(0), SequenceId(1)
PROMPT = (5, 9, 31)


class SamplingExecutor:
    """A CpuStepExecutor that samples greedily by itself, and keeps the tokens for the next step."""

    has_sampler, max_in_flight, draw = True, 2, None

    def __init__(self, inner):
        self._inner, self._last, self.unknown = inner, {}, []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def start_step(self, tokens, samples, keeps_logits, hidden_rows, keeps_prompt_logits, reads):
        ids, places = list(tokens.token_ids), [i for i, token in enumerate(tokens.token_ids) if token == UNKNOWN]
        self.unknown.append(len(places))
        slot_of = [slot for s, slot in enumerate(tokens.batch_slots) for _ in range(tokens.starts[s], tokens.starts[s + 1])]
        for place in places:
            ids[place] = self._last[slot_of[place]]
        step = tokens._replace(token_ids=ids)
        logits, _ = self._inner.start_step(step, False, True, hidden_rows, keeps_prompt_logits, reads)
        found = logits.argmax(1).tolist()
        for row, token in zip(tokens.logit_rows, found, strict=True):
            self._last[slot_of[row]] = token
        return logits.clone(), found

    def take_sampled(self, started):
        return started[1], NO_FAILURES


@pytest.fixture
def drivers(tiny_model):
    """Two drivers over the same weights: of the CPU's executor, and of one that samples."""
    found = [
        build_runner(EngineConfig(model=str(tiny_model), num_kv_blocks=8, max_model_len=64, block_size=16))[0] for _ in "ab"
    ]
    found[1] = AsyncStepDriver(SamplingExecutor(found[1].executor))
    yield found
    for driver in found:
        driver.close()


def start(sequence_id, block, **params):
    request = Request(
        request_id=RequestId(str(sequence_id)),
        prompt_token_ids=PROMPT,
        params=SamplingParams(ignore_eos=True, **params),
        seed=sequence_id,
    )
    return SequenceStart(sequence_id, request, 0, PROMPT, 0, (block,))


def first_plan(**params):
    return StepPlan(0, {FIRST: 3, SECOND: 3}, (start(FIRST, 0, temperature=0.0), start(SECOND, 1, **params)))


def next_plan(step_id):
    return StepPlan(step_id, {FIRST: 1, SECOND: 1})


def test_only_a_driver_whose_steps_may_overlap_is_an_ahead_runner(drivers):
    assert [isinstance(driver, AheadRunner) for driver in drivers] == [False, True]


def test_tokens_are_the_same_when_the_next_step_starts_before_the_tokens_are_read(drivers):
    plain, ahead = drivers
    expected = [plain.execute(first_plan(temperature=0.0)), *(plain.execute(next_plan(i)) for i in (1, 2, 3))]
    in_flight, results = [ahead.launch(first_plan(temperature=0.0))], []
    for step_id in (1, 2, 3):
        assert in_flight[-1].allows_next
        in_flight.append(ahead.launch(next_plan(step_id)))
        results.append(in_flight.pop(0).collect())
    results.append(in_flight.pop().collect())
    assert [result.sampled for result in results] == [result.sampled for result in expected]
    assert ahead.executor.unknown == [0, 2, 2, 2]
    rows = [driver.batch.row(FIRST).token_ids for driver in drivers]
    assert rows[0] == rows[1]
    assert UNKNOWN not in rows[1]


def test_a_step_waits_for_the_one_before_when_the_driver_samples_a_row_of_it(drivers):
    plain, ahead = drivers
    asked = {"temperature": 0.0, "logprobs": 1}
    expected = [plain.execute(first_plan(**asked)), plain.execute(next_plan(1))]
    results = []
    for plan in (first_plan(**asked), next_plan(1)):
        step = ahead.launch(plan)
        assert not step.allows_next
        results.append(step.collect())
    assert [result.sampled for result in results] == [result.sampled for result in expected]
    assert [result.logprobs.keys() for result in results] == [{SECOND}] * 2
    assert ahead.executor.unknown == [0, 0]


def test_only_the_rows_that_the_executor_cannot_sample_are_sampled_by_the_driver(drivers, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "quire.worker.step_driver.sample", lambda logits, rows, draw: seen.append(len(logits)) or sample(logits, rows, draw)
    )
    drivers[1].execute(first_plan(temperature=0.0, logprobs=1))
    drivers[0].execute(first_plan(temperature=0.0, logprobs=1))
    assert seen == [1, 2]


def test_no_more_steps_are_in_flight_than_the_executor_allows(drivers):
    ahead = drivers[1]
    steps = [ahead.launch(first_plan(temperature=0.0)), ahead.launch(next_plan(1))]
    with pytest.raises(InvariantError, match="2 steps are not collected"):
        ahead.launch(next_plan(2))
    assert all(len(step.collect().sampled) == 2 for step in steps)


def test_the_speculator_hears_nothing_of_steps_that_it_skips_also_not_of_the_last_one(drivers, monkeypatch):
    """It plans skipped steps in `end`, and the next `begin` tells it of them: an `end` between would plan anew."""
    ahead, calls, skips = drivers[1], [], iter([False, True, True, False])
    speculator = ahead.speculator
    monkeypatch.setattr(speculator, "skips", lambda plan: next(skips))
    monkeypatch.setattr(speculator, "begin", lambda plan: calls.append(("begin", plan.step_id)))
    monkeypatch.setattr(speculator, "end", lambda plan, paths: calls.append(("end", plan.step_id)) or {})
    # As while something drafts: only during skipped steps, but for its last step, may the next step begin early.
    may_begin = iter([False, True, False, False])
    monkeypatch.setattr(type(speculator), "lets_next_begin", property(lambda self: next(may_begin)))
    monkeypatch.setattr(speculator, "note_idle", lambda idle_s: None)
    allowed = []
    for plan in (first_plan(temperature=0.0), next_plan(1), next_plan(2), next_plan(3)):
        step = ahead.launch(plan)
        allowed.append(step.allows_next)
        step.collect()
    assert allowed == [False, True, False, False]
    assert calls == [("begin", 0), ("end", 0), ("begin", 3), ("end", 3)]


def test_a_plan_without_tokens_computes_nothing(drivers):
    for driver in drivers:
        driver.execute(first_plan(temperature=0.0))
        result = driver.execute(StepPlan(1, {}, ended=(FIRST, SECOND)))
        assert (result.step_id, result.sampled, result.errors) == (1, {}, {})
    assert torch.is_inference_mode_enabled() is False


def test_each_launch_is_marked_with_its_plan(drivers):
    log, executor = [], drivers[1].executor

    @contextmanager
    def mark(plan):
        log.append(("begin", plan.step_id))
        yield
        log.append(("end", plan.step_id))

    marked = AsyncStepDriver(executor, mark_step=mark)
    first = marked.launch(first_plan(temperature=0.0))
    assert log == [("begin", 0), ("end", 0)]
    second = marked.launch(next_plan(1))
    first.collect()
    second.collect()
    assert log[2:] == [("begin", 1), ("end", 1)]


def test_nvtx_range_has_the_number_and_the_size_of_the_step(monkeypatch):
    build = pytest.importorskip("quire.worker.device.build", reason="needs Triton")
    ranges = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    with build.nvtx_range(first_plan(temperature=0.0)):
        assert ranges == ["step 0: 6 tokens of 2 sequences"]
    assert ranges[1:] == ["end"]


class FailingProcessor:
    """A RowProcessor whose deferred sampling fails."""

    def takes_row(self, row):
        return True

    def takes_masked(self, row):
        return False

    def sample_deferred(self, started, masks):
        raise ValueError("no memory to sample")


def test_a_step_that_cannot_be_sampled_fails_and_not_the_one_launched_behind_it(drivers):
    """The plan behind it is applied: what it starts and ends would be lost else."""
    driver = AsyncStepDriver(drivers[1].executor, row_processor=FailingProcessor())
    first = driver.launch(StepPlan(0, {FIRST: 3}, (start(FIRST, 0, temperature=0.0),)))
    first.is_deferred, first.pending = True, frozenset()
    second = driver.launch(StepPlan(1, {SECOND: 3}, (start(SECOND, 1, temperature=0.0),), ended=(FIRST,)))
    with pytest.raises(ValueError, match="no memory to sample"):
        first.collect()
    assert second.collect().sampled.keys() == {SECOND}
    assert driver.num_in_flight == 0


def test_a_step_whose_masks_cannot_be_filled_fails_when_it_is_collected(drivers):
    def fail(is_running):
        raise ValueError("a grammar has no state")

    driver = AsyncStepDriver(drivers[1].executor, row_processor=FailingProcessor())
    running = driver.launch(StepPlan(0, {FIRST: 3}, (start(FIRST, 0, temperature=0.0),)))
    running.is_deferred, running.masks = True, SimpleNamespace(wait=fail)
    assert not running.allows_next
    with pytest.raises(ValueError, match="a grammar has no state"):
        running.collect()
    assert driver.num_in_flight == 0


def test_pages_are_asked_for_in_the_scope_of_a_step(drivers):
    log = []

    class Executor(SamplingExecutor):
        @contextmanager
        def step_scope(self):
            log.append("begin")
            yield
            log.append("end")

        def take_moved(self, waits):
            log.append(("moved", waits))
            return (7,)

    executor = Executor(drivers[0].executor)
    driver = AsyncStepDriver(executor, page_mover=executor)
    assert driver.execute(StepPlan(0, {})).moved_steps == (7,)
    assert log[-3:] == ["begin", ("moved", True), "end"]


def test_all_executors_are_closed_where_the_first_one_fails_and_its_error_is_raised(drivers):
    plain, _ = drivers
    closed = []

    class Failing(SamplingExecutor):
        def close(self):
            raise RuntimeError("the device is lost")

    def draft():
        return SimpleNamespace(close=lambda: closed.append("draft"))

    driver = AsyncStepDriver(Failing(plain.executor), draft_executors=[draft(), draft()])
    with pytest.raises(RuntimeError, match="the device is lost"):
        driver.close()
    assert closed == ["draft", "draft"]
    with pytest.raises(AttributeError, match="executor"):
        _ = driver.executor
