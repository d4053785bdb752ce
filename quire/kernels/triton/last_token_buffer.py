"""State that stays on the device between steps: the last sampled tokens, and the block tables."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton.last_token_buffer_kernels import _gather_ids, _gather_tables, _scatter_ids
from quire.kernels.triton.launching import Launch, check_contiguous

_BLOCK, _TABLE_BLOCK = 256, 1024


def gather_inputs_launches(
    token_ids: Tensor, tables: Tensor, given_ids: Tensor, token_rows: Tensor, rows: Tensor, last_ids: Tensor, all_tables: Tensor
) -> list[Launch]:
    """Return the launches that write the tokens of a step, and the block tables of its sequences.

    token_ids   [T] i64, output: the given one, or if that is negative the last one of its row
    tables      [S, max_blocks] i32, output: those of `rows`
    given_ids   [T] i64
    token_rows  [T] i32 rows of last_ids; rows [S] i32: rows of all_tables
    last_ids    [N] i64
    all_tables  [N, max_blocks] i32
    """
    num_tokens, (num_rows, width), num_known = len(token_ids), tables.shape, len(last_ids)
    check_contiguous("token_ids", token_ids, (None,), torch.int64)
    check_contiguous("given_ids", given_ids, (num_tokens,), torch.int64)
    check_contiguous("token_rows", token_rows, (num_tokens,), torch.int32)
    check_contiguous("rows", rows, (num_rows,), torch.int32)
    check_contiguous("last_ids", last_ids, (None,), torch.int64)
    check_contiguous("tables", tables, (None, None), torch.int32)
    check_contiguous("all_tables", all_tables, (num_known, width), torch.int32)
    ids = {"out_ptr": token_ids, "given_ptr": given_ids, "rows_ptr": token_rows, "last_ptr": last_ids, "num_tokens": num_tokens}
    arguments = {"out_ptr": tables, "rows_ptr": rows, "tables_ptr": all_tables, "width": width}
    return [
        Launch(_gather_ids, (-(-num_tokens // _BLOCK),), ids, {"BLOCK": _BLOCK}, 4, 1),
        Launch(_gather_tables, (num_rows, -(-width // _TABLE_BLOCK)), arguments, {"BLOCK": _TABLE_BLOCK}, 4, 1),
    ]


def scatter_ids_launch(last_ids: Tensor, token_ids: Tensor, rows: Tensor) -> Launch:
    """Return the launch that writes token_ids [R] i64 to last_ids [N] i64 at rows [R] i32; negative ids are skipped.

    A row may occur more than once only if it is never read.
    """
    num_rows = len(rows)
    check_contiguous("last_ids", last_ids, (None,), torch.int64)
    check_contiguous("token_ids", token_ids, (num_rows,), torch.int64)
    check_contiguous("rows", rows, (num_rows,), torch.int32)
    arguments = {"last_ptr": last_ids, "ids_ptr": token_ids, "rows_ptr": rows, "num_rows": num_rows}
    return Launch(_scatter_ids, (-(-num_rows // _BLOCK),), arguments, {"BLOCK": _BLOCK}, 4, 1)
