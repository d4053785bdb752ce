"""What ranks that share a model exchange in a layer and in a step: collectives and bytes, counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec
from quire.contracts.parallel import LEAST_DIVIDED_TOKENS
from quire.planner.layout import Layout

_CHUNK = 256
_ROUND_BYTES = 16 << 20
_TILE_ROWS = 48
"""Of the partial results of CPU ranks with -dcp: tokens of a chunk, bytes of a round, rows of a tile."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Sequences of a step, new tokens of each and tokens that it attends to, its own included; bytes of a cached value."""

    num_sequences: int = 1
    num_new: int = 1
    context_len: int = 1
    kv_value_bytes: float = 2.0
    is_gpu: bool = False

    def parts(self, layout: Layout) -> int:
        """Return among how many groups of ranks the tokens of the step are divided."""
        return 1 if self.is_gpu and self.num_new < LEAST_DIVIDED_TOKENS else layout.num_parts


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the ranks of a tensor-parallel group exchange in a layer, or in a step: collectives, and bytes that each rank
    receives for a token."""

    num_calls: int
    num_bytes: float

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.num_calls + other.num_calls, self.num_bytes + other.num_bytes)


def gathered_widths(layer: LayerSpec, hidden_size: int, has_whole_experts: bool, has_homes: bool = False) -> list[int]:
    """Return the values of a token that each collective of a layer gathers, where every weight is sharded by its outputs.

    has_homes  one rank has all of a token's attention
    """
    attention, mlp = layer.attention, layer.mlp
    head = attention.head_dim if attention.latent is None else attention.latent.value_dim
    widths = [hidden_size] if has_homes else [attention.num_heads * head, hidden_size]
    if not isinstance(mlp, MoeSpec):
        return [*widths, mlp.intermediate_size, hidden_size]
    if mlp.shared is not None:
        widths += [mlp.shared.intermediate_size, hidden_size]
    inner = [] if has_whole_experts else [mlp.top_k * mlp.expert.intermediate_size]
    return [*widths, *inner, mlp.top_k * hidden_size]


def layer_exchange(layer: LayerSpec, hidden_size: int, layout: Layout, is_gathered: bool, value_bytes: int) -> Exchange:
    """Return what a layer exchanges.

    is_gathered  weights are sharded by their outputs and results are gathered, as on CPUs and with deterministic; otherwise
                 two all-reduces in a ring
    """
    size, has_homes = layout.num_tensor, layout.num_homes > 1
    if size == 1:
        return Exchange(0, 0.0)
    others = (size - 1) / size * value_bytes
    if not is_gathered:  # homes gather the rows of the feed-forward block, and get the sums of their own (reduce-scatter)
        return Exchange(2, (1 if has_homes else 2) * 2 * hidden_size * others)
    widths = gathered_widths(layer, hidden_size, layout.has_whole_experts, has_homes)
    found = Exchange(len(widths), sum(widths) * others)
    if has_homes and layout.head_ranks > 1:  # the ranks of a home share the results of their heads, of its tokens only
        width = gathered_widths(layer, hidden_size, True)[0] * value_bytes
        found += Exchange(1, width * (1 - 1 / layout.head_ranks) / layout.num_homes)
    return found


def context_exchange(layer: LayerSpec, layout: Layout, tokens: StepTokens, is_gathered: bool, value_bytes: int) -> Exchange:
    """Return what a layer exchanges in addition, of each token of a step, where ranks share the tokens of a sequence, or divide
    those of prompts."""
    one, places, parts = layer.attention, layout.num_places, tokens.parts(layout)
    if not one.num_kv_heads:
        return Exchange(0, 0.0)
    if parts > 1:  # the new keys and values, on CPUs as f32 rows, on GPUs as the cache has them
        values = 2 * -(-one.num_kv_heads // layout.num_tensor) * one.head_dim * (1 - 1 / parts)
        return Exchange(2, values * tokens.kv_value_bytes) if tokens.is_gpu else Exchange(1, values * value_bytes)
    if places == 1:
        return Exchange(0, 0.0)
    groups, others = layout.num_tensor // places, 1 - 1 / places
    num_heads, num_kv_heads = -(-one.num_heads // groups), -(-one.num_kv_heads // groups)
    rows = (num_heads + 2 * num_kv_heads) * one.head_dim * value_bytes * others
    seen = tokens.context_len if one.window is None else min(tokens.context_len, one.window + tokens.num_new - 1)
    chunks = -(-seen // _CHUNK)
    if not tokens.is_gpu:
        group = num_heads // num_kv_heads
        tile = min(tokens.num_new, max(1, _TILE_ROWS // group))
        partial = 4 * num_kv_heads * chunks * (2 * _TILE_ROWS / tile + group * one.head_dim)
        rounds = math.ceil(tokens.num_sequences * tokens.num_new * partial / _ROUND_BYTES)
        return Exchange(1 + rounds, rows + partial * others)
    if tokens.num_new >= LEAST_DIVIDED_TOKENS:  # the keys of prompts
        keys = 2 * num_kv_heads * one.head_dim * tokens.kv_value_bytes * seen / tokens.num_new
        return Exchange(3, rows + keys * others)
    results = (places - 1) * num_heads * (one.head_dim + 1) * 4
    return Exchange(3, rows + results * -(-chunks // places)) if is_gathered else Exchange(2, rows + results)


def around_experts(layer: LayerSpec, hidden_size: int, layout: Layout, is_gathered: bool, value_bytes: int) -> Exchange:
    """Return what a layer exchanges in addition to the rows of its experts.

    Its ranks add up attention for their rows (reduce-scatter), gather the routes, and gather the rows of the next layer. With
    is_gathered all have all rows: attention and its output are gathered, and the results of the experts.
    """
    assert isinstance(layer.mlp, MoeSpec)
    others = (layout.num_tensor - 1) / layout.num_tensor
    shared, has_homes = layer.mlp.shared, layout.num_homes > 1
    if is_gathered and not has_homes:
        widths = [*gathered_widths(layer, hidden_size, True)[:-1], hidden_size]
        return Exchange(len(widths), sum(widths) * others * value_bytes)
    routes = Exchange(1, 8 * layer.mlp.top_k * others)
    num_rows = 0 if has_homes else 2  # homes have their own rows in attention
    num_rows += 0 if shared is None else 2  # a shared expert reads all rows, and its output is added up
    return routes + Exchange(num_rows, num_rows * hidden_size * others * value_bytes)


def step_exchange(
    spec: ModelSpec, layout: Layout, is_gathered: bool, value_bytes: int, tokens: StepTokens = StepTokens()
) -> Exchange:
    """Return what all layers of a step exchange of each of its tokens, with the rows of the embedding and the logits."""
    total, parts, hidden = Exchange(0, 0.0), tokens.parts(layout), spec.hidden_size
    for layer in spec.layers:
        found = layer_exchange(layer, hidden, layout, is_gathered, value_bytes)
        total += Exchange(found.num_calls, found.num_bytes / parts)
        total += context_exchange(layer, layout, tokens, is_gathered, value_bytes)
    if layout.num_tensor > 1:
        others = (layout.num_tensor - 1) / layout.num_tensor * value_bytes
        total += Exchange(2, (hidden / parts + spec.vocab_size / tokens.num_new) * others)
        if layout.num_homes > 1 and tokens.is_gpu:  # the hidden states
            total += Exchange(1, hidden * others)
        elif layout.num_homes > 1:  # homes write where others still read the embedding, or the sums of a dense layer
            total += Exchange(1 + sum(not isinstance(layer.mlp, MoeSpec) for layer in spec.layers[:-1]), 0.0)
    if parts > 1:  # the hidden states; CPU ranks gather those that logits need
        total += Exchange(1, hidden * value_bytes * (1 - 1 / parts) / (1 if tokens.is_gpu else tokens.num_new))
    return total
