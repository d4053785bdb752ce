"""Benchmark cases: linear layers for each weight format and shape, and the greedy argmax of an LM head with its prefilter."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.bench.kernel_setup import MAX_OUT_BYTES, KernelCase, ModelShapes, Setup, noise

_ROWS_AT_ONCE = 4096
_INT8_GROUP, _INT4_GROUP, INPUT_GROUP = 256, 128, 256
"""Columns that share a scale: of weights, and of int8 inputs."""
_UNITS = {"bf12": 8, "fp8": 4}
"""Columns of such a weight are a multiple of this."""
_FP8_BLOCK = 128
_INT4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_LINEAR_FORMATS = {
    **{"bf16": "bf16", "bf12": "bf12", "f32": "f32", "f16": "f16"},
    **{"int8": "u8", "int4": "u4", "fp8": "f8"},
}
_DTYPES = {"f32": torch.float32, "f16": torch.float16}
PEAKS = {"int8": "u8", "int4": "u8", "bf12": "bf16", "fp8": "bf16", "f16": "f32"}
"""The type in which formats are multiplied, if it is not their own."""
_MAX_PREFILTER_ROWS = 128


def linear_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    for number_format in _LINEAR_FORMATS:
        for name, (n, k) in shapes.linears.items():
            rows = [m for m in setup.rows if 4 * m * n <= MAX_OUT_BYTES]
            if not rows or k % _UNITS.get(number_format, 1):
                continue
            weights = [pack_weight(setup, number_format, n, k)]
            weights += [pack_weight(setup, number_format, n, k) for _ in range(setup.copies_for(weights[0].num_bytes) - 1)]
            for m in rows:
                yield _linear_case(setup, number_format, f"{name} [{n}, {k}]", weights, m)


def _linear_case(setup: Setup, number_format: str, name: str, weights: list, m: int) -> KernelCase:
    n, k = weights[0].n, weights[0].k
    x, out = noise(m, k), torch.empty(m, n)

    def run(copy: int) -> None:
        setup.native.linear(
            weights[copy], None, x.data_ptr(), k, m, out.data_ptr(), n, num_threads=setup.num_threads, isa=setup.isa
        )

    kind = PEAKS.get(number_format, number_format)
    num_bytes = weights[0].num_bytes + 4 * m * (n + k)
    return KernelCase("linear", number_format, f"M={m} {name}", num_bytes, 2 * m * n * k, kind, len(weights), run)


def pack_weight(setup: Setup, number_format: str, n: int, k: int) -> object:
    """Return a weight packed as in the engine.

    bf12 is bf16 in twelve bits, int8 has a scale per row, int4 groups of 128 with nonlinear levels, fp8 blocks of 128 columns.
    """
    group = {"int8": min(_INT8_GROUP, k), "int4": min(_INT4_GROUP, k), "fp8": _FP8_BLOCK}.get(number_format, 0)
    input_group = min(INPUT_GROUP, k) if number_format.startswith("int") else 0
    weight = setup.native.Weight(_LINEAR_FORMATS[number_format], n, k, group, input_group)
    levels = torch.tensor(_INT4_LEVELS, dtype=torch.int8)
    count = min(n, _ROWS_AT_ONCE)
    if number_format == "int4":
        source = levels[torch.arange(count * k) * 7 % 16].contiguous()
    elif number_format == "int8":
        source = (noise(count, k) * 40).clamp(-127, 127).to(torch.int8)
    elif number_format == "fp8":
        source = (noise(count, k) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        source = noise(count, k, dtype=_DTYPES.get(number_format, torch.bfloat16)).contiguous()
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


def best_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    """Yield the greedy argmax of a bfloat16 LM head; bytes and products are those of its int8 copy."""
    n, k = shapes.linears["head"]
    heads = [pack_weight(setup, "bf16", n, k)]
    int8_heads = [setup.native.Int8Head(heads[0], setup.num_threads, setup.isa)]
    for _ in range(setup.copies_for(int8_heads[0].num_bytes) - 1):
        heads.append(pack_weight(setup, "bf16", n, k))
        int8_heads.append(setup.native.Int8Head(heads[-1], setup.num_threads, setup.isa))
    for m in (rows for rows in setup.rows if rows <= _MAX_PREFILTER_ROWS):
        x, best = noise(m, k), torch.empty(m, dtype=torch.int32)

        def run(copy: int, m: int = m, x: torch.Tensor = x, best: torch.Tensor = best) -> None:
            int8_heads[copy].best(heads[copy], x.data_ptr(), k, m, best.data_ptr(), setup.num_threads, setup.isa)

        name = f"M={m} head [{n}, {k}]"
        yield KernelCase("best", "bf16", name, int8_heads[0].num_bytes, 2 * m * n * k, "u8", len(int8_heads), run)
