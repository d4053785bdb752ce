"""Benchmark cases: a layer's mixture of experts as in a step: routing, grouping by expert, their linear layers, and sums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.bench.kernel_setup import KernelCase, MixtureShape, ModelShapes, Setup
from quire.bench.linear_cases import PEAKS, pack_weight

_FORMATS = ("bf16", "int8", "int4")
_HEAD_DIM, _BLOCK_SIZE = 16, 16
"""Sizes of the attention before the mixture, the minimum that a layer may have; its results are zero."""
_EPS = 1e-6


def embed_experts(mixture: MixtureShape, hidden_size: int) -> Tensor:
    """Return an embedding [tokens, hidden] that encodes the experts of each token: top_k from t * top_k on, the first
    strongest.

    There are as many tokens as needed until the experts repeat.
    """
    num_tokens = mixture.num_experts // math.gcd(mixture.num_experts, mixture.top_k)
    chosen = torch.arange(num_tokens * mixture.top_k).view(num_tokens, -1) % mixture.num_experts
    shares = torch.linspace(2, 1, mixture.top_k).repeat(num_tokens, 1)
    return torch.zeros(num_tokens, hidden_size).scatter_(1, chosen, shares)


class _Mixtures:
    """A plan of layers that consist of little but a mixture, whose tokens go to experts in turn.

    The router reads a column for each expert, where the embedding of its tokens is large, so it is known what a step reads.
    """

    def __init__(self, setup: Setup, shapes: ModelShapes, mixture: MixtureShape, number_format: str) -> None:
        self._setup, self._hidden, self._mixture, self._format = setup, shapes.hidden_size, mixture, number_format
        first = self._expert()
        self.expert_bytes = sum(weight.num_bytes for weight in first)
        self.num_layers = setup.copies_for(mixture.num_experts * self.expert_bytes)
        rows = embed_experts(mixture, self._hidden)
        self.num_tokens, embedding = len(rows), self._pack_f32(rows)
        self.plan = setup.native.Plan(self._hidden, self.num_tokens, number_format == "bf16", setup.num_threads, setup.isa)
        self.plan.set_embedding(embedding, None, 1.0)
        self.plan.set_head(embedding, 1.0, 0.0)
        self._cache = torch.zeros(2, max(setup.rows) * _BLOCK_SIZE, _HEAD_DIM)
        for index in range(self.num_layers):
            self.plan.add_layer(self._layer(None if index else first))
        self.plan.finish()

    def _pack_f32(self, rows: Tensor) -> Any:
        weight = self._setup.native.Weight("f32", *rows.shape)
        weight.pack(rows.data_ptr(), rows.shape[1], 0, len(rows), num_threads=self._setup.num_threads)
        weight.set_extras()
        return weight

    def _expert(self) -> tuple[Any, Any, Any]:
        """Return gate, up and down."""
        inner = self._mixture.inner_size
        sizes = ((inner, self._hidden), (inner, self._hidden), (self._hidden, inner))
        gate, up, down = (pack_weight(self._setup, self._format, *size) for size in sizes)
        return gate, up, down

    def _layer(self, first: tuple[Any, Any, Any] | None) -> Any:
        layer, hidden, mixture = self._setup.native.PlanLayer(), self._hidden, self._mixture
        small = self._pack_f32(torch.zeros(_HEAD_DIM, hidden))
        layer.q = layer.k = layer.v = small
        layer.o = self._pack_f32(torch.zeros(hidden, _HEAD_DIM))
        layer.num_heads, layer.num_kv_heads, layer.head_dim = 1, 1, _HEAD_DIM
        layer.scale, layer.window, layer.softcap, layer.rope, layer.residual_scale = 1.0, 0, 0.0, -1, 1.0
        layer.set_cache(1, _BLOCK_SIZE, self._cache[0].data_ptr(), self._cache[1].data_ptr(), 0, 0)
        ones = torch.ones(hidden)
        layer.mlp_in.set(False, hidden, _EPS, ones.data_ptr())
        layer.set_activation(0)
        layer.top_k, layer.is_renormalized = mixture.top_k, True
        layer.router = self._pack_f32(torch.eye(mixture.num_experts, hidden))
        for index in range(mixture.num_experts):
            layer.add_expert(*(first if first is not None and index == 0 else self._expert()))
        return layer

    def case(self, m: int) -> KernelCase:
        """Return a step of m tokens, each its own sequence; consecutive steps use the next experts, or a new layer."""
        mixture, hidden = self._mixture, self._hidden
        num_met = min(mixture.num_experts, m * mixture.top_k)
        rounds = -(-mixture.num_experts // num_met)
        tokens = torch.arange(rounds * m).view(rounds, m) % self.num_tokens
        layers = torch.arange(self.num_layers, dtype=torch.int32)
        positions, slots = torch.zeros(m, dtype=torch.int64), torch.arange(m) * _BLOCK_SIZE
        starts, lengths = torch.arange(m + 1, dtype=torch.int32), torch.ones(m, dtype=torch.int32)
        tables = torch.arange(m, dtype=torch.int32)

        def run(copy: int) -> None:
            self.plan.step(
                tokens[copy // self.num_layers].data_ptr(),
                positions.data_ptr(),
                slots.data_ptr(),
                m,
                m,
                starts.data_ptr(),
                lengths.data_ptr(),
                tables.data_ptr(),
                1,
                wanted_rows=0,
                num_wanted_rows=0,
                num_logit_rows=0,
                keeps_all=True,
                logits=0,
                layers=layers[copy % self.num_layers :].data_ptr(),
                num_layers=1,
            )

        inner, pairs = mixture.inner_size, m * mixture.top_k
        num_bytes = num_met * self.expert_bytes + 4 * mixture.num_experts * hidden + 2 * 4 * m * hidden
        name = f"M={m} {mixture.top_k} of {mixture.num_experts} experts [{inner}, {hidden}]"
        num_operations = 2 * 3 * pairs * inner * hidden
        kind = PEAKS.get(self._format, self._format)
        return KernelCase("experts", self._format, name, num_bytes, num_operations, kind, rounds * self.num_layers, run)


def expert_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    """Yield the mixture of a model, if it has one, with experts in every format; bytes are those of the experts that are
    used."""
    mixture = shapes.mixture
    if mixture is None or mixture.num_experts > shapes.hidden_size:
        return
    for number_format in _FORMATS:
        yield from map(_Mixtures(setup, shapes, mixture, number_format).case, setup.rows)
