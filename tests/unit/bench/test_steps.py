"""Designed steps on a real engine: what is counted, and the record that plan and simulate read."""

import json
import random

import pytest

from quire import EngineConfig
from quire.base.errors import ConfigError
from quire.bench.steps import StepCase, StepsTrial, _in_order, _Session, design_cases, measure_steps
from quire.engine.inspect import weight_bytes_by_precision
from quire.engine.llm_engine import LLMEngine
from quire.planner.model_shape import ModelShape
from quire.planner.record import StepsRecord
from quire.planner.step_time import StepWork


def config_of(folder, **changes):
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 64, "device": "cpu", "num_threads": 1}
    return EngineConfig(model=str(folder), **{**options, **changes})


def test_cases_fit_the_engine_and_cover_batches_contexts_and_chunks():
    cases = design_cases(16, 2048, 10_000, 6)
    assert len(set(cases)) == len(cases)
    assert all(case.num_sequences <= 16 and case.num_prompt_tokens + 6 <= 2048 for case in cases)
    assert all(case.num_sequences * (case.num_prompt_tokens + 6) <= 10_000 for case in cases)
    assert {1, 16} <= {case.num_sequences for case in cases}
    assert StepCase(1, 2042) in cases
    assert StepCase(1, 1) in cases


def test_model_too_short_for_the_decode_steps_is_refused():
    with pytest.raises(ConfigError, match="--decode-steps must be below the 6 tokens of a sequence, got 6"):
        design_cases(4, 6, 1000, 6)


def test_steps_of_a_case_are_counted_by_hand(tiny_family):
    engine = LLMEngine(config_of(tiny_family, enable_prefix_caching=False, skip_tokenizer_init=True))
    engine.is_recording = True
    session = _Session(engine, random.Random(0))
    session.run(StepCase(2, 40), 3)
    engine.close()
    windows = list(engine.windows)
    # 64 tokens a step: 40 of the first prompt and 24 of the second; then one token and 16 tokens; then 2 tokens and 1
    expected = [
        ([(0, 40), (0, 24)], 1),
        ([(40, 1), (24, 16)], 2),
        ([(41, 1), (40, 1)], 2),
        ([(41, 1)], 1),
    ]
    assert [step.work for step in session.steps] == [StepWork.of_spans(spans, windows, number) for spans, number in expected]
    assert all(step.duration_s > 0 for step in session.steps)
    shape = ModelShape.of("tiny", engine.report, weight_bytes_by_precision(engine.report))
    assert _in_order(shape, engine).windows == tuple(windows)


def test_record_is_read_as_it_was_written(tiny_model, tmp_path):
    record = measure_steps(config_of(tiny_model), StepsTrial(seconds=0.5, num_decode_steps=3))
    assert len(record.steps) >= 12
    path = tmp_path / "steps.json"
    path.write_text(record.to_json())
    assert StepsRecord.read(path) == record
    fit = record.fit()
    assert all(value >= 0 for value in fit.coefficients)
    assert fit.mean_s(record.steps[0].work) > 0
    assert record.hardware.is_measured
    assert record.scheduler["num_kv_blocks"] == 64
    assert record.shape.num_parameters > record.shape.num_head > 0


def test_quantised_weights_are_recorded_as_they_are_run(tiny_model):
    pytest.importorskip("quire.kernels.cpu._native")
    record = measure_steps(config_of(tiny_model, quantization="int8"), StepsTrial(seconds=0.5, num_decode_steps=3))
    assert record.precision == "int8"
    assert record.shape.weight_bytes["int8"] < record.shape.weight_bytes["float32"] / 2


@pytest.mark.parametrize(
    "arguments, message",
    [({"seconds": 0.0}, "--seconds must be a number above 0, got 0.0"), ({"num_decode_steps": 1}, "--decode-steps .*, got 1")],
)
def test_wrong_trials_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        StepsTrial(**arguments)


def test_drafts_and_replicas_are_refused(tiny_model):
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="--speculative-config must be left out"):
        measure_steps(config_of(tiny_model, speculative_config=drafts), StepsTrial())
    with pytest.raises(ConfigError, match="--data-parallel-size must be 1, .* got 2"):
        measure_steps(config_of(tiny_model, data_parallel_size=2), StepsTrial())


def test_other_files_are_refused_as_records(tmp_path):
    path = tmp_path / "record.json"
    with pytest.raises(ConfigError, match=r"--measured .*record.json cannot be read"):
        StepsRecord.read(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is not a record of quire bench steps"):
        StepsRecord.read(path)
    path.write_text(json.dumps({"kind": "quire bench steps", "model": {}}))
    with pytest.raises(ConfigError, match="is damaged"):
        StepsRecord.read(path)
