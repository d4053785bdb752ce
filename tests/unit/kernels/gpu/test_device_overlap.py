"""Steps of the device launched before the one before is read back: the tokens are those of steps one by one."""

from dataclasses import replace

import pytest
import torch

from quire import LLM, EngineConfig, LLMEngine, SamplingParams, StructuredOutputsParams
from quire.base.errors import DeviceLostError, InvariantError
from quire.base.ids import RequestId, SequenceId
from quire.contracts.request import Request
from quire.contracts.step import SequenceStart, StepPlan
from quire.worker.device import gpu_executor
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU, needs_llguidance

DEVICE = "cuda" if HAS_GPU else "interpreter"
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 16, "num_kv_blocks": 40, "max_model_len": 96}
COMMON = {"ignore_eos": True, "detokenize": False, "seed": 5}
PROMPTS = [[5, 9, 31, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [200, 3]]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("overlap") / "qwen3", "qwen3")


def both(folder, prompts, params, **options):
    """Return the tokens, and why they ended, of steps one by one, and those of steps ahead, with how often these preempted."""
    found = []
    for is_ahead in (False, True):
        llm = LLM(str(folder), device=DEVICE, async_scheduling=is_ahead, **(OPTIONS | options))
        assert llm.llm_engine.step_loop.is_ahead == is_ahead
        outputs = llm.generate(prompts, params, use_tqdm=False)
        scheduler = llm.llm_engine.scheduler
        assert scheduler.kv_usage == 0
        found.append([[(c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs] for output in outputs])
        llm.close()
    return *found, scheduler.num_preemptions


PROCESSED = {"logprobs": 2, "repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": {9: 1.0}, "min_tokens": 2}


@pytest.mark.parametrize("options", [{}, PROCESSED], ids=["plain", "processed"])
def test_the_device_is_ahead_by_default_and_a_step_is_launched_before_the_one_before_is_read(qwen, monkeypatch, options):
    engine = LLMEngine(EngineConfig(model=str(qwen), device=DEVICE, **OPTIONS))
    calls = []
    stepper = engine.runner.executor
    launch, take = stepper.launch, stepper.take_sampled

    def note_launch(step, *rest):
        calls.append(("launch", step.given_ids.tolist()))
        return launch(step, *rest)

    def note_read(launched):
        found = take(launched)
        calls.append(("read", len(found[0])))
        return found

    monkeypatch.setattr(stepper, "launch", note_launch)
    monkeypatch.setattr(stepper, "take_sampled", note_read)
    engine.add_request("a", [5, 9, 31], SamplingParams(temperature=0.0, max_tokens=3, **options, **COMMON))
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    assert calls == [
        ("launch", [5, 9, 31]), ("launch", [-1]), ("read", 1), ("launch", [-1]), ("read", 1), ("read", 1)
    ]  # fmt: skip


@pytest.mark.slow
def test_tokens_are_those_of_steps_one_by_one_when_ends_are_found_late(qwen):
    params = [
        SamplingParams(temperature=0.0, max_tokens=5, **COMMON),
        SamplingParams(temperature=1.2, max_tokens=8, stop_token_ids=list(range(0, 300, 4)), **COMMON),
        SamplingParams(temperature=1.0, max_tokens=5, n=2, top_k=20, **COMMON),
    ]
    one_by_one, ahead, _ = both(qwen, PROMPTS, params, max_num_seqs=4, max_num_batched_tokens=8)
    assert ahead == one_by_one
    assert ahead[1][0][1] == "stop"


@pytest.mark.slow
def test_tokens_are_those_of_steps_one_by_one_when_some_are_sampled_on_the_host(qwen):
    params = [
        SamplingParams(temperature=0.0, max_tokens=9, **COMMON),
        SamplingParams(temperature=1.0, max_tokens=3, typical_p=0.8, logprobs=1, prompt_logprobs=1, **COMMON),
        SamplingParams(temperature=0.8, max_tokens=4, repetition_penalty=1.3, logprobs=3, **COMMON),
    ]
    one_by_one, ahead, _ = both(qwen, PROMPTS, params, max_num_seqs=2, max_num_batched_tokens=8)
    assert ahead == one_by_one


@pytest.mark.slow
def test_tokens_are_those_of_steps_one_by_one_when_logits_are_processed(qwen):
    params = [
        SamplingParams(temperature=0.0, max_tokens=9, **PROCESSED, **COMMON),
        SamplingParams(temperature=1.0, max_tokens=3, stop_token_ids=list(range(0, 300, 4)), logprobs=1, **COMMON),
        SamplingParams(temperature=0.8, max_tokens=4, frequency_penalty=0.7, top_p=0.9, n=2, **COMMON),
    ]
    one_by_one, ahead, _ = both(qwen, PROMPTS, params, max_num_seqs=2, max_num_batched_tokens=8)
    assert ahead == one_by_one


@pytest.mark.slow
def test_tokens_are_those_of_steps_one_by_one_when_sequences_are_preempted(qwen):
    params = SamplingParams(temperature=1.0, max_tokens=9, **COMMON)
    options = {"block_size": 4, "num_kv_blocks": 7, "max_model_len": 24, "max_num_seqs": 3}
    one_by_one, ahead, num_preemptions = both(qwen, PROMPTS, params, **options)
    assert ahead == one_by_one
    assert num_preemptions > 0


CONSTRAINED = SamplingParams(
    temperature=1.0, max_tokens=9, seed=5, logprobs=2, structured_outputs=StructuredOutputsParams(regex="[0-9a-f]{4,8}")
)


def launches_ahead(monkeypatch):
    """Return a list of how many tokens each step of any engine leaves to the device."""
    found, launch = [], gpu_executor.GpuStepExecutor.launch

    def note(stepper, step, *rest):
        found.append(0 if step is None else int((step.given_ids < 0).sum()))
        return launch(stepper, step, *rest)

    monkeypatch.setattr(gpu_executor.GpuStepExecutor, "launch", note)
    return found


@pytest.mark.slow
@needs_llguidance
def test_a_step_is_launched_before_the_one_before_is_read_when_masks_depend_on_its_tokens(qwen, monkeypatch):
    unknown = launches_ahead(monkeypatch)
    free = SamplingParams(temperature=0.0, max_tokens=6, **COMMON)
    one_by_one, ahead, _ = both(qwen, PROMPTS[:2], [CONSTRAINED, free], skip_tokenizer_init=False)
    assert ahead == one_by_one
    assert sum(unknown) >= 6


@pytest.mark.slow
@needs_llguidance
def test_what_a_constraint_forces_is_drafted_when_no_other_row_would_profit_from_steps_ahead(qwen, monkeypatch):
    unknown = launches_ahead(monkeypatch)
    engine = LLMEngine(EngineConfig(model=str(qwen), device=DEVICE, **OPTIONS | {"skip_tokenizer_init": False}))
    constraint = StructuredOutputsParams(regex="[0-9]{3}xyz[0-9]{3}")
    params = SamplingParams(max_tokens=12, seed=5, repetition_penalty=1.5, structured_outputs=constraint)
    engine.add_request("a", PROMPTS[0], params)
    while engine.has_unfinished_requests():
        (output,) = engine.step() or [None]
    num_drafted = engine.stats.num_draft_tokens
    engine.close()
    assert num_drafted > 0
    assert sum(unknown) == 0
    llm = LLM(str(qwen), device="cpu", **OPTIONS | {"skip_tokenizer_init": False})
    (expected,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    llm.close()
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.slow
@needs_llguidance
@pytest.mark.parametrize("is_crowded", [False, True], ids=["roomy", "crowded"])
def test_tokens_are_those_of_steps_one_by_one_when_some_rows_have_constraints(qwen, monkeypatch, is_crowded):
    unknown = launches_ahead(monkeypatch)
    params = [
        SamplingParams(temperature=0.0, max_tokens=9, logprobs=1, repetition_penalty=1.3, **COMMON),
        SamplingParams(temperature=1.0, max_tokens=7, top_k=20, **COMMON),
        replace(CONSTRAINED, repetition_penalty=1.5, presence_penalty=0.5, logit_bias={9: 1.0}),
        replace(CONSTRAINED, typical_p=0.9, logprobs=None),  # sampled on the host, beside steps in flight
    ]
    prompts = [*PROMPTS, list(range(30, 43))]
    crowded = {"block_size": 4, "num_kv_blocks": 7, "max_model_len": 24, "max_num_seqs": 3, "max_num_batched_tokens": 8}
    options = {"skip_tokenizer_init": False, **(crowded if is_crowded else {})}
    one_by_one, ahead, num_preemptions = both(qwen, prompts, params, **options)
    assert ahead == one_by_one
    assert sum(unknown) > 0
    assert (num_preemptions > 0) == is_crowded
    llm = LLM(str(qwen), device="cpu", **(OPTIONS | {"skip_tokenizer_init": False}))
    expected = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    assert [choice[0] for (choice,) in ahead] == [output.outputs[0].token_ids for output in expected]


def test_logits_that_are_not_finite_end_one_request_when_its_next_step_is_on_its_way(qwen, monkeypatch):
    engine = LLMEngine(EngineConfig(model=str(qwen), device=DEVICE, enforce_eager=True, max_num_seqs=2, **OPTIONS))
    decoder = engine.runner.executor.decoder
    real = decoder.logits

    def poisoned(hidden, **options):
        logits = real(hidden, **options)
        logits[0] = torch.nan
        return logits

    params = SamplingParams(temperature=0.0, max_tokens=3, **COMMON)
    engine.add_request("bad", [1, 2], params)
    engine.add_request("good", [4, 5, 6], params)
    launch, plans = engine.runner.launch, []

    def launch_poisoned(plan):
        plans.append(plan)
        monkeypatch.setattr(decoder, "logits", poisoned if len(plans) == 1 else real)
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", launch_poisoned)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    ends = {output.request_id: output.outputs[0].finish_reason for output in outputs if output.finished}
    assert ends == {"bad": "error", "good": "length"}
    assert set(plans[1].num_scheduled_tokens) == {0, 1}
    assert engine.scheduler.kv_usage == 0
    engine.close()


def test_no_third_step_is_launched_before_the_first_is_collected(qwen):
    engine = LLMEngine(EngineConfig(model=str(qwen), device=DEVICE, **OPTIONS))
    params = SamplingParams(temperature=0.0, max_tokens=9, **COMMON)
    request = Request(request_id=RequestId("a"), prompt_token_ids=(5, 9), params=params, seed=0)
    start = SequenceStart(SequenceId(0), request, 0, (5, 9), 0, (0,))
    runner = engine.runner
    steps = [runner.launch(StepPlan(0, {SequenceId(0): 2}, (start,))), runner.launch(StepPlan(1, {SequenceId(0): 1}))]
    with pytest.raises(InvariantError, match="2 steps are not collected"):
        runner.launch(StepPlan(2, {SequenceId(0): 1}))
    results = [step.collect() for step in steps]
    results.append(runner.execute(StepPlan(2, {SequenceId(0): 1})))
    tokens = [result.sampled[SequenceId(0)][0] for result in results]
    assert runner.batch.row(SequenceId(0)).token_ids == [5, 9, *tokens]
    engine.close()


def failing_once(stepper, error):
    """Return `launch` of a stepper that raises before its second step."""
    launch, calls = stepper.launch, []

    def fail(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return launch(*arguments)

    return fail


def test_the_engine_goes_on_and_says_what_to_lower_when_the_driver_has_no_memory_for_a_step(qwen, monkeypatch):
    engine = LLMEngine(EngineConfig(model=str(qwen), device=DEVICE, **OPTIONS))
    released = []
    monkeypatch.setattr(gpu_executor, "release_unused", released.append)
    stepper = engine.runner.executor
    monkeypatch.setattr(stepper, "launch", failing_once(stepper, RuntimeError("Triton Error [CUDA]: out of memory")))
    ends = {}
    for name in ("first", "second"):
        engine.add_request(name, [5, 9, 31], SamplingParams(temperature=0.0, max_tokens=3, **COMMON))
        while engine.has_unfinished_requests():
            ends |= {output.request_id: output for output in engine.step() if output.finished}
    assert [output.outputs[0].finish_reason for output in ends.values()] == ["error", "length"]
    assert "lower max_num_batched_tokens" in ends["first"].error
    assert released == [engine.runner.executor.decoder.device]
    engine.close()


def test_the_engine_stops_and_can_be_closed_when_the_device_is_lost(qwen, monkeypatch):
    engine = LLMEngine(EngineConfig(model=str(qwen), device=DEVICE, **OPTIONS))
    monkeypatch.setattr(gpu_executor, "is_lost", lambda device: True)
    stepper = engine.runner.executor
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(stepper, "launch", failing_once(stepper, error))
    engine.add_request("a", [5, 9, 31], SamplingParams(temperature=0.0, max_tokens=3, **COMMON))
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        engine.step()
    engine.close()
