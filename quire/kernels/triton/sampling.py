"""The sampler on the device: samples the same tokens as the CPU's sampler from the same logits, for any mix of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.cpu.sampling import DrawOptions
from quire.kernels.reference.noise import STREAM_TARGET
from quire.kernels.triton.launching import FLOATS, Launch, check_contiguous, check_tensor, run_all
from quire.kernels.triton.sampling_kernels import LIST_SIZE, NUM_DEPTHS, collect_rows, scan_rows, weigh_rows
from quire.kernels.triton.sizes import ceil_divide, power_of_two
from quire.kernels.triton.topk_topp_kernels import choose_rows

_BLOCK = 2048


class RowOptions(NamedTuple):
    """Sampling options of [R] rows, on the device: a column per field of DrawOptions.

    inverse_temperatures  [R] f32
    is_greedy             [R] i32, 0 or 1
    top_ks                [R] i32, 0: all
    top_ps                [R] f64, 1: all
    log_min_ps            [R] f32, -inf: off
    seeds                 [R] i64, the bits of u64
    positions             [R] i64, of which the lowest 32 bits are used
    token_masks           [R, ceil(V / 32)] i32, a bit per token, the lowest first: 0 forbids it; None: all are allowed
    """

    inverse_temperatures: Tensor
    is_greedy: Tensor
    top_ks: Tensor
    top_ps: Tensor
    log_min_ps: Tensor
    seeds: Tensor
    positions: Tensor
    token_masks: Tensor | None = None


class Choices(NamedTuple):
    """tokens [R] i64, -1 if there is none; statuses [R] i32, values of kernels.cpu.sampling.SampleStatus."""

    tokens: Tensor
    statuses: Tensor


def row_options(options: Sequence[DrawOptions], vocab_size: int, device: torch.device) -> RowOptions:
    """Return the options of rows on a device."""

    def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    masks = None
    if any(row.token_mask is not None for row in options):
        masks = torch.full((len(options), -(-vocab_size // 32)), -1, dtype=torch.int32)
        for index, row in enumerate(options):
            if row.token_mask is not None:
                masks[index] = row.token_mask[: masks.shape[1]]
        masks = masks.to(device)
    signed = [(row.seed & (1 << 64) - 1) - (1 << 64 if row.seed >> 63 & 1 else 0) for row in options]
    return RowOptions(
        column([1.0 if row.is_greedy else row.inverse_temperature for row in options], torch.float32),
        column([int(row.is_greedy) for row in options], torch.int32),
        column([row.top_k if 0 < row.top_k < vocab_size else 0 for row in options], torch.int32),
        column([row.top_p for row in options], torch.float64),
        column([row.log_min_p for row in options], torch.float32),
        column(signed, torch.int64),
        column([row.position for row in options], torch.int64),
        masks,
    )


def sample_rows(logits: Tensor, options: RowOptions, has_cuts: bool = True, stream: int = STREAM_TARGET) -> Choices:
    """Return the token of every row; see kernels.cpu.sampling.sample_rows, which returns the same for the same logits.

    logits    [R, V] float, with contiguous rows; not changed
    has_cuts  False: no sampled row has top_k, top_p or min_p, and two of four launches are omitted
    stream    of the noise
    """
    choices = Choices(
        torch.empty(len(logits), dtype=torch.int64, device=logits.device),
        torch.empty(len(logits), dtype=torch.int32, device=logits.device),
    )
    run_all(sample_launches(choices, logits, options, has_cuts, stream))
    return choices


def sample_launches(
    choices: Choices, logits: Tensor, options: RowOptions, has_cuts: bool = True, stream: int = STREAM_TARGET
) -> list[Launch]:
    """Return the launches of `sample_rows`, which write `choices`."""
    _check(choices, logits, options)
    num_rows, vocab_size = logits.shape
    num_blocks = ceil_divide(vocab_size, _BLOCK)

    def per_block(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, num_blocks, *shape, dtype=dtype, device=logits.device)

    rows = {
        "logits_ptr": logits,
        "masks_ptr": options.token_masks,
        "inverses_ptr": options.inverse_temperatures,
        "greedy_ptr": options.is_greedy,
        "top_ks_ptr": options.top_ks,
        "top_ps_ptr": options.top_ps,
        "log_min_ps_ptr": options.log_min_ps,
        "vocab_size": vocab_size,
        "logits_stride": logits.stride(0),
        "masks_stride": 0 if options.token_masks is None else options.token_masks.stride(0),
        "num_blocks": num_blocks,
    }
    keys = {"seeds_ptr": options.seeds, "positions_ptr": options.positions, "noise_stream": stream}
    peaks = {"peaks_ptr": per_block(torch.float32)}
    found = {
        "nans_ptr": per_block(torch.int32),
        "scores_ptr": per_block(torch.float32),
        "tokens_ptr": per_block(torch.int32),
    }
    blocks = {"BLOCKS": power_of_two(num_blocks)}
    grid = (num_rows, num_blocks)
    scan = Launch(scan_rows, grid, rows | keys | peaks | found, {"BLOCK": _BLOCK, "HAS_CUTS": has_cuts}, 4, 1, is_fused=False)
    lists: dict[str, Tensor | None] = dict.fromkeys(("masses_ptr", "list_values_ptr", "list_tokens_ptr", "lengths_ptr"))
    between: list[Launch] = []
    if has_cuts:
        lists, between = _list_launches(rows | peaks, grid)
    results = {"out_ptr": choices.tokens, "statuses_ptr": choices.statuses}
    constants = {**blocks, "NUM_DEPTHS": NUM_DEPTHS.value, "HAS_CUTS": has_cuts}
    arguments = rows | keys | peaks | found | lists | results
    num_warps = 32 if has_cuts else 1  # fewer would spill
    return [scan, *between, Launch(choose_rows, (num_rows,), arguments, constants, num_warps, 1, is_fused=False)]


def _list_launches(
    rows: dict[str, Tensor | int | float | None], grid: tuple[int, int]
) -> tuple[dict[str, Tensor | None], list[Launch]]:
    """Return the candidate lists, and the launches that write them."""
    num_rows, num_blocks = grid
    device = _device_of(rows)
    counts = torch.empty(num_rows, num_blocks, NUM_DEPTHS.value, dtype=torch.int32, device=device)
    lists: dict[str, Tensor | None] = {
        "masses_ptr": torch.empty(counts.shape, dtype=torch.int64, device=device),
        "list_values_ptr": torch.empty(num_rows, LIST_SIZE.value, dtype=torch.float32, device=device),
        "list_tokens_ptr": torch.empty(num_rows, LIST_SIZE.value, dtype=torch.int32, device=device),
        "lengths_ptr": torch.empty(num_rows, dtype=torch.int32, device=device),
    }
    arguments = {**rows, "counts_ptr": counts}
    constants = {"BLOCK": _BLOCK, "BLOCKS": power_of_two(num_blocks)}
    weigh = Launch(weigh_rows, grid, {**arguments, "masses_ptr": lists["masses_ptr"]}, constants, 16, 1, is_fused=False)
    return lists, [weigh, Launch(collect_rows, grid, {**arguments, **lists}, constants, 8, 1, is_fused=False)]


def _device_of(rows: dict[str, Tensor | int | float | None]) -> torch.device:
    logits = rows["logits_ptr"]
    if not isinstance(logits, Tensor):
        raise InvariantError("the sampler's rows have logits")
    return logits.device


def _check(choices: Choices, logits: Tensor, options: RowOptions) -> None:
    check_tensor("logits", logits, (None, None), *FLOATS)
    num_rows, vocab_size = logits.shape
    if vocab_size < 1:
        raise InvariantError("a row of logits has at least one token")
    columns = [
        ("tokens", choices.tokens, torch.int64),
        ("statuses", choices.statuses, torch.int32),
        ("inverse_temperatures", options.inverse_temperatures, torch.float32),
        ("is_greedy", options.is_greedy, torch.int32),
        ("top_ks", options.top_ks, torch.int32),
        ("top_ps", options.top_ps, torch.float64),
        ("log_min_ps", options.log_min_ps, torch.float32),
        ("seeds", options.seeds, torch.int64),
        ("positions", options.positions, torch.int64),
    ]
    for name, tensor, dtype in columns:
        check_contiguous(name, tensor, (num_rows,), dtype)
    if options.token_masks is not None:
        check_contiguous("token_masks", options.token_masks, (num_rows, -(-vocab_size // 32)), torch.int32)
