"""Mixture of experts on the device: products of the experts in tiles of (token, expert) pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.errors import InvariantError, UnsupportedError
from quire.contracts.expert_options import float8_row_bytes, is_float8_step
from quire.contracts.model_spec import MoeSpec
from quire.kernels.reference.moe import route
from quire.kernels.triton.activation import ACTIVATION_KINDS
from quire.kernels.triton.device_traits import device_traits
from quire.kernels.triton.float8 import pack_rows_launch
from quire.kernels.triton.launching import ELEMENT_TYPES, FLOATS, Launch, check_contiguous, check_tensor, run_all
from quire.kernels.triton.moe_kernels import (
    count_pairs,
    multiply_experts,
    multiply_packed_experts,
    route_rows,
    sort_pairs,
    sum_pairs,
)
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight
from quire.kernels.triton.sizes import ceil_divide, power_of_two
from quire.kernels.triton.tiles import ExpertTile, expert_tile, large_expert_tile, swapped_expert_tile

_BLOCK = 1024


ExpertWeights = Tensor | DeviceQuantizedWeight
"""[E, O, K], or quantised, with the rows of all experts concatenated."""


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """gate_up [E, 2 * I], down [E, N]."""

    gate_up: Tensor
    down: Tensor


AddedProducts = Callable[[str, Tensor, int], Tensor]
"""("gate_up" or "down", x [P / n, K], the n pairs that share a row) -> what adapters add to each pair's product [P, O]."""


@dataclass(frozen=True, slots=True)
class ExpertExtras:
    """Parameters that not all mixtures, and not all steps, have.

    biases      of the experts, in x's dtype
    correction  [E] f32, added to the scores for selection
    scale       [E], multiplies the weights of the experts in the end
    adapters    experts of the pairs, i32 [P] -> what LoRA adapters add to their products
    change      returns other routes for all tokens; a negative expert leaves a pair out. None: they stay
    """

    biases: ExpertBiases | None = None
    correction: Tensor | None = None
    scale: Tensor | None = None
    adapters: Callable[[Tensor], AddedProducts] | None = None
    change: Callable[[Routes], Routes] | None = None


def mixture_of_experts(
    x: Tensor,
    logits: Tensor,
    spec: MoeSpec,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    is_in_order: bool = False,
    extra: ExpertExtras | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Apply a mixture of experts to each row, as kernels/reference/moe.py does, except that the sum is rounded once.

    A softmax over all experts is routed by a kernel, other scores by torch operations on the device.

    x        [T, N]
    logits   [T, E] of the router, float
    gate_up  [E, 2 * I, N], the gate rows first; of experts without a gate [E, I, N]
    down     [E, N, I]
    is_in_order  batch-invariant: sums have the same order for any number of rows
    gather   for experts sharded by outputs: returns the columns [P, I] of all ranks, given this rank's. `spec` has this
             rank's columns, `down` rows for this rank's outputs, over all columns
    Returns  [T, N] in x's dtype, or this rank's outputs; rows are independent

    Raises UnsupportedError for another activation, InvariantError for shapes that do not match.
    """
    width = down.shape[-2] if isinstance(down, Tensor) else down.shape[0] // spec.num_experts
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    call = _ExpertCall(out, x, logits, spec, gate_up, down, is_in_order, extra or ExpertExtras(), gather is not None)
    launches, hidden, close = _begin_launches(call)
    run_all(launches)
    run_all(close(hidden if gather is None else gather(hidden)))
    return out


class _ExpertCall(NamedTuple):
    """Arguments of `mixture_of_experts`; is_gathered: whether it has a gather."""

    out: Tensor
    x: Tensor
    logits: Tensor | None
    spec: MoeSpec
    gate_up: ExpertWeights
    down: ExpertWeights
    is_in_order: bool
    extra: ExpertExtras
    is_gathered: bool = False


class Routes(NamedTuple):
    """Of each (token, choice) pair: its weight, f32 [P], and its expert, i32 [P]; negative: it is not computed here."""

    shares: Tensor
    experts: Tensor


def route_pairs(logits: Tensor, spec: MoeSpec, dtype: torch.dtype, extra: ExpertExtras) -> Routes:
    """Return the routes of tokens, given the router's logits [T, E]; dtype: of the tokens."""
    routed = _routed(logits, spec, dtype, extra)
    if routed is None:
        num_pairs = len(logits) * spec.top_k
        shares = torch.empty(num_pairs, dtype=torch.float32, device=logits.device)
        routed = Routes(shares, torch.empty(num_pairs, dtype=torch.int32, device=logits.device))
        if num_pairs:
            _route_launch(logits, spec, *routed, dtype).run()
    return routed if extra.change is None else extra.change(routed)


def pack_inputs(x: Tensor, num_tokens: int, spec: MoeSpec, gate_up: ExpertWeights, down: ExpertWeights) -> Tensor:
    """Return rows [T, N] as products without adapters and without a fixed order of sums take them: for float8 experts in steps
    with many tokens u8, see pack_rows_launch; otherwise x itself.

    num_tokens  of the step, on all ranks together; spec: with the experts of all ranks
    """
    group_size = _float8_group(x, num_tokens, spec, gate_up, down)
    if group_size is None:
        return x
    launch, packed = pack_rows_launch(x, group_size)
    launch.run()
    return packed


def _float8_group(x: Tensor, num_tokens: int, spec: MoeSpec, gate_up: ExpertWeights, down: ExpertWeights) -> int | None:
    """Return how many columns of inputs share a scale; None: they are not quantised. Arguments are those of pack_inputs."""
    if not is_float8_step(spec, num_tokens) or x.dtype == torch.float32 or not device_traits().has_float8:
        return None
    if isinstance(gate_up, Tensor) or isinstance(down, Tensor):
        return None
    fits = all(each.codes.dtype == torch.float8_e4m3fn and each.shape[1] % 16 == 0 for each in (gate_up, down))
    return gate_up.group_size if fits else None


def multiply_pairs(
    x: Tensor,
    routes: Routes,
    spec: MoeSpec,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    is_in_order: bool = False,
    extra: ExpertExtras | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the weighted outputs of the pairs [P, N]; zeros where the expert is negative. Arguments are those of
    `mixture_of_experts`; spec: with as many experts as there are weights.

    x      [T, N], or u8: in the form of pack_inputs
    dtype  of the outputs; None: that of x
    """
    dtype, width = x.dtype if dtype is None else dtype, gate_up.shape[-1]
    out = torch.empty(len(x), width, dtype=dtype, device=x.device)
    parts = torch.zeros(len(routes.experts), width, dtype=dtype, device=x.device)
    if len(x) == 0:
        return parts
    call = _ExpertCall(out, x, None, spec, gate_up, down, is_in_order, extra or ExpertExtras())
    _check(call)
    _check_biases(out, spec, call.extra.biases)
    launches, hidden, close = _product_launches(call, routes)
    run_all(launches)
    run_all(close(hidden, parts))  # what adapters add to the last product reads `hidden` at once
    return parts


def add_pairs(parts: Tensor, top_k: int) -> Tensor:
    """Return the sums of the pairs of each token [T, N], in the order of its choices, rounded once; parts [T * top_k, N]."""
    out = torch.empty(len(parts) // top_k, parts.shape[1], dtype=parts.dtype, device=parts.device)
    if len(out):
        _sum_launch(parts, out, top_k).run()
    return out


class SortedPairs(NamedTuple):
    """pairs None: tile i is pair i, with expert tile_experts[i]."""

    pairs: Tensor | None
    tile_experts: Tensor
    num_tiles: int


def expert_launches(
    out: Tensor,
    x: Tensor,
    logits: Tensor,
    spec: MoeSpec,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    is_in_order: bool = False,
    extra: ExpertExtras | None = None,
) -> list[Launch]:
    """Return the launches of `mixture_of_experts`, which write `out`; their number depends only on shapes."""
    call = _ExpertCall(out, x, logits, spec, gate_up, down, is_in_order, extra or ExpertExtras())
    launches, hidden, close = _begin_launches(call)
    return [*launches, *close(hidden)]


def _begin_launches(call: _ExpertCall) -> tuple[list[Launch], Tensor, Callable[[Tensor], list[Launch]]]:
    """Return the launches up to the experts' hidden states, these [P, I], and a function of them that returns the others."""
    out, x, logits, spec = call.out, call.x, call.logits, call.spec
    _check(call)
    _check_biases(out, spec, call.extra.biases)
    assert logits is not None
    num_pairs = len(x) * spec.top_k
    routed, routes = _routed(logits, spec, x.dtype, call.extra), list[Launch]()
    if routed is None:
        shares = torch.empty(num_pairs, dtype=torch.float32, device=x.device)
        routed = Routes(shares, torch.empty(num_pairs, dtype=torch.int32, device=x.device))
        routes.append(_route_launch(logits, spec, *routed, x.dtype))
    change = call.extra.change
    if call.extra.adapters is not None or change is not None:  # they read the routes at once
        run_all(routes)
        routes = []
    routed = routed if change is None else change(routed)
    is_exact = call.is_in_order or call.extra.adapters is not None
    group_size = None if is_exact else _float8_group(x, len(x), spec, call.gate_up, call.down)
    if group_size is not None:
        launch, packed = pack_rows_launch(x, group_size)
        routes, call = [*routes, launch], call._replace(x=packed)
    launches, hidden, close = _product_launches(call, routed)

    def close_and_sum(whole: Tensor) -> list[Launch]:
        new = torch.empty if change is None else torch.zeros  # of pairs that are left out
        parts = new(num_pairs, out.shape[1], dtype=x.dtype, device=x.device)
        return [*close(whole, parts), _sum_launch(parts, out, spec.top_k)]

    return [*routes, *launches], hidden, close_and_sum


def _product_launches(
    call: _ExpertCall, routes: Routes
) -> tuple[list[Launch], Tensor, Callable[[Tensor, Tensor], list[Launch]]]:
    """Return the launches up to the experts' hidden states [P, I], these, and a function that returns the launches of the last
    product, into its second argument [P, N]. Hidden states are quantised if x is."""
    x, spec, biases = call.x, call.spec, call.extra.biases
    added = None if call.extra.adapters is None else call.extra.adapters(routes.experts.clamp(min=0))
    shares: Tensor | None = routes.shares
    num_pairs, inner = len(x) * spec.top_k, spec.expert.intermediate_size
    is_swapped = (
        call.is_in_order or isinstance(call.gate_up, DeviceQuantizedWeight) or isinstance(call.down, DeviceQuantizedWeight)
    )
    dtype, is_float8 = call.out.dtype, x.dtype == torch.uint8
    tile = (swapped_expert_tile if is_swapped else expert_tile)(num_pairs, spec.num_experts, dtype)
    if is_float8:  # as is compiled ahead, although a rank may have few pairs
        tile = large_expert_tile()
    sort, pairs = sort_launches(routes.experts, spec.num_experts, tile.pairs, is_always=is_float8)
    hidden = torch.empty(num_pairs, inner, dtype=dtype, device=x.device)
    num_slots = spec.top_k  # pairs that share a row of x
    if spec.weighs_inputs:
        x, shares, num_slots = x.repeat_interleave(num_slots, 0) * routes.shares.to(x.dtype)[:, None], None, 1
    clamp = spec.expert.clamp
    gate = {
        "ACTIVATION": ACTIVATION_KINDS[spec.expert.activation],
        "LIMIT": 0.0 if clamp is None else clamp.limit,
        "SLOPE": 1.0 if clamp is None else clamp.slope,
    }
    gate_up_bias, down_bias = (None, None) if biases is None else (biases.gate_up, biases.down)
    constants: dict[str, int | bool | float] = {"TOP_K": num_slots, "IS_GATED": spec.expert.is_gated, **gate}
    summed = None if added is None else added("gate_up", x, num_slots)
    first = _product(hidden, x, call.gate_up, _Epilogue(gate_up_bias, summed), pairs, tile, constants)

    def close(whole: Tensor, parts: Tensor) -> list[Launch]:
        own = {"TOP_K": 1, "IS_GATED": False, **gate, "ACTIVATION": -1}
        summed, launches = None if added is None else added("down", whole, 1), list[Launch]()
        if is_float8:
            assert isinstance(call.down, DeviceQuantizedWeight)
            launch, whole = pack_rows_launch(whole, call.down.group_size)
            launches.append(launch)
        return [*launches, _product(parts, whole, call.down, _Epilogue(down_bias, summed, shares), pairs, tile, own)]

    return [*sort, first], hidden, close


def _sum_launch(parts: Tensor, out: Tensor, top_k: int) -> Launch:
    sizes = {"WIDTH": out.shape[1], "TOP_K": top_k, "BLOCK": _BLOCK}
    grid = (len(out), ceil_divide(out.shape[1], _BLOCK))
    return Launch(sum_pairs, grid, {"y_ptr": parts, "out_ptr": out}, sizes, 4, 1)


def _route_launch(logits: Tensor, spec: MoeSpec, shares: Tensor, experts: Tensor, dtype: torch.dtype) -> Launch:
    return Launch(
        route_rows,
        (len(logits),),
        {"logits_ptr": logits, "weights_ptr": shares, "experts_ptr": experts, "logits_stride": logits.stride(0)},
        {
            "NUM_EXPERTS": spec.num_experts,
            "TOP_K": spec.top_k,
            "BLOCK_E": power_of_two(spec.num_experts),
            "IS_RENORMALIZED": spec.is_renormalized,
            "DTYPE": ELEMENT_TYPES[torch.float32 if spec.is_weight_f32 else dtype],
        },
        num_warps=1,
        num_stages=1,
    )


def _routed(logits: Tensor, spec: MoeSpec, dtype: torch.dtype, extra: ExpertExtras) -> Routes | None:
    """Return the weights and experts of all pairs, computed by torch; None if the kernel computes them."""
    if spec.is_plain_softmax and not spec.weighs_inputs and extra.scale is None and extra.correction is None:
        return None
    weights, experts = route(logits, spec, extra.correction)
    weights = weights if extra.scale is None else weights * extra.scale.float()[experts]
    weights = weights if spec.is_weight_f32 else weights.to(dtype)
    return Routes(weights.float().flatten().contiguous(), experts.to(torch.int32).flatten().contiguous())


def sort_launches(
    experts: Tensor, num_experts: int, tile_pairs: int, is_always: bool = False
) -> tuple[list[Launch], SortedPairs]:
    """Return the launches that sort the pairs by expert; none if there are so few pairs that most experts have at most one,
    unless is_always.

    experts     [P] i32; pairs with a negative one are in no tile that has an expert
    tile_pairs  pairs of a tile
    """
    num_pairs = len(experts)
    if num_pairs <= num_experts and not is_always:
        return [], SortedPairs(None, experts, num_pairs)
    num_tiles = min(num_pairs, num_pairs // tile_pairs + num_experts)

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=experts.device)

    counts, pairs, tile_experts = empty(num_experts), empty(num_tiles * tile_pairs), empty(num_tiles)
    count = Launch(
        count_pairs, (num_experts,), {"experts_ptr": experts, "counts_ptr": counts, "num_pairs": num_pairs}, {}, 4, 1
    )
    arguments = {
        "experts_ptr": experts,
        "counts_ptr": counts,
        "pairs_ptr": pairs,
        "tile_experts_ptr": tile_experts,
        "num_pairs": num_pairs,
        "num_tiles": num_tiles,
    }
    constants = {"NUM_EXPERTS": num_experts, "BLOCK_E": power_of_two(num_experts), "BLOCK_M": tile_pairs}
    return [count, Launch(sort_pairs, (num_experts,), arguments, constants, 4, 1)], SortedPairs(pairs, tile_experts, num_tiles)


class _Epilogue(NamedTuple):
    """What products get: a bias [E, O], rows [P, O] that are added, and shares [P] that they are multiplied by."""

    bias: Tensor | None = None
    added: Tensor | None = None
    shares: Tensor | None = None


def _product(
    out: Tensor,
    x: Tensor,
    weight: ExpertWeights,
    epilogue: _Epilogue,
    pairs: SortedPairs,
    tile: ExpertTile,
    constants: dict[str, int | bool | float],
) -> Launch:
    num_rows = out.shape[1]
    is_float8 = x.dtype == torch.uint8
    arguments = {
        "x_ptr": x.view(torch.float8_e4m3fn) if is_float8 else x,
        **_weight_arguments(weight),
        "bias_ptr": epilogue.bias,
        "added_ptr": epilogue.added,
        "shares_ptr": epilogue.shares,
        "out_ptr": out,
        "pairs_ptr": pairs.pairs,
        "tile_experts_ptr": pairs.tile_experts,
        "x_stride": x.stride(0),
    }
    tiles = {
        "NUM_ROWS": num_rows,
        "NUM_COLUMNS": weight.shape[-1],
        "BLOCK_M": tile.pairs,
        "BLOCK_N": tile.rows,
        **_weight_constants(weight, tile),
    }
    grid = (ceil_divide(num_rows, tile.rows), pairs.num_tiles)
    kernel = multiply_experts
    if isinstance(weight, DeviceQuantizedWeight):
        kernel, arguments["x_scales_ptr"] = multiply_packed_experts, x.view(torch.float32) if is_float8 else None
    return Launch(kernel, grid, arguments, {**constants, **tiles}, tile.num_warps, tile.num_stages)


def _weight_arguments(weight: ExpertWeights) -> dict[str, Tensor | None]:
    if isinstance(weight, Tensor):
        return {"weight_ptr": weight}
    return {"codes_ptr": weight.readable_codes, "scales_ptr": weight.scales, "offsets_ptr": weight.offsets}


def _weight_constants(weight: ExpertWeights, tile: ExpertTile) -> dict[str, object]:
    if isinstance(weight, Tensor):
        return {"BLOCK_K": tile.columns, "IS_SWAPPED": tile.is_swapped}
    return {
        "BLOCK_K": weight.run,
        "GROUP": weight.group_size,
        "SCALE_ROWS": weight.scale_rows,
        "IS_PACKED": weight.is_packed,
        "BASE": weight.base,
    }


def _check(call: _ExpertCall) -> None:
    spec, x, out = call.spec, call.x, call.out
    if spec.expert.activation not in ACTIVATION_KINDS:
        raise UnsupportedError(f"experts must have one of {', '.join(ACTIVATION_KINDS)}; got {spec.expert}")
    num_tokens, width = len(x), call.gate_up.shape[-1]
    if x.dtype == torch.uint8:
        assert isinstance(call.gate_up, DeviceQuantizedWeight)
        check_contiguous("x", x, (None, float8_row_bytes(width, call.gate_up.group_size)), torch.uint8)
    else:
        check_tensor("x", x, (None, width), *FLOATS)
    inner = spec.expert.intermediate_size
    num_outputs, num_inputs = width, inner
    if call.is_gathered:
        num_outputs = out.shape[1]
        num_inputs = call.down.shape[-1]
    check_contiguous("out", out, (num_tokens, num_outputs), *FLOATS)
    if call.logits is not None:
        check_tensor("logits", call.logits, (num_tokens, spec.num_experts), *FLOATS)
    shapes = (("gate_up", call.gate_up, (_up_rows(spec), width)), ("down", call.down, (num_outputs, num_inputs)))
    for name, weight, shape in shapes:
        if isinstance(weight, Tensor):
            check_contiguous(name, weight, (spec.num_experts, *shape), out.dtype)
            continue
        is_whole = shape[0] % weight.scale_rows == 0 and weight.columns is None
        if weight.shape != (spec.num_experts * shape[0], shape[1]) or not is_whole:
            raise InvariantError(
                f"{name} must be {spec.num_experts} times {shape}, each with scales of its own, got {weight.shape}"
            )


def _up_rows(spec: MoeSpec) -> int:
    return spec.expert.intermediate_size * (2 if spec.expert.is_gated else 1)


def _check_biases(out: Tensor, spec: MoeSpec, biases: ExpertBiases | None) -> None:
    if (biases is not None) != spec.expert.has_bias:
        raise InvariantError(f"biases are only given for experts that have them, got {biases} for {spec.expert}")
    if biases is not None:
        check_contiguous("bias of gate_up", biases.gate_up, (spec.num_experts, _up_rows(spec)), out.dtype)
        check_contiguous("bias of down", biases.down, (spec.num_experts, out.shape[1]), out.dtype)
