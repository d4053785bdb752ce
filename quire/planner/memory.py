"""How a device's memory is divided, and how many users fit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from quire.base.errors import ConfigError
from quire.contracts.kv_spec import QUANTIZED_KV_BITS, PoolDivision, check_kv_format, window_blocks_of
from quire.contracts.memory import format_bytes
from quire.planner.hardware import Hardware
from quire.planner.model_shape import KV_FORMATS, ModelShape

GPU_RUNTIME_BYTES = 10**9
"""CUDA context, compiled kernels and CUDA graphs: an assumption."""

CPU_RUNTIME_BYTES = 18 << 20
"""Arrays of a step are rounded up to huge pages, and what loading has freed stays with the process: 14 to 20 MiB, measured."""

_MAX_PROMPT_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one replica's engine, with the defaults of EngineConfig. Raises ConfigError.

    memory_share  of the device's memory that the engine may take
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    memory_share: float

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), got {self.max_num_batched_tokens}"
            )
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.memory_share}")

    @classmethod
    def usual(
        cls,
        hardware: Hardware,
        shape: ModelShape,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        block_size: int | None = None,
        memory_share: float | None = None,
    ) -> Limits:
        """Return the limits of an engine on this hardware; None: its default."""
        is_gpu = hardware.kind == "gpu"
        num_seqs = 128 if max_num_seqs is None else max_num_seqs
        length = shape.max_positions if max_model_len is None else max_model_len
        if length > shape.max_positions:
            raise ConfigError(
                f"--max-model-len must be at most {shape.max_positions}, the positions of {shape.name}, got {length}"
            )
        default_tokens = max(8192 if is_gpu else 2048, num_seqs)
        return cls(
            num_seqs,
            default_tokens if max_num_batched_tokens is None else max_num_batched_tokens,
            length,
            (64 if is_gpu else 16) if block_size is None else block_size,
            0.9 if memory_share is None else memory_share,
        )


@dataclass(frozen=True, slots=True)
class WindowPool:
    """The pool of the window group of a replica, see KvSpec.

    num_tokens        that its layers keep of a sequence
    bytes_per_block   of the replica, and full_bytes_per_block those of a block of the other layers
    kv_bytes          that both pools may take on all devices of the replica
    """

    num_blocks: int
    num_tokens: int
    bytes_per_block: float
    full_bytes_per_block: float
    kv_bytes: float

    def blocks_of(self, num_tokens: int, block_size: int) -> int:
        """Return the most blocks of this pool that a decoding sequence of num_tokens holds."""
        return window_blocks_of(self.num_tokens, num_tokens, block_size)

    def users(self, num_tokens: int, block_size: int, num_shared_tokens: int) -> int:
        """Return how many sequences of num_tokens the memory holds, if its division suits them."""
        shared_blocks = num_shared_tokens // block_size
        own_bytes = (-(-num_tokens // block_size) - shared_blocks) * self.full_bytes_per_block
        own_bytes += self.blocks_of(num_tokens, block_size) * self.bytes_per_block
        return max(0, int((self.kv_bytes - shared_blocks * self.full_bytes_per_block) // own_bytes))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device of a layout, in bytes.

    kv_bytes       what is left for the KV pool; 0 where the model does not fit
    num_kv_blocks  of the replica: all of its devices together hold them
    missing_bytes  by how much the weights and activations are too large; 0 where they fit
    window         pool of the layers that keep only a window; None: all layers keep all tokens
    """

    total_bytes: int
    usable_bytes: int
    weight_bytes: int
    activation_bytes: int
    runtime_bytes: int
    kv_bytes: int
    num_kv_blocks: int
    missing_bytes: int
    window: WindowPool | None = None

    @property
    def fits(self) -> bool:
        """Whether weights, activations and at least one block fit."""
        return self.missing_bytes == 0 and self.num_kv_blocks > 0

    def describe(self) -> str:
        """Return the division for people, in a line."""
        parts = (
            f"weights {format_bytes(self.weight_bytes)}, activations {format_bytes(self.activation_bytes)} (estimate), "
            f"KV pool {format_bytes(self.kv_bytes)}"
        )
        if self.window is not None:
            parts += f" ({self.num_kv_blocks:,} blocks, and {self.window.num_blocks:,} of layers with a window)"
        if self.fits:
            return parts
        return f"{parts}: DOES NOT FIT, {format_bytes(self.missing_bytes)} are missing"


def choose_kv_format(shape: ModelShape, kv_format: str, is_gpu: bool, has_float8: bool = True) -> str:
    """Return the KV format, for "auto" the engine's choice: the model's dtype, on a CPU float32 for float16.

    has_float8  of a GPU
    Raises ConfigError for a format that an engine refuses on such a device, too.
    """
    wanted = shape.dtype if kv_format == "auto" else kv_format
    if wanted not in KV_FORMATS:
        raise ConfigError(f"--kv-cache-dtype must be auto or one of {', '.join(KV_FORMATS)}, got {kv_format!r}")
    check_kv_format(wanted, shape.head_dims, shape.state_bytes > 0, is_gpu)
    if wanted == "fp8" and is_gpu and not has_float8:
        raise ConfigError("--kv-cache-dtype 'fp8' needs a GPU of compute capability 8.9 or later; choose 'auto' or 'int8'")
    return "float32" if kv_format == "auto" and wanted == "float16" and not is_gpu else wanted


def usable_kv_formats(shape: ModelShape, is_gpu: bool, has_float8: bool = True) -> list[str]:
    """Return the quantised formats that an engine has for a model on such a device."""
    found: list[str] = []
    for name in QUANTIZED_KV_BITS:
        if name == "fp8" and is_gpu and not has_float8:
            continue
        with suppress(ConfigError):
            check_kv_format(name, shape.head_dims, shape.state_bytes > 0, is_gpu)
            found.append(name)
    return found


def activation_bytes(shape: ModelShape, limits: Limits, is_gpu: bool = True) -> int:
    """Estimate the peak of one step: a layer's tensors and six residuals per token, logits in f32, twice, and those of prompts.

    The last are of prompt tokens whose log probabilities are asked for; the engine computes them in parts of a limited size. A
    CPU's kernels read the logits in place; other devices copy them twice.
    """
    width = 4 if shape.dtype == "float32" else 2
    per_layer = shape.num_active_body / max(1, shape.num_layers) / shape.hidden_size
    vocab_size = shape.num_head / shape.hidden_size
    per_token = (per_layer + 6 * shape.hidden_size) * width
    prompt_logits = min(limits.max_num_batched_tokens * vocab_size, _MAX_PROMPT_LOGITS) * (12 if is_gpu else 4)
    return round(limits.max_num_batched_tokens * per_token + limits.max_num_seqs * vocab_size * 8 + prompt_logits)


def divide_memory(
    shape: ModelShape,
    hardware: Hardware,
    limits: Limits,
    precision: str,
    kv_format: str,
    num_devices: int = 1,
    has_tiers: bool = False,
) -> DeviceMemory:
    """Return how the memory of each device of a replica is divided; weights, activations and KV are shared evenly.

    has_tiers  of the KV cache: their pages have all layers, so that layers with a window keep all tokens
    """
    usable = int(hardware.memory_bytes * limits.memory_share)
    copies = shape.copy_bytes if precision == shape.dtype else 0
    weights = -(-(shape.weight_bytes[precision] + copies) // num_devices)
    activations = -(-activation_bytes(shape, limits, hardware.kind == "gpu") // num_devices)
    runtime = GPU_RUNTIME_BYTES if hardware.kind == "gpu" else CPU_RUNTIME_BYTES
    room = usable - weights - activations - runtime
    states = limits.max_num_seqs * shape.state_bytes // num_devices
    kv = max(0, room - states)
    per_token = max(1.0 / limits.block_size, shape.kv_bytes_per_token(kv_format) / num_devices)
    per_block = per_token * limits.block_size
    missing = max(0, states + round(per_block) - room)
    num_blocks, window = int(kv // per_block), None
    if not has_tiers:
        num_blocks, window = divide_pools(shape, limits, kv_format, num_blocks, takes_all=hardware.kind == "gpu")
    return DeviceMemory(hardware.memory_bytes, usable, weights, activations, runtime, kv, num_blocks, missing, window)


def divide_pools(
    shape: ModelShape,
    limits: Limits,
    kv_format: str,
    num_blocks: int,
    is_given: bool = False,
    takes_all: bool = False,
) -> tuple[int, WindowPool | None]:
    """Return the blocks of the full group and the pool of the window group, as the engine divides them.

    num_blocks  for which the memory suffices if all layers keep all tokens; is_given: of the full group, whatever that takes
    takes_all   see PoolDivision
    """
    cache, longest = shape.window_cache, shape.longest_window
    if cache is None or cache.window_tokens is None or longest is None or longest >= limits.max_model_len:
        return num_blocks, None
    division = PoolDivision(
        cache.window_tokens,
        limits.block_size,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_model_len,
        takes_all,
    )
    window_bytes = cache.kv_bytes(kv_format) * limits.block_size
    full_bytes = shape.full_cache.kv_bytes(kv_format) * limits.block_size
    if is_given:
        num_full, num_window = num_blocks, division.num_window_blocks(num_blocks)
    else:
        num_full, num_window = division.divide(num_blocks, full_bytes, window_bytes)
    kv_bytes = num_full * full_bytes + num_window * window_bytes if is_given else num_blocks * (full_bytes + window_bytes)
    return num_full, WindowPool(num_window, cache.window_tokens, window_bytes, full_bytes, kv_bytes)


def users_that_fit(num_kv_blocks: int, block_size: int, num_tokens: int, num_shared_tokens: int = 0) -> int:
    """Return how many sequences of num_tokens fit in a pool; num_shared_tokens: of a prefix that all share, held once."""
    shared_blocks = num_shared_tokens // block_size
    own_blocks = -(-num_tokens // block_size) - shared_blocks
    if own_blocks <= 0 or num_kv_blocks < shared_blocks:
        return 0
    return (num_kv_blocks - shared_blocks) // own_blocks


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a workload in tokens: of prompts, outputs and both together, at the mean and percentiles."""

    mean_input: float
    mean_output: float
    p50: int
    p95: int
    p95_input: int
    num_shared: int = 0

    @classmethod
    def of(cls, inputs: Sequence[int], outputs: Sequence[int], num_shared: int = 0) -> Lengths:
        """Return those of requests; at least one."""
        totals = np.add(inputs, outputs)
        p50, p95 = np.percentile(totals, [50, 95], method="higher").tolist()
        p95_input = int(np.percentile(inputs, 95, method="higher"))
        return cls(float(np.mean(inputs)), float(np.mean(outputs)), int(p50), int(p95), p95_input, num_shared)
