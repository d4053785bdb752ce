"""Which engines may have KV tiers, and how many pages the host tier has."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

import quire
from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport
from quire.kernels.native import load_native

_CHECKPOINT_SUFFIXES = (".json", ".safetensors", ".gguf")
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


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
    if report.spec.has_recurrent_state:
        raise ConfigError(
            f"{name} is {value!r}, but {report.spec.model_type} has a recurrent state, which KV tiers do not hold: leave it out"
        )
    if not report.spec.is_causal:
        raise ConfigError(f"{name} is {value!r}, but the model attends in both directions, which caches nothing: leave it out")
    if report.spec.implementation == "transformers":
        raise ConfigError(f"{name} is {value!r}, but model_impl 'transformers' has no KV tiers: leave one of them out")
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
    return config.host_tier_bytes // max(1, report.memory.kv.bytes_per_block)


def tier_fingerprint(config: EngineConfig, report: ModelReport) -> dict[str, str]:
    """Return all on which the bytes of a page depend, besides its tokens: pages of another fingerprint are never loaded.

    Of the weights it has samples, and the time at which each file was written.
    """
    kv = report.memory.kv
    return {
        "version": quire.__version__,
        "kernels": _kernels(),
        "weights": _weights_hash(report.folder),
        "model": repr((config.dtype, config.quantization, report.spec.rope_switch_len(report.memory.max_model_len))),
        "max_model_len": str(report.memory.max_model_len),
        "kv": repr((kv.dtype, kv.block_size, kv.layer_shapes)),
    }


def _kernels() -> str:
    native = load_native()
    if native is None or native.__file__ is None:
        return f"torch {torch.__version__}"
    return hashlib.sha256(Path(native.__file__).read_bytes()).hexdigest()[:16] + f" {native.isa()}"


def _weights_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    paths = [folder] if folder.is_file() else sorted(path for path in folder.iterdir() if path.suffix in _CHECKPOINT_SUFFIXES)
    for path in paths:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        with path.open("rb") as file:
            for index in range(_NUM_SAMPLES):
                file.seek(status.st_size * index // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
