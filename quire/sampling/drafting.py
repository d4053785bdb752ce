"""Draw draft tokens, with the noise that the verifier will use: a close model then mostly draws what it will."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.cpu.sampling import DrawOptions, SampleStatus, sample_rows, takes_logits
from quire.kernels.native import load_native
from quire.kernels.reference.noise import gumbel_noise
from quire.sampling.row_state import SamplingRow


def draw_drafts(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> list[int]:
    """Return a token per row, drawn as for that position but without the processors, which depend on the tokens before it.

    logits     [R, V] any float type
    positions  [R] of the tokens to draw, at or behind those of the rows
    """
    native = load_native() if takes_logits(logits) else None
    if native is None:
        return _draw_in_torch(logits, rows, positions)
    options = [_options(row, position) for row, position in zip(rows, positions, strict=True)]
    found = sample_rows(native, logits, range(len(rows)), options)
    # A draft model may fail without harm: any token does as a draft.
    return [token_id if status is SampleStatus.FINE else 0 for token_id, status in found]


def _options(row: SamplingRow, position: int) -> DrawOptions:
    params = row.params
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    return DrawOptions(row.inverse_temperature, row.is_greedy, params.top_k, params.top_p, log_min_p, row.seed, position)


def _draw_in_torch(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> list[int]:
    scores = logits.float() * torch.tensor([[row.inverse_temperature] for row in rows])
    is_drawn = torch.tensor([[not row.is_greedy] for row in rows])
    if bool(is_drawn.any()):
        scores = scores + gumbel_noise([row.seed for row in rows], positions, logits.shape[1]) * is_drawn
    return scores.argmax(1).tolist()
