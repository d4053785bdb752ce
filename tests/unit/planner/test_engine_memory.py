"""The planner's memory against the engine's own plan, for every precision and KV format of the CPU."""

from dataclasses import replace

import pytest

from quire import EngineConfig
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import LatentSpec, NormSpec
from quire.engine.inspect import inspect_model, weight_bytes_by_precision
from quire.planner.hardware import find_hardware
from quire.planner.memory import Limits, choose_kv_format, divide_memory, divide_pools
from quire.planner.model_shape import ModelShape
from quire.planner.record import StepsRecord
from quire.planner.step_time import MachineRates
from tests.tiny_checkpoint import write_checkpoint

pytest.importorskip("quire.kernels.cpu._native")


@pytest.mark.parametrize("kv_format", ["auto", "int8", "k8v4", "turboquant_4bit"])
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
    wanted = choose_kv_format(shape, kv_format, is_gpu=False)
    planned = divide_memory(shape, hardware, Limits.usual(hardware, shape), precision, wanted)
    assert planned.weight_bytes == memory.weight_bytes
    assert shape.kv_bytes_per_token(wanted) == memory.kv.bytes_per_token
    # The engine's figure is a bound for everything that requests may ask for; test_process_memory.py measures.
    assert 0.3 < (planned.activation_bytes + planned.runtime_bytes) / memory.activation_bytes <= 1


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "k8v4", "turboquant_4bit"])
def test_layers_that_keep_the_models_format_are_counted_as_in_the_engine(kv_format):
    options = {"model": "demo", "device": "cpu", "num_kv_blocks": 100}
    kv = inspect_model(EngineConfig(**options, kv_cache_dtype=kv_format, kv_cache_dtype_skip_layers=(0, -1))).memory.kv
    report = inspect_model(EngineConfig(**options))
    shape = ModelShape.of("demo", report, weight_bytes_by_precision(report), kept_layers=(0, 7))
    assert shape.kv_bytes_per_token(kv_format) == kv.bytes_per_token
    assert sum(group.kv_bytes(kv_format) for group in shape.attention) == kv.bytes_per_token
    assert shape.kv_bytes_per_token("bfloat16") == report.memory.kv.bytes_per_token
    assert ModelShape.from_dict(shape.to_dict()) == shape


@pytest.mark.parametrize(
    ("kv_format", "layer_bytes"), [("bfloat16", 576 * 2), ("int8", 580), ("k8v4", 580), ("turboquant_4bit", 292)]
)
def test_a_layer_of_deepseek_v3_keeps_576_values_of_a_token(kv_format, layer_bytes):
    report = inspect_model(EngineConfig(model="demo", device="cpu", num_kv_blocks=1, dtype="bfloat16"))
    latent = LatentSpec(1536, 512, 128, 64, 128, NormSpec("rms", 1e-6))
    attention = replace(report.spec.layers[0].attention, num_kv_heads=1, head_dim=576, latent=latent)
    spec = replace(report.spec, layers=tuple(replace(layer, attention=attention) for layer in report.spec.layers))
    kv = KvSpec.of(spec, 16, kv_format).with_layers((1,), "bfloat16")
    assert kv.bytes_per_token == 7 * layer_bytes + 576 * 2
    shape = ModelShape.of("latent", replace(report, spec=spec), weight_bytes_by_precision(report), kept_layers=(1,))
    assert shape.kv_bytes_per_token(kv_format) == kv.bytes_per_token
    assert sum(group.kv_bytes(kv_format) for group in shape.attention) == kv.bytes_per_token


@pytest.fixture(scope="module", params=["gemma2", "mistral"], ids=["every-other-layer", "all-layers"])
def window_model(request, tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("window") / "model", request.param, sliding_window=64))


def limits_of(shape, **changes):
    figures = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 256, "block_size": 16}
    return Limits.usual(find_hardware("xeon-8480"), shape, **{**figures, **changes})


@pytest.mark.parametrize("max_num_seqs", [1, 4, 16])
@pytest.mark.parametrize("kv_format", ["auto", "int8"])
def test_blocks_of_a_window_model_are_those_of_the_engine(window_model, kv_format, max_num_seqs):
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 128, "max_model_len": 256, "block_size": 16}
    report = inspect_model(EngineConfig(model=window_model, device="cpu", num_kv_blocks=1))
    shape = ModelShape.of("window", report, weight_bytes_by_precision(report))
    limits, wanted = limits_of(shape, max_num_seqs=max_num_seqs), choose_kv_format(shape, kv_format, is_gpu=False)
    block_bytes = shape.kv_bytes_per_token(wanted) * 16
    for num_blocks in (5, 40, 120, 5000):
        memory = inspect_model(
            EngineConfig(
                model=window_model,
                device="cpu",
                kv_cache_dtype=kv_format,
                kv_cache_memory_bytes=round(num_blocks * block_bytes),
                **options,
            )
        ).memory
        num_full, window = divide_pools(shape, limits, wanted, num_blocks)
        assert (num_full, window.num_blocks) == (memory.num_kv_blocks, memory.num_window_blocks)
        assert window.num_tokens == memory.kv.window_tokens
        assert window.bytes_per_block == memory.kv.window_bytes_per_block
        assert window.full_bytes_per_block == memory.kv.bytes_per_block
        assert window.blocks_of(256, 16) == memory.kv.window_blocks_per_sequence(256)
    given = inspect_model(EngineConfig(model=window_model, device="cpu", num_kv_blocks=100, **options)).memory
    num_full, window = divide_pools(shape, limits, wanted, 100, is_given=True)
    assert (num_full, window.num_blocks) == (given.num_kv_blocks, given.num_window_blocks)


def test_window_model_holds_more_users_but_all_tokens_with_tiers(window_model):
    report = inspect_model(EngineConfig(model=window_model, device="cpu", num_kv_blocks=1))
    shape = ModelShape.of("window", report, weight_bytes_by_precision(report))
    cpu, gpu = find_hardware("xeon-8480"), find_hardware("l4")
    assert divide_memory(shape, cpu, limits_of(shape), "float32", "float32").window is not None
    assert divide_memory(shape, cpu, limits_of(shape), "float32", "float32", has_tiers=True).window is None
    own = divide_memory(shape, gpu, limits_of(shape), "float32", "float32")
    assert own.window is not None
    # A GPU has no other use for the memory: what four sequences do not need is for cached prefixes of both groups.
    num_bytes = own.num_kv_blocks * own.window.full_bytes_per_block + own.window.num_blocks * own.window.bytes_per_block
    assert own.num_kv_blocks == 1 << 18 or num_bytes == pytest.approx(own.kv_bytes, rel=1e-3)
    assert own.window.num_blocks > 1000
    assert divide_memory(shape, gpu, limits_of(shape), "float32", "float32", has_tiers=True).window is None
    assert divide_pools(shape, limits_of(shape, max_model_len=64), "float32", 100) == (100, None)


def test_users_of_a_window_model_are_worked_out(window_model):
    """256 tokens are 16 blocks, of which layers with a window of 64 keep 4 + 2."""
    report = inspect_model(EngineConfig(model=window_model, device="cpu", num_kv_blocks=1))
    shape = ModelShape.of("window", report, weight_bytes_by_precision(report))
    _, window = divide_pools(shape, limits_of(shape), "float32", 1600)
    num_windowed = sum(one.attention.window is not None for one in report.spec.layers)
    num_full = len(report.spec.layers) - num_windowed
    blocks_of_layers = 16 * num_full + 6 * num_windowed
    assert window.users(256, 16, 0) == 1600 * len(report.spec.layers) // blocks_of_layers
    assert window.users(256, 16, 0) > 100  # 1600 blocks of all layers


def test_record_of_a_window_model_keeps_its_pools(window_model):
    report = inspect_model(EngineConfig(model=window_model, device="cpu", num_kv_blocks=1))
    shape = ModelShape.of("window", report, weight_bytes_by_precision(report))
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 256, "block_size": 16, "num_kv_blocks": 100}
    record = StepsRecord(
        shape, "float32", "float32", "cpu", MachineRates(1e9, 1e9), 0, 0.0, {**limits, "num_window_blocks": 50}, ()
    )
    assert ModelShape.from_dict(shape.to_dict()) == shape
    assert (record.scheduler_config().window_tokens, record.scheduler_config().num_window_blocks) == (64, 50)
    assert replace(record, scheduler=limits).scheduler_config().window_tokens is None  # written before there were groups
