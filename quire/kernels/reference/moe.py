"""Mixture-of-experts feed-forward: route each token to its top experts, run each expert on its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import MoeSpec
from quire.kernels.reference.activation import ACTIVATIONS, apply_gate

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: F.softplus(logits).sqrt(),
}


@dataclass(frozen=True, slots=True)
class ExpertExtras:
    """What only some mixtures have.

    router, gate_up, down  biases [E], [E, 2 * I], [E, N]; None: none
    correction    [E] f32, added to the scores for selection only
    scale         [E], multiplies the weights of the experts in the end
    router_input  [T, N], what the router reads; None: what the experts read
    add           called as add(y, x, rows, expert, module), adds to the outputs y [R, O] of a module ("gate", "up", "down")
                  of an expert for its inputs x [R, I] of the tokens `rows` [R]; None: nothing is added
    chosen        [T, K], the experts of each row; None: the best ones
    add_to_router  the same of the router, called as add_to_router(logits [T, E], x [T, N])
    """

    router: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    correction: Tensor | None = None
    scale: Tensor | None = None
    router_input: Tensor | None = None
    add: Callable[[Tensor, Tensor, Tensor, int, str], object] | None = None
    add_to_router: Callable[[Tensor, Tensor], Tensor] | None = None
    chosen: Tensor | None = None


def mixture_of_experts(
    x: Tensor, spec: MoeSpec, router: Tensor, gate_up: Tensor, down: Tensor, extra: ExpertExtras | None = None
) -> Tensor:
    """Apply a mixture of experts to each row, without the shared expert.

    x        [T, N]
    router   [E, N]
    gate_up  [E, 2 * I, N], the gate rows first; [E, I, N] where experts have no gate
    down     [E, N, I]
    Returns  [T, N] in x's dtype; rows are independent
    """
    extra = extra or ExpertExtras()
    read = x if extra.router_input is None else extra.router_input
    weights, chosen = route(router_logits(read, spec, router, extra), spec, extra.correction, extra.chosen)
    if extra.scale is not None:
        weights = weights * extra.scale.float()[chosen]
    return run_experts(x, spec, (weights, chosen), gate_up, down, extra)


def router_logits(x: Tensor, spec: MoeSpec, router: Tensor, extra: ExpertExtras) -> Tensor:
    """Return the router's logits [T, E] of rows x [T, N]."""
    bias = extra.router
    if spec.is_router_f32:
        logits = F.linear(x.float(), router.float(), None if bias is None else bias.float())
    else:
        logits = F.linear(x, router, bias)
    return logits if extra.add_to_router is None else extra.add_to_router(logits, x)


def run_experts(
    x: Tensor, spec: MoeSpec, routed: tuple[Tensor, Tensor], gate_up: Tensor, down: Tensor, extra: ExpertExtras
) -> Tensor:
    """Return the weighted sum of the experts' outputs for each row of x [T, N].

    routed  weights and indices [T, K], as `route` returns them
    """
    weights, chosen = routed
    if not spec.is_weight_f32:
        weights = weights.to(x.dtype)
    out = torch.zeros_like(x, dtype=torch.float32 if spec.is_sum_f32 else None)
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        shares = weights[rows, slots, None]
        read = x[rows] * shares if spec.weighs_inputs else x[rows]
        inner = _linear(read, gate_up, extra.gate_up, expert)
        if extra.add is not None:
            names = ("gate", "up") if spec.expert.is_gated else ("up",)
            for name, part in zip(names, inner.chunk(len(names), -1), strict=True):
                extra.add(part, read, rows, expert, name)
        inner = (
            apply_gate(*inner.chunk(2, dim=-1), spec.expert)
            if spec.expert.is_gated
            else ACTIVATIONS[spec.expert.activation](inner)
        )
        y = _linear(inner, down, extra.down, expert)
        if extra.add is not None:
            extra.add(y, inner, rows, expert, "down")
        out.index_add_(0, rows, (y if spec.weighs_inputs else y * shares).to(out.dtype))
    return out.to(x.dtype)


def route(
    logits: Tensor, spec: MoeSpec, correction: Tensor | None = None, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights [T, K] f32 and indices [T, K] i64 of the experts of each row of a router's logits [T, E].

    given  the indices, where scores do not decide them
    """
    if spec.scoring == "sparse":
        weights, chosen = sparse_weights(logits, spec.top_k, spec.sparse_margin)
    else:
        read = logits.float() if spec.is_score_f32 else logits
        scores = read.softmax(-1) if spec.scoring == "softmax" else _SCORES[spec.scoring](read)
        wanted = scores if correction is None else scores + correction.float()
        if spec.groups is not None:
            grouped = wanted.unflatten(-1, (spec.groups.count, -1))
            best = grouped.topk(spec.groups.num_best, dim=-1).values.sum(-1).topk(spec.groups.num_chosen, dim=-1).indices
            is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter(1, best, False)
            wanted = grouped.masked_fill(is_out[..., None], -torch.inf).flatten(1)
        chosen = wanted.topk(spec.top_k, dim=-1).indices if given is None else given
        weights = scores.gather(1, chosen)
    if spec.is_renormalized:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total.clamp(min=spec.least_sum) if spec.least_sum > 0 else total)
    return (weights if spec.routed_scale == 1.0 else weights * spec.routed_scale).float(), chosen


def sparse_weights(logits: Tensor, top_k: int, margin: float) -> tuple[Tensor, Tensor]:
    """Return weights and indices [T, K] of SparseMixer at inference (https://arxiv.org/abs/2310.00811).

    Each of the top_k experts is the best remaining one. Its weight is its softmax probability among the remaining experts
    whose logit is at most `margin` * max(its logit, abs(the other's logit)) below it.
    """
    left, shares, found = logits, [], []
    for _ in range(top_k):
        best, index = left.max(-1, keepdim=True)
        factor = torch.maximum(logits.abs(), best)
        kept = left.masked_fill((best - logits) / factor > margin, -torch.inf)
        shares.append(kept.softmax(-1).gather(-1, index))
        found.append(index)
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(shares, -1).float(), torch.cat(found, -1)


def _linear(x: Tensor, weights: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    """Return the product with an expert's weight. The bias is added to the rounded product."""
    y = F.linear(x, weights[expert])
    return y if biases is None else y + biases[expert]
