"""Tile sizes of kernel launches, by shape, from the device's table (tile_table.py).

The defaults were chosen from the compiler's output (registers, shared memory, instructions) for sm_90, and for GPUs with other
matrix instructions or less shared memory for sm_80, sm_89 and sm_120. Those of fused layers were measured on an H200.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.base.errors import ConfigError
from quire.kernels.triton.arithmetic import INTERPRETED
from quire.kernels.triton.device_traits import device_traits
from quire.kernels.triton.sizes import power_of_two
from quire.kernels.triton.tile_table import active_table

CHUNK = 256
"""Cached tokens per chunk of split attention; larger for long contexts, so that there are at most most_chunks. It affects the
result, because sums are merged chunk by chunk."""

MULTIPROCESSORS = 132
"""Of an H200."""

SPLIT_PROGRAMS = 8 if INTERPRETED.value else 4 * MULTIPROCESSORS
"""Programs of a split attention launch: as many as an H200 runs at a time, 4 on each of 132 multiprocessors."""

LONG_CHUNK = 4096
"""Cached tokens per chunk of launches with many queries. The partial results cost long prompts a few percent of attention."""

ROWS_OF_DECODE = 16
"""Rows of the smallest matrix instruction; a sequence whose queries and heads fit into these is split over its keys."""


class AttentionTile(NamedTuple):
    """rows: queries times the heads that share their keys; keys: cached tokens processed at once."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_attention_tile(head_dim: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionTile:
    """Return the tile for sequences with few queries; `group` query heads share their keys."""
    is_even = group & (group - 1) == 0  # other divisions of rows into heads need registers
    shape = {**_attention_shape(head_dim, dtype, kv_dtype), "group": group, "is_even_group": is_even}
    return AttentionTile(rows=ROWS_OF_DECODE, **active_table().find("attention-decode", shape))


class FusedAttentionTile(NamedTuple):
    """chunk: cached tokens per chunk of fused attention, as CHUNK."""

    chunk: int
    num_stages: int


def fused_attention_tile(num_kv_heads: int, head_dim: int) -> FusedAttentionTile:
    """Return how fused attention divides its keys. The chunk affects the result: it does not depend on the batch."""
    return FusedAttentionTile(**active_table().find("fused-attention", {"num_kv_heads": num_kv_heads, "head_dim": head_dim}))


def most_chunks(num_kv_heads: int) -> int:
    """Return the maximum number of chunks of a context: enough for one sequence to fill the device."""
    return max(32, min(128, power_of_two(256 // num_kv_heads)))


def prefill_attention_tile(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionTile:
    """Return the tile for runs of queries."""
    return AttentionTile(**active_table().find("attention-prefill", _attention_shape(head_dim, dtype, kv_dtype)))


def is_filled(num_programs: int) -> bool:
    """Return whether that many programs, for whole runs of queries, fill the device, so that keys are not split.

    The last programs may leave multiprocessors idle for 15 % of the time: merging costs more.
    """
    at_once = device_traits().num_multiprocessors
    rounds = -(-num_programs // at_once)
    return rounds >= 4 and rounds * at_once <= 1.15 * num_programs


class PromptTile(NamedTuple):
    """keys processed at once, and tiles of them that are loaded ahead; takes_turns: one warp group multiplies at a time."""

    keys: int
    num_stages: int
    takes_turns: bool


def prompt_tile(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> PromptTile | None:
    """Return the tile of attend_prompts, the kernel for Hopper; None: attend_runs is used."""
    found = dict(active_table().find("attention-prefill-hopper", _attention_shape(head_dim, dtype, kv_dtype)))
    return PromptTile(**found) if found.pop("is_specialized") else None


def _attention_shape(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, int | str]:
    # Conversions of quantised values need registers.
    return {"head_dim": head_dim, "dtype": _name(dtype), "is_quantised": kv_dtype != dtype}


def _is_mma() -> bool:
    return device_traits().matrix_instruction == "mma"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def in_order_attention_tile(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionTile:
    """Return the batch-invariant tile, the same for sequences with few queries and for runs, so that sums have one order.

    Its rows are those of the wide matrix instruction, most of them empty in a decode step, which is bound by reading.
    """
    if dtype == torch.float32:
        return AttentionTile(16, 32, 8, 1)
    if head_dim > 128:
        # Wider values of more rows do not fit in registers; nor do the operands of mma.
        return AttentionTile(32 if head_dim > 256 or _is_mma() else 64, 32, 8, 2)
    return AttentionTile(64, 64 if kv_dtype == dtype else 32, 8, 3)


class ExpertTile(NamedTuple):
    """pairs of a token and an expert; rows and columns of the weight; is_swapped: the weight is the left operand."""

    pairs: int
    rows: int
    columns: int
    is_swapped: bool
    num_warps: int
    num_stages: int


def expert_tile(num_pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertTile:
    """Return the tile for a mixture of experts, by the average number of pairs per expert."""
    shape = {"dtype": _name(dtype), "pairs_per_expert": num_pairs / num_experts}
    return ExpertTile(**active_table().find("experts", shape))


def swapped_expert_tile(num_pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertTile:
    """Return a tile with the weight as left operand and a fixed number of columns."""
    if dtype == torch.float32:
        return ExpertTile(16, 32, 32, True, 4, 1)
    if num_pairs <= 8 * num_experts:
        return ExpertTile(16, 64, 64, True, 4, 4)
    if num_pairs <= 32 * num_experts:
        return ExpertTile(32, 64, 64, True, 4, 4)
    return large_expert_tile()


def large_expert_tile() -> ExpertTile:
    """Return the swapped tile of many pairs per expert."""
    return ExpertTile(32 if _is_mma() else 64, 64, 64, True, 4, 3)


class LinearTile(NamedTuple):
    """rows of the weight times tokens."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def linear_tile(num_tokens: int, dtype: torch.dtype, num_rows: int, has_offsets: bool) -> LinearTile:
    """Return the tile for a linear layer with quantised weights; offsets take sums, and registers, of their own."""
    shape = {"dtype": _name(dtype), "tokens": num_tokens, "rows": num_rows, "has_offsets": has_offsets}
    return LinearTile(**active_table().find("linear", shape))


class LargeBatchTile(NamedTuple):
    """tokens of a tile, at most 256, and runs of columns that are loaded ahead, at least 2."""

    tokens: int
    num_stages: int


def large_batch_tile(num_tokens: int, dtype: torch.dtype, num_rows: int) -> LargeBatchTile | None:
    """Return the tile of multiply_dequantised, the kernel for Hopper and many tokens; None: others are used.

    Raises ConfigError for one stage, with which the kernel would wait forever.
    """
    shape = {"dtype": _name(dtype), "tokens": num_tokens, "rows": num_rows}
    found = dict(active_table().find("linear-large-batch", shape))
    if found["num_stages"] < 2:
        raise ConfigError(
            f"num_stages of linear-large-batch is {found['num_stages']} in the table of tiles; allowed: 2 or more"
        )
    return LargeBatchTile(**found) if found.pop("is_specialized") else None


class DenseTile(NamedTuple):
    """rows of the weight times tokens, columns taken at once."""

    rows: int
    tokens: int
    columns: int
    num_warps: int
    num_stages: int


def dense_tile(num_tokens: int, dtype: torch.dtype) -> DenseTile:
    """Return the tile for a batch-invariant linear layer with plain weights.

    The columns determine the order of sums, so the weight is the wide matrix instruction's left operand in every tile.
    """
    if dtype == torch.float32:
        return DenseTile(32, 16, 32, 4, 1)
    if num_tokens <= 16:
        return DenseTile(64, 16, 64, 4, 5)
    if num_tokens <= 32:
        return DenseTile(64, 32, 64, 4, 5)
    if num_tokens <= 64:
        return DenseTile(64, 64, 64, 4, 4)
    if num_tokens <= 256:
        return DenseTile(64, 128, 64, 4, 4)
    return DenseTile(128, 128, 64, 8, 4)


def float8_tile(num_tokens: int) -> LinearTile:
    """Return the tile for a linear layer with float8 weights and float8 activations."""
    return LinearTile(**active_table().find("float8", {"tokens": num_tokens}))


class FusedLinearTile(NamedTuple):
    """Of products with few tokens.

    rows     of the weight
    columns  processed at once, in so many splits by different warps
    early    tiles of columns that are loaded before the previous launch ends
    """

    rows: int
    columns: int
    splits: int
    early: int
    num_warps: int
    num_stages: int


def fused_linear_tile(num_rows: int, num_columns: int, dtype: torch.dtype, num_tokens: int) -> FusedLinearTile:
    """Return the tile for a fused linear layer, by the shape of the weight and the padded number of tokens: 1, 8 or 16.

    Programs have few rows, so that small weights fill the GPU, too: splitting sums would cost a round trip to memory.
    """
    shape = {"dtype": _name(dtype), "tokens": num_tokens, "rows": num_rows, "columns": num_columns}
    tile = FusedLinearTile(**active_table().find("fused-linear", shape))
    columns = min(tile.columns, power_of_two(num_columns, 16 * tile.splits))
    return tile._replace(columns=columns, early=min(tile.early, -(-num_columns // columns)))


class FusedQuantizedTile(NamedTuple):
    """rows of the weight; bytes of codes processed at once, 0: tensor cores process a run of columns for each warp.

    fetched_bytes  prefetched by a program while the previous kernel runs
    """

    rows: int
    bytes: int
    num_warps: int
    num_stages: int
    fetched_bytes: int


def fused_quantized_tile(num_tokens: int, num_rows: int, row_bytes: int, is_packed: bool, has_norm: bool) -> FusedQuantizedTile:
    """Return the tile for a fused linear layer with quantised weights, whose rows have `row_bytes` of codes."""
    shape = {"tokens": num_tokens, "rows": num_rows, "row_bytes": row_bytes, "is_packed": is_packed, "has_norm": has_norm}
    return FusedQuantizedTile(**active_table().find("fused-quantized", shape))
