"""Predictions for ranks of this machine: what they are made of, and in which form products are timed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire import EngineConfig
from quire.base.errors import ConfigError
from quire.bench.parallel_compare import MeasuredRates, measure_other_kernels, measure_products, packed_format, predict_here
from quire.engine.inspect import inspect_model, weight_bytes_by_precision
from quire.kernels.native import load_native
from quire.kernels.peaks import Peaks
from quire.planner.layout import Layout
from quire.planner.model_shape import ModelShape
from quire.planner.parallel_time import Load

RATES = MeasuredRates(
    product_bytes_per_s=8e9, layer_s=1e-4, sampler_s=5e-4, peaks=Peaks(1e30, 1e30), barrier_s=1e-6, small_step_s=2e-3
)


@pytest.fixture(scope="module")
def report():
    return inspect_model(EngineConfig(model="demo", device="cpu", num_kv_blocks=4))


def test_a_step_is_its_weights_at_the_measured_rate_the_other_kernels_its_barriers_and_a_small_step(report):
    shape = ModelShape.of("demo", report, weight_bytes_by_precision(report))
    packed = replace(report, packed_weight_bytes=12_000_000)
    read = replace(shape, weight_bytes={"bfloat16": 12_000_000}).read_bytes("bfloat16", 4)
    one = predict_here(shape, packed, "bfloat16", RATES, Layout(), Load(4, 32))
    others_s = len(report.spec.layers) * 1e-4 + 5e-4 + 2e-3
    assert one.step_s == pytest.approx(read / 8e9 + others_s)
    two = predict_here(shape, packed, "bfloat16", RATES, Layout(num_tensor=2), Load(4, 32))
    num_barriers = 4 * len(report.spec.layers) + 2
    assert two.num_collectives == num_barriers
    assert two.step_s == pytest.approx(read / 8e9 + others_s + num_barriers * 1e-6)  # both ranks together reach the rates


@pytest.mark.parametrize(
    ("precision", "bits", "expected"),
    [("bfloat16", 12, "bf12"), ("bfloat16", 16, "bf16"), ("int8", 8, "int8"), ("float32", 32, "f32")],
)
def test_products_are_timed_in_the_form_in_which_the_weights_are_packed(report, precision, bits, expected):
    assert packed_format(replace(report, packed_weight_bytes=report.num_parameters * bits // 8), precision) == expected


def test_precisions_without_a_timed_product_are_refused(report):
    with pytest.raises(ConfigError, match="the weights are int3: products are timed for float32, .*int4"):
        packed_format(report, "int3")


@pytest.mark.slow
@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_products_and_other_kernels_have_times(report):
    assert measure_products(report, "bf12", 4, 1) > 1e7
    layer_s, sampler_s = measure_other_kernels(report, Load(4, 32), 1)
    assert 0 < layer_s < 2
    assert 0 < sampler_s < 2


def test_caches_without_a_timed_attention_are_refused(report):
    kv = replace(report.memory.kv, dtype="turboquant_4bit")
    with pytest.raises(ConfigError, match="the KV cache is turboquant_4bit: attention is timed for bfloat16"):
        measure_other_kernels(replace(report, memory=replace(report.memory, kv=kv)), Load(4, 32), 1)
