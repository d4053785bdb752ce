"""Benchmark cases that work row by row: norms, norm and rotation of heads, and sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.bench.kernel_setup import MAX_OUT_BYTES, KernelCase, ModelShapes, Setup, noise


def norm_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    size = shapes.hidden_size
    for m in setup.rows:
        num_bytes = 2 * 4 * m * size
        copies = setup.copies_for(num_bytes)
        # Ones, because memory that is written for the first time would be allocated by the system during the call.
        x, out, weight = noise(copies, m, size).contiguous(), torch.ones(copies, m, size), torch.ones(size)
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


def sampler_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    if not hasattr(setup.native, "sample"):
        return
    # (inverse temperature, is greedy, top_k, top_p, log of min_p, seed, position, mask), see bind_sampler.cpp.
    kinds = {
        "greedy": (1.0, True, 0, 1.0, -math.inf, 0, 0, 0),
        "top-k 20 top-p 0.95": (1.0, False, 20, 0.95, -math.inf, 7, 3, 0),
    }
    vocab_size = shapes.vocab_size
    for m in (rows for rows in setup.rows if 4 * rows * vocab_size <= MAX_OUT_BYTES):
        num_bytes = 4 * m * vocab_size
        copies = setup.copies_for(num_bytes)
        logits = noise(copies, m, vocab_size).contiguous()
        for name, options in kinds.items():
            rows = [[(logits[copy, row].data_ptr(), *options) for row in range(m)] for copy in range(copies)]

            def run(copy: int, rows: list = rows, _memory: Tensor = logits) -> None:
                setup.native.sample(rows[copy], vocab_size, setup.num_threads, setup.isa)

            yield KernelCase("sampler", "f32", f"{name} M={m} [{vocab_size}]", num_bytes, 0, "f32", copies, run)


def turn_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    """Yield the norm and the rotation of the query and key heads of rows, by one thread, as in a step."""
    heads, dim = shapes.num_heads + shapes.num_kv_heads, shapes.head_dim
    for m in setup.rows:
        num_bytes = 4 * m * (2 * heads + 1) * dim
        copies = setup.copies_for(num_bytes)
        x, weight = noise(copies, m, heads * dim).contiguous(), torch.ones(dim)
        cosine, sine = torch.ones(m, dim // 2), torch.zeros(m, dim // 2)
        step, first, tensors = 4 * m * heads * dim, x.data_ptr(), (x, weight, cosine, sine)

        def run(copy: int, m: int = m, at: tuple[int, int] = (first, step), held: tuple[Tensor, ...] = tensors) -> None:
            _, weight, cosine, sine = held
            angles = cosine.data_ptr(), sine.data_ptr()
            setup.native.turn_heads(
                at[0] + copy * at[1], m, heads, dim, dim, *angles, 1e-6, False, weight.data_ptr(), 0, setup.isa
            )

        yield KernelCase("turn", "f32", f"M={m} {heads} heads of {dim}", num_bytes, 0, "f32", copies, run)
