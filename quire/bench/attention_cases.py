"""Benchmark cases: attention over the paged cache, and storing new keys and values in it, in every cache format."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.bench.kernel_setup import KernelCase, ModelShapes, Setup, noise

_BLOCK_SIZE = 16
_CACHES = {
    "bf16": ("bf16", torch.bfloat16, torch.bfloat16),
    "f32": ("f32", torch.float32, torch.float32),
    "int8": ("i8", torch.int8, torch.int8),
    "fp8": ("f8", torch.float8_e4m3fn, torch.float8_e4m3fn),
    "k8v4": ("k8v4", torch.int8, torch.uint8),
    "turboquant_4bit": ("r4", torch.uint8, torch.uint8),
}
"""Format -> name in the kernels, and types of the elements of keys and of values; an u8 has two codes of four bits."""


def _head_bytes(number_format: str, dim: int) -> int:
    """Return the bytes of the key and the value of one head of one token, with their scales."""
    types = _CACHES[number_format][1:]
    return sum(_row_size(dtype, dim) * dtype.itemsize for dtype in types) + (8 if _is_quantised(number_format) else 0)


def _is_quantised(number_format: str) -> bool:
    return number_format not in ("bf16", "f32")


def _row_size(dtype: torch.dtype, dim: int) -> int:
    return dim // 2 if dtype == torch.uint8 else dim


def _random_elements(count: int, dtype: torch.dtype) -> Tensor:
    values = noise(count)
    return values.to(dtype) if dtype.is_floating_point else (values * 40).to(torch.int8).view(dtype)


class _Cache:
    """The memory of a layer's keys and values, and the native layer that points to it."""

    def __init__(self, setup: Setup, shapes: ModelShapes, number_format: str, num_blocks: int) -> None:
        name, *types = _CACHES[number_format]
        rows = num_blocks * _BLOCK_SIZE * shapes.num_kv_heads
        arrays = [_random_elements(rows * _row_size(dtype, shapes.head_dim), dtype) for dtype in types]
        scales = [torch.full((rows,), 0.02) for _ in range(2)] if _is_quantised(number_format) else []
        self.held: tuple[Tensor, ...] = (*arrays, *scales)
        addresses = [tensor.data_ptr() for tensor in self.held]
        self.layer = setup.native.KvLayer(name, _BLOCK_SIZE, shapes.num_kv_heads, shapes.head_dim, *addresses)


def attention_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    """Yield attention of new tokens, and of prompts, over caches of every format."""
    for number_format in _CACHES:
        for length in setup.lengths:
            for num_sequences in (1, 16):
                name = f"decode S={num_sequences} context {length}"
                yield attention_case(setup, shapes, (number_format, name), num_sequences, 1, length)
            yield attention_case(setup, shapes, (number_format, f"prefill {length}"), 1, length, length)


def attention_case(
    setup: Setup, shapes: ModelShapes, name: tuple[str, str], num_sequences: int, num_queries: int, length: int
) -> KernelCase:
    """Return attention of the last num_queries of `length` tokens of each sequence.

    name  format of the cache (bf16, f32, int8, fp8, k8v4, turboquant_4bit), and the text that the case is shown with
    """
    native, heads, kv_heads, dim = setup.native, shapes.num_heads, shapes.num_kv_heads, shapes.head_dim
    blocks = num_sequences * -(-length // _BLOCK_SIZE)
    kv_bytes = num_sequences * length * kv_heads * _head_bytes(name[0], dim)
    copies = setup.copies_for(kv_bytes)
    cache = _Cache(setup, shapes, name[0], copies * blocks)
    num_tokens = num_sequences * num_queries
    q, out = noise(num_tokens, heads * dim), torch.empty(num_tokens, heads * dim)
    starts = torch.arange(0, num_tokens + 1, num_queries, dtype=torch.int32)
    lengths = torch.full((num_sequences,), length, dtype=torch.int32)
    tables = torch.arange(copies * blocks, dtype=torch.int32).view(copies, num_sequences, -1)
    job = native.AttentionJob(cache.layer, heads, dim**-0.5)
    batches = [
        native.AttentionBatch(
            num_sequences, num_tokens, starts.data_ptr(), lengths.data_ptr(), table.data_ptr(), tables.shape[2]
        )
        for table in tables
    ]
    scratch = torch.empty(native.attention_scratch_bytes(job, batches[0], setup.num_threads, setup.isa) + 64, dtype=torch.uint8)
    job.set_rows(q.data_ptr(), heads * dim, out.data_ptr(), heads * dim, -(-scratch.data_ptr() // 64) * 64)
    memory = (cache, q, out, starts, lengths, tables, scratch)

    def run(copy: int, _memory: tuple[object, ...] = memory) -> None:
        native.attend(job, batches[copy], setup.num_threads, setup.isa)

    pairs = num_sequences * (num_queries * (2 * length - num_queries + 1) // 2)
    num_bytes = kv_bytes + 2 * 4 * num_tokens * heads * dim
    kind = "f32" if name[0] == "f32" else "bf16"
    return KernelCase("attention", name[0], name[1], num_bytes, 4 * heads * dim * pairs, kind, copies, run)


def store_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    """Yield storing the keys and values of new tokens."""
    heads, dim = shapes.num_kv_heads, shapes.head_dim
    for number_format in _CACHES:
        for m in setup.rows:
            num_bytes = m * heads * (8 * dim + _head_bytes(number_format, dim))
            copies, blocks = setup.copies_for(num_bytes), -(-m // _BLOCK_SIZE)
            cache = _Cache(setup, shapes, number_format, copies * blocks)
            keys, values = noise(copies, m, heads * dim).contiguous(), noise(copies, m, heads * dim).contiguous()
            slots = torch.arange(m).repeat(copies, 1) + blocks * _BLOCK_SIZE * torch.arange(copies)[:, None]

            def run(copy: int, m: int = m, cache: _Cache = cache, held: tuple[Tensor, ...] = (keys, values, slots)) -> None:
                rows = held[0][copy].data_ptr(), held[1][copy].data_ptr()
                setup.native.store_kv(cache.layer, held[2][copy].data_ptr(), m, *rows, setup.num_threads, setup.isa)

            yield KernelCase("store", number_format, f"M={m} {heads} heads of {dim}", num_bytes, 0, "f32", copies, run)
