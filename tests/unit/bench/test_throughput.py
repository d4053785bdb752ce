"""Throughput with LoRA adapters is compared with that of the same engine without them."""

import pytest
from safetensors.torch import load_file

from quire.base.errors import ConfigError
from quire.bench.throughput import measure_throughput
from quire.bench.workload import Workload
from quire.contracts.config import EngineConfig
from tests.lora_adapter import write_adapter

WORKLOAD = Workload(num_prompts=3, input_len=4, output_len=2, seed=0, ignore_eos=True, temperature=0.0)


def config(model, **options):
    return EngineConfig(model=str(model), device="cpu", enable_lora=True, num_kv_blocks=16, max_num_seqs=4, **options)


@pytest.mark.slow
def test_runs_with_adapters_are_compared_with_runs_without(tiny_model, tmp_path):
    weights = load_file(tiny_model / "model.safetensors")
    shapes = {name.removesuffix(".weight"): tuple(weights[name].shape) for name in weights if "q_proj.weight" in name}
    for name in ("one", "two"):
        write_adapter(tmp_path / name, shapes)
    modules = [(name, str(tmp_path / name)) for name in ("one", "two")]
    figures = measure_throughput(config(tiny_model), WORKLOAD, lora_modules=modules, num_repeats=2)
    assert figures.num_adapters == 2
    assert len(figures.base_output_tokens_per_second_of_runs) == len(figures.output_tokens_per_second_of_runs) == 2
    assert figures.adapter_slowdown is not None
    assert "LoRA: 2 adapters in turn; without them" in figures.describe()
    plain = measure_throughput(config(tiny_model), WORKLOAD)
    assert (plain.num_adapters, plain.adapter_slowdown) == (0, None)
    assert "LoRA" not in plain.describe()


def test_adapters_that_would_be_loaded_during_the_run_are_refused(tiny_model):
    with pytest.raises(ConfigError, match="lora_modules has 2 adapters, but max_loras is 1"):
        measure_throughput(config(tiny_model, max_loras=1), WORKLOAD, lora_modules=[("a", "/a"), ("b", "/b")])
