"""What a run needs, counted by hand."""

import math
from dataclasses import replace

import pytest

from quire import EngineConfig
from quire.bench.roofline import needed_bytes, needed_flops
from quire.kernels.peaks import LONG, SHORT, measure_peaks
from quire.worker.inspect import inspect_model
from tests.tiny_checkpoint import VOCAB_SIZE, write_checkpoint


def report_of(folder):
    return inspect_model(EngineConfig(model=str(folder), num_kv_blocks=4))


def test_dense_model_multiplies_with_everything_but_the_embedding_rows(tiny_model):
    report = report_of(tiny_model)
    hidden, inner, q, kv = 32, 48, 32, 16
    layer = 2 * hidden + hidden * (q + 2 * kv) + q * hidden + 2 * 8 + 3 * hidden * inner
    head = VOCAB_SIZE * hidden
    assert report.num_active_parameters == 2 * layer + hidden + head
    assert needed_flops(report, 10, 3) == 2 * ((2 * layer + hidden) * 13 + head * 3)
    assert needed_bytes(report, 5) == 5 * 4 * report.num_active_parameters


def test_mixture_counts_only_the_experts_of_a_token(tmp_path):
    report = report_of(write_checkpoint(tmp_path / "moe", "qwen3_moe"))
    experts = 2 * 4 * 3 * 32 * 24
    every = report.num_active_parameters + experts // 2
    assert every == sum(math.prod(shape) for name, shape in report.parameters.items() if name != "embed.weight")


@pytest.mark.parametrize("is_native, effort", [(True, LONG), (True, SHORT), (False, SHORT)])
def test_machine_rates_are_measured(tiny_model, monkeypatch, is_native, effort):
    if not is_native:
        monkeypatch.setattr("quire.kernels.peaks.load_native", lambda: None)
    machine = measure_peaks(report_of(tiny_model), effort)
    assert machine.bytes_per_s > 1e8
    assert machine.flops_per_s > 1e8


def test_weights_are_counted_as_they_are_run(tiny_model):
    pytest.importorskip("quire.kernels.cpu._native")
    report = inspect_model(EngineConfig(model=str(tiny_model), num_kv_blocks=4, quantization="int8"))
    assert report.is_quantized
    assert not report_of(tiny_model).is_quantized
    assert needed_bytes(report, 1) < needed_bytes(report_of(tiny_model), 1) / 2


def test_bytes_are_those_of_the_packed_weights_when_they_are_loaded(tiny_model):
    report = report_of(tiny_model)

    assert needed_bytes(replace(report, packed_weight_bytes=report.memory.weight_bytes // 2), 2) == pytest.approx(
        needed_bytes(report, 2) / 2, rel=1e-6
    )
