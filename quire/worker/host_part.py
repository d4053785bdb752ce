"""What the tensor-parallel ranks on this host will hold of a model, for the memory plan."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from quire.contracts.config import EngineConfig
from quire.contracts.kv_spec import KvSpec
from quire.contracts.memory import HostPart
from quire.contracts.model_spec import ModelSpec
from quire.model.tensor_shards import ModelShard
from quire.worker.expert_parallel import Placements, expert_parameters, find_placements
from quire.worker.memory import kv_spec_of, limits_windows
from quire.worker.parallel_launch import launched_group


def host_part(
    config: EngineConfig,
    spec: ModelSpec,
    shapes: Mapping[str, tuple[int, ...]],
    num_weight_bytes: int,
    max_model_len: int,
    environment: Mapping[str, str] = os.environ,
) -> HostPart | None:
    """Return what the ranks on this host hold; None where one process has the whole model.

    shapes            of all parameters, by their canonical names
    num_weight_bytes  of the whole model, as it is run, without copies of experts
    max_model_len     decides whether there is a window group

    Raises ConfigError where the model cannot be divided so.
    """
    if config.prefill_context_parallel_size > 1 and config.tensor_parallel_size == 1:
        return _row_ranks_part(config, spec, num_weight_bytes, max_model_len, environment)
    if config.tensor_parallel_size == 1:
        return None
    num_stages, num_copies = config.pipeline_parallel_size, config.prefill_context_parallel_size
    has_groups = num_stages * num_copies > 1  # stages, or groups that divide prompts
    ranks = range(config.tensor_parallel_size) if has_groups else ranks_on_host(config, environment)
    placements = find_placements(config, spec)
    shards = [shard_of(config, spec, rank, placements) for rank in ranks]
    own = sum(held_parameters(config, shard, shapes) for shard in shards)
    whole = max(1, sum(map(math.prod, shapes.values())))
    is_limited = limits_windows(config, spec, max_model_len)
    model_kv = kv_spec_of(config, spec, is_limited)
    parts = (shard.kv_spec(spec, model_kv.block_size, model_kv.dtype, is_limited) for shard in shards)
    kv: list[KvSpec] = [part.with_dtypes(model_kv.layer_dtypes) for part in parts]
    return HostPart(
        len(ranks) * num_stages * num_copies,
        config.tensor_parallel_size * num_stages * num_copies,
        num_weight_bytes * own // whole * num_copies,
        # each block is on one of so many ranks
        -(-sum(each.bytes_per_block for each in kv) // (config.decode_context_parallel_size * config.parallel.num_homes))
        * num_copies,
        sum(each.window_bytes_per_block for each in kv) * num_copies,
        sum(each.bytes_per_state for each in kv) * num_copies,
    )


def _row_ranks_part(
    config: EngineConfig, spec: ModelSpec, num_weight_bytes: int, max_model_len: int, environment: Mapping[str, str]
) -> HostPart:
    """Return the same for ranks that each have the whole model and the whole KV cache."""
    num_ranks = len(ranks_on_host(config, environment))
    kv = kv_spec_of(config, spec, limits_windows(config, spec, max_model_len))
    return HostPart(
        num_ranks,
        config.prefill_context_parallel_size,
        num_ranks * num_weight_bytes,
        num_ranks * kv.bytes_per_block,
        num_ranks * kv.window_bytes_per_block,
    )


def shard_of(config: EngineConfig, spec: ModelSpec, rank: int, placements: Placements | None) -> ModelShard:
    """Return the part of a tensor-parallel rank. Raises ConfigError where the model cannot be divided so."""
    size, home_size = config.decode_context_parallel_size, config.parallel.home_size
    return ModelShard.of(spec, rank, config.parallel.shares, placements, size, home_size)


def shard_parameters(shard: ModelShard, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many parameters the shard of a rank has."""
    return sum(map(math.prod, shard.parameter_shapes(shapes).values()))


def held_parameters(config: EngineConfig, shard: ModelShard, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many parameters a rank on a CPU holds; shapes: of all parameters, by their canonical names."""
    own = shard_parameters(shard, shapes)
    if shard.rank == 0 and config.speculative_config is not None and config.speculative_config.has_draft_heads:
        # Rank 0 has the whole embedding and LM head too, which the heads read.
        own += sum(math.prod(shapes[name]) for name in ("embed.weight", "lm_head.weight") if name in shapes)
    if config.enable_eplb:
        # An expert that is loaded takes its place only when all ranks are ready.
        layers = range(len(shard.layers))
        own += max(expert_parameters(shapes, layer) for layer in layers)
    return own


def ranks_on_host(config: EngineConfig, environment: Mapping[str, str] = os.environ) -> range:
    """Return the ranks that run on this host.

    A leader that starts the others itself, or by Ray, has all of them here. torchrun says how many it has started on this host
    (LOCAL_WORLD_SIZE); each pod of a LeaderWorkerSet counts as a host.
    """
    group = launched_group(config, environment)
    if group is None:
        return range(config.parallel.world_size)
    first = group.rank - group.local_rank
    return range(first, first + (group.num_local_ranks or group.local_rank + 1))
