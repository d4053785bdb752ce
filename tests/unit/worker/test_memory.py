"""The memory plan: what it counts, what it leaves, and that it says no with numbers."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from quire import ConfigError, EngineConfig
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import LatentSpec, NormSpec
from quire.kernels.native import load_native
from quire.worker import memory
from quire.worker.build import build_runner, warn_replaced
from quire.worker.inspect import inspect_model
from quire.worker.tiers import tier_fingerprint, transfer_fingerprint
from tests.tiny_checkpoint import WIDE_EXPERTS, write_checkpoint


def inspect(model, **options):
    return inspect_model(EngineConfig(model=str(model), **options))


def test_plan_counts_weights_and_kv(tiny_model):
    report = inspect(tiny_model, num_kv_blocks=10, block_size=8)
    size = (tiny_model / "model.safetensors").stat().st_size
    assert 0 < size - report.memory.weight_bytes < 8000  # the file has a header
    assert report.memory.kv.bytes_per_token == 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, head_dim, f32
    assert report.memory.kv_bytes == 10 * 8 * report.memory.kv.bytes_per_token
    assert report.memory.num_kv_tokens == 80


def test_default_pool_holds_every_sequence_at_full_length(tiny_model):
    report = inspect(tiny_model, max_num_seqs=3, max_model_len=100, block_size=16)
    assert report.memory.num_kv_blocks == 3 * 7


def test_default_pool_takes_half_of_what_is_left_when_memory_is_short(tiny_model, monkeypatch):
    needed = inspect(tiny_model).memory
    room = 40 * needed.kv.bytes_per_block
    free = needed.weight_bytes + needed.activation_bytes + room
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: free)
    assert inspect(tiny_model).memory.num_kv_blocks == 20


def test_pool_by_bytes_is_rounded_down_to_blocks(tiny_model):
    block = inspect(tiny_model).memory.kv.bytes_per_block
    assert inspect(tiny_model, kv_cache_memory_bytes=5 * block - 1).memory.num_kv_blocks == 4


def test_model_that_does_not_fit_is_refused_with_the_numbers(tiny_model, monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1000)
    report = inspect(tiny_model)  # looking at it is no harm
    assert "DOES NOT FIT" in report.memory.describe()
    with pytest.raises(ConfigError, match="1000 B are available.*lower num_kv_blocks"):
        build_runner(EngineConfig(model=str(tiny_model)))


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_what_is_used_in_place_of_an_option_is_said(tiny_model, caplog):
    config = EngineConfig(model=str(tiny_model), dtype="float16", kv_cache_dtype="k8v4", enforce_eager=True)
    report = inspect_model(config)
    assert report.memory.kv.dtype == "k8v4"
    attention = replace(
        report.spec.layers[0].attention, num_kv_heads=1, latent=LatentSpec(None, 16, 8, 8, 8, NormSpec("rms", 1e-6))
    )
    spec = replace(report.spec, layers=(replace(report.spec.layers[0], attention=attention),))
    warn_replaced(config, replace(report, memory=replace(report.memory, kv=KvSpec.of(spec, 16, "k8v4"))))
    starts = ["kv_cache_dtype is k8v4: a", "dtype is float16: weights", "enforce_eager is True: it"]
    assert [record.getMessage()[:25] for record in caplog.records] == starts
    assert all(text in caplog.text for text in ("in one, is int8", "in float32; the KV cache is int8"))
    warn_replaced(EngineConfig(model=str(tiny_model)), report)
    assert len(caplog.records) == 3


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_formats_of_four_bits_are_in_the_plan_and_refuse_heads_that_are_too_wide(tiny_model, tmp_path):
    plans = {
        name: inspect_model(EngineConfig(model=str(tiny_model), kv_cache_dtype=name, num_kv_blocks=10)).memory
        for name in ("int8", "k8v4", "turboquant_4bit")
    }
    sizes = [plan.kv_bytes for plan in plans.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    assert "a token, turboquant_4bit)" in plans["turboquant_4bit"].describe()
    write_checkpoint(tmp_path / "wide", "qwen3", head_dim=4096)
    for name in ("k8v4", "turboquant_4bit"):
        with pytest.raises(ConfigError, match=f"kv_cache_dtype '{name}' allows heads of at most 2048 values, .* heads of 4096"):
            inspect_model(EngineConfig(model=str(tmp_path / "wide"), kv_cache_dtype=name))


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_layers_that_are_not_quantised_are_in_the_plan_and_in_the_fingerprints(tiny_model):
    def inspect_with(*layers, **options):
        config = EngineConfig(
            model=str(tiny_model), kv_cache_dtype="int8", kv_cache_dtype_skip_layers=layers or None, num_kv_blocks=10, **options
        )
        return config, inspect_model(config)

    (config, mixed), (_, other), (_, plain) = inspect_with(-1), inspect_with(0), inspect_with()
    last = len(mixed.spec.layers) - 1
    assert mixed.memory.kv.layer_dtypes == ("int8",) * last + (mixed.spec.dtype,)
    assert mixed.memory.kv_bytes > plain.memory.kv_bytes
    assert f"int8; {mixed.spec.dtype} in layers {last})" in mixed.memory.describe()
    kinds = (tier_fingerprint, transfer_fingerprint)
    prints = [fingerprint(config, one) for one in (mixed, other, plain) for fingerprint in kinds]
    assert len({str(one) for one in prints}) == 6
    with pytest.raises(ConfigError, match=f"kv_cache_dtype_skip_layers must be from -{last + 1} to {last} .* got {last + 1}"):
        inspect_with(0, last + 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_cache_dtype_skip_layers": (0,)}, "needs a quantised kv_cache_dtype"),
        ({"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": ()}, "must be None or a sequence of integers, got"),
        ({"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": "0"}, "must be None or a sequence of integers, got '0'"),
        ({"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (True,)}, "must be None or a sequence of integers, got"),
    ],
)
def test_lists_of_layers_that_cannot_be_meant_are_refused(options, text):
    with pytest.raises(ConfigError, match=f"kv_cache_dtype_skip_layers {text}"):
        EngineConfig(model="demo", **options)


@pytest.mark.parametrize("name", ["int8", "fp8", "k8v4", "turboquant_4bit"])
def test_quantised_formats_are_refused_without_native_kernels(tiny_model, name):
    with pytest.raises(ConfigError, match=f"kv_cache_dtype '{name}' needs the native kernels"):
        inspect_model(EngineConfig(model=str(tiny_model), kv_cache_dtype=name, block_size=4))


def test_inspecting_reads_no_weights(tiny_model, tmp_path):
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    assert inspect(tmp_path).memory.weight_bytes == inspect(tiny_model).memory.weight_bytes


def test_plan_counts_no_longer_context_than_the_pool_holds(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "qwen3", max_position_embeddings=1 << 30)
    short = inspect(folder, num_kv_blocks=8, max_model_len=128)
    assert inspect(folder, num_kv_blocks=8).memory.activation_bytes == short.memory.activation_bytes
    assert inspect(folder).memory.fits


@pytest.mark.slow
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("family, changes", [("qwen3", {}), ("qwen3_moe", WIDE_EXPERTS)], ids=["dense", "wide-experts"])
def test_activation_estimate_covers_the_measured_peak(tmp_path, family, changes, is_native):
    """Run full steps in a process of its own and compare the growth of its peak memory with the estimate."""
    folder = write_checkpoint(tmp_path / "model", family, **changes)
    code = f"""
import resource
from quire import LLM, SamplingParams
llm = LLM({str(folder)!r}, max_num_batched_tokens=20000, max_num_seqs=100, num_kv_blocks=1700, enable_prefix_caching=False)
greedy = SamplingParams(temperature=0, max_tokens=1)
llm.generate([[1, 2]], greedy, use_tqdm=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
llm.generate([[n % 300] * 200 for n in range(100)], greedy, use_tqdm=False)
growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
plan = llm.llm_engine.report.memory
print(growth, plan.activation_bytes + plan.kv_bytes)
"""
    environment = {**os.environ, "QUIRE_NATIVE": "1" if is_native else "0"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    growth, planned = map(int, out.stdout.split())
    assert growth <= planned, (growth, planned)
