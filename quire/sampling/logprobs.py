"""Log probabilities of tokens and of the most likely alternatives, for sampled and for prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from quire.contracts.step import TokenLogprobs
from quire.kernels.cpu.sampling import logprobs_of_rows
from quire.kernels.native import load_native

# Logits per pass; limits the f32 copies of the logits to 64 MB each.
_CHUNK_ELEMENTS = 1 << 24

# The native kernel keeps the best in a heap; for most of the vocabulary a sort is faster.
MAX_NATIVE_TOP = 1024


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the log probabilities at every row: log_softmax in f32 of the model's raw logits.

    logits     [R, V] any float type, not changed; types wider than f32 are rounded to it
    token_ids  [R] the actual token
    num_top    number of most likely tokens to list; 0 none, -1 the whole vocabulary
    Returns    one TokenLogprobs per row. rank is 1 + the number of tokens with larger logits, so tied tokens share a rank;
               `top` orders equal logits by token id
    """
    num_rows, vocab_size = logits.shape
    num_top = vocab_size if num_top < 0 else min(num_top, vocab_size)
    chunk_rows = max(1, _CHUNK_ELEMENTS // max(vocab_size, 1))
    native = load_native() if logits.device.type == "cpu" and num_top <= MAX_NATIVE_TOP else None
    found: list[TokenLogprobs] = []
    for first in range(0, num_rows, chunk_rows):
        part = slice(first, first + chunk_rows)
        part_logits = logits[part].to(torch.float32)
        if native is None:
            found += _chunk_logprobs(part_logits, token_ids[part], num_top)
        else:
            found += _native_logprobs(native, part_logits.contiguous(), token_ids[part], num_top)
    return found


def allowed_logprobs(logits: Tensor, token_id: int, token_mask: Tensor, num_top: int) -> TokenLogprobs:
    """Return the log probabilities at one row, with only the tokens that a mask allows among the most likely ones.

    logits      [V] any float type, not changed; the log probabilities are those among all tokens
    token_mask  [at least ceil(V / 32)] i32, a bit per token, the lowest first
    """
    whole = logits.to(torch.float32)
    logprobs = torch.log_softmax(whole, dim=0)
    is_allowed = ((token_mask[:, None] >> torch.arange(32, dtype=torch.int32)) & 1).bool().flatten()[: len(whole)]
    allowed = is_allowed.to(logits.device).nonzero()[:, 0]
    order = torch.sort(whole[allowed], descending=True, stable=True).indices[:num_top]
    best = allowed[order]
    top = tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), 1 + int((whole > whole[token_id]).sum()), top)


def _native_logprobs(native: ModuleType, logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    chosen, top_ids, top_values = logprobs_of_rows(native, logits, token_ids, num_top)
    id_lists, value_lists = top_ids.tolist(), top_values.tolist()
    found: list[TokenLogprobs] = []
    for row, (logprob, rank, is_finite) in enumerate(chosen):
        if is_finite:
            top = tuple(zip(id_lists[row], value_lists[row], strict=True))
            found.append(TokenLogprobs(token_ids[row], logprob, rank, top))
        else:
            found += _chunk_logprobs(logits[row : row + 1], token_ids[row : row + 1], num_top)
    return found


def _chunk_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the log probabilities of rows of f32 logits, in torch."""
    logprobs = torch.log_softmax(logits, dim=1)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    ranks = 1 + (logits > logits.gather(1, ids)).sum(1)
    tops = _top_tokens(logits, logprobs, num_top)
    chosen_list, rank_list = logprobs.gather(1, ids)[:, 0].tolist(), ranks.tolist()
    return [
        TokenLogprobs(token_id, logprob, rank, top)
        for token_id, logprob, rank, top in zip(token_ids, chosen_list, rank_list, tops, strict=True)
    ]


def _top_tokens(logits: Tensor, logprobs: Tensor, num_top: int) -> list[tuple[tuple[int, float], ...]]:
    """Return the num_top best (token id, log probability) of each row, equal logits by id."""
    num_rows, vocab_size = logits.shape
    if num_top == 0:
        return [()] * num_rows
    if num_top == vocab_size:
        return [_first_of_sorted(logits[row], logprobs[row], num_top) for row in range(num_rows)]
    # One more than requested shows whether a tie crosses the cut, where topk may return any of the tied tokens.
    values, ids = logits.topk(num_top + 1, dim=1)
    crosses = (values[:, num_top - 1] == values[:, num_top]).tolist()
    listed = logprobs.gather(1, ids)[:, :num_top].tolist()
    tops: list[tuple[tuple[int, float], ...]] = []
    for row, row_values in enumerate(values[:, :num_top].tolist()):
        if crosses[row]:
            tops.append(_first_of_sorted(logits[row], logprobs[row], num_top))
        else:
            triples = zip(row_values, ids[row, :num_top].tolist(), listed[row], strict=True)
            tops.append(tuple((token_id, logprob) for _, token_id, logprob in sorted(triples, key=lambda t: (-t[0], t[1]))))
    return tops


def _first_of_sorted(logits: Tensor, logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    ids = torch.sort(logits, descending=True, stable=True).indices[:count]
    return tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
