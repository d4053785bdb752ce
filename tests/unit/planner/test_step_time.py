"""Step times: work by hand, the fit of known times, the anchors that were measured on an H100."""

import itertools
import random

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.planner.hardware import find_hardware
from quire.planner.model_shape import AttentionGroup
from quire.planner.step_time import (
    FEATURES,
    MachineRates,
    MeasuredStep,
    RooflineTime,
    StepWork,
    attended_by,
    features,
    fit_steps,
    nnls,
    region_of,
    step_bytes,
    step_flops,
)
from tests.unit.planner.shapes import make_mixture, make_shape, qwen3_06b

RATES = MachineRates(10e9, 100e9)


def attended_by_hand(spans, window):
    tokens = pairs = 0
    for start, count in spans:
        seen = set()
        for position in range(start, start + count):
            first = 0 if window is None else max(0, position - window + 1)
            seen |= set(range(first, position + 1))
            pairs += position + 1 - first
        tokens += len(seen)
    return tokens, pairs


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("spans", [[(0, 1)], [(9, 1), (3, 1)], [(0, 20)], [(5, 30), (100, 1)]], ids=str)
def test_attended_tokens_are_counted_as_by_hand(spans, window):
    assert attended_by(spans, window) == attended_by_hand(spans, window)


def test_work_of_a_decode_step_by_hand():
    shape = make_shape()
    work = StepWork.of_spans([(99, 1), (49, 1)], shape.windows, 2)
    assert work == StepWork(2, 2, 2, ((150, 150),))
    body = 4_000_000 - 256_000
    assert step_flops(shape, work) == (2 * (body * 2 + 256_000 * 2), 4 * 4 * 4 * 64 * 150)
    assert step_bytes(shape, work, "bfloat16", "bfloat16") == (8e6, 150 * 4 * 2 * 2 * 64 * 2)
    assert step_bytes(shape, work, "bfloat16", "int8")[1] == 150 * (4 * 2 * 2 * 64 + 4 * 2 * 2 * 4)


def test_windows_limit_what_is_read():
    windowed = AttentionGroup(16, 4, 8, 1024, 1024)
    work = StepWork.of_spans([(99, 1)], (16,), 1)
    assert step_bytes(make_shape(attention=(windowed,)), work, "bfloat16", "bfloat16")[1] == 16 * 1024 * 2


def test_mixture_reads_the_experts_that_are_chosen():
    shape = make_mixture()
    one, many = shape.read_bytes("bfloat16", 1), shape.read_bytes("bfloat16", 200)
    assert one == pytest.approx(2 * (2e6 + 2e6 / 4))
    assert many == pytest.approx(8e6)
    assert shape.num_active_body == 4_000_000 - 256_000 - 2_000_000 + 500_000


def test_nnls_keeps_the_constraint_and_finds_the_optimum():
    rng = np.random.default_rng(3)
    matrix = rng.random((50, 5))
    truth = np.array([1.0, 0.0, 2.0, 0.0, 0.5])
    assert nnls(matrix, matrix @ truth) == pytest.approx(truth, abs=1e-9)
    target = matrix @ np.array([1.0, -2.0, 2.0, 0.5, -1.0])
    found = nnls(matrix, target)
    assert (found >= 0).all()
    gradient = matrix.T @ (target - matrix @ found)  # the conditions of Karush, Kuhn and Tucker
    assert (gradient <= 1e-8).all()
    assert gradient[found > 0] == pytest.approx(0, abs=1e-8)


def synthetic_steps(noise=0.0):
    """Return steps of 2 ms + 5 us a sequence + the roofline at 80 %."""
    shape, rng = make_shape(), random.Random(1)
    steps = []
    for number, context in itertools.product((1, 2, 4, 8, 16, 32), (16, 100, 500, 2000)):
        for spans in ([(context, 1)] * number, [(0, context), *[(50, 1)] * (number - 1)]):
            work = StepWork.of_spans(spans, shape.windows, number)
            *_, roofline = features(work, shape, "bfloat16", "bfloat16", RATES)
            duration = 2e-3 + 5e-6 * number + roofline / 0.8
            steps.append(MeasuredStep(work, duration * (1 + noise * rng.uniform(-1, 1))))
    return shape, steps


def test_fit_finds_the_times_of_a_known_machine():
    shape, steps = synthetic_steps()
    fit = fit_steps(steps, shape, "bfloat16", "bfloat16", RATES)
    assert fit.p90_error < 1e-3
    assert all(value >= 0 for value in fit.coefficients)
    assert len(fit.coefficients) == len(FEATURES)
    work = StepWork.of_spans([(300, 1)] * 12, shape.windows, 12)  # not among the steps
    *_, roofline = features(work, shape, "bfloat16", "bfloat16", RATES)
    assert fit.mean_s(work) == pytest.approx(2e-3 + 5e-6 * 12 + roofline / 0.8, rel=0.01)


def test_fit_keeps_residuals_by_region_and_draws_from_them():
    shape, steps = synthetic_steps(noise=0.2)
    fit = fit_steps(steps, shape, "bfloat16", "bfloat16", RATES)
    assert sum(len(values) for values in fit.residuals.values()) == len(steps)
    work = StepWork.of_spans([(100, 1)] * 6, shape.windows, 6)
    kept = fit.residuals[region_of(work)]
    drawn = {fit.draw_ratio(work, random.Random(seed)) for seed in range(200)}
    assert drawn == set(kept)
    assert "median" in fit.describe()


def test_interrupted_steps_do_not_pull_the_fit():
    shape, steps = synthetic_steps()
    late = [MeasuredStep(one.work, one.duration_s * (10 if place % 10 == 0 else 1)) for place, one in enumerate(steps)]
    fit = fit_steps(late, shape, "bfloat16", "bfloat16", RATES)
    assert fit.median_error < 0.05


def test_times_that_grow_in_steps_of_the_batch_are_corrected():
    shape, steps = synthetic_steps()
    tiled = [
        MeasuredStep(one.work, one.duration_s * (0.7 if one.work.num_tokens == one.work.num_sequences == 4 else 1.0))
        for one in steps * 3
    ]
    fit = fit_steps(tiled, shape, "bfloat16", "bfloat16", RATES)
    plain = fit_steps(steps, shape, "bfloat16", "bfloat16", RATES)
    for number, factor in ((1, 1.0), (4, 0.7), (8, 1.0), (64, 1.0)):
        work = StepWork.of_spans([(300, 1)] * number, shape.windows, number)
        assert fit.mean_s(work) / plain.mean_s(work) == pytest.approx(factor, rel=0.05)


def test_too_few_steps_are_refused():
    shape, steps = synthetic_steps()
    with pytest.raises(ConfigError, match="at least 12 steps with tokens, got 5"):
        fit_steps(steps[:5], shape, "bfloat16", "bfloat16", RATES)


DECODE = [(1, 973), (8, 3854), (64, 16282)]
PROMPTS = [(512, 3.22), (2048, 8.39), (8192, 43.9)]


@pytest.mark.parametrize("batch, tokens_per_s", DECODE)
def test_decode_of_qwen3_06b_on_an_h100_is_within_20_percent_of_the_measured_rate(batch, tokens_per_s):
    times = RooflineTime(qwen3_06b(), find_hardware("h100"), "bfloat16", "bfloat16")
    work = StepWork.of_spans([(960, 1)] * batch, (None,), batch)
    assert batch / times.mean_s(work) == pytest.approx(tokens_per_s, rel=0.20)


@pytest.mark.parametrize("num_tokens, ttft_ms", PROMPTS)
def test_prompt_of_qwen3_06b_on_an_h100_is_within_20_percent_of_the_measured_time(num_tokens, ttft_ms):
    times = RooflineTime(qwen3_06b(), find_hardware("h100"), "bfloat16", "bfloat16")
    work = StepWork.of_spans([(0, num_tokens)], (None,), 1)
    assert (times.request_s + times.mean_s(work)) * 1e3 == pytest.approx(ttft_ms, rel=0.20)


def test_tensor_parallelism_divides_large_steps_and_costs_transfers():
    shape, device = qwen3_06b(), find_hardware("h100")
    one, four = (RooflineTime(shape, device, "bfloat16", "bfloat16", devices) for devices in (1, 4))
    prompt = StepWork.of_spans([(0, 8192)], (None,), 1)
    token = StepWork.of_spans([(10, 1)], (None,), 1)
    assert one.mean_s(prompt) / 4 < four.mean_s(prompt) < one.mean_s(prompt)
    assert four.mean_s(token) > one.mean_s(token)  # the all-reduces of 28 layers outweigh what is read less


def test_longer_contexts_and_larger_batches_take_longer():
    times = RooflineTime(qwen3_06b(), find_hardware("a100"), "int8", "int8")
    previous = 0.0
    for batch in (1, 5, 50, 500):
        now = times.mean_s(StepWork.of_spans([(1000, 1)] * batch, (None,), batch))
        assert now > previous
        previous = now
    assert times.mean_s(StepWork.of_spans([(4000, 1)], (None,), 1)) > times.mean_s(StepWork.of_spans([(40, 1)], (None,), 1))
