"""The fused launches of small decode steps, for bench/gpu.py.

Each is launched several times, over more weights or caches than fit the L2 cache, and begins while the previous one ends, as in
a model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from gpu_kernels import BF16, Case, case_rows
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec, NormSpec, RopeSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.rope import inverse_frequencies
from quire.kernels.triton.attention import KvCache
from quire.kernels.triton.fused_attention import ProjectedAttention
from quire.kernels.triton.fused_linear import FEW_TOKENS, Epilogue, multiply_few_launch
from quire.kernels.triton.launching import Launch
from quire.kernels.triton.norm import Norm
from quire.kernels.triton.precompile import variant_of
from quire.kernels.triton.qk_rope_store import rope_table
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.worker.device.precompile import compile_all

_RMS = NormSpec("rms", 1e-6)
_PAGE = 64
_WEIGHTS = {
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate, up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate, up": (24576, 4096),
    "8B down": (4096, 12288),
}
"""Rows and columns of the linear layers of Qwen3."""


def few_rows(device: torch.device, is_smoke: bool, peaks: tuple[float, float], until_s: float) -> Iterator[dict[str, object]]:
    """Yield the times of the cases; before that, the seconds that compiling their kernels takes, in several processes."""
    if not is_smoke:
        started = time.perf_counter()
        launches = [launch for case in few_cases(torch.device("meta"), False) for launch in case.make()]
        errors = compile_all(list(dict.fromkeys(map(variant_of, launches))), 90)
        yield {"section": "few", "compiled_s": time.perf_counter() - started, "errors": errors}
    yield from case_rows("few", few_cases(device, is_smoke), is_smoke, peaks, until_s)


def few_cases(device: torch.device, is_tiny: bool) -> Iterator[Case]:
    """Yield a case for each weight and number of tokens, and attention of 960 cached tokens for each of some sequences."""
    for num_tokens in (1, 2, 8, FEW_TOKENS):
        for name, (num_rows, num_columns) in _WEIGHTS.items():
            shape = (num_rows // 128, num_columns // 32) if is_tiny else (num_rows, num_columns)
            if not is_tiny or (num_tokens, name) in ((1, "0.6B qkv"), (2, "0.6B gate, up")):
                yield _product(f"{name}, {num_tokens} tokens", num_tokens, shape, device)
        if not is_tiny or num_tokens == 2:
            yield _attention(num_tokens, 70 if is_tiny else 960, device)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(BF16)


def _product(name: str, num_tokens: int, shape: tuple[int, int], device: torch.device) -> Case:
    num_rows, num_columns = shape
    is_gated, is_input = "gate" in name, "qkv" in name or "gate" in name
    epilogue = Epilogue(None, "silu", True) if is_gated else Epilogue(residual_scale=None if is_input else 1.0)

    def make() -> list[Launch]:
        norm = Norm(_RMS, _random(device, num_columns)) if is_input else None
        out = torch.zeros(num_tokens, num_rows // 2 if is_gated else num_rows, dtype=BF16, device=device)
        x, weight = _random(device, num_tokens, num_columns), _random(device, num_rows, num_columns)
        return [multiply_few_launch(out, x, weight, norm, epilogue)]

    return Case(name, make, 2 * num_rows * num_columns)


def _attention(num_sequences: int, length: int, device: torch.device) -> Case:
    spec = AttentionSpec(16, 8, 128, 128**-0.5, RopeSpec(128, 1e6))
    assert spec.rope is not None
    num_blocks = -(-length // _PAGE)
    table = rope_table(spec.rope, inverse_frequencies(spec.rope, length).to(device), length, BF16)
    arrived = torch.zeros(num_sequences, spec.num_kv_heads, dtype=torch.int32, device=device)
    attention = ProjectedAttention(spec, table, (Norm(_RMS, _random(device, 128)), Norm(_RMS, _random(device, 128))), arrived)
    tables = torch.arange(num_sequences * num_blocks).view(num_sequences, num_blocks)
    starts, positions = [*range(num_sequences + 1)], torch.full((num_sequences,), length - 1)
    metadata = AttentionMetadata(positions, starts, [length] * num_sequences, tables)

    def make() -> list[Launch]:
        step = DeviceAttentionMetadata.of(metadata, device)
        cache = KvCache(*(_random(device, num_sequences * num_blocks, spec.num_kv_heads, _PAGE, 128) for _ in "kv"))
        qkv, out = _random(device, num_sequences, 32 * 128), _random(device, num_sequences, 16 * 128)
        return [attention.launch(out, qkv, cache, step, positions.to(device))]

    num_bytes = num_sequences * length * spec.num_kv_heads * 4 * spec.head_dim
    return Case(f"0.6B attention {num_sequences} x {length}", make, num_bytes)
