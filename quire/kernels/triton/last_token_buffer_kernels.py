"""Kernels of last_token_buffer.py: the tokens and the block tables of a step."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_ids(
    out_ptr: tl.tensor,
    given_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    last_ptr: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < num_tokens
    given = tl.load(given_ptr + tokens, mask=is_token, other=0)
    is_unknown = is_token & (given < 0)
    rows = tl.load(rows_ptr + tokens, mask=is_unknown, other=0)
    last = tl.load(last_ptr + rows, mask=is_unknown, other=0)
    tl.store(out_ptr + tokens, tl.where(is_unknown, last, given), mask=is_token)


@triton.jit(do_not_specialize=["width"])
def _gather_tables(
    out_ptr: tl.tensor, rows_ptr: tl.tensor, tables_ptr: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < width
    blocks = tl.load(tables_ptr + row * width + places, mask=inside, other=0)
    tl.store(out_ptr + sequence * width + places, blocks, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _scatter_ids(
    last_ptr: tl.tensor, ids_ptr: tl.tensor, rows_ptr: tl.tensor, num_rows: tl.tensor, BLOCK: tl.constexpr
) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_rows
    ids = tl.load(ids_ptr + places, mask=inside, other=-1)
    rows = tl.load(rows_ptr + places, mask=inside, other=0)
    tl.store(last_ptr + rows, ids, mask=inside & (ids >= 0))
