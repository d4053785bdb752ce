"""A tensor-parallel rank whose collectives are part of captured steps: NCCL of one rank on a GPU, gloo of one without."""

import pytest
import torch

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_ranks import DeviceRanks
from quire.model.device_shards import DeviceShard
from quire.model.parameters import parameter_shapes
from quire.parallel.communicator import CountingCommunicator
from quire.parallel.torch_communicator import TorchCommunicator
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.graphs import CudaGraphCapturer, StepGraphs
from quire.worker.device.launched_step import StepSizes
from quire.worker.device.variants import NotCapturing
from quire.worker.step_executor import StepTokens
from tests.unit.kernels.gpu.conftest import HAS_GPU
from tests.unit.kernels.gpu.test_triton_decoder import MODELS, RMS

pytestmark = pytest.mark.usefixtures("few_programs")
NUM_REPLAYS = 1000 if HAS_GPU else 2


@pytest.fixture
def communicator(device):
    store = torch.distributed.HashStore()
    if device.type == "cuda":
        torch.cuda.set_device(0)
        found = TorchCommunicator.nccl(store, 0, 1)
    else:
        found = TorchCommunicator.gloo(store, 0, 1, interface="lo")
    yield CountingCommunicator(found)
    found.close()


def make_executor(spec, device, is_in_order, communicator, is_captured):
    generator = torch.Generator().manual_seed(0)
    parameters = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in parameter_shapes(spec).items()}
    shard = DeviceShard.of(spec, 0, (1.0,), is_in_order)
    ranks = None if communicator is None else DeviceRanks(communicator, shard)
    decoder = DeviceDecoder(spec, parameters, 64, device, None, is_in_order, ranks)
    pool = DeviceKvPool(KvSpec.of(decoder.spec, 16, "float32"), 6, device)
    capturer = CudaGraphCapturer(device) if device.type == "cuda" else NotCapturing()
    return GpuStepExecutor(decoder, pool, StepSizes(2, 16, 64), StepGraphs(capturer if is_captured else None))


def step_of(executor, token_ids, starts, ends):
    """Run a step of two sequences, and return the logits and the sampled tokens."""
    rows = [start - 1 for start in starts[1:]]
    with executor.step_scope():
        tokens = StepTokens(token_ids, starts, ends, [0, 1], rows, 2, None, None)
        started = executor.start_step(tokens, True, True, (), False, ())
        found, failures = executor.take_sampled(started)
        assert not failures
        return executor.logits(started).clone(), list(found)


def run(executor):
    """Run a prompt, and a decode step many times; return the logits of all and their tokens."""
    executor.block_tables[:, :2] = [[1, 2], [3, 4]]
    executor.begin_step([(0, 0, [1, 2]), (1, 0, [3, 4])], ())
    found = [step_of(executor, [5, 9, 31, 7, 11, 12, 13], [0, 3, 7], [3, 4])]
    found += [step_of(executor, [8, 21], [0, 1, 2], [4, 5]) for _ in range(1 + NUM_REPLAYS)]
    executor.close()
    return found


@pytest.mark.parametrize("is_in_order", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_captured_steps_with_collectives_give_the_logits_of_steps_without(device, communicator, is_in_order):
    layers = tuple(MODELS["qwen3"])
    spec = ModelSpec("test", "float32", 61, 48, layers, RMS, 64)
    expected = run(make_executor(spec, device, is_in_order, None, is_captured=False))
    found = run(make_executor(spec, device, is_in_order, communicator, is_captured=True))
    assert communicator.counts["all_gather"].num_calls > 0
    for (logits, tokens), (expected_logits, expected_tokens) in zip(found, expected, strict=True):
        assert torch.equal(logits, expected_logits)
        assert tokens == expected_tokens
