"""Which engines may have KV tiers, and how many pages the host tier has."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import torch

import quire
from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.kernels.native import load_native
from quire.kv.tiers.host_slab import MAX_SAVED_BYTES_ON_GPU
from quire.worker.host_part import ranks_on_host
from quire.worker.memory import skipped_layers, uses_native_kernels

_MAX_SAVED_BYTES = 64 << 20
"""The most that one step of a CPU copies to the host tier."""
_CHECKPOINT_SUFFIXES = (".json", ".safetensors", ".gguf")
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096
_NUM_TRANSFER_SAMPLES = 4096
"""Of each file for engines on different machines: 16 MiB. Files up to that size are read whole."""


def check_tiers(config: EngineConfig, report: ModelReport) -> None:
    """Raise ConfigError where the KV tiers that a configuration asks for are not supported."""
    if not config.host_tier_bytes:
        return
    name = "kv_host_bytes" if config.kv_host_bytes is not None else "kv_disk_dir"
    if config.has_kv_transfer:
        name = "role" if config.role != "both" else "prefill_listen"
    value = getattr(config, name)
    if report.spec.has_recurrent_state:
        _check_states(config, report, f"{name} is {value!r}, but {report.spec.model_type} has a recurrent state")
    if not report.spec.is_causal:
        raise ConfigError(f"{name} is {value!r}, but the model attends in both directions, which caches nothing: leave it out")
    if report.spec.implementation == "transformers":
        raise ConfigError(f"{name} is {value!r}, but model_impl 'transformers' has no KV tiers: leave one of them out")
    if report.device != "cpu" and len(ranks_on_host(config)) < config.parallel.world_size:
        raise ConfigError(
            f"{name} is {value!r}, but ranks on GPUs of several hosts share no pages: leave it out, or start all ranks on one "
            "host, by one process or torchrun"
        )
    if config.has_kv_transfer:
        _check_transfer(config, report)
    if num_host_pages(config, report) == 0:
        raise ConfigError(
            f"kv_host_bytes is {config.host_tier_bytes}, but a page (one KV block of {report.memory.kv.block_size} tokens) "
            f"takes {page_bytes(report.memory)} bytes; raise it"
        )


def _check_states(config: EngineConfig, report: ModelReport, what: str) -> None:
    if len(ranks_on_host(config)) < config.parallel.world_size or config.distributed_executor_backend == "ray":
        raise ConfigError(f"{what}, whose ranks share pages only on one host, started by one process or torchrun: leave it out")
    num_bytes = page_bytes(report.memory) * (num_state_pages(report.memory) + 1)
    if config.host_tier_bytes < num_bytes:
        raise ConfigError(
            f"{what}: a KV block and a state take {num_bytes} bytes of kv_host_bytes, which is {config.host_tier_bytes}"
        )


def _check_transfer(config: EngineConfig, report: ModelReport) -> None:
    if report.spec.rope_switch_len(report.memory.max_model_len) is not None:
        raise ConfigError(
            f"{config.transfer_field}: the rope of {report.spec.model_type} depends on the length of a sequence, which KV "
            "transfer does not support: choose a smaller max_model_len, or role 'both' without prefill_listen"
        )


def num_host_pages(config: EngineConfig, report: ModelReport) -> int:
    """Return how many pages the host tier has, over all ranks together; 0: there is none."""
    return config.host_tier_bytes // max(1, page_bytes(report.memory))


def max_page_saves(report: ModelReport) -> int:
    """Return how many pages one step copies to the host tier at most; each GPU copies its share of them."""
    most = _MAX_SAVED_BYTES if report.device == "cpu" else MAX_SAVED_BYTES_ON_GPU
    num_bytes = max(report.memory.page_shares, default=page_bytes(report.memory))
    return max(1, num_state_pages(report.memory), most // max(1, num_bytes))


def state_bytes(memory: MemoryPlan) -> int:
    """Return the bytes of a recurrent state over all ranks; 0: there is none."""
    return memory.kv.bytes_per_state if memory.host is None else memory.host.bytes_per_state


def slot_bytes(memory: MemoryPlan) -> int:
    """Return the bytes of a page in the memory that processes of a host share: those of a block, and where blocks have no
    bytes, as no layer has attention, those of a state."""
    return memory.kv.bytes_per_block or state_bytes(memory)


def num_state_pages(memory: MemoryPlan) -> int:
    """Return how many pages a recurrent state takes; 0: there is none."""
    return -(-state_bytes(memory) // max(1, slot_bytes(memory)))


def page_bytes(memory: MemoryPlan) -> int:
    """Return the bytes of a page over all ranks, or over those of this host where these hold more: key and value heads that
    several ranks hold count for each."""
    return sum(memory.page_shares) or max(memory.kv.bytes_per_block, memory.host_bytes_per_block) or state_bytes(memory)


def tier_fingerprint(config: EngineConfig, report: ModelReport) -> dict[str, str]:
    """Return all on which the bytes of a page depend, besides its tokens: pages of another fingerprint are never loaded.

    Of the weights it has samples, and the time at which each file was written.
    """
    kv = report.memory.kv
    return {
        "version": quire.__version__,
        "kernels": kernels_name(config, report),
        "weights": _weights_hash(report.folder),
        "model": repr((config.dtype, config.quantization, report.spec.rope_switch_len(report.memory.max_model_len))),
        "max_model_len": str(report.memory.max_model_len),
        "kv": repr((_kv_format(config, report), kv.block_size, kv.layer_shapes, kv.is_joined)),
        "page": _page_name(config, report),
        **({"values": repr(kv.value_sizes)} if kv.value_sizes else {}),
        **_states_name(config, report),
        **_routing_name(config),
    }


def _kv_format(config: EngineConfig, report: ModelReport) -> str:
    """Return the KV format of the model, with the layers that have another one. The report of a GPU with a stage has its own
    layers only."""
    kv, kept = report.memory.kv, config.kv_cache_dtype_skip_layers
    if kept is None or not report.memory.page_shares:
        return kv.format_name
    return f"{kv.dtype}; {report.spec.dtype} in layers {', '.join(map(str, sorted(skipped_layers(kept, report.spec))))}"


def _states_name(config: EngineConfig, report: ModelReport) -> dict[str, str]:
    """Return how recurrent states are laid out; nothing where there are none."""
    kv = report.memory.kv
    return {"states": repr((kv.dtype, config.parallel.shares, kv.state_shapes))} if state_bytes(report.memory) else {}


def _routing_name(config: EngineConfig) -> dict[str, str]:
    """Return the options by which experts are chosen in another way than the model's; nothing where there are none."""
    return {"lossy_routing": repr(config.lossy_routing)} if config.lossy_routing else {}


def transfer_fingerprint(config: EngineConfig, report: ModelReport) -> dict[str, str]:
    """Return all on which the bytes of a page depend for engines that may be on different machines.

    One field for each thing that a user can set, as its name and both values are shown where two engines differ. Of the weights
    it has more samples than `tier_fingerprint`, and no times of files.
    """
    spec, kv = report.spec, report.memory.kv
    return {
        "version": quire.__version__,
        "kernels": kernels_name(config, report),
        "model": f"{spec.model_type}, {len(spec.layers)} layers, hidden size {spec.hidden_size}, vocabulary {spec.vocab_size}",
        "dtype": str(spec.dtype),
        "quantization": str(config.quantization),
        "kv_cache_dtype": _kv_format(config, report),
        "block_size": str(kv.block_size),
        "max_model_len": str(report.memory.max_model_len),
        "kv_heads": _runs(kv.layer_shapes) + (", keys that are values" if kv.is_joined else ""),
        "page": _page_name(config, report),
        "weights": _weights_hash(report.folder, has_times=False)[:24],
        **_states_name(config, report),
        **_routing_name(config),
    }


def _page_name(config: EngineConfig, report: ModelReport) -> str:
    """Return in what order a page has its bytes: on several GPUs it is the share of each, one after the other."""
    if not report.memory.page_shares:
        return "whole blocks"
    shares = ":".join(f"{share:g}" for share in config.parallel.shares)
    stages = config.pipeline_parallel_size if config.pipeline_layers is None else tuple(config.pipeline_layers)
    return f"shares {shares} of GPUs, stages {stages}"


def _runs(shapes: tuple[tuple[int, int], ...]) -> str:
    """Return the heads and head size of each layer; layers in a row that are equal are counted."""
    runs = [(shape, len(list(equal))) for shape, equal in itertools.groupby(shapes)]
    return ", ".join(f"{count} layers of {heads} x {dim}" for (heads, dim), count in runs)


def kernels_name(config: EngineConfig, report: ModelReport) -> str:
    """Return what computes the model: each kind of kernels lays out keys and values in its own way."""
    if report.device != "cpu":
        return _gpu_kernels(config, report)
    native = load_native()
    if native is None or native.__file__ is None or not uses_native_kernels(config, report.spec):
        return f"torch {torch.__version__}"
    return hashlib.sha256(Path(native.__file__).read_bytes()).hexdigest()[:16] + f" {native.isa()}"


def _gpu_kernels(config: EngineConfig, report: ModelReport) -> str:
    """Return what of a GPU and its kernels decides the bits of keys and values."""
    name, library = "interpreted", config.attention_backend
    if report.device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(report.device)
        name = f"sm_{major}{minor}"
    order = "in order" if config.deterministic else "in any order"
    return f"triton {name}, {order}, attention by {library}"


def _weights_hash(folder: Path, has_times: bool = True) -> str:
    num_samples = _NUM_SAMPLES if has_times else _NUM_TRANSFER_SAMPLES
    digest = hashlib.sha256()
    paths = [folder] if folder.is_file() else sorted(path for path in folder.iterdir() if path.suffix in _CHECKPOINT_SUFFIXES)
    for path in paths:
        status = path.stat()
        time_ns = status.st_mtime_ns if has_times else 0
        digest.update(f"{path.name}\0{status.st_size}\0{time_ns}\0".encode())
        with path.open("rb") as file:
            for index in range(num_samples):
                file.seek(status.st_size * index // num_samples)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
