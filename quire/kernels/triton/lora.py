"""The products of LoRA adapters on a GPU, for rows that are grouped by adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.launching import FLOATS, Launch, check_contiguous, check_tensor, run_all
from quire.kernels.triton.lora_kernels import expand_rows, number_pairs, shrink_rows
from quire.kernels.triton.moe import SortedPairs, sort_launches
from quire.kernels.triton.sizes import ceil_divide, power_of_two

_TILE_ROWS, _SHRINK_COLUMNS, _EXPAND_OUTPUTS, _MOST_RANKS, _LEAST_RANKS = 16, 128, 64, 64, 16
"""Rows of a tile; inputs that a program of `shrink` reads at once; outputs of one of `expand`; outputs of one of `shrink`.
Matrix instructions need 16 of each at least."""
_PAIRS = 1024


class RowGroups(NamedTuple):
    """The rows of a step, or the pairs of a mixture, sorted by adapter.

    num_rows  of the step, or its pairs
    tiles     rows with an adapter, in tiles of one adapter each
    """

    num_rows: int
    tiles: SortedPairs


def group_rows(adapters: Tensor, num_adapters: int) -> RowGroups:
    """Sort the rows of a step by adapter.

    adapters  [T] i32, the index of each row's adapter; -1: none
    """
    check_tensor("adapters", adapters, (None,), torch.int32)
    launches, tiles = sort_launches(adapters, num_adapters, _TILE_ROWS)
    run_all(launches)
    return RowGroups(len(adapters), tiles)


def group_pairs(adapters: Tensor, has_experts: Tensor, experts: Tensor, num_experts: int) -> RowGroups:
    """Sort the (token, choice) pairs of a mixture by adapter and expert, whose matrices `add_low_rank` then takes at index
    adapter * num_experts + expert.

    adapters     [T] i32, the index of each token's adapter; -1: none
    has_experts  [adapters] i32, 1 for adapters with matrices of experts, 0 for others
    experts      [P] i32 of the pairs, P / T of each token; negative: none
    """
    num_adapters = len(has_experts)
    check_tensor("adapters", adapters, (None,), torch.int32)
    check_contiguous("has_experts", has_experts, (num_adapters,), torch.int32)
    check_contiguous("experts", experts, (len(experts),), torch.int32)
    groups = torch.empty_like(experts)
    arguments = {
        "adapters_ptr": adapters,
        "has_experts_ptr": has_experts,
        "experts_ptr": experts,
        "groups_ptr": groups,
        "num_pairs": len(experts),
    }
    constants = {"NUM_SLOTS": len(experts) // len(adapters), "NUM_EXPERTS": num_experts, "BLOCK": _PAIRS}
    Launch(number_pairs, (-(-len(experts) // _PAIRS),), arguments, constants, 4, 1).run()
    return group_rows(groups, num_adapters * num_experts)


class HeadGroups(NamedTuple):
    """The (token, head) pairs of a step with adapters, token by token.

    by_adapter  sorted by adapter
    by_head     sorted by adapter and head: their matrices are those of adapter * num_heads + head
    """

    by_adapter: RowGroups
    by_head: RowGroups


def group_heads(adapters: Tensor, num_adapters: int, num_heads: int) -> HeadGroups:
    """Sort the heads of a step's tokens; adapters: [T] i32 of the tokens, -1: none."""
    pairs = adapters[:, None].expand(-1, num_heads).contiguous()
    heads = torch.arange(num_heads, dtype=torch.int32, device=adapters.device)
    numbers = torch.where(pairs < 0, pairs, pairs * num_heads + heads).flatten()
    return HeadGroups(group_rows(pairs.flatten(), num_adapters), group_rows(numbers, num_adapters * num_heads))


def add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor], groups: RowGroups, num_slots: int = 1) -> None:
    """Add b (a x) of each row's adapter to y in place, as torch does: each product is rounded to the dtype.

    y  [T, sum of O_i], the outputs of a linear layer that has several parts over the same inputs
    x  [T / num_slots, K] in y's dtype, of which num_slots rows of y share each
    a  [adapters, parts * R, K]; part i has rows [i * R, (i + 1) * R)
    b  for each part [adapters, O_i, R]
    """
    num_adapters, num_parts = a.shape[0], len(b)
    rank, width = a.shape[1] // num_parts, sum(part.shape[1] for part in b)
    check_tensor("y", y, (groups.num_rows, width), *FLOATS)
    check_tensor("x", x, (groups.num_rows // num_slots, a.shape[2]), y.dtype)
    check_contiguous("a", a, (num_adapters, num_parts * rank, x.shape[1]), y.dtype)
    for part in b:
        check_contiguous("b", part, (num_adapters, part.shape[1], rank), y.dtype)
    if rank * num_parts != a.shape[1]:
        raise InvariantError(f"a has {a.shape[1]} rows, which are not those of {num_parts} parts")
    shrunk = shrink(x, a, groups, num_slots)
    first = 0
    for index, part in enumerate(b):
        own = shrunk[:, index * rank : (index + 1) * rank]
        _expand_launch(y[:, first : first + part.shape[1]], own, part, groups).run()
        first += part.shape[1]


def shrink(x: Tensor, a: Tensor, groups: RowGroups, num_slots: int = 1) -> Tensor:
    """Return a x of each row's adapter [groups.num_rows, R]; rows without an adapter are undefined.

    x  [groups.num_rows / num_slots, K], of which num_slots rows share each; a [adapters, R, K]
    """
    check_tensor("x", x, (groups.num_rows // num_slots, a.shape[2]), *FLOATS)
    check_contiguous("a", a, tuple(a.shape), x.dtype)
    out = torch.empty(groups.num_rows, a.shape[1], dtype=x.dtype, device=x.device)
    _shrink_launch(out, x, a, groups, num_slots).run()
    return out


def expand(y: Tensor, x: Tensor, b: Tensor, groups: RowGroups) -> None:
    """Add b x of each row's adapter to y [T, O] in place; x [T, R], b [adapters, O, R]."""
    check_tensor("y", y, (groups.num_rows, b.shape[1]), *FLOATS)
    check_tensor("x", x, (groups.num_rows, b.shape[2]), y.dtype)
    check_contiguous("b", b, tuple(b.shape), y.dtype)
    _expand_launch(y, x, b, groups).run()


def _shrink_launch(out: Tensor, x: Tensor, a: Tensor, groups: RowGroups, num_slots: int) -> Launch:
    num_outputs, num_columns = a.shape[1:]
    block = min(_MOST_RANKS, power_of_two(num_outputs, _LEAST_RANKS))
    arguments = {"x_ptr": x, "a_ptr": a, "out_ptr": out, **_tile_arguments(groups), "x_stride": x.stride(0)}
    constants = {
        "NUM_OUTPUTS": num_outputs,
        "NUM_COLUMNS": num_columns,
        "NUM_SLOTS": num_slots,
        "BLOCK_M": _TILE_ROWS,
        "BLOCK_N": block,
        "BLOCK_K": min(_SHRINK_COLUMNS, power_of_two(num_columns, 16)),
    }
    return Launch(shrink_rows, (groups.tiles.num_tiles, ceil_divide(num_outputs, block)), arguments, constants, 4, 3)


def _expand_launch(y: Tensor, x: Tensor, b: Tensor, groups: RowGroups) -> Launch:
    num_outputs, rank = b.shape[1:]
    arguments = {
        "x_ptr": x,
        "b_ptr": b,
        "y_ptr": y,
        **_tile_arguments(groups),
        "x_stride": x.stride(0),
        "y_stride": y.stride(0),
        "adapter_stride": b.stride(0),
    }
    constants = {
        "NUM_OUTPUTS": num_outputs,
        "RANK": rank,
        "BLOCK_M": _TILE_ROWS,
        "BLOCK_N": _EXPAND_OUTPUTS,
        "BLOCK_R": power_of_two(rank, _LEAST_RANKS),
    }
    return Launch(expand_rows, (groups.tiles.num_tiles, ceil_divide(num_outputs, _EXPAND_OUTPUTS)), arguments, constants, 4, 1)


def _tile_arguments(groups: RowGroups) -> dict[str, Tensor | None]:
    return {"rows_ptr": groups.tiles.pairs, "tile_adapters_ptr": groups.tiles.tile_experts}
