"""Which engines may have KV tiers, and how many pages the host tier has."""

from __future__ import annotations

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport


def check_tiers(config: EngineConfig, report: ModelReport) -> None:
    """Raise ConfigError where the KV tiers that a configuration asks for are not supported."""
    if not config.host_tier_bytes:
        return
    name = "kv_host_bytes" if config.kv_disk_dir is None else "kv_disk_dir"
    value = getattr(config, name)
    if report.device != "cpu":
        raise ConfigError(
            f"{name} is {value!r}, but the model runs on {report.device}: KV tiers are supported on a CPU only; leave it "
            "out, or choose device='cpu'"
        )
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"{name} is {value!r} and pipeline_parallel_size {config.pipeline_parallel_size}: KV tiers of pipeline stages are "
            "not supported yet; leave one of them out"
        )
    if config.kv_disk_dir is not None and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"kv_disk_dir is {value!r} and tensor_parallel_size {config.tensor_parallel_size}: the disk tier needs one rank, "
            "as each rank has a part of every page; give kv_host_bytes only, or leave tensor_parallel_size at 1"
        )
    if num_host_pages(config, report) == 0:
        raise ConfigError(
            f"kv_host_bytes is {config.host_tier_bytes}, but a page (one KV block of {report.memory.kv.block_size} tokens) "
            f"takes {report.memory.kv.bytes_per_block} bytes; raise it"
        )


def num_host_pages(config: EngineConfig, report: ModelReport) -> int:
    """Return how many pages the host tier has, over all ranks together; 0: there is none."""
    return config.host_tier_bytes // report.memory.kv.bytes_per_block
