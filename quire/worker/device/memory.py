"""The memory of a device: what is free, what the model takes, and how many KV blocks that leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from quire.base.errors import ConfigError
from quire.base.gguf_file import is_gguf, read_gguf
from quire.base.host_memory import available_memory_bytes
from quire.contracts.config import EngineConfig
from quire.contracts.expert_options import float8_row_bytes, is_float8_step
from quire.contracts.kv_spec import MAX_DEFAULT_BLOCKS, QUANTIZED_KV_BITS, KvSpec, check_kv_format, head_dims_of
from quire.contracts.memory import GATHERED_BYTES, GATHERED_TOKENS, MemoryPlan, ModelReport, format_bytes
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec, MoeSpec
from quire.kv.tiers.host_slab import staged_pages
from quire.model.checkpoint import distinct_shapes
from quire.model.config_reader import read_quantization_config
from quire.model.device_shards import DeviceShard
from quire.model.offload_plan import OffloadPlan, plan_offload
from quire.model.parameters import shapes_with_head
from quire.model.stored_tensors import stored_bytes
from quire.model.tensor_shards import ModelShard
from quire.quant.config import Fp8Config, Mxfp4Config, has_quantized_form
from quire.quant.gguf_blocks import device_bytes
from quire.quant.policy import DEVICE_POLICIES, quantized_bytes
from quire.speculate.speculator import most_drafts
from quire.worker.device.peaks import SCRATCH_BYTES
from quire.worker.device.stages import device_stages, place_of
from quire.worker.expert_parallel import count_experts, expert_parameters, find_placements
from quire.worker.lora import planned_adapter_bytes
from quire.worker.memory import (
    DEVICE_BLOCK_SIZE,
    block_unit,
    count_states,
    divide_blocks,
    given_blocks,
    limits_windows,
    max_num_batched_tokens,
    skipped_layers,
)
from quire.worker.pipeline_plan import StageMemory
from quire.worker.pipeline_stage import StagePlace

HOW_TO_SAVE = (
    "lower max_num_batched_tokens, max_num_seqs or max_model_len, or gpu_memory_utilization where others use the device too; "
    "or take a smaller model or dtype"
)
"""What helps when the memory of a device ends."""

_SLACK = 1.1
"""What the allocator loses between blocks, as a factor on what was measured."""

_MAX_DRAFT_LOGITS = 1 << 27
"""Logits after drafts that are held at once: a quarter or half a GiB, which the memory plan sees in the largest step."""

_NUM_COPIES = 12
_DRIVER_BYTES = 16 << 20
"""What copies of a CUDA graph may have taken of the driver's last piece of memory: a copy takes nothing or a whole piece."""
_LATER_BYTES = 128 << 20
"""Reserve for CUDA graphs: a library's working memory for another thread, and the allocator's pieces for smaller tensors."""


class DeviceMemory(Protocol):
    """What a device says of its memory."""

    def free_and_total(self) -> tuple[int, int]:
        """Return the bytes that nobody uses, and all bytes."""
        ...

    def allocated(self) -> int:
        """Return the bytes that this process's tensors take."""
        ...

    def peak_of(self, run: Callable[[], None]) -> int:
        """Return the most bytes that tensors took during a run, beyond those that they took before."""
        ...

    def taken_by(self, run: Callable[[], None]) -> int:
        """Return the bytes of the device that are taken for good after a run, and were not before."""
        ...


class CudaMemory:
    """The memory of a CUDA device, on which runs launch in the current stream.

    wait  waits for an event, and raises where a rank has ended for which it would not come
    """

    def __init__(self, device: torch.device, wait: Callable[[torch.cuda.Event], None] = torch.cuda.Event.synchronize) -> None:
        self._device, self._wait = device, wait

    def _finish(self) -> None:
        event = torch.cuda.Event()
        event.record()
        self._wait(event)

    def free_and_total(self) -> tuple[int, int]:
        """See DeviceMemory. What the allocator keeps for nobody, as of an engine that was closed, is free."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)

    def allocated(self) -> int:
        """See DeviceMemory."""
        return torch.cuda.memory_allocated(self._device)

    def peak_of(self, run: Callable[[], None]) -> int:
        """See DeviceMemory. What the run leaves to the allocator goes back to the device."""
        self._finish()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        self._finish()
        peak = torch.cuda.max_memory_allocated(self._device) - before
        torch.cuda.empty_cache()
        return peak

    def taken_by(self, run: Callable[[], None]) -> int:
        """See DeviceMemory."""
        before, _ = self.free_and_total()
        run()
        self._finish()
        return max(0, before - self.free_and_total()[0])


class HostMemory:
    """The memory of the machine, where the interpreter runs the kernels: half of it, as the rest is not ours.

    limit_bytes  of the machine's memory, what an engine may plan with; None: all
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes

    def free_and_total(self) -> tuple[int, int]:
        """See DeviceMemory."""
        available = available_memory_bytes()
        available = min(available, self._limit_bytes or available) // 2
        return available, available

    def allocated(self) -> int:
        """See DeviceMemory: nobody counts."""
        return 0

    def peak_of(self, run: Callable[[], None]) -> int:
        """See DeviceMemory: nobody counts."""
        return 0

    def taken_by(self, run: Callable[[], None]) -> int:
        """See DeviceMemory: nobody counts."""
        return 0


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """What is known of a device before the KV pool is made, in bytes.

    foreign_bytes     taken by others, and by the driver and the code of the kernels
    weight_bytes      of the model and of all else that stays allocated
    activation_bytes  peak of one full step, and of the CUDA graphs' own pool; at least what measuring the device takes
    """

    total_bytes: int
    foreign_bytes: int
    weight_bytes: int
    activation_bytes: int


class Captures(NamedTuple):
    """CUDA graphs.

    samples     captures and runs steps of every sort, the largest first: takes what all share, and code
    copies      captures and runs one of the largest steps so many times more: each takes what is its own
    num_graphs  how many there may be in all
    """

    samples: Callable[[], None]
    copies: Callable[[int], None]
    num_graphs: int


class MemoryBefore(NamedTuple):
    """What is free of a device, and what tensors of this process take there, before a model is loaded, in bytes."""

    free_bytes: int
    allocated_bytes: int


def measure_usage(
    memory: DeviceMemory, before: MemoryBefore, run_full: Callable[[], None], captures: Captures | None
) -> DeviceUsage:
    """Return what a loaded model takes.

    run_full  runs the largest step
    captures  None where no steps are captured
    """
    weight_bytes = memory.allocated() - before.allocated_bytes
    activation_bytes = memory.peak_of(run_full)
    taken, graph_bytes = 0, 0
    if captures is not None:
        shared = memory.taken_by(captures.samples)
        copies = memory.taken_by(lambda: captures.copies(_NUM_COPIES))
        each = -(-(copies + _DRIVER_BYTES) // _NUM_COPIES)
        taken, graph_bytes = shared + copies, shared + _LATER_BYTES + captures.num_graphs * each
    # The first step brings the code of kernels, and the libraries of torch, which no allocator counts.
    free, total = memory.free_and_total()
    foreign_bytes = max(0, total - before.free_bytes, total - free - weight_bytes - taken)
    step_bytes = max(round(activation_bytes * _SLACK), SCRATCH_BYTES)
    return DeviceUsage(total, foreign_bytes, weight_bytes, step_bytes + graph_bytes)


def estimated_usage(memory: DeviceMemory, spec: ModelSpec, num_weight_bytes: int, sizes: tuple[int, int]) -> DeviceUsage:
    """Return about what a model takes that is not loaded; sizes: the most tokens, and the most rows of logits, of a step."""
    free, total = memory.free_and_total()
    width, (num_tokens, num_rows) = DTYPE_BYTES[spec.dtype], sizes
    per_token = 0
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        qkv = (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
        inner = (
            mlp.top_k * (mlp.expert.intermediate_size + spec.hidden_size)
            if isinstance(mlp, MoeSpec)
            else 3 * mlp.intermediate_size
        )
        per_token = max(per_token, (qkv + inner + 4 * spec.hidden_size) * width)
    logits = 2 * num_rows * spec.vocab_size * width
    return DeviceUsage(total, total - free, num_weight_bytes, num_tokens * per_token + logits)


def most_drafts_on_device(config: EngineConfig, vocab_size: int) -> int:
    """Return how many drafts are wished for together, whatever room a step has: those of all sequences where memory allows."""
    drafting = config.speculative_config
    least = most_drafts(0, vocab_size)
    if drafting is None:
        return least
    wanted = config.max_num_seqs * drafting.max_tokens
    return max(least, min(wanted, most_drafts(drafting.max_tokens, vocab_size, _MAX_DRAFT_LOGITS)))


def most_step_tokens(num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> int:
    """Return the tokens of a step at most: the budget, or all tokens of as many sequences as there may be."""
    return min(num_batched_tokens, max_num_seqs * max_model_len)


def device_weight_bytes(config: EngineConfig, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> int:
    """Return about what the weights of a model take on a device: quantised ones as they are stored, or will be quantised. LoRA
    adapters are not counted, see DeviceAdapters."""
    if config.quantization is not None:
        return quantized_bytes(shapes, spec, DEVICE_POLICIES[config.quantization])
    dense = sum(map(math.prod, shapes.values())) * DTYPE_BYTES[spec.dtype]
    quantization = None if is_gguf(folder) else read_quantization_config(folder)
    if isinstance(quantization, Mxfp4Config):
        # A scale takes a byte in the file and four there, for sixteen bytes of codes.
        return min(dense, stored_bytes(folder) * 20 // 17)
    if is_gguf(folder):
        return min(dense, device_bytes(read_gguf(folder).tensors.values(), DTYPE_BYTES[spec.dtype]))
    return min(dense, stored_bytes(folder)) if has_quantized_form(quantization) else dense


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Return the device of a rank: GPU `rank` of this host; where kernels are interpreted, the CPU as well."""
    return torch.device("cuda", rank) if device.type == "cuda" else device


def estimate_memory(
    config: EngineConfig,
    device: torch.device,
    spec: ModelSpec,
    shapes: Mapping[str, tuple[int, ...]],
    max_model_len: int,
    folder: Path,
    rank: int = 0,
) -> MemoryPlan:
    """Return the plan for a model that is not loaded; for the interpreter's device, which is the CPU, that of the CPU.

    rank  whose part the plan is for, see gpu_group.py; rank 0 has the last pipeline stage
    Raises ConfigError, also where the model cannot be shared by so many ranks.
    """
    if spec.has_recurrent_state:
        _check_recurrent(config, spec)
    if config.cpu_offload_gb == 0 and any(layer.shared_block is not None for layer in spec.layers):
        shapes = distinct_shapes(folder, spec, shapes)
    num_weight_bytes = device_weight_bytes(config, spec, shapes, folder)
    place, own, cached, whole = None, shapes, spec, spec
    ranks = list[tuple[StagePlace, ModelSpec]]()
    if config.parallel.world_size > 1:
        stages = device_stages(config, spec, shapes, folder, num_weight_bytes)
        places = [place_of(config, stages, each) for each in range(config.parallel.world_size)]
        ranks = [(each, _part_of(config, spec, shapes, each)[1]) for each in places]
        place = places[rank]
        own, spec, cached = _part_of(config, spec, shapes, place)
        num_weight_bytes = num_weight_bytes * _count(own) // _count(shapes)
    has_windows = limits_windows(config, spec, max_model_len) and config.prefill_context_parallel_size == 1
    kv = device_kv_spec(config, cached, has_windows)
    if place is not None:
        kv, spec = kv.part(place.stage.start, place.stage.stop), place.stage.spec(spec)
    budget = max_num_batched_tokens(config, device.type if device.type == "cuda" else "interpreter")
    num_tokens = most_step_tokens(budget, config.max_num_seqs, max_model_len)
    memory: DeviceMemory = CudaMemory(device) if device.type == "cuda" else HostMemory(config.host_memory_bytes)
    num_rows = config.max_num_seqs + min(most_drafts_on_device(config, spec.vocab_size), num_tokens - 1)
    offload = offload_plan(config, spec, shapes, num_weight_bytes)
    num_offloaded_bytes = 0 if offload is None else offload.num_bytes
    num_weight_bytes += 0 if offload is None else offload.staging_bytes - offload.num_bytes
    num_weight_bytes += planned_adapter_bytes(config, spec, shapes_with_head(spec, own))
    if config.speculative_config is None:
        num_weight_bytes += 4 * (config.max_num_seqs + 1) * spec.vocab_size  # about what ProcessorTables take
    usage = estimated_usage(memory, spec, num_weight_bytes, (num_tokens, num_rows))
    page_shares = _page_shares(config, ranks)
    num_beside = tier_staging_bytes(config, kv, page_shares) + moving_bytes(config, whole, shapes)
    num_beside += gathered_bytes(config, kv, max_model_len) + float8_input_bytes(config, spec, folder, num_tokens)
    usage = replace(usage, activation_bytes=usage.activation_bytes + num_beside)
    plan = plan_device_memory(config, kv, usage, max_model_len, budget, has_own_memory=device.type == "cuda")
    pinned_bytes = config.host_tier_bytes
    return replace(plan, offloaded_bytes=num_offloaded_bytes, pinned_bytes=pinned_bytes, page_shares=page_shares)


def float8_input_bytes(config: EngineConfig, spec: ModelSpec, folder: Path, num_tokens: int) -> int:
    """Return the memory that inputs of float8 experts take, in float8 blocks of 128 columns, in a step of so many tokens."""
    stored = None if config.quantization is not None or is_gguf(folder) else read_quantization_config(folder)
    if config.deterministic or not (config.quantization == "fp8" or isinstance(stored, Fp8Config)):
        return 0
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec) and is_float8_step(layer.mlp, num_tokens)]
    inner = max((mlp.top_k * float8_row_bytes(mlp.expert.intermediate_size, 128) for mlp in mixtures), default=None)
    return 0 if inner is None else num_tokens * (float8_row_bytes(spec.hidden_size, 128) + inner)


def moving_bytes(config: EngineConfig, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the memory of a GPU that experts take while they move: two of the largest, dense; 0 where none move.

    shapes  of all parameters of the whole model
    """
    if not config.enable_eplb:
        return 0
    return 2 * DTYPE_BYTES[spec.dtype] * max(expert_parameters(shapes, layer) for layer in count_experts(spec))


def device_kv_spec(config: EngineConfig, spec: ModelSpec, has_windows: bool) -> KvSpec:
    """Return the cache shape of a model, or of a rank's part of its layers, on a GPU, with the dtype of each layer.

    has_windows  with a window group, if a layer has a window
    Raises ConfigError for formats, and layers of kv_cache_dtype_skip_layers, that this model cannot have.
    """
    check_kv_format(config.kv_cache_dtype, head_dims_of(spec), spec.has_recurrent_state, is_gpu=True)
    dtype = spec.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    kv = KvSpec.on_device(spec, config.block_size or DEVICE_BLOCK_SIZE, dtype, has_windows)
    has_other_values = kv.is_joined or not all(layer.attention.has_plain_values for layer in spec.layers)
    if has_other_values and 4 in QUANTIZED_KV_BITS.get(dtype, ()):
        rows = "latent rows, and values of another size than keys,"
        raise ConfigError(f"kv_cache_dtype is {dtype!r}, but {rows} are kept in auto, int8 or fp8 on a GPU")
    if kv.index_dims and dtype in QUANTIZED_KV_BITS:
        raise ConfigError(f"kv_cache_dtype is {dtype!r}, but an indexer of keys needs the model's own on a GPU: choose 'auto'")
    kept = config.kv_cache_dtype_skip_layers
    return kv if kept is None else kv.with_layers(skipped_layers(kept, spec), spec.dtype)


def _page_shares(config: EngineConfig, ranks: Sequence[tuple[StagePlace, ModelSpec]]) -> tuple[int, ...]:
    """Return the bytes that each rank has of a page of the host tier; empty where there is one rank, or no host tier.

    ranks  the place of each, and the whole model with its part of each layer
    """
    if config.host_tier_bytes == 0:
        return ()
    specs = [(place.stage, device_kv_spec(config, spec, False)) for place, spec in ranks]
    return tuple(whole.part(stage.start, stage.stop).bytes_per_block for stage, whole in specs)


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def _part_of(
    config: EngineConfig, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], place: StagePlace
) -> tuple[Mapping[str, tuple[int, ...]], ModelSpec, ModelSpec]:
    """Return the shapes of a rank's parameters, and the whole model with its part of each layer, and with what its cache has of
    each. Raises ConfigError."""
    cached = spec
    is_tied = "lm_head.weight" not in shapes
    if place.num_tensor_ranks > 1:
        shares, placements = config.parallel.shares, find_placements(config, spec)
        options = shares, config.deterministic, placements, config.decode_context_parallel_size
        shard = DeviceShard.of(spec, place.tensor_rank, *options, has_homes=config.enable_dp_attention)
        shapes, spec, cached = shard.shapes(), shard.local_spec, shard.cached_spec
    return place.stage.select(shapes, is_tied), spec, cached


def device_stage_memories(config: EngineConfig, device: torch.device, report: ModelReport) -> list[StageMemory]:
    """Return what each pipeline stage, or each tensor-parallel rank of each stage, will hold of its device."""
    model = report.spec, report.parameters, report.folder
    stages = device_stages(config, *model, device_weight_bytes(config, *model))
    ranks = range(config.parallel.world_size)
    places = [place_of(config, stages, rank) for rank in ranks]
    sizes = report.memory.max_model_len, report.folder
    plans = [estimate_memory(config, rank_device(device, rank), *model[:2], *sizes, rank) for rank in ranks]
    blocks = min(plan.num_kv_blocks for plan in plans), min(plan.num_window_blocks for plan in plans)
    shares = config.parallel.shares
    shards = [None if len(shares) == 1 else ModelShard.of(report.spec, rank, shares) for rank in range(len(shares))]
    found = [
        StageMemory(place.stage, plan.weight_bytes, plan.kv.pool_bytes(*blocks), shards[place.tensor_rank])
        for place, plan in zip(places, plans, strict=True)
    ]
    return [*found[len(shares) :], *found[: len(shares)]]


def num_spare_blocks(config: EngineConfig) -> int:
    """Return how many blocks follow a pool's own: where ranks share the tokens of sequences, one for copies of other ranks'
    blocks."""
    return 1 if config.decode_context_parallel_size > 1 else 0


def check_pinned(memory: MemoryPlan) -> None:
    """Raise ConfigError if the host's memory does not hold both the host tier and offloaded weights."""
    wanted, available = memory.pinned_bytes, available_memory_bytes() - memory.offloaded_bytes
    if wanted > available:
        raise ConfigError(
            f"kv_host_bytes is {wanted}, which a GPU needs as pinned host memory, but {format_bytes(max(0, available))} are "
            "available there: lower it"
        )


def tier_staging_bytes(config: EngineConfig, kv: KvSpec, page_shares: Sequence[int] = ()) -> int:
    """Return the bytes of the buffers on a device that pages of the host tier pass through; 0 without a host tier.

    page_shares  of all ranks, see MemoryPlan
    """
    if config.host_tier_bytes == 0 or kv.page_bytes == 0:
        return 0
    num_pages = config.host_tier_bytes // (sum(page_shares) or kv.page_bytes)
    return sum(staged_pages(kv.page_bytes, num_pages)) * kv.page_bytes


def gathered_bytes(config: EngineConfig, kv: KvSpec, max_model_len: int) -> int:
    """Return the bytes in which keys of a layer, and results of attention, are gathered where ranks share the tokens of
    sequences; 0 where they do not."""
    if config.decode_context_parallel_size == 1:
        return 0
    layer_bytes = max(kv.part(layer, layer + 1).bytes_per_block for layer in range(len(kv.layer_shapes)))
    num_blocks = -(-max(GATHERED_TOKENS, max_model_len) // kv.block_size)
    # Results of this rank, of all ranks, and these in order; keys of this rank, of all ranks, and of its heads.
    return 3 * GATHERED_BYTES + 3 * num_blocks * layer_bytes


def offload_plan(
    config: EngineConfig, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], num_weight_bytes: int
) -> OffloadPlan | None:
    """Return which layers cpu_offload_gb moves to host memory; None: it is 0.

    num_weight_bytes  of all weights, as they are run
    Raises ConfigError where it is less than a layer, or more than the host has.
    """
    if config.cpu_offload_gb == 0:
        return None
    plan = plan_offload(spec, shapes, num_weight_bytes, int(config.cpu_offload_gb * (1 << 30)))
    available = available_memory_bytes()
    if plan.num_bytes > available:
        raise ConfigError(
            f"cpu_offload_gb is {config.cpu_offload_gb:g}, which moves {format_bytes(plan.num_bytes)} of weights to host "
            f"memory, but {format_bytes(available)} are available there: lower it"
        )
    return plan


def _check_recurrent(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for options with which a GPU does not run models with a recurrent state."""
    what = f"a {spec.model_type!r} model has layers with a recurrent state"
    if config.tensor_parallel_size > 1:
        raise ConfigError(f"tensor_parallel_size is {config.tensor_parallel_size}: {what}, which run on one GPU; set it to 1")


def plan_device_memory(
    config: EngineConfig,
    kv: KvSpec,
    usage: DeviceUsage,
    max_model_len: int,
    num_batched_tokens: int,
    has_own_memory: bool = True,
    draft_block_bytes: int = 0,
) -> MemoryPlan:
    """Decide the number of KV blocks: as many as were asked for, or what gpu_memory_utilization leaves.

    num_batched_tokens
                    of a step at most, for which a sequence holds blocks of the window group
    has_own_memory  no: the memory is the host's, of which max_num_seqs sequences of max_model_len get what they need. On a GPU
                    what they leave keeps prefixes cached
    draft_block_bytes
                    what drafts keep under each block, also under those of other homes
    Raises ConfigError, with the numbers and what to change, where nothing is left.
    """
    available = math.floor(usage.total_bytes * config.gpu_memory_utilization) - usage.foreign_bytes
    num_states, num_checkpoints = count_states(config, kv)
    state_bytes = num_states * kv.bytes_per_state
    all_bytes = kv.pool_bytes(1, 1)  # of a block of each group
    spare_bytes = num_spare_blocks(config) * all_bytes
    room = available - usage.weight_bytes - usage.activation_bytes - state_bytes - spare_bytes
    num_homes, num_places = config.parallel.num_homes, config.decode_context_parallel_size
    num_pools = num_homes * num_places
    unit = block_unit(config, kv.block_size) // num_pools
    given = given_blocks(config, kv, max(1, all_bytes))
    if given is not None and config.num_kv_blocks is not None:
        given //= num_pools
    needed = config.max_num_seqs * -(-max_model_len // kv.block_size)
    wanted = -(-(MAX_DEFAULT_BLOCKS if has_own_memory else min(needed, MAX_DEFAULT_BLOCKS)) // (num_pools * unit)) * unit
    block_bytes = max(1, all_bytes + num_homes * draft_block_bytes)  # 0 without attention
    num_blocks = min(wanted, room // block_bytes) if given is None else given  # of this rank
    num_blocks = num_pools * (num_blocks // unit * unit)
    used = usage.weight_bytes, usage.activation_bytes + spare_bytes
    known = available, *used, kv, num_blocks, max_model_len, num_states, num_checkpoints
    plan = MemoryPlan(*known, num_block_places=num_places, num_homes=num_homes)
    if num_blocks >= 1 and kv.window_tokens is not None:
        plan = divide_blocks(config, plan, num_batched_tokens, draft_block_bytes, has_own_memory)
    if num_blocks < 1 or plan.kv_bytes + plan.num_kv_blocks * draft_block_bytes > room:
        asked = "" if given is None else f", and the KV pool asked for {format_bytes(given * block_bytes)} ({given} blocks)"
        share = config.gpu_memory_utilization
        raise ConfigError(
            f"the device has {format_bytes(usage.total_bytes)}, of which gpu_memory_utilization {share:g} and what others use "
            f"leave {format_bytes(max(0, available))}; the model takes {format_bytes(usage.weight_bytes)}, "
            f"{num_states} recurrent states {format_bytes(state_bytes)} and a step up to "
            f"{format_bytes(usage.activation_bytes)}, a KV block {format_bytes(block_bytes)}{asked}: raise "
            "gpu_memory_utilization; lower max_num_batched_tokens, max_num_seqs, max_model_len"
            + (", num_kv_blocks or kv_cache_memory_bytes" if given is not None else "")
            + "; or take a smaller model or dtype"
        )
    return plan
