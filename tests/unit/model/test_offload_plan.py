"""Which layers cpu_offload_gb moves to the host, and what the memory plan says of it."""

import math

import pytest

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.model.config_reader import read_model_spec
from quire.model.offload_plan import OffloadPlan, plan_offload
from quire.model.parameters import parameter_shapes
from quire.worker.inspect import inspect_model
from tests.tiny_checkpoint import write_checkpoint

LAYER = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48  # elements of q, k, v, o, gate, up and down


def plan_of(folder, most_bytes):
    spec = read_model_spec(folder, "float32")
    shapes = parameter_shapes(spec)
    num_elements = sum(a * (b[0] if b else 1) for a, *b in shapes.values())
    return plan_offload(spec, shapes, 4 * num_elements, most_bytes)


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(1, (3,)), (2, (1, 4)), (3, (1, 3, 5)), (6, (0, 1, 2, 3, 4, 5)), (99, (0, 1, 2, 3, 4, 5))]
)
def test_layers_are_spread_evenly_when_a_part_is_offloaded(tmp_path, num_layers, layers):
    folder = write_checkpoint(tmp_path / "model", "mistral", num_hidden_layers=6)
    plan = plan_of(folder, num_layers * LAYER * 4 + 100)
    assert plan.layers == layers
    assert plan.num_bytes == pytest.approx(len(layers) * LAYER * 4)
    assert plan.staging_bytes == pytest.approx(min(2, len(layers)) * LAYER * 4)


def test_what_is_not_moved_does_not_count_when_layers_are_chosen(tmp_path):
    spec = read_model_spec(write_checkpoint(tmp_path / "model", "mistral", num_hidden_layers=6), "float32")
    mixers = {
        f"layers.{layer}.{name}.weight": (9, 9) for layer in range(6) for name in ("mamba.in", "conv", "delta.o", "router")
    }
    moved = {"layers.2.o.weight": (4, 4), "layers.2.shared.up.weight": (2, 4), "layers.5.experts.down.weight": (2, 2, 6)}
    shapes = {**mixers, **moved, "layers.5.attn_in.weight": (4,)}
    num_bytes = sum(math.prod(shape) for shape in shapes.values())
    assert plan_offload(spec, shapes, num_bytes, 99) == OffloadPlan((2, 5), 48, 48)
    assert plan_offload(spec, shapes, num_bytes, 40) == OffloadPlan((5,), 24, 24)
    with pytest.raises(ConfigError, match="no layer has weights that can be"):
        plan_offload(spec, mixers, num_bytes, 99)


def test_less_than_a_layer_is_refused_with_its_size(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "mistral", num_hidden_layers=6)
    with pytest.raises(ConfigError, match=r"cpu_offload_gb is .* one layer has about 30\.0 KiB"):
        plan_of(folder, LAYER * 4 - 100)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cpu_offload_gb": -1}, "cpu_offload_gb must be a number of GiB, 0 or more"),
        ({"cpu_offload_gb": float("nan")}, "cpu_offload_gb"),
        ({"cpu_offload_gb": 1, "device": "cpu"}, "in host memory already"),
        ({"cpu_offload_gb": 1, "tensor_parallel_size": 2}, "tensor_parallel_size must be 1 with cpu_offload_gb"),
        ({"cpu_offload_gb": 1, "model_impl": "transformers"}, "cpu_offload_gb is 1, but model_impl 'transformers'"),
    ],
)
def test_option_is_refused_where_it_does_not_work(options, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(model="demo", **options)


def test_option_is_refused_when_auto_chooses_the_cpu(monkeypatch):
    monkeypatch.setattr("quire.worker.inspect.choose_device", lambda config: None)
    with pytest.raises(ConfigError, match=r"cpu_offload_gb is 0\.5, but the model runs on the CPU"):
        inspect_model(EngineConfig(model="demo", cpu_offload_gb=0.5))
