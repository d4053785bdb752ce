"""Steps as they are launched on the device: what padding leaves alone, what stays there, and how it gets there."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.base.errors import DeviceLostError
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.last_token_buffer import gather_inputs_launches, scatter_ids_launch
from quire.kernels.triton.launching import run_all
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.parameters import parameter_shapes
from quire.worker.device import gpu_executor
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.gpu_group import GpuGroup
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import HostStep
from quire.worker.device.launched_step import StepSizes

RMS = NormSpec("rms", 1e-6)
LAYER = LayerSpec(AttentionSpec(2, 1, 16, 0.25, RopeSpec(16, 1e4)), MlpSpec(24, "silu"), attn_in=RMS, mlp_in=RMS)
SPEC = ModelSpec("test", "float32", 61, 32, (LAYER,), RMS, 64)
BLOCK_SIZE, NUM_BLOCKS = 4, 9


class CountedGraphs(StepGraphs):
    """Launches step by step, and notes the kinds."""

    def __init__(self):
        super().__init__()
        self.keys = []

    def run(self, key, step, exchange=None):
        self.keys.append(key)
        super().run(key, step, exchange)


def make_stepper(device, max_num_seqs, library=None, adapters=None):
    generator = torch.Generator().manual_seed(3)
    parameters = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in parameter_shapes(SPEC).items()}
    graphs = CountedGraphs()
    kv = KvSpec.of(SPEC, BLOCK_SIZE, "float32")
    decoder = DeviceDecoder(SPEC, parameters, 64, device)
    pool, sizes = DeviceKvPool(kv, NUM_BLOCKS, device), StepSizes(max_num_seqs, 32, 64)
    stepper = GpuStepExecutor(decoder, pool, sizes, graphs, library, adapters)
    assert not parameters  # taken one by one
    return stepper, graphs


def whole_pool(stepper):
    cache = stepper.kv_pool.caches[0]
    return torch.stack((cache.k, cache.v))


def prompt(line, ids):
    count = len(ids)
    positions = np.arange(count)
    lines = np.array([line], np.int32)
    slots = line * 3 * BLOCK_SIZE + positions
    lengths = np.array([count], np.int32)
    return HostStep((count,), lines, lengths, np.array(ids), positions, slots, np.array([count - 1]), lines, np.array([count]))


def decode(lines, lengths, ids):
    lines, lengths = np.array(lines, np.int32), np.array(lengths, np.int32)
    slots = lines * 3 * BLOCK_SIZE + lengths - 1
    count, positions = len(lines), lengths.astype(np.int64) - 1
    rows = np.arange(count)
    return HostStep((1,) * count, lines, lengths, np.array(ids), positions, slots.astype(np.int64), rows, lines, positions + 1)


def tables(*lines):
    return BlockTableUpdates([(line, 0, (3 * line, 3 * line + 1, 3 * line + 2)) for line in lines])


def sampled(stepper, step, changes=None, sampling="plain"):
    return stepper.read_sampled(stepper.launch(step, sampling, changes or BlockTableUpdates([])))[0]


PROMPTS = {0: [4, 9, 16], 1: [25, 36, 49, 3, 1], 2: [7]}


def test_padding_changes_no_token_and_no_cached_value_when_a_step_is_padded(device):
    wide, graphs = make_stepper(device, 4)  # three sequences are padded to four
    exact, exact_graphs = make_stepper(device, 3)
    for stepper in (wide, exact):
        for cache in stepper.kv_pool.caches:
            cache.k.fill_(torch.nan), cache.v.fill_(torch.nan)
    for line, ids in PROMPTS.items():
        assert sampled(wide, prompt(line, ids), tables(line)) == sampled(exact, prompt(line, ids), tables(line))
    lengths = [len(ids) for ids in PROMPTS.values()]
    for _ in range(3):
        before = whole_pool(wide)
        lengths = [length + 1 for length in lengths]
        step = decode([0, 1, 2], lengths, [-1] * 3)
        assert sampled(wide, step) == sampled(exact, step)
        after = whole_pool(wide)
        torch.testing.assert_close(after, whole_pool(exact), equal_nan=True, atol=1e-5, rtol=1e-5)
        is_same = (after == before) | (after.isnan() & before.isnan())
        changed = (~is_same).any(-1).any(2).any(0).nonzero()  # (block, place in it)
        assert sorted(block * BLOCK_SIZE + place for block, place in changed.tolist()) == sorted(step.slots.tolist())
    assert {key.num_rows for key in graphs.keys[-3:]} == {4}
    assert {key.num_rows for key in exact_graphs.keys[-3:]} == {3}


def test_the_token_that_was_sampled_is_the_next_ones_input_when_the_host_does_not_give_it(device):
    stepper, _ = make_stepper(device, 4)
    other, _ = make_stepper(device, 4)
    (first,) = sampled(stepper, prompt(1, PROMPTS[1]), tables(1))
    sampled(other, prompt(1, PROMPTS[1]), tables(1))
    for length in (6, 7, 8):
        (from_device,) = sampled(stepper, decode([1], [length], [-1]))
        (given,) = sampled(other, decode([1], [length], [first]))
        assert from_device == given
        first = given


def test_one_copy_brings_a_step_to_the_device_when_it_changes_tables_and_copies_blocks(device, monkeypatch):
    stepper, _ = make_stepper(device, 4)
    sampled(stepper, prompt(0, PROMPTS[0]), tables(0))
    copies = []
    send = stepper.staging.send
    monkeypatch.setattr(stepper.staging, "send", lambda count: (copies.append(count), send(count)))
    changes = BlockTableUpdates([(0, 0, (7,)), (1, 0, (7, 1, 2))], ((0, 7),))
    step = HostStep(
        (1, 2),
        np.array([0, 1], np.int32),
        np.array([4, 2], np.int32),
        np.array([-1, 5, 6]),
        np.array([3, 0, 1]),
        np.array([31, 4, 5]),
        np.array([0, 2]),
        np.array([0, 1], np.int32),
        np.array([4, 2]),
    )
    assert len(sampled(stepper, step, changes)) == 2
    assert len(copies) == 1
    pool = whole_pool(stepper)
    torch.testing.assert_close(pool[:, 7, :, :3], pool[:, 0, :, :3])  # copied before the step wrote behind it
    assert stepper.tables[:2, :3].tolist() == [[7, 1, 2], [7, 1, 2]]


def test_full_steps_store_nothing_when_memory_is_measured(device):
    stepper, _ = make_stepper(device, 3)
    for cache in stepper.kv_pool.caches:
        cache.k.fill_(0.5), cache.v.fill_(0.5)
    stepper.run_full(7, 3, 64)
    stepper.capture(stepper.capture_sizes.keys[0])
    assert bool((whole_pool(stepper) == 0.5).all())


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_blocks_are_copied_with_their_scales_when_the_cache_is_quantised(device, dtype):
    pool = DeviceKvPool(KvSpec.of(SPEC, BLOCK_SIZE, dtype), 4, device)
    cache = pool.caches[0][:4]
    for part in cache:
        seen = part.view(torch.uint8)
        seen.copy_(torch.arange(seen.numel(), device=device).to(torch.uint8).view(seen.shape))
    expected = [part.view(torch.uint8)[[1, 3]].clone() for part in cache]
    pool.copy_blocks(torch.tensor([1, 3], device=device), torch.tensor([3, 0], device=device))
    for part, wanted in zip(cache, expected, strict=True):
        assert torch.equal(part.view(torch.uint8)[[3, 0]], wanted)


def test_tokens_tables_and_last_tokens_are_taken_by_line_when_there_are_more_than_a_program_takes(device):
    generator = torch.Generator().manual_seed(1)
    num_tokens, width = 1500, 1100
    rows = torch.randint(0, 6, (num_tokens,), generator=generator, dtype=torch.int32)
    given = torch.randint(-1, 3, (num_tokens,), generator=generator)
    last = torch.arange(100, 106)
    all_tables = torch.randint(0, 99, (6, width), generator=generator, dtype=torch.int32)
    ids, lines = torch.full((num_tokens,), -7), torch.full((2, width), -7, dtype=torch.int32)
    moved = [part.to(device) for part in (ids, lines, given, rows, torch.tensor([4, 1], dtype=torch.int32), last, all_tables)]
    run_all(gather_inputs_launches(*moved))
    assert torch.equal(moved[0].cpu(), torch.where(given < 0, last[rows.long()], given))
    assert torch.equal(moved[1].cpu(), all_tables[[4, 1]])
    tokens = torch.tensor([8, -1, 9], device=device)
    scatter_ids_launch(moved[5], tokens, torch.tensor([5, 2, 0], dtype=torch.int32, device=device)).run()
    assert moved[5].tolist() == [9, 101, 102, 103, 104, 8]  # where there is no token, the old one stays


def test_a_library_attends_the_steps_that_are_launched_one_by_one(device):
    class Library:
        def __init__(self):
            self.lengths = []

        def attend(self, q, k, v, step, spec):
            self.lengths.append(step.host_context_lens)
            return attend(q, KvCache(k, v), dataclasses.replace(step, library=None), spec)

    library = Library()
    found = []
    for chosen in (library, None):
        stepper, _ = make_stepper(device, 2, chosen)
        first = sampled(stepper, prompt(0, [5, 6, 7]), tables(0))
        found.append([*first, *sampled(stepper, decode([0], [4], first))])
    assert found[0] == found[1]
    assert library.lengths == [(3,)]


def test_nobody_waits_for_a_device_whose_group_has_ended(device, monkeypatch):
    stepper, _ = make_stepper(device, 1)
    monkeypatch.setattr(gpu_executor, "is_lost", lambda device: pytest.fail("waited for"))
    with pytest.raises(DeviceLostError, match="rank 1"), stepper.step_scope():
        raise DeviceLostError("rank 1 has ended", 1)
    waited = []
    group = SimpleNamespace(communicators=[SimpleNamespace(wait_for=waited.append)])
    GpuGroup.wait_for(group, "event")  # as long as it lives
    assert waited == ["event"]
