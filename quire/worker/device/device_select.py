"""Which device runs a model, and what is not there on it yet. Nothing here needs Triton."""

from __future__ import annotations

import importlib.util
import os

import torch

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.contracts.config import ATTENTION_LIBRARIES, EngineConfig
from quire.contracts.speculative import SpeculativeConfig
from quire.kernels.triton.device_traits import DeviceTraits

logger = get_logger(__name__)

_HEADS = ("eagle", "eagle3", "mtp", "deepseek_mtp", "medusa")
DEVICE_METHODS = ("ngram", "suffix", "lookahead", "draft_model", *_HEADS)
"""Methods of speculative_config that there are on a GPU: all but "self", see docs/design/gpu.md."""

_WHY = {"self": "; a draft by half of the layers takes half a step, that of a head one layer"}

# What 8.6, 8.9 and 12.0 have, for which the smallest tiles are made.
_LEAST_CAPABILITY = (8, 0)
_LEAST_SHARED_KIB = 99


def choose_device(config: EngineConfig) -> torch.device | None:
    """Return the device that runs a model by DeviceRunner, None where the CPU's own runner does; see also library_device.

    "interpreter" gives the CPU, on which Triton's interpreter then runs the GPU's kernels.
    Raises ConfigError where a device is asked for that is not there, or for what is not there on it, with what to change.
    """
    if config.model_impl == "transformers":
        _refuse_on_cpu(config)
        return None
    device = _find_device(config.device)
    if device is not None:
        _refuse(config, DeviceTraits.of(device) if device.type == "cuda" else None)
    else:
        _refuse_on_cpu(config)
    return device


def library_device(config: EngineConfig) -> torch.device | None:
    """Return the GPU on which the transformers library computes a model, None for the CPU. It needs torch only.

    Raises ConfigError where a GPU is asked for that is not there.
    """
    if config.model_impl != "transformers" or config.device == "cpu":
        return None
    if not torch.cuda.is_available():
        if config.device == "auto":
            return None
        raise _no_cuda(config.device)
    index = int(config.device.partition(":")[2] or torch.cuda.current_device())
    return _nth_device(config.device, index)


def _no_cuda(name: str) -> ConfigError:
    built = "" if torch.version.cuda else ", which was built without CUDA,"
    found = f"torch {torch.__version__}{built} finds no CUDA device here"
    return ConfigError(f"device is {name!r}, but {found}; choose 'auto' or 'cpu'")


def _nth_device(name: str, index: int) -> torch.device:
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return torch.device("cuda", index)


def _find_device(name: str) -> torch.device | None:
    if name == "cpu":
        return None
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "interpreter":
        if not has_triton or os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(
                "device 'interpreter' runs the GPU's kernels on the CPU, slowly, for tests: it needs Triton (pip install "
                "'quire[gpu]') and TRITON_INTERPRET=1 in the environment; otherwise choose 'auto', 'cpu' or 'cuda'"
            )
        return torch.device("cpu")
    is_there = torch.cuda.is_available()
    if name == "auto":
        return _find_own_device(has_triton) if is_there else None
    if not is_there:
        raise _no_cuda(name)
    if not has_triton:
        raise ConfigError(f"device is {name!r}, but Triton is not installed: pip install 'quire[gpu]', or choose 'cpu'")
    device = _nth_device(name, int(name.partition(":")[2] or torch.cuda.current_device()))
    lack = _unsupported_reason(device)
    if lack is not None:
        raise ConfigError(f"{lack}; choose 'auto' or 'cpu'")
    return device


def _find_own_device(has_triton: bool) -> torch.device | None:
    """Return torch's current CUDA device; None where it cannot be used, and log why."""
    device = torch.device("cuda", torch.cuda.current_device())
    lack = _unsupported_reason(device) if has_triton else "there is a GPU, but not Triton (pip install 'quire[gpu]')"
    if lack is not None:
        logger.warning("%s: the CPU runs the model", lack)
        return None
    return device


def _unsupported_reason(device: torch.device) -> str | None:
    """Return why the kernels do not run on a CUDA device, None where they do."""
    title = f"{device} ({torch.cuda.get_device_name(device)})"
    if torch.version.hip is not None:
        return f"{title} is a GPU of AMD; the kernels need one of NVIDIA"
    traits = DeviceTraits.of(device)
    shared_kib = traits.shared_bytes // 1024
    if traits.capability >= _LEAST_CAPABILITY and shared_kib >= _LEAST_SHARED_KIB:
        return None
    needed = ".".join(map(str, _LEAST_CAPABILITY))
    return (
        f"{title} has compute capability {traits.name} and {shared_kib} KiB of shared memory for a program; the kernels need "
        f"at least {needed} (Ampere, such as an A100 or an RTX 3090) and {_LEAST_SHARED_KIB} KiB"
    )


def _refuse_on_cpu(config: EngineConfig) -> None:
    if config.attention_backend in ATTENTION_LIBRARIES:
        raise ConfigError(f"attention_backend {config.attention_backend!r} needs a GPU; on the CPU choose 'auto'")
    if config.tile_table is not None:
        raise ConfigError(f"tile_table {config.tile_table!r} is for a GPU; on the CPU leave it out")
    if config.nvtx_ranges:
        raise ConfigError("nvtx_ranges marks the steps of a GPU; on the CPU leave it out")
    if config.async_scheduling:
        raise ConfigError(
            "async_scheduling needs a GPU: on a CPU the model and the planning of steps share cores; leave it out"
        )


def drafts_trees(config: SpeculativeConfig) -> bool:
    """Return whether drafts may be trees with these methods, of those that there are on a GPU."""
    is_medusa = "medusa" in config.methods and config.draft_top_k != 1  # which may have a tree stored with it
    is_suffix = config.suffix_decoding_use_tree_spec
    return len(config.methods) > 1 or "lookahead" in config.methods or config.top_k > 1 or is_medusa or is_suffix


def _missing_drafts(config: SpeculativeConfig, is_deterministic: bool) -> list[str]:
    """Return what of a speculative_config is not there on a GPU."""
    there = ", ".join(DEVICE_METHODS)
    others = [method for method in config.methods if method not in DEVICE_METHODS]
    missing = [f"speculative_config with method {method!r} (there are {there}{_WHY.get(method, '')})" for method in others]
    if is_deterministic and not missing and drafts_trees(config):
        # A token of a tree stands elsewhere than in a row, where sums over its keys are cut otherwise.
        missing.append(
            "deterministic with drafts that are trees (choose one method alone, not lookahead, draft_top_k 1 of heads, and no "
            "suffix_decoding_use_tree_spec)"
        )
    loaded = [method for method in config.methods if method in ("draft_model", *_HEADS)]
    if len(loaded) > 1:
        missing.append(f"speculative_config with {' and '.join(loaded)} at once (choose one of them, alone or with others)")
    if config.quantization is not None and any(method in _HEADS for method in config.methods):
        missing.append(
            f"speculative_config with quantization {config.quantization!r} of a head (choose null, or a draft model)"
        )
    return missing


def _refuse(config: EngineConfig, traits: DeviceTraits | None) -> None:
    """Raise ConfigError for options that the GPU's runner does not have.

    traits  of the GPU; None: Triton's interpreter runs its kernels
    """
    if traits is not None and not traits.has_float8 and config.kv_cache_dtype == "fp8":
        raise ConfigError(
            f"kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9 or later, and this one has {traits.name}; "
            "choose 'auto', 'int8', 'k8v4' or 'turboquant_4bit'"
        )
    missing: list[str] = []
    if config.speculative_config is not None:
        missing += _missing_drafts(config.speculative_config, config.deterministic)
    if config.deterministic and config.attention_backend in ATTENTION_LIBRARIES:
        missing.append(f"deterministic with attention_backend {config.attention_backend!r} (choose 'triton')")
    if missing:
        raise ConfigError(f"not supported on a GPU yet: {'; '.join(missing)}; or choose device='cpu'")


def check_rank_devices(config: EngineConfig, device: str, num_here: int | None = None) -> None:
    """Raise ConfigError where the ranks of tensor_parallel_size, pipeline_parallel_size and prefill_context_parallel_size
    cannot have a GPU each.

    device    of rank 0: "cuda:N", or "interpreter", whose ranks share the CPU
    num_here  ranks on this host; None: all
    """
    options = "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"
    sizes = {name: getattr(config, name) for name in options}
    size = config.parallel.world_size
    names = [name for name, value in sizes.items() if value > 1]
    what = f"{' * '.join(names)} is {size}"
    if num_here is not None and num_here < size:
        what, size = f"{what}, {num_here} of them on this host", num_here
    if device == "interpreter":
        return
    num_devices = torch.cuda.device_count()
    if num_devices < size:
        raise ConfigError(
            f"{what}, but there {'is' if num_devices == 1 else 'are'} {num_devices} CUDA "
            f"device{'' if num_devices == 1 else 's'} here, and each rank needs one: lower {' or '.join(names)} to "
            f"{num_devices}, or see CUDA_VISIBLE_DEVICES"
        )
    if device != "cuda:0":
        raise ConfigError(
            f"device is {device!r}, but {what}, and rank r runs on cuda:r: leave device out, and choose the GPUs by "
            "CUDA_VISIBLE_DEVICES"
        )
    for rank in range(size):
        lack = _unsupported_reason(torch.device("cuda", rank))
        if lack is not None:
            raise ConfigError(f"{what}, and rank {rank} cannot run on cuda:{rank}: {lack}")
