"""The memory of a native step: what is planned before the model is there covers what its plan then takes, and not much more."""

import random
from itertools import accumulate

import pytest
import torch

pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec
from quire.kernels.native import load_native
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.build import build_model, whole_prompt_logits
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_scratch import adapter_scratch_bytes, attention_bytes, scratch_bytes
from quire.quant.policy import POLICIES
from tests.lora_adapter import load_random_adapter
from tests.tiny_checkpoint import WIDE_EXPERTS, write_checkpoint

NUM_TOKENS = 1500
SHAPES = [(16, 8, 128, None), (4, 1, 80, None), (64, 1, 256, 1000)]
"""Heads, key heads, head size and window."""


@pytest.fixture(scope="module")
def wide_experts(tmp_path_factory):
    """A mixture of experts whose step is mostly what eight experts make of each token."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return write_checkpoint(folder, "qwen3_moe", **WIDE_EXPERTS)


def taken_by_a_prompt(folder, dtype, quantization, num_threads):
    """Return planned and taken bytes of a step that is one prompt."""
    spec = read_model_spec(folder, dtype)
    torch.set_num_threads(num_threads)
    try:
        decoder = build_model(spec, load_parameters(folder, spec), NUM_TOKENS, 16, quantization and POLICIES[quantization])
        whole_prompt_logits(decoder, [1] * NUM_TOKENS)
    finally:
        torch.set_num_threads(1)
    return scratch_bytes(spec, NUM_TOKENS, NUM_TOKENS, num_threads), decoder.scratch_bytes


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_plan_covers_the_step_of_every_family(tiny_family, dtype, quantization):
    planned, taken = taken_by_a_prompt(tiny_family, dtype, quantization, 1)
    assert 0 < taken <= planned


@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_covers_the_adapters_of_a_step(tiny_family, dtype):
    spec, rank = read_model_spec(tiny_family, dtype), 20
    decoder = build_model(spec, load_parameters(tiny_family, spec), NUM_TOKENS, 16)
    load_random_adapter(decoder, "a", rank=rank)
    kv = KvPool(KvSpec.of(spec, 16, dtype), -(-NUM_TOKENS // 16))
    tokens, positions = torch.ones(NUM_TOKENS, dtype=torch.int64), torch.arange(NUM_TOKENS)
    tables = torch.arange(kv.num_blocks)[None]
    taken = []
    for adapters in (None, {"a": positions}):
        step = AttentionMetadata(positions, [0, NUM_TOKENS], [NUM_TOKENS], tables, adapters=adapters)
        decoder.step(tokens, positions, step, kv, [NUM_TOKENS - 1])
        taken.append(decoder.scratch_bytes)
    assert taken[0] < taken[1] <= taken[0] + adapter_scratch_bytes(spec, NUM_TOKENS, rank)


@pytest.mark.covering
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_plan_is_near_what_is_taken_when_experts_are_wide(wide_experts, quantization, num_threads):
    planned, taken = taken_by_a_prompt(wide_experts, "bfloat16", quantization, num_threads)
    rounding = 42 << 20
    assert 35 << 20 < taken <= planned <= 1.6 * taken + rounding


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("num_threads", [1, 2, 5, 16])
@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim, window", [(16, 8, 128, None), (4, 1, 80, None), (64, 1, 256, 1000)]
)
def test_plan_covers_the_attention_of_any_step(num_heads, num_kv_heads, head_dim, window, num_threads):
    attention = AttentionSpec(num_heads, num_kv_heads, head_dim, 1.0, rope=None, window=window)
    native, longest = load_native(), 40000
    layer = native.KvLayer("f32", 16, num_kv_heads, head_dim, 0, 0)
    job = native.AttentionJob(layer, num_heads, 1.0, window or 0, is_bf16=False)
    rng = random.Random(num_threads)
    taken = []
    for _ in range(200):
        counts = [rng.choice((1, 1, 1, 5, 60, 700)) for _ in range(rng.choice((1, 2, 3, 8, 30)))]
        lengths = torch.tensor([rng.choice((longest, max(count, 300))) for count in counts], dtype=torch.int32)
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        batch = native.AttentionBatch(len(counts), sum(counts), starts.data_ptr(), lengths.data_ptr(), 0, 0)
        taken.append(native.attention_scratch_bytes(job, batch, num_threads))
    planned = attention_bytes(attention, longest, num_threads)
    assert planned / 3 < max(taken) <= planned
