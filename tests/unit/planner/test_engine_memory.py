"""The planner's memory against the engine's own plan, for every precision and KV format of the CPU."""

import pytest

from quire import EngineConfig
from quire.engine.inspect import inspect_model, weight_bytes_by_precision
from quire.planner.hardware import find_hardware
from quire.planner.memory import Limits, check_kv_format, divide_memory
from quire.planner.model_shape import ModelShape

pytest.importorskip("quire.kernels.cpu._native")


@pytest.mark.parametrize("kv_format", ["auto", "int8"])
@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("model", ["demo", "demo-moe"])
def test_memory_is_that_of_the_engine(model, precision, kv_format):
    quantization = None if precision == "bfloat16" else precision
    plain = inspect_model(EngineConfig(model=model, device="cpu", num_kv_blocks=1, dtype="bfloat16"))
    config = EngineConfig(
        model=model, device="cpu", dtype="bfloat16", quantization=quantization, kv_cache_dtype=kv_format, num_kv_blocks=3000
    )
    memory = inspect_model(config).memory
    sizes = weight_bytes_by_precision(plain)
    shape = ModelShape.of(model, plain, sizes, plain.memory.weight_bytes - sizes["bfloat16"])
    hardware = find_hardware("xeon-8480")
    wanted = check_kv_format(shape, kv_format)
    planned = divide_memory(shape, hardware, Limits.usual(hardware, shape), precision, wanted)
    assert planned.weight_bytes == memory.weight_bytes
    assert shape.kv_bytes_per_token(wanted) == memory.kv.bytes_per_token
    total = memory.weight_bytes + memory.activation_bytes + memory.kv_bytes
    own = planned.weight_bytes + planned.activation_bytes + planned.runtime_bytes
    assert own + memory.kv_bytes == pytest.approx(total, rel=0.10)
