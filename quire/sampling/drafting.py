"""Sample draft tokens with the noise that the verifier will use, so that a similar model usually samples the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.cpu.sampling import DrawOptions, SampleStatus, sample_rows, takes_logits
from quire.kernels.native import load_native
from quire.kernels.reference.noise import gumbel_noise
from quire.sampling.row_state import SamplingRow
from quire.sampling.truncation import has_truncation, truncate


def draw_drafts(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> list[int]:
    """Return a token per row, sampled as at that position but without the processors, which depend on the tokens before it.

    logits     [R, V] any float type
    positions  [R] of the tokens to sample, not before those of the rows
    """
    return DraftDraws(rows, positions).draw(logits)


class DraftDraws:
    """Samples the drafts of consecutive positions, as draw_drafts does.

    positions  [R] of the first tokens to sample
    """

    def __init__(self, rows: Sequence[SamplingRow], positions: Sequence[int]) -> None:
        self._rows, self._positions = rows, list(positions)
        self._options = [_options(row, position) for row, position in zip(rows, positions, strict=True)]
        self._is_drawn = not all(row.is_greedy for row in rows)  # otherwise no noise is used, and no position is read

    def draw(self, logits: Tensor) -> list[int]:
        """Return a token per row, and advance to the next position."""
        native = load_native() if takes_logits(logits) else None
        if native is None:
            found = _draw_in_torch(logits, self._rows, self._positions)
        else:
            found = _tokens(sample_rows(native, logits, range(len(self._rows)), self._options))
        self._positions = [position + 1 for position in self._positions]
        if self._is_drawn:
            pairs = zip(self._options, self._positions, strict=True)
            self._options = [options._replace(position=position) for options, position in pairs]
        return found


def _tokens(found: Sequence[tuple[int, SampleStatus]]) -> list[int]:
    # A failed draft model does no harm: any token is valid as a draft.
    return [token_id if status is SampleStatus.FINE else 0 for token_id, status in found]


def _options(row: SamplingRow, position: int) -> DrawOptions:
    params = row.params
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    return DrawOptions(row.inverse_temperature, row.is_greedy, params.top_k, params.top_p, log_min_p, row.seed, position)


def _draw_in_torch(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> list[int]:
    values = logits.float() * torch.tensor([[row.inverse_temperature] for row in rows])
    is_drawn = torch.tensor([[not row.is_greedy] for row in rows])
    scores = values
    if bool(is_drawn.any()):
        scores = values + gumbel_noise([row.seed for row in rows], positions, logits.shape[1]) * is_drawn
    # The native sampler knows no typical_p either.
    params = [replace(row.params, typical_p=1.0) if row.params.typical_p < 1 else row.params for row in rows]
    is_cut = [not row.is_greedy and has_truncation(own, logits.shape[1]) for row, own in zip(rows, params, strict=True)]
    cut = [index for index, peak in enumerate(values.amax(1).tolist()) if is_cut[index] and math.isfinite(peak)]
    if cut:
        kept = torch.full_like(scores, -math.inf)
        for part in truncate(values, cut, [params[index] for index in cut]):
            kept[part.row_ids, part.token_ids] = scores[part.row_ids, part.token_ids]
        scores[cut] = kept[cut]
    return scores.argmax(1).tolist()
