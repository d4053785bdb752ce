"""The sampler: from the logits of a step to one token per row.

A row's token is argmax(logit / temperature + Gumbel noise) over the candidates that its processors and truncations keep, ties
to the lowest id; without noise if greedy. This samples from the softmax of the candidates. The noise is keyed by (seed of the
row, position, token id), so the token depends only on the row's own logits and state.

On a CPU the native kernel handles every row whose truncations it supports, all but typical_p; the rest, and every row without
the extension, is computed in torch. Both return the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.outputs import NOTHING_FITS, NOTHING_LEFT
from quire.contracts.step import TokenLogprobs
from quire.kernels.cpu.sampling import DrawOptions, SampleStatus, sample_rows, takes_logits
from quire.kernels.native import load_native
from quire.kernels.reference.noise import MAX_GUMBEL, MIN_GUMBEL, gumbel_noise, gumbel_noise_flat, key_columns
from quire.sampling.logprobs import allowed_logprobs, token_logprobs
from quire.sampling.processors import apply_token_masks, process_logits
from quire.sampling.row_state import SamplingRow
from quire.sampling.truncation import Candidates, has_truncation, truncate

# Logits per pass; limits the f32 copy of the logits of rows that are not plainly greedy to 32 MB.
_PASS_ELEMENTS = 1 << 23

# Noise for single tokens costs about four times as much per token as for the whole vocabulary (philox returns four).
_SPARSE_SHARE = 0.25

_HOLDS_NAN = "the model's logits hold NaN"
_HOLDS_INFINITY = "the model's logits hold +inf"
_ALL_NEVER = "the model's logits are all -inf: no token can follow"
_TOO_LARGE = "the logits exceed the range of f32 after logit_bias, penalties and temperature"
_RAW_ERRORS = {
    SampleStatus.FINE: None,
    SampleStatus.NAN: _HOLDS_NAN,
    SampleStatus.INFINITE: _HOLDS_INFINITY,
    SampleStatus.NOTHING: _ALL_NEVER,
    SampleStatus.OVERFLOW: _TOO_LARGE,
    SampleStatus.UNDERFLOW: NOTHING_LEFT,
}
# Errors for logits that were valid before the processors changed them, and for those of a constrained output.
_EDITED_ERRORS = _RAW_ERRORS | {SampleStatus.INFINITE: _TOO_LARGE, SampleStatus.NOTHING: NOTHING_LEFT}
_MASKED_ERRORS = {SampleStatus.NOTHING: NOTHING_FITS, SampleStatus.UNDERFLOW: NOTHING_FITS}


class Sampled(NamedTuple):
    """The result of the sampler for one row: a token, with log probabilities if requested, or an error, never both."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


Draw = Callable[[Tensor, Sequence[int], Sequence[DrawOptions]], list[tuple[int, SampleStatus]]]
"""Samples the token of some rows of logits [R, V], as kernels.cpu.sampling.sample_rows does."""


def sample(logits: Tensor, rows: Sequence[SamplingRow], draw: Draw | None = None) -> list[Sampled]:
    """Return the next token of every row. Changes neither the logits nor the rows: the owner appends the tokens.

    logits   [R, V] any float type; V is the vocab_size of every row
    rows     [R]
    draw     samples from logits of this dtype, on their device; None: the native kernels, if they can, or torch
    Returns  [R]; a row whose logits contain NaN or +inf, or that has no candidate left, gets an error with the reason
    """
    if logits.ndim != 2 or logits.shape[0] != len(rows) or any(row.vocab_size != logits.shape[1] for row in rows):
        raise InvariantError(f"logits of shape {tuple(logits.shape)} do not fit {len(rows)} rows and their vocabulary")
    found: list[Sampled] = [Sampled(None)] * len(rows)
    takes_raw = draw is not None or takes_logits(logits)
    native = load_native() if draw is None and logits.device.type == "cpu" else None
    if native is not None:
        draw = partial(sample_rows, native)
    if draw is None:
        _sample_in_torch(logits, rows, list(range(len(rows))), found)
    else:
        fitting = [index for index, row in enumerate(rows) if row.is_greedy or row.params.typical_p >= 1]
        _sample_by(draw, takes_raw, logits, rows, fitting, found)
        if len(fitting) < len(rows):
            _sample_in_torch(logits, rows, sorted(set(range(len(rows))) - set(fitting)), found)
    _add_logprobs(found, logits, rows)
    return found


def sample_ahead(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> list[int] | None:
    """Return what `sample` would return at later positions, if that does not depend on the tokens before; else None.

    logits     [R, V], see `sample`
    rows       [R] the same row may belong to several logits
    positions  [R] of the tokens
    """
    native = load_native() if takes_logits(logits) else None
    if native is None or any(not _is_plain(row) for row in rows):
        return None
    options = [draw_options(row)._replace(position=position) for row, position in zip(rows, positions, strict=True)]
    found = sample_rows(native, logits, range(len(rows)), options)
    fine = SampleStatus.FINE
    return [token_id for token_id, _ in found] if all(status is fine for _, status in found) else None


def _is_plain(row: SamplingRow) -> bool:
    is_drawn_natively = row.is_greedy or row.params.typical_p >= 1
    return is_drawn_natively and not row.edits_logits and row.matcher is None and not row.needs_logprob


def error_of_status(status: SampleStatus, is_edited: bool = False, is_masked: bool = False) -> str | None:
    """Return why a row of logits got no token; None if it got one.

    is_edited  logits processors have changed the logits: which of them were not finite before is not known
    is_masked  the row had a token mask
    """
    errors = _EDITED_ERRORS if is_edited else _RAW_ERRORS
    return _MASKED_ERRORS.get(status, errors[status]) if is_masked else errors[status]


def _sample_by(
    draw: Draw, takes_raw: bool, logits: Tensor, rows: Sequence[SamplingRow], indices: list[int], found: list[Sampled]
) -> None:
    """Set the results of the rows in `indices`; takes_raw: `draw` accepts these logits as they are."""
    vocab_size = logits.shape[1]
    if takes_raw:
        plain = [index for index in indices if not rows[index].edits_logits]
        tokens = draw(logits, plain, [draw_options(rows[index]) for index in plain])
        fine = SampleStatus.FINE
        for index, (token_id, status) in zip(plain, tokens, strict=True):
            error = None if status is fine else _error_of(status, rows[index], _RAW_ERRORS)
            found[index] = Sampled(token_id) if error is None else Sampled(None, error=error)
        if len(plain) == len(indices):
            return
        indices = [index for index in indices if rows[index].edits_logits]
    for part in _passes(indices, vocab_size):
        part_rows, part_logits = [rows[index] for index in part], _copy_rows(logits, part)
        raw_errors = _logit_errors(part_logits.amax(1))
        process_logits(part_logits, part_rows)
        tokens = draw(part_logits, range(len(part)), [draw_options(row) for row in part_rows])
        edited = [_error_of(status, row, _EDITED_ERRORS) for row, (_, status) in zip(part_rows, tokens, strict=True)]
        errors = [raw or error for raw, error in zip(raw_errors, edited, strict=True)]
        _place(found, part, [_sampled(token_id, error) for (token_id, _), error in zip(tokens, errors, strict=True)])


def _error_of(status: SampleStatus, row: SamplingRow, errors: Mapping[SampleStatus, str | None]) -> str | None:
    return errors[status] if row.token_mask is None else _MASKED_ERRORS.get(status, errors[status])


def draw_options(row: SamplingRow) -> DrawOptions:
    """Return what the kernels that draw tokens read of a row."""
    params = row.params
    return DrawOptions(
        row.inverse_temperature,
        row.is_greedy,
        params.top_k,
        params.top_p,
        row.log_min_p,
        row.seed,
        row.position,
        row.token_mask,
    )


def _sampled(token_id: int, error: str | None) -> Sampled:
    return Sampled(token_id) if error is None else Sampled(None, error=error)


def _sample_in_torch(logits: Tensor, rows: Sequence[SamplingRow], indices: list[int], found: list[Sampled]) -> None:
    """Set the results of the rows in `indices`."""
    plain = [index for index in indices if rows[index].is_greedy and not _is_edited(rows[index])]
    if plain:
        _place(found, plain, _take_best(logits if len(plain) == len(rows) else logits[plain]))
    others = [index for index in indices if not rows[index].is_greedy or _is_edited(rows[index])]
    for part in _passes(others, logits.shape[1]):
        _place(found, part, _sample_pass(_copy_rows(logits, part), [rows[index] for index in part]))


def _is_edited(row: SamplingRow) -> bool:
    return row.edits_logits or row.token_mask is not None


def _place(found: list[Sampled], indices: list[int], sampled: list[Sampled]) -> None:
    for index, one in zip(indices, sampled, strict=True):
        found[index] = one


def _passes(indices: list[int], vocab_size: int) -> list[list[int]]:
    num_rows = max(1, _PASS_ELEMENTS // max(vocab_size, 1))
    return [indices[first : first + num_rows] for first in range(0, len(indices), num_rows)]


def _copy_rows(logits: Tensor, indices: list[int]) -> Tensor:
    """Return a f32 copy of some rows: row by row, which is several times faster than indexing."""
    copy = torch.empty(len(indices), logits.shape[1], dtype=torch.float32, device=logits.device)
    for row, index in enumerate(indices):
        copy[row].copy_(logits[index])
    return copy


def _take_best(logits: Tensor) -> list[Sampled]:
    """Return the best token of every row. torch.argmax returns the first of equal values (documented), and NaN before all."""
    best = logits.argmax(1)
    peaks = logits.gather(1, best[:, None])[:, 0]
    return [_sampled(token_id, error) for token_id, error in zip(best.tolist(), _logit_errors(peaks), strict=True)]


def _logit_errors(peaks: Tensor) -> list[str | None]:
    """Return the errors of rows of logits, given the largest logit of each (NaN if a row contains one)."""
    if bool(torch.isfinite(peaks).all()):
        return [None] * len(peaks)
    errors: list[str | None] = []
    for peak in peaks.tolist():
        if peak != peak:
            errors.append(_HOLDS_NAN)
        elif peak == float("inf"):
            errors.append(_HOLDS_INFINITY)
        else:
            errors.append(_ALL_NEVER if peak == float("-inf") else None)
    return errors


def _sample_pass(logits: Tensor, rows: list[SamplingRow]) -> list[Sampled]:
    """Sample rows that need a copy of their logits: `logits` [R, V] f32 is overwritten."""
    errors = _logit_errors(logits.amax(1))
    apply_token_masks(logits, rows)
    process_logits(logits, rows)
    factors = [row.inverse_temperature for row in rows]
    if any(factor != 1.0 for factor in factors):
        logits.mul_(torch.tensor(factors, dtype=torch.float32, device=logits.device)[:, None])
    peaks = logits.amax(1)
    for index, peak in enumerate(peaks.tolist()):
        if errors[index] is None and peak == float("-inf"):
            errors[index] = NOTHING_LEFT if rows[index].token_mask is None else NOTHING_FITS
        elif errors[index] is None and peak == float("inf"):
            errors[index] = _TOO_LARGE
    usable = [index for index, error in enumerate(errors) if error is None]
    tokens: dict[int, int] = {}
    greedy = [index for index in usable if rows[index].is_greedy]
    if greedy:
        tokens.update(zip(greedy, logits[greedy].argmax(1).tolist(), strict=True))
    drawn = [index for index in usable if not rows[index].is_greedy]
    if drawn:
        tokens.update(_draw(logits, peaks, rows, drawn))
    return [Sampled(tokens.get(index), error=error) for index, error in enumerate(errors)]


def _draw(logits: Tensor, peaks: Tensor, rows: list[SamplingRow], drawn: list[int]) -> dict[int, int]:
    """Return the tokens of the rows in `drawn`, which have a finite peak."""
    is_cut = {index: has_truncation(rows[index].params, logits.shape[1]) for index in drawn}
    cut = [index for index in drawn if is_cut[index]]
    uncut = [index for index in drawn if not is_cut[index]]
    parts = truncate(logits, cut, [rows[index].params for index in cut]) if cut else []
    dense: list[int] = []
    if uncut:
        reachable, dense = _reachable(logits, peaks, uncut)
        parts.append(reachable)
    tokens = _draw_sparse(parts, rows, logits.shape[1])
    if dense:
        noise = gumbel_noise(
            [rows[index].seed for index in dense],
            [rows[index].position for index in dense],
            logits.shape[1],
            device=logits.device,
        )
        noise += logits if len(dense) == len(logits) else logits[dense]
        tokens.update(zip(dense, noise.argmax(1).tolist(), strict=True))
    return {index: tokens[index] for index in drawn}


def _reachable(logits: Tensor, peaks: Tensor, uncut: list[int]) -> tuple[Candidates, list[int]]:
    """Return the tokens that can win given the bounds of the noise, and the rows with too many of them to profit.

    The best token scores at least peak + MIN_GUMBEL and a token at most its logit + MAX_GUMBEL; the additional margin covers
    the rounding of both sums. Skipping the other tokens changes no result.
    """
    floor = peaks - (MAX_GUMBEL - MIN_GUMBEL + 0.1) - peaks.abs() * 2.0**-20
    mask = logits > floor[:, None]
    counts = mask.sum(1).tolist()
    dense = [index for index in uncut if counts[index] > _SPARSE_SHARE * logits.shape[1]]
    sparse = torch.zeros(len(counts), dtype=torch.bool)
    sparse[sorted(set(uncut) - set(dense))] = True
    mask &= sparse.to(mask.device)[:, None]
    row_ids, token_ids = mask.nonzero(as_tuple=True)
    return Candidates(row_ids, token_ids, logits[row_ids, token_ids]), dense


def _draw_sparse(parts: list[Candidates], rows: list[SamplingRow], vocab_size: int) -> dict[int, int]:
    """Return the winner among the candidates of each row that has any."""
    if not parts:
        return {}
    row_ids = torch.cat([part.row_ids for part in parts])
    token_ids = torch.cat([part.token_ids for part in parts])
    keys = key_columns([row.seed for row in rows], [row.position for row in rows], row_ids.device)
    scores = torch.cat([part.values for part in parts]) + gumbel_noise_flat(keys, row_ids, token_ids)
    best = scores.new_full((len(rows),), float("-inf")).scatter_reduce(0, row_ids, scores, "amax")
    won = scores == best[row_ids]
    winners = token_ids.new_full((len(rows),), vocab_size).scatter_reduce(0, row_ids[won], token_ids[won], "amin")
    return {index: token_id for index, token_id in enumerate(winners.tolist()) if token_id < vocab_size}


def with_logprobs(token_id: int, logits: Tensor, row: SamplingRow) -> Sampled:
    """Return a token that was not sampled, with the log probabilities that the row requests, from its logits [V]."""
    found = [Sampled(token_id)]
    _add_logprobs(found, logits[None], [row])
    return found[0]


def _add_logprobs(found: list[Sampled], logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Set the log probabilities from the raw logits; rows with the same number of alternatives are processed together."""
    by_num_top: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        token_id = found[index].token_id
        if not row.needs_logprob or token_id is None:
            continue
        if row.lists_allowed and row.token_mask is not None:
            logprobs = allowed_logprobs(logits[index], token_id, row.token_mask, row.params.logprobs or 0)
            found[index] = Sampled(token_id, logprobs)
        else:
            by_num_top.setdefault(row.params.logprobs or 0, []).append(index)
    for num_top, indices in by_num_top.items():
        for part in _passes(indices, logits.shape[1]):
            token_ids = [token_id for index in part if (token_id := found[index].token_id) is not None]
            part_logits = logits if len(part) == len(rows) else logits[part]
            for index, logprobs in zip(part, token_logprobs(part_logits, token_ids, num_top), strict=True):
                found[index] = Sampled(found[index].token_id, logprobs)
