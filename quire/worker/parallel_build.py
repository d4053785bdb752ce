"""Build a model that tensor-parallel ranks of one host share: start the workers, and load rank 0's shard meanwhile."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quire.base.errors import ConfigError, WorkerError
from quire.base.logging import get_logger
from quire.base.threads import num_usable_cores
from quire.contracts.config import EngineConfig
from quire.contracts.kv_spec import KvDtype
from quire.contracts.memory import MemoryPlan, ModelReport, format_bytes
from quire.model.checkpoint import open_parameters, tie_missing_head
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.native_model import native_refusal
from quire.model.tensor_shards import ModelShard, RankGroup
from quire.parallel.barrier import ProcessBarrier, native_extension
from quire.parallel.remote_workers import RemoteWorkers
from quire.parallel.rendezvous import check_fingerprints
from quire.parallel.row_exchange import RowExchange
from quire.parallel.shards import ShardRange
from quire.parallel.worker_group import LaunchOptions, WorkerGroup
from quire.quant.policy import POLICIES, parameter_quantizer
from quire.worker.device.device_select import check_rank_devices
from quire.worker.memory import available_memory_bytes, cpu_block_size
from quire.worker.parallel_executor import LeaderExecutor
from quire.worker.parallel_launch import config_fields, fingerprint, launched_group, start_workers
from quire.worker.tiers import num_host_pages

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """What every rank has to know to build its part; the leader's, sent to the workers as JSON.

    shares             what each rank gets, in parts
    num_threads        of each rank
    rows_file          descriptor of the file for the rows that ranks share, the same in every process
    has_draft_heads    rank 0 drafts with heads that read the whole embedding or LM head
    needed_bytes       of memory, of each rank, estimated
    options            see config_fields
    checks_first       ranks are compared before they load weights, not after: where a launcher has started all of them
    allow_missing_head as in EngineConfig
    num_host_pages     pages of the host tier, of which each rank has its part
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
    shares: tuple[float, ...]
    num_threads: tuple[int, ...]
    rows_file: int
    has_draft_heads: bool
    needed_bytes: tuple[int, ...]
    options: dict[str, str]
    checks_first: bool
    num_host_pages: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankConfig:
        """Return what to_json was called on."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def check_tensor_parallel(config: EngineConfig, report: ModelReport) -> None:
    """Raise ConfigError where the model cannot run on tensor_parallel_size ranks here."""
    if report.device != "cpu":
        check_rank_devices(config, report.device)
        native_extension()  # raises UnsupportedError
        return
    native_extension()  # raises UnsupportedError
    refusal = native_refusal(report.spec, cpu_block_size(config))
    if refusal is not None:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}: it needs the native kernels, which do not run {refusal}"
        )
    for rank in range(config.tensor_parallel_size):
        ModelShard.of(report.spec, rank, config.parallel.shares)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank of a model holds, before it is loaded; weight_bytes: an estimate.

    heads, kv_heads  of the first layer
    """

    weight_bytes: int
    kv_bytes: int
    heads: ShardRange
    kv_heads: ShardRange


def rank_memories(config: EngineConfig, report: ModelReport) -> list[RankMemory]:
    """Return what each rank will hold."""
    found: list[RankMemory] = []
    whole = report.num_parameters  # that weight_bytes is of; on GPUs it is of rank 0's
    for rank in range(config.tensor_parallel_size):
        shard = ModelShard.of(report.spec, rank, config.parallel.shares)
        own = sum(map(math.prod, shard.parameter_shapes(report.parameters).values()))
        kv = shard.kv_spec(report.spec, report.memory.kv.block_size, report.memory.kv.dtype)
        whole = own if rank == 0 and report.device != "cpu" else whole
        num_bytes = report.memory.weight_bytes * own // whole
        heads = shard.layers[0].heads
        found.append(RankMemory(num_bytes, kv.bytes_per_block * report.memory.num_kv_blocks, heads.heads, heads.kv_heads))
    return found


def check_rank_memory(config: RankConfig, rank: int) -> None:
    """Raise ConfigError where this host has not the memory that a rank needs."""
    needed, available = config.needed_bytes[rank], available_memory_bytes()
    if needed > available:
        raise ConfigError(
            f"rank {rank} needs about {format_bytes(needed)} for its weights and KV cache, but {format_bytes(available)} are "
            f"available on {socket.gethostname()}; lower num_kv_blocks, take more ranks, or give this one a smaller share "
            "(tensor_parallel_shares)"
        )


def build_rank(
    config: RankConfig, folder: Path, rank: int, barrier: ProcessBarrier, exchange: RowExchange | None = None
) -> tuple[NativeDecoder, MemoryPlan]:
    """Load a rank's shard; return what runs it, and the plan of its KV cache. It opens only the rows that the rank has.

    exchange  where the ranks share no memory

    Raises ModelFormatError, UnsupportedError or ConfigError.
    """
    spec = read_model_spec(folder, config.dtype)
    if config.allow_missing_head:
        spec = tie_missing_head(folder, spec)
    parameters = open_parameters(folder, spec)
    policy = None if config.quantization is None else POLICIES[config.quantization]
    quantize = None if policy is None else parameter_quantizer(parameters, spec, policy).narrowed
    shard = ModelShard.of(spec, rank, config.shares)
    has_whole_vocabulary = rank == 0 and config.has_draft_heads
    group = RankGroup(shard, barrier.address, config.rows_file, has_whole_vocabulary, exchange)
    decoder = NativeDecoder(native_extension(), spec, parameters, config.max_model_len, quantize, group)
    kv = shard.kv_spec(spec, config.block_size, config.kv_dtype)
    memory = MemoryPlan(0, decoder.weight_bytes, 0, kv, config.num_kv_blocks, config.max_model_len)
    return decoder, memory


def build_leader(config: EngineConfig, report: ModelReport) -> tuple[LeaderExecutor, ModelReport]:
    """Start the workers and load rank 0's shard; return its executor when all ranks are ready.

    Raises what any rank fails with.
    """
    size, memory = config.tensor_parallel_size, report.memory
    threads = divide_threads(config.num_threads or torch.get_num_threads(), size)
    rows_file = os.memfd_create("quire-rows", os.MFD_CLOEXEC)
    try:
        rank_config = RankConfig(
            folder=str(report.folder),
            dtype=report.spec.dtype,
            quantization=config.quantization,
            allow_missing_head=config.allow_missing_head,
            max_model_len=memory.max_model_len,
            max_num_seqs=config.max_num_seqs,
            block_size=memory.kv.block_size,
            kv_dtype=memory.kv.dtype,
            num_kv_blocks=memory.num_kv_blocks,
            shares=config.parallel.shares,
            num_threads=threads,
            rows_file=rows_file,
            has_draft_heads=config.speculative_config is not None and config.speculative_config.has_draft_heads,
            needed_bytes=tuple(each.weight_bytes + each.kv_bytes for each in rank_memories(config, report)),
            options=config_fields(config),
            checks_first=config.distributed_executor_backend == "ray" or launched_group(config) is not None,
            num_host_pages=num_host_pages(config, report),
        )
        workers = start_workers(config, rank_config.to_json(), LaunchOptions(pass_fds=(rows_file,)))
    except BaseException:
        os.close(rows_file)
        raise
    try:
        return _build_rank_0(config, report, rank_config, workers)
    except BaseException:
        workers.kill()
        os.close(rows_file)
        raise


def _build_rank_0(
    config: EngineConfig, report: ModelReport, rank_config: RankConfig, workers: WorkerGroup | RemoteWorkers
) -> tuple[LeaderExecutor, ModelReport]:
    torch.set_num_threads(num_threads_of(rank_config, 0, workers.num_on_host, config))
    if rank_config.checks_first:
        _check_alike(rank_config, report.folder, workers)
    workers.startup.stage("loading weights")
    check_rank_memory(rank_config, 0)
    decoder, memory = build_rank(rank_config, report.folder, 0, workers.barrier, workers.exchange)
    if not rank_config.checks_first:
        _check_alike(rank_config, report.folder, workers)
    workers.startup.ready({"packed_weight_bytes": decoder.weight_bytes})
    statuses = workers.wait_ready()
    own = [int(status.ready["packed_weight_bytes"]) for status in statuses]
    logger.info(
        "tensor parallel  %d ranks, threads %s, weights %s",
        len(own),
        ", ".join(map(str, rank_config.num_threads)) if workers.num_on_host is None else "of each host",
        ", ".join(map(format_bytes, own)),
    )
    report = replace(report, packed_weight_bytes=sum(own), spared_weight_bytes=decoder.spared_bytes)
    return LeaderExecutor(decoder, memory, config.max_num_seqs, workers, rank_config.rows_file, own), report


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
    return max(1, (given or torch.get_num_threads()) // num_on_host)


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
