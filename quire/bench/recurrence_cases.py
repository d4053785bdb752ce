"""Benchmark cases: recurrent states of gated delta nets and Mamba 2, taken through tokens, and the convolutions before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire.bench.kernel_setup import KernelCase, ModelShapes, Setup, noise
from quire.contracts.mixer_spec import GatedDeltaSpec, Mamba2Spec
from quire.kernels.cpu.recurrent import recur_native
from quire.kernels.reference.recurrent import Recurrence, StateRows

_OF_OTHER_MODELS = (GatedDeltaSpec(16, 32, 128, 128, 4, 1e-6), Mamba2Spec(48, 64, 1, 128, 4, None))
"""Measured for a model without such layers: those of Qwen3-Next and of Granite 4 Tiny."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A state of v_heads times [k_dim, v_dim]; num_operations: for each of its elements and each token."""

    name: str
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    num_operations: int

    @property
    def state_bytes(self) -> int:
        return 4 * self.v_heads * self.k_dim * self.v_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of q, k, v, the decay and the output of a token, and of beta."""
        return 4 * (2 * self.k_heads * self.k_dim + 2 * self.v_heads * self.v_dim + 2 * self.v_heads)


def recurrence_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    """Yield steps of one token of 1 and 16 sequences, and prompts of one."""
    for mixer in shapes.mixers or _OF_OTHER_MODELS:
        if isinstance(mixer, Mamba2Spec):
            shape = _Shape("mamba 2", mixer.num_groups, mixer.num_heads, mixer.state_size, mixer.head_dim, 5)
        else:
            shape = _Shape("gated delta", mixer.num_k_heads, mixer.num_v_heads, mixer.k_dim, mixer.v_dim, 7)
        if shape.k_dim > setup.native.MAX_STATE_ROWS:
            continue
        for num_sequences in (1, 16):
            yield _case(setup, shape, f"decode S={num_sequences}", num_sequences, 1)
            yield _convolution(setup, mixer.conv_channels, mixer.conv_size, f"decode S={num_sequences}", num_sequences, 1)
        for length in setup.lengths:
            yield _case(setup, shape, f"prefill {length}", 1, length)
            yield _convolution(setup, mixer.conv_channels, mixer.conv_size, f"prefill {length}", 1, length)


def _case(setup: Setup, shape: _Shape, name: str, num_sequences: int, num_tokens: int) -> KernelCase:
    """Return the case of so many tokens of each sequence, whose states are read and written where they lie."""
    total = num_sequences * num_tokens
    num_bytes = 2 * num_sequences * shape.state_bytes + total * shape.token_bytes
    copies = setup.copies_for(num_bytes)
    pool = noise(copies * num_sequences, shape.v_heads, shape.k_dim, shape.v_dim).contiguous()
    keys = noise(2, total, shape.k_heads, shape.k_dim) * shape.k_dim**-0.5
    values, decay = noise(total, shape.v_heads, shape.v_dim), torch.full((total, shape.v_heads), 0.9)
    beta = torch.full((total, shape.v_heads), 0.5) if shape.name == "gated delta" else None
    inputs = Recurrence(keys[0], keys[1], values, decay, beta)
    starts = list(range(0, total + 1, num_tokens))

    def run(copy: int) -> None:
        own = range(copy * num_sequences, (copy + 1) * num_sequences)
        rows = StateRows(own, [[(num_tokens, row)] for row in own])
        recur_native(setup.native, inputs, pool, starts, rows, num_threads=setup.num_threads, isa=setup.isa)

    operations = total * shape.v_heads * shape.k_dim * shape.v_dim * shape.num_operations
    title = f"{shape.name} {name} {shape.v_heads}x[{shape.k_dim}, {shape.v_dim}]"
    return KernelCase("recurrence", "f32", title, num_bytes, operations, "f32", copies, run)


def _convolution(setup: Setup, channels: int, taps: int, name: str, num_sequences: int, num_tokens: int) -> KernelCase:
    """Return the case of a causal convolution, whose states are in bfloat16."""
    total, width = num_sequences * num_tokens, taps - 1
    num_bytes = 2 * num_sequences * width * channels * 2 + 8 * total * channels + 4 * taps * channels
    copies = setup.copies_for(num_bytes)
    pool = noise(copies * num_sequences, width, channels, dtype=torch.bfloat16).contiguous()
    x, weight = noise(copies, total, channels).contiguous(), noise(taps, channels).contiguous()
    out, starts, size = torch.empty(total, channels), list(range(0, total + 1, num_tokens)), 2 * width * channels

    def run(copy: int) -> None:
        rows = [pool.data_ptr() + row * size for row in range(copy * num_sequences, (copy + 1) * num_sequences)]
        tensors = (x[copy].data_ptr(), weight.data_ptr(), 0, out.data_ptr())
        saves = [[(num_tokens, row)] for row in rows]
        setup.native.convolve(tensors, (channels, taps), True, starts, rows, saves, setup.num_threads, setup.isa)

    operations = 2 * total * taps * channels
    return KernelCase(
        "recurrence", "bf16", f"convolution {name} [{channels}, {taps}]", num_bytes, operations, "f32", copies, run
    )
