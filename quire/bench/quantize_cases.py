"""Benchmark cases: quantisation of the inputs of linear layers in every call, and of weights during loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.bench.kernel_setup import KernelCase, ModelShapes, Setup, noise
from quire.bench.linear_cases import INPUT_GROUP, pack_weight
from quire.quant.quantize import INT4, INT8, Scheme, fit_scheme, native_quantizer

_INPUT_BYTES = {"bf16": 2, "int8": 1}
_GROUP_BYTES = 12
"""Additional bytes per group of int8 inputs: its scale, and its sum in two forms."""


def pack_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    """Yield the packing of inputs, to int8 with a scale for each group or to bfloat16, which `linear` cases include."""
    for number_format, width in _INPUT_BYTES.items():
        for k in dict.fromkeys(k for _, k in shapes.linears.values()):
            weight = pack_weight(setup, number_format, 1, k)
            row_bytes = (4 + width) * k + (_GROUP_BYTES * -(-k // INPUT_GROUP) if number_format == "int8" else 0)
            for m in setup.rows:
                copies = setup.copies_for(m * row_bytes)
                x = noise(copies, m, k).contiguous()

                def run(copy: int, m: int = m, k: int = k, weight: Any = weight, x: Tensor = x) -> None:
                    setup.native.pack_inputs(weight, x[copy].data_ptr(), k, m, setup.num_threads, setup.isa)

                yield KernelCase("pack", number_format, f"M={m} [{k}]", m * row_bytes, 0, "f32", copies, run)


def quantize_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    """Yield the quantisation of bfloat16 weights: the search for scales, and the codes."""
    if not hasattr(setup.native, "quantize_search"):
        return
    for number_format, scheme in (("int8", INT8), ("int4", INT4)):
        for name, (n, k) in shapes.linears.items():
            fitting = fit_scheme(scheme, k)
            if name != "head" and fitting is not None and fitting.kind == scheme.kind:
                yield _quantize_case(setup, number_format, fitting, f"{name} [{n}, {k}]", (n, k))


def _quantize_case(setup: Setup, number_format: str, scheme: Scheme, name: str, size: tuple[int, int]) -> KernelCase:
    (n, k), quantizer = size, native_quantizer(setup.native, scheme, setup.isa)
    num_bytes = 3 * n * k + 4 * n * (1 if scheme.kind == "int8" else k // scheme.group_size)
    copies = setup.copies_for(num_bytes)
    weights, codes = noise(copies, n, k, dtype=torch.bfloat16).contiguous(), torch.ones(copies, n, k, dtype=torch.int8)

    def run(copy: int) -> None:
        (scale,) = quantizer.search(weights[copy])
        quantizer.encode(weights[copy], scale, None, codes[copy])

    return KernelCase("quantize", number_format, name, num_bytes, 0, "f32", copies, run)
