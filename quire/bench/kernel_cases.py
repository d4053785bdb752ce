"""The kernels and shapes that `quire bench kernels` measures: data for one call after the other, each in memory of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec

KERNELS = ("linear", "attention", "norm", "sampler")
_BLOCK_SIZE = 16
_ROWS_AT_ONCE = 4096
_MAX_OUT_BYTES = 256 << 20
"""Results larger than this are left out: no step computes logits of so many rows."""
_NOISE_ELEMENTS = 1 << 20
_INT8_GROUP, _INT4_GROUP, _INPUT_GROUP = 256, 128, 256
_UNITS = {"bf12": 8, "fp8": 4}
"""Columns of such a weight come in units of so many."""
_FP8_BLOCK = 128
_INT4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_LINEAR_FORMATS = {"bf16": "bf16", "bf12": "bf12", "f32": "f32", "int8": "u8", "int4": "u4", "fp8": "f8"}


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What of a model decides the sizes of its kernels' work.

    linears  name to (outputs, inputs)
    """

    linears: dict[str, tuple[int, int]]
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


QWEN3_0_6B = ModelShapes(
    linears={
        "q": (2048, 1024),
        "k, v": (1024, 1024),
        "o": (1024, 2048),
        "gate, up": (3072, 1024),
        "down": (1024, 3072),
        "head": (151936, 1024),
    },
    hidden_size=1024,
    vocab_size=151936,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
)


def shapes_of(spec: ModelSpec) -> ModelShapes:
    """Return the shapes of a model: of its first layer, and where it has some, of the first layer with experts."""
    mixtures = [layer for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    attention = spec.layers[0].attention
    q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    linears = {"q": (q_size, spec.hidden_size), "k, v": (kv_size, spec.hidden_size), "o": (spec.hidden_size, q_size)}
    linears |= _mlp_shapes(spec.layers[0], spec.hidden_size)
    if mixtures:
        linears |= _mlp_shapes(mixtures[0], spec.hidden_size)
    linears["head"] = (spec.vocab_size, spec.hidden_size)
    return ModelShapes(
        linears, spec.hidden_size, spec.vocab_size, attention.num_heads, attention.num_kv_heads, attention.head_dim
    )


def _mlp_shapes(layer: LayerSpec, hidden_size: int) -> dict[str, tuple[int, int]]:
    mlp, prefix = (layer.mlp.expert, "expert ") if isinstance(layer.mlp, MoeSpec) else (layer.mlp, "")
    first = "gate, up" if mlp.is_gated else "up"
    inner = mlp.intermediate_size
    return {prefix + first: (inner, hidden_size), f"{prefix}down": (hidden_size, inner)}


@dataclass(frozen=True, slots=True)
class Setup:
    """How kernels are called.

    working_set_bytes  what the copies of a kernel's data take at least, so that each call finds its own out of the caches
    rows               rows M of linear layers, norms and sampling
    lengths            cached tokens of attention, and the prompt's of prefill
    """

    native: ModuleType
    isa: str
    num_threads: int
    working_set_bytes: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    def copies_for(self, num_bytes: int) -> int:
        """Return how many times data of a call must be there."""
        return max(1, -(-self.working_set_bytes // num_bytes))


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel at one shape.

    num_bytes       that a call reads and writes at least, everything counted once
    num_operations  products and sums of a call; 0 where they are not what limits it
    peak_kind       "f32", "bf16" or "u8": in what numbers it multiplies
    run             run(copy) calls the kernel on copy 0 <= copy < num_copies
    """

    kernel: str
    number_format: str
    shape: str
    num_bytes: int
    num_operations: int
    peak_kind: str
    num_copies: int
    run: Callable[[int], object]


def make_cases(setup: Setup, shapes: ModelShapes, only: tuple[str, ...] = KERNELS) -> Iterator[KernelCase]:
    """Yield the cases; each one's data lives until the next one is asked for."""
    makers = {"linear": _linear_cases, "attention": _attention_cases, "norm": _norm_cases, "sampler": _sampler_cases}
    for kernel in KERNELS:
        if kernel in only:
            yield from makers[kernel](setup, shapes)


def _noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal noise that repeats itself: no kernel's time depends on it, and drawing gigabytes would take long."""
    count = math.prod(shape)
    base = torch.randn(min(count, _NOISE_ELEMENTS), generator=torch.Generator().manual_seed(0)).to(dtype)
    return base.repeat(-(-count // len(base)))[:count].view(shape)


def _linear_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    for number_format in _LINEAR_FORMATS:
        for name, (n, k) in shapes.linears.items():
            rows = [m for m in setup.rows if 4 * m * n <= _MAX_OUT_BYTES]
            if not rows or k % _UNITS.get(number_format, 1):
                continue
            weights = [_pack(setup, number_format, n, k)]
            weights += [_pack(setup, number_format, n, k) for _ in range(setup.copies_for(weights[0].num_bytes) - 1)]
            for m in rows:
                yield _linear_case(setup, number_format, f"{name} [{n}, {k}]", weights, m)


def _linear_case(setup: Setup, number_format: str, name: str, weights: list, m: int) -> KernelCase:
    n, k = weights[0].n, weights[0].k
    x, out = _noise(m, k), torch.empty(m, n)

    def run(copy: int) -> None:
        setup.native.linear(
            weights[copy], None, x.data_ptr(), k, m, out.data_ptr(), n, num_threads=setup.num_threads, isa=setup.isa
        )

    kind = {"int8": "u8", "int4": "u8", "bf12": "bf16", "fp8": "bf16"}.get(number_format, number_format)
    num_bytes = weights[0].num_bytes + 4 * m * (n + k)
    return KernelCase("linear", number_format, f"M={m} {name}", num_bytes, 2 * m * n * k, kind, len(weights), run)


def _pack(setup: Setup, number_format: str, n: int, k: int) -> object:
    """Return a packed weight as the engine makes it.

    bf12 is bf16 in twelve bits, int8 has a scale per row, int4 groups of 128 with uneven levels, fp8 blocks of 128 columns.
    """
    group = {"int8": min(_INT8_GROUP, k), "int4": min(_INT4_GROUP, k), "fp8": _FP8_BLOCK}.get(number_format, 0)
    input_group = min(_INPUT_GROUP, k) if number_format.startswith("int") else 0
    weight = setup.native.Weight(_LINEAR_FORMATS[number_format], n, k, group, input_group)
    levels = torch.tensor(_INT4_LEVELS, dtype=torch.int8)
    count = min(n, _ROWS_AT_ONCE)
    if number_format == "int4":
        source = levels[torch.arange(count * k) * 7 % 16].contiguous()
    elif number_format == "int8":
        source = (_noise(count, k) * 40).clamp(-127, 127).to(torch.int8)
    elif number_format == "fp8":
        source = (_noise(count, k) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        source = _noise(count, k, dtype=torch.bfloat16 if number_format.startswith("bf") else torch.float32).contiguous()
    options = {"levels": levels.data_ptr(), "num_levels": len(levels)} if number_format == "int4" else {}
    for first in range(0, n, _ROWS_AT_ONCE):
        weight.pack(source.data_ptr(), k, first, min(count, n - first), num_threads=setup.num_threads, **options)
    padded = -(-n // 16) * 16
    column_scale = torch.full((padded,), 0.01)
    if number_format == "int8":
        weight.set_extras(column_scale=column_scale.data_ptr())
    elif number_format == "int4":
        scales = torch.ones(padded * -(-k // group), dtype=torch.float16)
        weight.set_extras(group_scales=scales.data_ptr(), column_scale=column_scale.data_ptr())
    elif number_format == "fp8" and k > group:
        scales = torch.full((padded * -(-k // group),), 0.01)
        weight.set_extras(block_scales=scales.data_ptr())
    elif number_format == "fp8":
        weight.set_extras(column_scale=column_scale.data_ptr())
    return weight


def _attention_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    for length in setup.lengths:
        for num_sequences in (1, 16):
            yield _attention_case(setup, shapes, f"decode S={num_sequences} context {length}", num_sequences, 1, length)
        yield _attention_case(setup, shapes, f"prefill {length}", 1, length, length)


def _attention_case(
    setup: Setup, shapes: ModelShapes, name: str, num_sequences: int, num_queries: int, length: int
) -> KernelCase:
    """Return attention of the last num_queries of `length` tokens of each sequence, in a bfloat16 cache."""
    native, heads, kv_heads, dim = setup.native, shapes.num_heads, shapes.num_kv_heads, shapes.head_dim
    blocks = num_sequences * -(-length // _BLOCK_SIZE)
    kv_bytes = 2 * 2 * num_sequences * length * kv_heads * dim
    copies = setup.copies_for(kv_bytes)
    keys, values = (_noise(copies * blocks * _BLOCK_SIZE * kv_heads * dim, dtype=torch.bfloat16).clone() for _ in range(2))
    num_tokens = num_sequences * num_queries
    q, out = _noise(num_tokens, heads * dim), torch.empty(num_tokens, heads * dim)
    starts = torch.arange(0, num_tokens + 1, num_queries, dtype=torch.int32)
    lengths = torch.full((num_sequences,), length, dtype=torch.int32)
    tables = torch.arange(copies * blocks, dtype=torch.int32).view(copies, num_sequences, -1)
    layer = native.KvLayer("bf16", _BLOCK_SIZE, kv_heads, dim, keys.data_ptr(), values.data_ptr())
    job = native.AttentionJob(layer, heads, dim**-0.5)
    batches = [
        native.AttentionBatch(
            num_sequences, num_tokens, starts.data_ptr(), lengths.data_ptr(), table.data_ptr(), tables.shape[2]
        )
        for table in tables
    ]
    scratch = torch.empty(native.attention_scratch_bytes(job, batches[0], setup.num_threads, setup.isa) + 64, dtype=torch.uint8)
    job.set_rows(q.data_ptr(), heads * dim, out.data_ptr(), heads * dim, -(-scratch.data_ptr() // 64) * 64)
    memory = (keys, values, q, out, starts, lengths, tables, scratch)

    def run(copy: int, _memory: tuple[Tensor, ...] = memory) -> None:
        native.attend(job, batches[copy], setup.num_threads, setup.isa)

    pairs = num_sequences * (num_queries * (2 * length - num_queries + 1) // 2)
    num_bytes = kv_bytes + 2 * 4 * num_tokens * heads * dim
    return KernelCase("attention", "bf16", name, num_bytes, 4 * heads * dim * pairs, "bf16", copies, run)


def _norm_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    size = shapes.hidden_size
    for m in setup.rows:
        num_bytes = 2 * 4 * m * size
        copies = setup.copies_for(num_bytes)
        # Ones, not zeros or nothing: memory that is written for the first time would be taken from the system in the call.
        x, out, weight = _noise(copies, m, size).contiguous(), torch.ones(copies, m, size), torch.ones(size)
        step, first_x, first_out = 4 * m * size, x.data_ptr(), out.data_ptr()

        def run(
            copy: int,
            m: int = m,
            step: int = step,
            first: tuple[int, int] = (first_x, first_out),
            memory: tuple[Tensor, ...] = (x, out, weight),
        ) -> None:
            setup.native.norm(
                first[0] + copy * step,
                first[1] + copy * step,
                m,
                size,
                1e-6,
                False,
                memory[2].data_ptr(),
                0,
                setup.num_threads,
                setup.isa,
            )

        yield KernelCase("norm", "f32", f"rms M={m} [{size}]", num_bytes, 0, "f32", copies, run)


def _sampler_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    if not hasattr(setup.native, "sample"):
        return
    # (inverse temperature, is greedy, top_k, top_p, log of min_p, seed, position, mask), as bind_sampler.cpp takes them.
    kinds = {
        "greedy": (1.0, True, 0, 1.0, -math.inf, 0, 0, 0),
        "top-k 20 top-p 0.95": (1.0, False, 20, 0.95, -math.inf, 7, 3, 0),
    }
    vocab_size = shapes.vocab_size
    for m in (rows for rows in setup.rows if 4 * rows * vocab_size <= _MAX_OUT_BYTES):
        num_bytes = 4 * m * vocab_size
        copies = setup.copies_for(num_bytes)
        logits = _noise(copies, m, vocab_size).contiguous()
        for name, options in kinds.items():
            rows = [[(logits[copy, row].data_ptr(), *options) for row in range(m)] for copy in range(copies)]

            def run(copy: int, rows: list = rows, _memory: Tensor = logits) -> None:
                setup.native.sample(rows[copy], vocab_size, setup.num_threads, setup.isa)

            yield KernelCase("sampler", "f32", f"{name} M={m} [{vocab_size}]", num_bytes, 0, "f32", copies, run)
