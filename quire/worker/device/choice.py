"""Which device runs a model, and what is not there on it yet. Nothing here needs Triton."""

from __future__ import annotations

import importlib.util
import os

import torch

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.contracts.config import ATTENTION_LIBRARIES, EngineConfig

logger = get_logger(__name__)

_LEAST_CAPABILITY = (8, 0)
_LEAST_OF_FP8 = (8, 9)


def choose_device(config: EngineConfig) -> torch.device | None:
    """Return the device that runs a model by DeviceRunner, None where the CPU's own runner does.

    "interpreter" gives the CPU, on which Triton's interpreter then runs the GPU's kernels.
    Raises ConfigError where a device is asked for that is not there, or for what is not there on it, with what to change.
    """
    device = _find_device(config.device)
    if device is not None:
        _refuse(config)
        if config.kv_cache_dtype == "fp8" and device.type == "cuda":
            _check_capability(device, _LEAST_OF_FP8, "with kv_cache_dtype 'fp8' (choose 'auto' or 'int8')")
        if config.quantization == "fp8" and device.type == "cuda":
            _check_capability(device, _LEAST_OF_FP8, "with quantization 'fp8' (choose 'int8' or 'int4')")
    else:
        _refuse_on_cpu(config)
    return device


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
        if is_there and not has_triton:
            logger.warning("there is a GPU, but not Triton: the CPU runs the model; pip install 'quire[gpu]'")
        return _checked(torch.device("cuda", torch.cuda.current_device())) if is_there and has_triton else None
    if not is_there:
        raise ConfigError(
            f"device is {name!r}, but torch {torch.__version__} finds no CUDA device here; choose 'auto' or 'cpu'"
        )
    if not has_triton:
        raise ConfigError(f"device is {name!r}, but Triton is not installed: pip install 'quire[gpu]', or choose 'cpu'")
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return _checked(torch.device("cuda", index))


def _checked(device: torch.device) -> torch.device:
    _check_capability(device, _LEAST_CAPABILITY, "")
    return device


def _check_capability(device: torch.device, least: tuple[int, int], reason: str) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < least:
        got, needed = (".".join(map(str, version)) for version in (capability, least))
        raise ConfigError(f"{device} has compute capability {got}, at least {needed} is needed {reason}".rstrip())


def _refuse_on_cpu(config: EngineConfig) -> None:
    if config.kv_cache_dtype == "fp8":
        raise ConfigError("kv_cache_dtype 'fp8' needs a GPU; on the CPU choose 'auto' or 'int8'")
    if config.quantization == "fp8":
        raise ConfigError("quantization 'fp8' needs a GPU; on the CPU choose 'int8' or 'int4'")
    if config.attention_backend in ATTENTION_LIBRARIES:
        raise ConfigError(f"attention_backend {config.attention_backend!r} needs a GPU; on the CPU choose 'auto'")
    if config.async_scheduling:
        raise ConfigError(
            "async_scheduling needs a GPU: on the CPU the model and whoever plans its steps want the same cores; leave it out"
        )


def _refuse(config: EngineConfig) -> None:
    """Raise ConfigError for options that the GPU's runner does not have."""
    missing: list[str] = []
    if config.speculative_config is not None:
        missing.append("speculative_config (leave it out)")
    if config.deterministic and config.attention_backend in ATTENTION_LIBRARIES:
        missing.append(f"deterministic with attention_backend {config.attention_backend!r} (choose 'triton')")
    if missing:
        raise ConfigError(f"not supported on a GPU yet: {'; '.join(missing)}; or choose device='cpu'")
