"""Build a model that tensor-parallel ranks of one host share: start the workers, and load rank 0's shard meanwhile."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import ConfigError, WorkerError
from quire.base.logging import get_logger
from quire.base.numa import bind_process, bind_rank_to_numa_node
from quire.base.threads import num_usable_cores
from quire.contracts.config import EngineConfig
from quire.contracts.expert_options import EplbConfig, LossyRouting
from quire.contracts.kv_spec import KvDtype, KvSpec
from quire.contracts.memory import MemoryPlan, ModelReport, format_bytes
from quire.contracts.model_spec import ModelSpec
from quire.kv.tiers.host_slab import HostSlab, PagePart, slots_of
from quire.model.checkpoint import open_parameters, tie_missing_head
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.native_experts import ExpertLoader
from quire.model.native_model import native_refusal
from quire.model.tensor_shards import ContextPlace, ModelShard, RankGroup, RowDivision
from quire.parallel.barrier import ProcessBarrier, native_extension
from quire.parallel.communicator import Communicator
from quire.parallel.mesh import DeviceMesh
from quire.parallel.remote_workers import RemoteWorkers
from quire.parallel.rendezvous import check_fingerprints
from quire.parallel.row_exchange import RowExchange
from quire.parallel.shards import ShardRange
from quire.parallel.step_pacer import StepPacer
from quire.parallel.worker_group import WorkerGroup, attach_subgroups
from quire.quant.parameters import DenseOrQuantized, Parameter, StoredParameter
from quire.quant.policy import POLICIES, parameter_quantizer
from quire.worker.device.device_select import check_rank_devices
from quire.worker.expert_moves import ExpertMover
from quire.worker.expert_parallel import (
    Placements,
    count_copied_parameters,
    find_placements,
    placement_lists,
    placements_of,
)
from quire.worker.host_part import held_parameters, ranks_on_host, shard_of, shard_parameters
from quire.worker.memory import available_memory_bytes, cpu_block_size
from quire.worker.parallel_executor import LeaderExecutor
from quire.worker.parallel_launch import config_fields, fingerprint, launch_options, launched_group, start_workers
from quire.worker.tiers import num_host_pages, slot_bytes

logger = get_logger(__name__)

_MOVE_SHARE = 1 / 32
"""How much of the weights that the shortest step reads is read and written next to each step while experts move. One thread
converts and packs them, so a byte may cost up to 16 times as much as in the step before the step is 1.5 times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """What every rank has to know to build its part; the leader's, sent to the workers as JSON.

    shares             what each rank gets, in parts
    num_threads        of each rank
    rows_file          descriptor of the file for the rows that ranks share, the same in every process
    group_files        where tensor-parallel groups divide the rows of a step: in place of rows_file, those of each group, and
                       behind them those of the ranks with each shard
    has_draft_heads    rank 0 drafts with heads that read the whole embedding or LM head
    needed_bytes       of memory, of each rank, estimated
    options            see config_fields
    checks_first       ranks are compared before they load weights, not after: where a launcher has started all of them
    allow_missing_head as in EngineConfig
    num_host_pages     pages of the host tier, of which each rank has its part
    slots_file         descriptor of the memory of these pages, where the ranks share memory; -1: there are none
    expert_ranks       with expert parallelism: for each layer that has experts, in order, those of each rank
    expert_move_bytes  that each rank may read and write next to a step to load experts that move; 0: none move
    lossy_routing      the fields of LossyRouting
    context_size       ranks that share the tokens of sequences
    home_size          ranks of each home of sequences; 0: there are no homes
    num_states, num_state_checkpoints  as in MemoryPlan
    layer_kv_dtypes    see KvSpec.layer_dtypes
    num_row_ranks      groups of len(shares) tensor-parallel ranks that divide the rows of a step
    """

    folder: str
    dtype: str
    quantization: str | None
    allow_missing_head: bool
    max_model_len: int
    max_num_seqs: int
    block_size: int
    kv_dtype: KvDtype
    num_kv_blocks: int
    num_window_blocks: int
    shares: tuple[float, ...]
    num_threads: tuple[int, ...]
    rows_file: int
    has_draft_heads: bool
    needed_bytes: tuple[int, ...]
    options: dict[str, str]
    checks_first: bool
    num_host_pages: int = 0
    slots_file: int = -1
    expert_ranks: tuple[list[list[int]], ...] | None = None
    expert_move_bytes: int = 0
    lossy_routing: tuple[float, float, float] = (0.0, 0.0, 0.0)
    context_size: int = 1
    home_size: int = 0
    num_row_ranks: int = 1
    group_files: tuple[int, ...] = ()
    num_states: int = 0
    num_state_checkpoints: int = 0
    layer_kv_dtypes: tuple[KvDtype, ...] = ()

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a grid."""
        return DeviceMesh(tensor=len(self.shares), context=self.num_row_ranks)

    @property
    def num_homes(self) -> int:
        """Homes of sequences; 1: all ranks attend to all sequences."""
        return len(self.shares) // self.home_size if self.home_size else 1

    @property
    def num_local_blocks(self) -> int:
        """Blocks in the KV cache of each rank."""
        return self.num_kv_blocks // (self.num_homes if self.home_size else self.context_size)

    def placements(self, spec: ModelSpec) -> Placements | None:
        """Return where the experts of the model are; None without expert parallelism."""
        return placements_of(self.expert_ranks, spec)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankConfig:
        """Return what to_json was called on."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def check_tensor_parallel(config: EngineConfig, spec: ModelSpec, device: str) -> None:
    """Raise ConfigError where the model cannot run on tensor_parallel_size ranks here; device: ModelReport.device."""
    if device != "cpu":
        check_rank_devices(config, device, len(ranks_on_host(config)))
        native_extension()  # raises UnsupportedError
        return
    native_extension()  # raises UnsupportedError
    refusal = native_refusal(spec, cpu_block_size(config))
    if refusal is not None:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}: it needs the native kernels, which do not run {refusal}"
        )
    placements = find_placements(config, spec)
    for rank in range(config.tensor_parallel_size):
        shard_of(config, spec, rank, placements)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank of a model holds, before it is loaded; weight_bytes: an estimate.

    kv_bytes         of its KV cache and its recurrent states
    heads, kv_heads  of the first layer with attention
    num_experts      with expert parallelism: experts of all layers together; None: without
    tokens           with context parallelism: which tokens it holds or computes
    """

    weight_bytes: int
    kv_bytes: int
    heads: ShardRange
    kv_heads: ShardRange
    num_experts: int | None = None
    tokens: str | None = None


def rank_memories(config: EngineConfig, report: ModelReport) -> list[RankMemory]:
    """Return what each rank will hold."""
    found: list[RankMemory] = []
    if config.prefill_context_parallel_size > 1 and config.tensor_parallel_size == 1:
        return _row_rank_memories(config, report)
    placements = find_placements(config, report.spec)
    whole = report.num_parameters  # that weight_bytes is of; on GPUs it is of rank 0's
    whole += count_copied_parameters(placements or {}, report.parameters)
    for rank in range(config.tensor_parallel_size):
        size, is_cpu = config.decode_context_parallel_size, report.device == "cpu"
        shard = shard_of(config, report.spec, rank, placements)
        own = held_parameters(config, shard, report.parameters) if is_cpu else shard_parameters(shard, report.parameters)
        memory = report.memory
        kv = shard.kv_spec(report.spec, memory.kv.block_size, memory.kv.dtype, memory.kv.window_tokens is not None)
        kv = kv.with_dtypes(memory.kv.layer_dtypes)
        whole = own if rank == 0 and not is_cpu else whole
        num_bytes = report.memory.weight_bytes * own // whole
        first = next((layer for layer in shard.layers if layer.heads.heads.size > 0), shard.layers[0])
        heads = first.heads if first.context is None else first.context
        num_experts = None if placements is None else sum(len(each.ranks[rank]) for each in placements.values())
        num_kv_bytes = kv.pool_bytes(memory.num_local_blocks, memory.num_window_blocks) + memory.num_states * kv.bytes_per_state
        tokens = None if size == 1 else f"1/{size} of the tokens of a sequence"
        if config.enable_dp_attention:
            tokens = f"the sequences at home here: {memory.num_local_blocks:,} blocks"
        if config.prefill_context_parallel_size > 1:
            tokens = f"computes 1/{config.prefill_context_parallel_size} of the tokens of a prompt"
        found.append(RankMemory(num_bytes, num_kv_bytes, first.heads.heads, heads.kv_heads, num_experts, tokens))
    return found * config.prefill_context_parallel_size


def _row_rank_memories(config: EngineConfig, report: ModelReport) -> list[RankMemory]:
    memory, attention, size = report.memory, report.spec.layers[0].attention, config.prefill_context_parallel_size
    num_kv_bytes = memory.kv.pool_bytes(memory.num_kv_blocks, memory.num_window_blocks)
    heads, kv_heads = ShardRange(0, attention.num_heads), ShardRange(0, attention.num_kv_heads)
    tokens = f"computes 1/{size} of the tokens of a prompt"
    return [RankMemory(memory.weight_bytes, num_kv_bytes, heads, kv_heads, tokens=tokens)] * size


def check_rank_memory(
    needed_bytes: Sequence[int], rank: int, advice: str = "ranks, or give this one a smaller share (tensor_parallel_shares)"
) -> None:
    """Raise ConfigError where this host has not the memory that a rank needs; needed_bytes: of each rank."""
    needed, available = needed_bytes[rank], available_memory_bytes()
    if needed > available:
        raise ConfigError(
            f"rank {rank} needs about {format_bytes(needed)} for its weights and KV cache, but {format_bytes(available)} are "
            f"available on {socket.gethostname()}; lower num_kv_blocks, take more {advice}"
        )


def build_rank(
    config: RankConfig,
    folder: Path,
    rank: int,
    barrier: ProcessBarrier,
    exchange: RowExchange | None = None,
    subgroups: Mapping[str, ProcessBarrier] | None = None,
) -> tuple[NativeDecoder, MemoryPlan]:
    """Load a rank's shard; return what runs it, and the plan of its KV cache. It opens only the rows that the rank has.

    exchange   where the ranks share no memory
    subgroups  the barriers of row_subgroups that the rank is in, where tensor-parallel groups divide rows

    Raises ModelFormatError, UnsupportedError or ConfigError.
    """
    spec = _read_spec(config, folder)
    parameters = open_parameters(folder, spec)
    quantize = _quantizer(config, spec, parameters)
    group, kv = _rank_group(config, spec, rank, barrier, exchange)
    if config.group_files:
        group = _divided_group(config, group, rank, subgroups or {})
    decoder = NativeDecoder(native_extension(), spec, parameters, config.max_model_len, quantize, group)
    lossy = LossyRouting(*config.lossy_routing)
    if lossy:
        decoder.use_lossy_routing(lossy)
    memory = MemoryPlan(
        0,
        decoder.weight_bytes,
        0,
        kv,
        config.num_kv_blocks,
        config.max_model_len,
        config.num_states,
        config.num_state_checkpoints,
        num_window_blocks=config.num_window_blocks,
        num_block_places=config.context_size,
        num_homes=config.num_homes,
    )
    return decoder, memory


def _read_spec(config: RankConfig, folder: Path) -> ModelSpec:
    spec = read_model_spec(folder, config.dtype)
    return tie_missing_head(folder, spec) if config.allow_missing_head else spec


def _quantizer(
    config: RankConfig, spec: ModelSpec, parameters: Mapping[str, Parameter | StoredParameter]
) -> Callable[[str, Tensor], DenseOrQuantized] | None:
    """Return how weights are quantised on load."""
    policy = None if config.quantization is None else POLICIES[config.quantization]
    return None if policy is None else parameter_quantizer(parameters, spec, policy).quantized


def make_mover(config: RankConfig, folder: Path, decoder: NativeDecoder, communicator: Communicator) -> ExpertMover:
    """Return what moves experts to this rank and from it; folder: the checkpoint."""
    spec = _read_spec(config, folder)
    parameters = open_parameters(folder, spec)
    quantize = _quantizer(config, spec, parameters)
    pacer = StepPacer(config.expert_move_bytes)
    loader = ExpertLoader(native_extension(), spec, lambda: parameters, quantize, decoder.dense_stacks, pacer)
    return ExpertMover(decoder, loader.load, communicator, config.placements(spec) or {}, pacer)


def _rank_group(
    config: RankConfig, spec: ModelSpec, rank: int, barrier: ProcessBarrier, exchange: RowExchange | None
) -> tuple[RankGroup, KvSpec]:
    """Return the place of a rank in its group, and the shape of its KV cache."""
    is_windowed = config.num_window_blocks > 0
    if len(config.shares) == 1:
        division = RowDivision(rank, config.num_row_ranks, barrier.address, config.rows_file)
        kv = KvSpec.of(spec, config.block_size, config.kv_dtype, is_windowed).with_dtypes(config.layer_kv_dtypes)
        return RankGroup(None, exchange=exchange, division=division), kv
    size, is_rank_0 = config.context_size, rank == 0
    rank %= len(config.shares)
    shard = ModelShard.of(spec, rank, config.shares, config.placements(spec), size, config.home_size)
    has_whole_vocabulary = is_rank_0 and config.has_draft_heads
    context = None if size == 1 else ContextPlace(rank % size, size, config.num_local_blocks)
    if config.home_size:
        context = ContextPlace(rank // config.home_size, config.num_homes, config.num_local_blocks)
    group = RankGroup(
        shard, barrier.address, config.rows_file, has_whole_vocabulary, exchange, context, home_size=config.home_size
    )
    kv = shard.kv_spec(spec, config.block_size, config.kv_dtype, is_windowed)
    return group, kv.with_dtypes(config.layer_kv_dtypes)


def page_part(config: RankConfig, folder: Path, rank: int, own: KvSpec, exchange: RowExchange | None) -> PagePart | None:
    """Return what a rank holds of the pages of the host tier; None: it has pages of its own, for its part of the blocks.

    own       its KV cache
    exchange  where the ranks share no memory
    """
    if config.slots_file < 0 or exchange is not None:
        return None
    spec = _read_spec(config, folder)
    place = rank % len(config.shares)
    shards = [ModelShard.of(spec, each, config.shares, config.placements(spec)) for each in range(len(config.shares))]
    whole = KvSpec.of(spec, config.block_size, config.kv_dtype).with_dtypes(config.layer_kv_dtypes)
    first_heads = tuple(layer.cached_kv_heads.start for layer in shards[place].layers)
    sizes = [shard.kv_spec(spec, config.block_size, config.kv_dtype).bytes_per_state for shard in shards]
    return PagePart(config.slots_file, whole, own, 0, first_heads, sum(sizes), sum(sizes[:place]))


def row_subgroups(mesh: DeviceMesh) -> dict[str, tuple[int, ...]]:
    """Return the ranks that have a barrier of their own where tensor-parallel groups divide the rows of steps: those of each
    group, and those that have the same shard; none where there is one kind only."""
    if mesh.tensor == 1 or mesh.context == 1:
        return {}
    groups = {f"tensor{place}": mesh.group(place * mesh.tensor, "tensor") for place in range(mesh.context)}
    return groups | {f"rows{place}": mesh.group(place, "context") for place in range(mesh.tensor)}


def _divided_group(config: RankConfig, group: RankGroup, rank: int, subgroups: Mapping[str, ProcessBarrier]) -> RankGroup:
    """Return the place of a rank whose tensor-parallel group divides rows with others."""
    at, mesh = config.mesh.coordinates(rank), config.mesh
    tensor, rows = subgroups[f"tensor{at.context}"], subgroups[f"rows{at.tensor}"]
    division = RowDivision(at.context, mesh.context, rows.address, config.group_files[mesh.context + at.tensor])
    return replace(group, barrier_address=tensor.address, rows_file=config.group_files[at.context], division=division)


def build_leader(config: EngineConfig, report: ModelReport, slab: HostSlab | None = None) -> tuple[LeaderExecutor, ModelReport]:
    """Start the workers and load rank 0's shard; return its executor when all ranks are ready.

    slab  see build_runner
    Raises what any rank fails with.
    """
    files = [os.memfd_create("quire-rows", os.MFD_CLOEXEC)]  # the rows, and the pages of tiers
    subgroups = row_subgroups(DeviceMesh.of(config.parallel))
    group_files = tuple(os.memfd_create("quire-rows", os.MFD_CLOEXEC) for _ in subgroups)
    release_threads = threads_release()

    def release() -> None:
        release_threads()
        close_files(group_files)

    try:
        num_pages = num_host_pages(config, report)
        if num_pages > 0:
            files.append(slots_of(slab, num_pages, slot_bytes(report.memory)))
        rank_config = _rank_config(config, report, files, group_files)
        options = launch_options(config, pass_fds=(*files, *group_files), subgroups=subgroups)
        workers = start_workers(config, rank_config.to_json(), options)
    except BaseException:
        close_files(files)
        release()
        raise
    try:
        executor, report = _build_rank_0(config, report, rank_config, workers, slab)
    except BaseException:
        workers.kill()
        close_files(files)
        release()
        raise
    close_files(files[1:])  # every rank has mapped them
    executor.release = release
    return executor, report


def close_files(files: Sequence[int]) -> None:
    """Close file descriptors."""
    for file in files:
        os.close(file)


def _expert_move_bytes(config: EngineConfig, report: ModelReport) -> int:
    """Return how much each rank reads and writes next to a step to load experts: a part of the weights that it reads in a
    step with one token, which is the shortest."""
    if not config.enable_eplb:
        return 0
    return max(1, int(report.active_weight_bytes * _MOVE_SHARE / config.tensor_parallel_size))


def _rank_config(config: EngineConfig, report: ModelReport, files: Sequence[int], group_files: tuple[int, ...]) -> RankConfig:
    """Return what every rank has to know. `files` are those of the rows and, with a tier, of its pages."""
    memory, placements = report.memory, find_placements(config, report.spec)
    return RankConfig(
        folder=str(report.folder),
        dtype=report.spec.dtype,
        quantization=config.quantization,
        allow_missing_head=config.allow_missing_head,
        max_model_len=memory.max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=memory.kv.block_size,
        kv_dtype=memory.kv.dtype,
        layer_kv_dtypes=memory.kv.layer_dtypes,
        num_kv_blocks=memory.num_kv_blocks,
        num_window_blocks=memory.num_window_blocks,
        shares=config.parallel.shares,
        num_threads=divide_threads(config.num_threads or torch.get_num_threads(), config.parallel.world_size),
        rows_file=files[0],
        has_draft_heads=config.speculative_config is not None and config.speculative_config.has_draft_heads,
        needed_bytes=tuple(each.weight_bytes + each.kv_bytes for each in rank_memories(config, report)),
        options=config_fields(config),
        checks_first=config.distributed_executor_backend == "ray" or launched_group(config) is not None,
        num_host_pages=num_host_pages(config, report),
        slots_file=files[1] if len(files) > 1 else -1,
        expert_move_bytes=_expert_move_bytes(config, report),
        lossy_routing=dataclasses.astuple(config.lossy_routing),
        expert_ranks=placement_lists(placements),
        context_size=config.decode_context_parallel_size,
        home_size=config.parallel.home_size,
        num_row_ranks=config.prefill_context_parallel_size,
        group_files=group_files,
        num_states=memory.num_states,
        num_state_checkpoints=memory.num_state_checkpoints,
    )


def _build_rank_0(
    config: EngineConfig,
    report: ModelReport,
    rank_config: RankConfig,
    workers: WorkerGroup | RemoteWorkers,
    slab: HostSlab | None,
) -> tuple[LeaderExecutor, ModelReport]:
    if workers.exchange is not None:
        check_hosts(config, report.spec)
    if workers.num_on_host is None:
        bind_rank_to_numa_node(0, rank_config.num_threads)
    torch.set_num_threads(num_threads_of(rank_config, 0, workers.num_on_host, config))
    if rank_config.checks_first:
        _check_alike(rank_config, report.folder, workers)
    if workers.exchange is not None:
        logger.info("rows are exchanged between hosts over gloo at every barrier, which is slow")
    workers.startup.stage("loading weights")
    check_rank_memory(rank_config.needed_bytes, 0)
    subgroups = attach_subgroups(workers.memory, 0, row_subgroups(rank_config.mesh))
    decoder, memory = build_rank(rank_config, report.folder, 0, workers.barrier, workers.exchange, subgroups)
    if not rank_config.checks_first:
        _check_alike(rank_config, report.folder, workers)
    workers.startup.ready({"packed_weight_bytes": decoder.weight_bytes})
    statuses = workers.wait_ready()
    own = [int(status.ready["packed_weight_bytes"]) for status in statuses]
    logger.info(
        "parallel    %d ranks, threads %s, weights %s",
        len(own),
        ", ".join(map(str, rank_config.num_threads)) if workers.num_on_host is None else "of each host",
        ", ".join(map(format_bytes, own)),
    )
    report = replace(report, packed_weight_bytes=sum(own), spared_weight_bytes=decoder.spared_bytes)
    executor = LeaderExecutor(decoder, memory, config.max_num_seqs, workers, rank_config.rows_file, own)
    part = page_part(rank_config, report.folder, 0, memory.kv, workers.exchange)
    executor.open_host_tier(rank_config.num_host_pages, config.prefill_listen is not None, part, slab)
    placements = rank_config.placements(report.spec)
    if placements is not None:
        executor.place_experts(placements, config.parallel.shares, config.save_expert_placement)
    if rank_config.expert_move_bytes:
        mover = make_mover(rank_config, report.folder, decoder, workers.communicator)
        executor.move_experts(mover, config.eplb_config or EplbConfig())
    return executor, report


def check_hosts(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for what ranks on several hosts do not support: no process has whole pages."""
    for name, value, allowed in (
        ("kv_host_bytes", config.kv_host_bytes if spec.has_recurrent_state else None, None),
        ("kv_disk_dir", config.kv_disk_dir, None),
        ("role", config.role, "both"),
        ("prefill_listen", config.prefill_listen, None),
    ):
        if value != allowed:
            raise ConfigError(
                f"{name} is {value!r}, but the ranks are on several hosts, which share no pages: leave it at {allowed!r}, or "
                "start all ranks on one host"
            )


def _check_alike(config: RankConfig, folder: Path, workers: WorkerGroup | RemoteWorkers) -> None:
    """Compare all ranks. Raises what a worker has failed with, where it did not come so far."""
    workers.startup.stage("comparing ranks")
    try:
        check_fingerprints(workers.communicator, fingerprint(folder, config.options))
    except WorkerError:
        workers.raise_failure()
        raise


def num_threads_of(config: RankConfig, rank: int, num_on_host: int | None, own: Any) -> int:
    """Return the threads of a rank: its part of those of all, or, where there are several hosts, of those of its host.

    num_on_host  ranks of its host; None: all
    own          its own EngineConfig, if it has one
    """
    if num_on_host is None:
        return config.num_threads[rank]
    given = own.num_threads if isinstance(own, EngineConfig) else None
    return threads_of_host(given, num_on_host)


def threads_of_host(num_threads: int | None, num_on_host: int) -> int:
    """Return the threads of each of num_on_host ranks of this host; num_threads: of all of them, None: those of torch."""
    return max(1, (num_threads or torch.get_num_threads()) // num_on_host)


def threads_release() -> Callable[[], None]:
    """Return a call that gives this process the number of threads and the cores back that it has now.

    A leader takes its part of them. The next engine of the process divides all of them again.
    """
    num_threads = torch.get_num_threads()
    cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()

    def release() -> None:
        torch.set_num_threads(num_threads)
        if cores and cores != frozenset(os.sched_getaffinity(0)):
            bind_process(cores)

    return release


def divide_threads(num_threads: int, num_ranks: int) -> tuple[int, ...]:
    """Return the threads of each rank: together num_threads, at least one each."""
    if num_threads < num_ranks:
        logger.warning(
            "%d ranks have one thread each, more than the %d threads that were asked for (%d cores can be used)",
            num_ranks,
            num_threads,
            num_usable_cores(),
        )
    return tuple(max(1, (rank + 1) * num_threads // num_ranks - rank * num_threads // num_ranks) for rank in range(num_ranks))
