"""The native sampler: tokens and log probabilities of rows of logits, without torch operations over the vocabulary."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.errors import InvariantError

_MASK32, _MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


class SampleStatus(enum.IntEnum):
    """Why a row got no token (csrc/sampler.h)."""

    FINE = 0
    NAN = 1
    INFINITE = 2
    NOTHING = 3
    OVERFLOW = 4
    UNDERFLOW = 5


_STATUSES = tuple(SampleStatus)  # by number, because calling the enum takes ten times as long


class DrawOptions(NamedTuple):
    """Sampling options of one row; a tuple, because one is created for every token.

    inverse_temperature  multiplies the logits, > 0
    is_greedy            the highest logit is taken, the lowest id of equal ones; the other options are ignored
    top_k                number of candidates; <= 0 or >= vocabulary: all
    top_p                share of the probability mass, 1: all
    log_min_p            logarithm of min_p, -inf: off
    seed, position       of the noise, taken modulo 2**64 and 2**32
    token_mask           [ceil(vocabulary / 32)] i32, contiguous: a bit per token, the lowest first; 0 forbids it
    """

    inverse_temperature: float
    is_greedy: bool
    top_k: int
    top_p: float
    log_min_p: float
    seed: int
    position: int
    token_mask: Tensor | None = None


def takes_logits(logits: Tensor) -> bool:
    """Return whether the kernels can read the logits: [R, V] f32 on the CPU with contiguous rows."""
    is_usable = logits.ndim == 2 and logits.dtype == torch.float32 and logits.device.type == "cpu"
    return is_usable and (logits.shape[1] == 1 or logits.stride(1) == 1)


def sample_rows(
    native: ModuleType, logits: Tensor, row_ids: Sequence[int], options: Sequence[DrawOptions], isa: str | None = None
) -> list[tuple[int, SampleStatus]]:
    """Return (token, status) of some rows; the token is -1 if the status is not FINE.

    native   the result of load_native
    logits   [R, V], see takes_logits; not changed
    row_ids  [N] the rows, each in [0, R)
    options  [N]
    isa      instruction set, for tests; default: the one of this process
    """
    addresses = _row_addresses(logits, row_ids)
    vocab_size = logits.shape[1]
    rows = [
        (
            address,
            inverse_temperature,
            is_greedy,
            top_k if 0 < top_k < vocab_size else 0,
            top_p,
            log_min_p,
            seed & _MASK64,
            position & _MASK32,
            _mask_address(token_mask, vocab_size),
        )
        for address, (inverse_temperature, is_greedy, top_k, top_p, log_min_p, seed, position, token_mask) in zip(
            addresses, options, strict=True
        )
    ]
    found = native.sample(rows, vocab_size, torch.get_num_threads(), isa)
    return [(token_id, _STATUSES[status]) for token_id, status in found]


def logprobs_of_rows(
    native: ModuleType, logits: Tensor, token_ids: Sequence[int], num_top: int, isa: str | None = None
) -> tuple[list[tuple[float, int, bool]], Tensor, Tensor]:
    """Return the log probabilities of a given token and of the best tokens in each row.

    native     the result of load_native
    logits     [R, V], see takes_logits; not changed
    token_ids  [R] each in [0, V)
    num_top    0 <= num_top <= V
    Returns    per row (log probability, 1 + number of larger logits, whether the best logit is finite: if not, the rest of the
               row is undefined); the best tokens [R, num_top] int32, equal logits by id; their log probabilities [R, num_top]
               f32
    """
    addresses = _row_addresses(logits, range(len(token_ids)))
    num_rows, vocab_size = logits.shape
    if not 0 <= num_top <= vocab_size or not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise InvariantError(f"{num_top} best tokens or a token id are outside a vocabulary of {vocab_size}")
    top_tokens = torch.zeros(num_rows, num_top, dtype=torch.int32)
    top_values = torch.zeros(num_rows, num_top)
    rows = list(zip(addresses, token_ids, strict=True))
    found = native.logprobs(
        rows, vocab_size, num_top, top_tokens.data_ptr(), top_values.data_ptr(), torch.get_num_threads(), isa
    )
    return found, top_tokens, top_values


def _mask_address(mask: Tensor | None, vocab_size: int) -> int:
    if mask is None:
        return 0
    is_usable = mask.dtype == torch.int32 and mask.device.type == "cpu" and mask.ndim == 1 and mask.is_contiguous()
    if not is_usable or 32 * len(mask) < vocab_size:
        raise InvariantError(
            f"a token mask has a bit for each of {vocab_size} tokens in one piece of i32 on the CPU, got "
            f"{tuple(mask.shape)} {mask.dtype} on {mask.device} with strides {mask.stride()}"
        )
    return mask.data_ptr()


def _row_addresses(logits: Tensor, row_ids: Sequence[int]) -> list[int]:
    is_within = not row_ids or (min(row_ids) >= 0 and max(row_ids) < logits.shape[0])
    if not takes_logits(logits) or logits.shape[1] < 1 or not is_within:
        raise InvariantError(
            "the native sampler takes rows of f32 logits [R, V] on the CPU, each in one piece, got "
            f"{len(row_ids)} rows of {tuple(logits.shape)} {logits.dtype} on {logits.device} with strides {logits.stride()}"
        )
    start, step = logits.data_ptr(), 4 * logits.stride(0)
    return [start + row_id * step for row_id in row_ids]
