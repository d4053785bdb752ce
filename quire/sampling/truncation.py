"""Truncations: which tokens may be sampled, by top_k, typical_p, top_p and min_p, in this order.

Each cut is a threshold on the remaining logits (typical_p: on the surprise), and tokens equal to the threshold are kept, so the
result does not depend on how a sort orders equal values. A cut uses the renormalised probabilities of what the previous cuts
kept. The masses of top_p are integers (kernels/reference/mass.py), those of typical_p are summed in f64, row by row: no cut
depends on the rest of the batch.

  top_k      logit >= the k-th best logit
  typical_p  the tokens whose surprise -ln p is nearest to the entropy, until they hold the mass typical_p
  top_p      the best tokens until they hold the mass top_p: those with less than ceil(top_p * total) units before them,
             the product in f64
  min_p      p >= min_p * the best remaining p

Most rows keep only some of their best few hundred tokens. These heads of rows are cut together, as one [R, C] matrix; a row
whose candidates may extend beyond its head (a flat distribution, a tie at the cut, a huge top_k) is cut separately. The native
sampler (kernels/cpu/csrc/sampler.inl) keeps the same tokens; it has no typical_p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.sampling_params import SamplingParams
from quire.kernels.reference.mass import fixed_point_exp

_HEAD_TOKENS = 256
_MAX_HEAD_TOKENS = 1025
_BINS_PER_NAT, _NUM_BINS = 8, 256
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that may be sampled, for several rows, ragged.

    row_ids    [N] int64 row of each candidate
    token_ids  [N] int64
    values     [N] f32 logit after processors and temperature, finite
    """

    row_ids: Tensor
    token_ids: Tensor
    values: Tensor


def has_truncation(params: SamplingParams, vocab_size: int) -> bool:
    """Return whether any truncation is set that can exclude a token."""
    return 0 < params.top_k < vocab_size or params.typical_p < 1 or params.top_p < 1 or params.min_p > 0


def truncate(values: Tensor, row_ids: Sequence[int], params: Sequence[SamplingParams]) -> list[Candidates]:
    """Return the candidates of some rows; their order, between and within rows, is not defined.

    values   [R, V] f32 logits after processors and temperature; the largest of every row in row_ids is finite
    row_ids  rows to cut, and their ids in the result
    params   one per element of row_ids
    """
    vocab_size = values.shape[1]
    head = [index for index, p in enumerate(params) if _fits_head(p, vocab_size)]
    alone = [index for index, p in enumerate(params) if not _fits_head(p, vocab_size)]
    parts: list[Candidates] = []
    if head:
        found, open_ended = _cut_heads(values, [row_ids[i] for i in head], [params[i] for i in head])
        parts.append(found)
        alone += [head[i] for i in open_ended]
    parts += [_cut_alone(values[row_ids[i]], row_ids[i], params[i]) for i in alone]
    return parts


def _fits_head(params: SamplingParams, vocab_size: int) -> bool:
    if 0 < params.top_k < vocab_size:
        return params.top_k < _MAX_HEAD_TOKENS
    return params.typical_p >= 1 or vocab_size <= _HEAD_TOKENS


def _cut_heads(values: Tensor, row_ids: list[int], params: list[SamplingParams]) -> tuple[Candidates, list[int]]:
    """Cut the heads of rows together; also return the indices of rows whose candidates may extend beyond the head."""
    vocab_size, device = values.shape[1], values.device
    limits = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    width = min(max(limit + 1 if limit < vocab_size else _HEAD_TOKENS for limit in limits), vocab_size)
    selected = torch.tensor(row_ids, device=device)
    whole_batch = row_ids == list(range(values.shape[0]))
    head, ids = (values if whole_batch else values[selected]).topk(width, dim=1)

    last = torch.tensor([min(limit, width) - 1 for limit in limits], device=device)[:, None]
    keep = (head >= head.gather(1, last)) & (head > _NEVER)
    is_limited = torch.tensor([limit < vocab_size for limit in limits], device=device)
    is_whole = torch.tensor([p.typical_p < 1 for p in params], device=device) | is_limited
    is_open = keep[:, -1] & is_limited  # a tie at the top_k cut
    mass: list[int | None] = [None] * len(params)
    for index, row_id in enumerate(row_ids):
        if limits[index] > width and params[index].top_p < 1:
            mass[index] = int(fixed_point_exp(values[row_id] - head[index, 0]).sum())
    keep = _cut(head, keep, params, mass)
    is_open |= keep[:, -1] & ~is_whole
    if width == vocab_size:
        is_open.zero_()
    keep &= ~is_open[:, None]
    where = keep.nonzero(as_tuple=True)
    return Candidates(selected[where[0]], ids[where], head[where]), is_open.nonzero()[:, 0].tolist()


def _cut_alone(values: Tensor, row_id: int, params: SamplingParams) -> Candidates:
    """Cut one row of any width; values [V]."""
    peak, mass = values.max(), None
    if 0 < params.top_k < len(values):
        kth = values.topk(params.top_k, sorted=False).values.min()
        kept = (values >= kth) & (values > _NEVER)
    elif params.typical_p < 1:
        kept = values > _NEVER
    elif params.top_p < 1:
        kept, mass = _nucleus_superset(values, peak, params.top_p)
    else:
        kept = (values >= peak + _log(params.min_p)) & (values > _NEVER)
    token_ids = kept.nonzero()[:, 0]
    head, order = values[token_ids].sort(descending=True)
    keep = _cut(head[None], torch.ones_like(head[None], dtype=torch.bool), [params], [mass])[0]
    token_ids = token_ids[order][keep]
    return Candidates(torch.full_like(token_ids, row_id), token_ids, head[keep])


def _nucleus_superset(values: Tensor, peak: Tensor, top_p: float) -> tuple[Tensor, int]:
    """Return a mask of tokens that contains the nucleus and little more, and the mass of the row relative to its best token.

    Avoids sorting the vocabulary: tokens are binned by their distance from the best; the bins up to the one in which the mass
    reaches top_p contain the nucleus.
    """
    depth = values - peak
    bins = (depth * -_BINS_PER_NAT).clamp_(max=_NUM_BINS - 1).to(torch.int64)
    mass = bins.new_zeros(_NUM_BINS).scatter_add_(0, bins, fixed_point_exp(depth)).cumsum(0)
    total = int(mass[-1])
    crossing = (mass < _nucleus_target(top_p, total)).sum()
    return (bins <= crossing) & (values > _NEVER), total


def _nucleus_target(top_p: float, total: int) -> int:
    """Return the mass that the nucleus must reach, in the units of `total`: at least one and at most all of it."""
    return max(1, min(total, math.ceil(top_p * float(total))))


def _cut(head: Tensor, keep: Tensor, params: list[SamplingParams], mass: list[int | None]) -> Tensor:
    """Return the mask of what typical_p, top_p and min_p keep of `keep`.

    head  [R, C] f32, descending along each row
    keep  [R, C] bool, at least one in each row
    mass  [R] units of mass of the whole row if the head is only a part of it, else None
    """
    device = head.device
    if any(p.typical_p < 1 for p in params):
        keep = _cut_typical(head, keep, torch.tensor([p.typical_p for p in params], dtype=torch.float64, device=device))
    if any(p.top_p < 1 for p in params):
        keep = _cut_nucleus(head, keep, [p.top_p for p in params], mass)
    if any(p.min_p > 0 for p in params):
        best = head.masked_fill(~keep, _NEVER).amax(1, keepdim=True)
        floor = torch.tensor([[_log(p.min_p)] for p in params], dtype=torch.float32, device=device)
        keep = keep & (head >= best + floor)
    return keep


def _cut_typical(head: Tensor, keep: Tensor, typical_p: Tensor) -> Tensor:
    logprobs = head.to(torch.float64).masked_fill(~keep, _NEVER).log_softmax(1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs.masked_fill(~keep, 0.0)).sum(1, keepdim=True)
    distance = (-logprobs - entropy).abs()  # infinite for tokens that are not kept
    ordered, order = distance.sort(dim=1)
    num_below = (probs.gather(1, order).cumsum(1) < typical_p[:, None]).sum(1, keepdim=True)
    limit = ordered.gather(1, num_below.clamp_(max=head.shape[1] - 1))
    return keep & ((distance <= limit) | (typical_p[:, None] >= 1))


def _cut_nucleus(head: Tensor, keep: Tensor, top_p: list[float], mass: list[int | None]) -> Tensor:
    best = head.masked_fill(~keep, _NEVER).amax(1, keepdim=True)
    units = fixed_point_exp(head - best).masked_fill_(~keep, 0)
    cumulated = units.cumsum(1)
    totals = [total if known is None else known for total, known in zip(cumulated[:, -1].tolist(), mass, strict=True)]
    targets = [_nucleus_target(share, total) for share, total in zip(top_p, totals, strict=True)]
    is_off = torch.tensor([share >= 1 for share in top_p], device=head.device)[:, None]
    inside = keep & ((cumulated - units < torch.tensor(targets, device=head.device)[:, None]) | is_off)
    lowest = head.masked_fill(~inside, float("inf")).amin(1, keepdim=True)
    return keep & (head >= lowest)


def _log(share: float) -> float:
    return math.log(share) if share > 0 else _NEVER
