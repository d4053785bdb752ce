"""How the memory of a device is divided, with one that only says numbers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quire.base.errors import ConfigError, WorkerError
from quire.contracts.config import EngineConfig
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec
from quire.model.parameters import parameter_shapes
from quire.worker.device.memory import (
    Captures,
    CudaMemory,
    DeviceUsage,
    MemoryBefore,
    estimate_memory,
    estimated_usage,
    float8_input_bytes,
    gathered_bytes,
    measure_usage,
    plan_device_memory,
)
from quire.worker.device.peaks import SCRATCH_BYTES
from quire.worker.memory import max_num_batched_tokens

GIB = 1 << 30
LAYER = LayerSpec(AttentionSpec(32, 8, 128, 0.1), MlpSpec(12288, "silu"))
SPEC = ModelSpec("test", "bfloat16", 150_000, 4096, (LAYER,) * 36, NormSpec("rms", 1e-6), 40960)


class FakeMemory:
    """A device with so many bytes; a run takes what it says."""

    def __init__(self, free, total, allocated=0):
        self.free, self.total, self.taken = free, total, allocated

    def free_and_total(self):
        return self.free, self.total

    def allocated(self):
        return self.taken

    def peak_of(self, run):
        return run()

    def taken_by(self, run):
        taken = run()
        self.free -= taken
        return taken


def config(**options):
    return EngineConfig(model="demo", **options)


def kv(dtype="bfloat16"):
    return KvSpec.of(SPEC, 64, dtype)


MIB = 1 << 20


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a model, estimated for a GPU."""
    monkeypatch.setattr("quire.worker.device.memory.CudaMemory", lambda device: FakeMemory(100 * GIB, 141 * GIB))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path


def captures(shared, piece, each, room=0, num_graphs=150):
    """Return captured steps: the first take `shared`, with `room` left for others; the driver takes memory in pieces."""
    left = room

    def copies(count):
        nonlocal left
        taken = 0
        for _ in range(count):
            missing = -(-max(0, each - left) // piece) * piece
            taken += missing
            left += missing - each
        return taken

    return Captures(lambda: shared, copies, num_graphs)


def test_the_pool_gets_what_the_model_and_a_step_leave_of_the_share():
    memory = FakeMemory(free=123 * GIB, total=141 * GIB, allocated=16 * GIB)
    captured = captures(GIB, MIB, 12 * MIB, num_graphs=30)
    usage = measure_usage(memory, MemoryBefore(139 * GIB, 0), lambda: 4 * GIB, captured)
    assert (usage.foreign_bytes, usage.weight_bytes) == (2 * GIB, 16 * GIB)
    # Captured steps have memory of their own: one for all, and each what its launches take.
    own = usage.activation_bytes - round(4 * GIB * 1.1) - GIB
    assert 30 * 12 * MIB < own < 30 * 14 * MIB + 128 * MIB
    plan = plan_device_memory(config(max_num_seqs=4096), kv(), usage, 40960, 8192)
    room = int(141 * GIB * 0.9) - 2 * GIB - 16 * GIB - usage.activation_bytes
    assert plan.num_kv_blocks == room // kv().bytes_per_block
    assert plan.fits
    assert plan.kv_bytes <= room < plan.kv_bytes + kv().bytes_per_block


@pytest.mark.parametrize("piece", [1, 2 * MIB, 16 * MIB])
@pytest.mark.parametrize("each", [MIB // 8, MIB, 3 * MIB, 13 * MIB])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_captured_steps_get_what_they_take_and_little_more_when_the_driver_takes_memory_in_pieces(piece, each, share):
    captured = captures(GIB, piece, each, int(piece * share))
    usage = measure_usage(FakeMemory(80 * GIB, 80 * GIB), MemoryBefore(80 * GIB, 0), lambda: GIB, captured)
    own = usage.activation_bytes - round(1.1 * GIB) - GIB
    assert 150 * each <= own <= 150 * (each + 3 * MIB) + 128 * MIB


@pytest.mark.parametrize(
    ("memory", "before", "step_bytes", "expected"),
    [
        ((103, 141, 36), (119, 20), GIB, (22, 16, 1.1)),  # tensors that were there before the model are not counted twice
        ((122, 141, 16), (139, 0), GIB, (3, 16, 1.1)),  # nor has the pool what the first step takes beside tensors
        ((0, 80, 0), (80, 0), 10 * GIB, (80, 0, 11)),  # nothing is kept for captured steps when there are none
        ((0, 80, 0), (80, 0), MIB, (80, 0, SCRATCH_BYTES / GIB)),  # what measuring the device takes is
    ],
)
def test_what_a_model_takes(memory, before, step_bytes, expected):
    sizes = ([GIB * number for number in numbers] for numbers in (memory, before))
    usage = measure_usage(FakeMemory(*next(sizes)), MemoryBefore(*next(sizes)), lambda: step_bytes, None)
    assert (usage.foreign_bytes, usage.weight_bytes, usage.activation_bytes) == tuple(round(GIB * size) for size in expected)


def test_the_pool_takes_what_is_free_for_cached_prefixes_when_sequences_need_less():
    usage = DeviceUsage(141 * GIB, 0, GIB, GIB)
    room = int(141 * GIB * 0.9) - 2 * GIB
    assert plan_device_memory(config(max_num_seqs=8), kv(), usage, 1000, 8192).num_kv_blocks == room // kv().bytes_per_block
    small = replace(kv(), layer_shapes=((1, 8),))
    assert plan_device_memory(config(max_num_seqs=8), small, usage, 1000, 8192).num_kv_blocks == 1 << 18


def test_the_pool_is_no_larger_than_all_sequences_need_when_the_memory_is_the_hosts():
    usage = DeviceUsage(141 * GIB, 0, GIB, GIB)
    plan = plan_device_memory(config(max_num_seqs=8), kv(), usage, 1000, 8192, has_own_memory=False)
    assert plan.num_kv_blocks == 8 * 16


@pytest.mark.parametrize(
    "device, options, expected",
    [
        ("cpu", {}, 2048),
        ("interpreter", {}, 2048),
        ("cuda:1", {}, 8192),
        ("cuda:0", {"max_num_seqs": 9000}, 9000),
        ("cuda:0", {"max_num_batched_tokens": 500}, 500),
    ],
)
def test_a_step_takes_more_tokens_on_a_gpu_unless_it_is_said_how_many(device, options, expected):
    assert max_num_batched_tokens(config(**options), device) == expected


def test_the_pool_has_the_size_that_was_asked_for():
    usage = DeviceUsage(80 * GIB, GIB, 16 * GIB, 2 * GIB)
    assert plan_device_memory(config(num_kv_blocks=77), kv(), usage, 4096, 8192).num_kv_blocks == 77
    asked = config(kv_cache_memory_bytes=4 * GIB)
    assert plan_device_memory(asked, kv(), usage, 4096, 8192).num_kv_blocks == 4 * GIB // kv().bytes_per_block


def test_quantised_keys_and_values_take_about_half():
    usage = DeviceUsage(80 * GIB, GIB, 16 * GIB, 2 * GIB)
    blocks = [
        plan_device_memory(config(max_num_seqs=999), kv(dtype), usage, 40960, 8192).num_kv_blocks
        for dtype in ("bfloat16", "fp8")
    ]
    assert blocks[1] / blocks[0] == pytest.approx(2 * 128 / (128 + 4), rel=0.01)


def test_blocks_take_the_sum_of_their_layers_when_some_are_not_quantised(folder):

    def plan_of(dtype="k8v4", layers=None, rank=0, **options):
        asked = config(max_num_seqs=999, kv_cache_dtype=dtype, kv_cache_dtype_skip_layers=layers, **options)
        return estimate_memory(asked, torch.device("cuda"), SPEC, {"embed.weight": (150_000, 4096)}, 40960, folder, rank)

    whole, narrow, mixed = plan_of("auto"), plan_of(), plan_of(layers=(0, 1, -1))
    assert mixed.kv.bytes_per_block == (3 * whole.kv.bytes_per_block + 33 * narrow.kv.bytes_per_block) // 36
    room = narrow.num_kv_blocks * narrow.kv.bytes_per_block
    assert mixed.num_kv_blocks == pytest.approx(room / mixed.kv.bytes_per_block, abs=2)
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_layers": (1, 35), "kv_host_bytes": GIB}
    last, first = (plan_of(layers=(0, 1, -1), rank=rank, **ranks) for rank in (0, 2))  # the ranks of the last stage come first
    assert [plan.kv.layer_dtypes.count("bfloat16") for plan in (first, last)] == [1, 2]
    shares = [plan.kv.bytes_per_block for plan in (last, last, first, first)]
    assert list(first.page_shares) == list(last.page_shares) == shares
    assert 2 * sum(shares[1:3]) == mixed.kv.bytes_per_block
    with pytest.raises(ConfigError, match="kv_cache_dtype_skip_layers must be from -36 to 35"):
        plan_of(layers=(36,))


@pytest.mark.parametrize(
    "options, usage, named",
    [
        ({}, DeviceUsage(24 * GIB, 0, 23 * GIB, GIB), ("gpu_memory_utilization", "max_num_batched_tokens", "smaller model")),
        ({}, DeviceUsage(80 * GIB, 79 * GIB, GIB, GIB), ("what others use leave 0 B", "gpu_memory_utilization")),
        ({"num_kv_blocks": 100_000}, DeviceUsage(80 * GIB, 0, 16 * GIB, GIB), ("num_kv_blocks", "100000 blocks")),
        ({"gpu_memory_utilization": 0.2}, DeviceUsage(80 * GIB, 0, 16 * GIB, GIB), ("utilization 0.2", "16.00 GiB")),
    ],
)
def test_the_error_says_what_to_change_when_nothing_is_left(options, usage, named):
    with pytest.raises(ConfigError) as raised:
        plan_device_memory(config(**options), kv(), usage, 4096, 8192)
    assert all(words in str(raised.value) for words in named), str(raised.value)


def test_the_estimate_counts_weights_and_the_widest_layer():
    usage = estimated_usage(FakeMemory(100 * GIB, 141 * GIB), SPEC, 16 * GIB, (2048, 128))
    assert (usage.total_bytes, usage.foreign_bytes, usage.weight_bytes) == (141 * GIB, 41 * GIB, 16 * GIB)
    assert 2048 * 3 * 12288 * 2 < usage.activation_bytes < GIB


def test_the_estimate_counts_the_logits_behind_drafts(folder):
    shapes = {"embedding.weight": (150_000, 4096)}

    def estimate(**options):
        asked = config(max_num_seqs=64, **options)
        return estimate_memory(asked, torch.device("cuda"), SPEC, shapes, 4096, folder).activation_bytes

    plain = estimate()
    few, some, many = (estimate(speculative_config={"method": "ngram", "num_speculative_tokens": n}) for n in (1, 5, 15))
    assert few == plain  # as what constraints force is drafted, too
    assert some - plain == 2 * 2 * 150_000 * (64 * 5 - (1 << 24) // 150_000)
    assert some < many < plain + GIB


def test_the_estimate_counts_inputs_of_float8_experts_by_hand(folder):
    experts = replace(LAYER, mlp=MoeSpec(32, 4, MlpSpec(640, "silu")))
    spec, asked = replace(SPEC, layers=(LAYER, experts)), config(quantization="fp8")
    assert float8_input_bytes(asked, spec, folder, 257) == 257 * (4096 + 128 + 4 * (640 + 32))
    assert float8_input_bytes(asked, spec, folder, 256) == 0
    assert float8_input_bytes(config(quantization="fp8", deterministic=True), spec, folder, 257) == 0
    assert float8_input_bytes(config(), spec, folder, 257) == 0


def test_the_estimate_counts_no_more_tokens_than_all_sequences_have(folder):

    def estimate(max_model_len, **options):
        asked = config(max_num_seqs=4, **options)
        shapes = {"embedding.weight": (150_000, 4096)}
        return estimate_memory(asked, torch.device("cuda"), SPEC, shapes, max_model_len, folder).activation_bytes

    assert estimate(100) == estimate(100, max_num_batched_tokens=400) < estimate(4096)
    assert estimate(4096) == estimate(4096, max_num_batched_tokens=8192)


def test_layers_with_a_window_keep_its_tokens_on_a_device(folder):
    windowed = replace(LAYER, attention=replace(LAYER.attention, window=512))
    spec = replace(SPEC, layers=(windowed, LAYER) * 18)
    shapes = {"embedding.weight": (150_000, 4096)}
    few = config(max_num_seqs=16)
    limited, whole = (estimate_memory(few, torch.device("cuda"), each, shapes, 1 << 17, folder) for each in (spec, SPEC))
    assert (limited.kv.window_tokens, sum(limited.kv.is_windowed), whole.kv.window_tokens) == (512, 18, None)
    assert limited.num_long_sequences > 1.8 * whole.num_long_sequences
    assert 0.999 * whole.kv_bytes < limited.kv_bytes <= whole.kv_bytes
    # Twice 16 sequences of ten blocks, and a step of 8192 tokens; the memory holds fewer than 16 of the longest sequences.
    assert limited.num_window_blocks == 2 * 16 * 10 + 8192 // 64


def test_a_block_takes_more_where_drafts_keep_something_under_it():
    usage = DeviceUsage(141 * GIB, 2 * GIB, 16 * GIB, GIB)
    alone = plan_device_memory(config(max_num_seqs=8), kv(), usage, 1000, 8192).num_kv_blocks
    options = config(max_num_seqs=8), kv(), usage, 1000, 8192
    both = plan_device_memory(*options, draft_block_bytes=3 * kv().bytes_per_block).num_kv_blocks
    assert both == alone // 4
    given = config(max_num_seqs=8, num_kv_blocks=alone), kv(), usage, 1000, 8192
    assert plan_device_memory(*given).num_kv_blocks == alone
    with pytest.raises(ConfigError, match=f"asked for .* .{alone} blocks"):
        plan_device_memory(*given, draft_block_bytes=kv().bytes_per_block)


def test_the_estimate_counts_adapters(folder):
    shapes = {"layers.0.q.weight": (4096, 4096), "layers.0.attn_in.weight": (4096,)}

    def weight_bytes(**options):
        return estimate_memory(config(**options), torch.device("cuda"), SPEC, shapes, 4096, folder).weight_bytes

    of_one_rank = 2 * (4096 + 4096 + 150_000 + 4096)  # of q and the head, in bfloat16
    assert weight_bytes(enable_lora=True, max_loras=3, max_lora_rank=8) - weight_bytes() == 3 * 8 * of_one_rank


def test_ranks_that_share_the_tokens_have_blocks_for_as_many_times_the_tokens_and_a_spare_one():
    usage, options = DeviceUsage(141 * GIB, GIB, 16 * GIB, 4 * GIB), {"tensor_parallel_size": 4}
    one = plan_device_memory(config(**options), kv(), usage, 4096, 2048)
    shared = plan_device_memory(config(**options, decode_context_parallel_size=4), kv(), usage, 4096, 2048)
    assert shared.num_kv_blocks % 16 == 0  # chunks of 256 tokens are four blocks
    assert shared.num_local_blocks in range(one.num_kv_blocks - 4, one.num_kv_blocks)
    assert shared.kv_bytes == shared.num_local_blocks * kv().bytes_per_block
    assert shared.activation_bytes == usage.activation_bytes + kv().bytes_per_block
    asked = config(**options, decode_context_parallel_size=4, kv_cache_memory_bytes=40 * kv().bytes_per_block)
    assert plan_device_memory(asked, kv(), usage, 4096, 2048).num_local_blocks == 40


def test_memory_for_gathered_keys_is_that_of_the_longest_sequence_in_a_layer():
    shared = config(tensor_parallel_size=2, decode_context_parallel_size=2)
    keys = gathered_bytes(shared, kv(), 131072) - gathered_bytes(shared, kv(), 1024)
    assert keys == 3 * (131072 - 16384) * kv().bytes_per_block // 64 // 36
    assert gathered_bytes(config(), kv(), 131072) == 0


def test_the_estimate_counts_experts_that_move(folder):
    mixture = replace(LAYER, mlp=MoeSpec(8, 2, MlpSpec(768, "silu")))
    spec = replace(SPEC, layers=(LAYER, mixture))
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}

    def estimate(**options):
        asked = config(**ranks, **options)
        return estimate_memory(asked, torch.device("cuda"), spec, parameter_shapes(spec), 4096, folder).activation_bytes

    assert estimate(enable_eplb=True) - estimate() == 2 * 2 * (3 * 768 * 4096)  # two experts, in bfloat16


def test_each_home_has_as_many_blocks_as_its_rank_holds():
    usage = DeviceUsage(141 * GIB, 2 * GIB, 16 * GIB, GIB)
    homes = {"tensor_parallel_size": 4, "enable_dp_attention": True}
    alone = plan_device_memory(config(gpu_memory_utilization=0.15), kv(), usage, 1000, 8192)
    plan = plan_device_memory(config(gpu_memory_utilization=0.15, **homes), kv(), usage, 1000, 8192)
    assert (plan.num_homes, plan.num_local_blocks) == (4, alone.num_kv_blocks)
    assert plan.kv_bytes == alone.kv_bytes
    given = plan_device_memory(config(num_kv_blocks=800, **homes), kv(), usage, 1000, 8192)
    assert (given.num_kv_blocks, given.num_local_blocks) == (800, 200)
    # The leader's drafts have a cache under the blocks of all homes.
    drafting = plan_device_memory(
        config(gpu_memory_utilization=0.15, **homes), kv(), usage, 1000, 8192, draft_block_bytes=kv().bytes_per_block
    )
    assert drafting.num_local_blocks == alone.num_kv_blocks // 5


def test_a_gpu_is_not_waited_for_when_a_rank_has_ended_for_which_it_waits(monkeypatch):
    def fail(event):
        raise WorkerError("rank 1 has ended", 1)

    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    memory, runs = CudaMemory(torch.device("cuda", 0), fail), []
    for measure in (memory.taken_by, memory.peak_of):
        with pytest.raises(WorkerError, match="rank 1"):
            measure(lambda: runs.append(1))
    assert runs == [1]
