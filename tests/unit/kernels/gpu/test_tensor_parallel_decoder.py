"""A model on several tensor-parallel GPUs, interpreted, over gloo: deterministic to the bit, otherwise as close as sums are."""

import re
from dataclasses import replace

import pytest
import torch

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec
from quire.kernels.reference.attention import AttentionInput
from quire.kernels.triton.launching import Launch
from quire.kernels.triton.step import DeviceStep
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.parameters import parameter_shapes
from quire.quant.policy import DEVICE_POLICIES
from tests.device_ranks import DeviceRankThreads, one_launch_at_a_time
from tests.unit.kernels.gpu.conftest import HAS_GPU
from tests.unit.kernels.gpu.test_triton_decoder import MODELS, RMS, attention

pytestmark = pytest.mark.skipif(HAS_GPU, reason="several ranks on one machine are interpreted, over gloo")

TABLES = torch.tensor([[3, 9, 1, 0, 0], [2, 4, 8, 10, 5]])
RUNS = [[[0, 1, 2], [0, 1, 2, 3, 4]], [[3], [5, 6, 7]], [[4], [8]], [[5], [9]]]


@pytest.fixture(autouse=True)
def in_turns(monkeypatch):
    one_launch_at_a_time(monkeypatch)


def spec_of(name, **options):
    layers = tuple(MODELS[name])
    final = layers[0].attn_in or RMS
    positions = 64 if name == "gpt" else 0
    return replace(ModelSpec("test", "float32", 61, 48, layers, final, 64, num_learned_positions=positions), **options)


def parameters_of(spec):
    generator = torch.Generator().manual_seed(0)
    return {
        key: 0.2 * torch.randn(shape, generator=generator) + (1.0 if "norm" in key or "_in." in key else 0.0)
        for key, shape in parameter_shapes(spec).items()
    }


def steps():
    """Yield tokens, positions and a step: prompts in chunks, then decode steps of two sequences."""
    lengths = [0, 0]
    for runs in RUNS:
        lengths = [length + len(run) for length, run in zip(lengths, runs, strict=True)]
        positions = torch.tensor(runs[0] + runs[1])
        places = [
            table[place // 4] * 4 + place % 4
            for table, length, run in zip(TABLES, lengths, runs, strict=True)
            for place in range(length - len(run), length)
        ]
        step = AttentionInput(torch.stack(places), [0, len(runs[0]), len(positions)], lengths, TABLES)
        yield (positions * 7 + torch.arange(len(positions)) * 3) % 61, positions, step


def logits_of(decoder, pool, device):
    found = []
    for token_ids, positions, step in steps():
        hidden = decoder.forward(token_ids.to(device), positions.to(device), DeviceStep.of(step, device), pool)
        found.append(decoder.logits(hidden))
    return found


def one_rank(spec, device, is_in_order, policy=None):
    decoder = DeviceDecoder(spec, parameters_of(spec), 64, device, policy, is_in_order)
    return logits_of(decoder, DeviceKvPool(KvSpec.of(spec, 4, "float32"), 12, device), device)


def on_ranks(spec, device, is_in_order, shares=(1, 1), policy=None):
    ranks = DeviceRankThreads(spec, lambda: parameters_of(spec), shares, 64, device, is_in_order, policy)
    pools = ranks.pools(4, "float32", 12, device)
    found = ranks.call(lambda decoder, rank: logits_of(decoder, pools[rank], device))
    ranks.close()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), "ranks differ"
    return found[0]


QUICK = ("qwen3", "gpt-oss")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
LAYOUTS = [pytest.param((1, 1), id="two"), pytest.param((2, 1, 1), id="unequal", marks=pytest.mark.slow),
           pytest.param((1, 1, 1, 1), id="four", marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize("shares", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_logits_have_the_bits_of_one_rank(name, shares, device):
    spec = spec_of(name)
    expected, found = one_rank(spec, device, True), on_ranks(spec, device, True, shares)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("shares", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_one_rank_up_to_the_order_of_sums(name, shares, device):
    spec = spec_of(name)
    expected, found = one_rank(spec, device, False), on_ranks(spec, device, False, shares)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, atol=3e-5, rtol=3e-5)
        assert a.argmax(1).tolist() == b.argmax(1).tolist()
