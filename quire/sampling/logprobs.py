"""Log probabilities of tokens and of the most likely alternatives, for sampled and for prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.contracts.step import TokenLogprobs

# Logits per pass; bounds the f32 copies of the logits to 64 MB each.
_CHUNK_ELEMENTS = 1 << 24


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the log probabilities at every row: log_softmax in f32 of the logits as the model gave them.

    logits     [R, V] any float type, not changed
    token_ids  [R] the token that is there
    num_top    how many of the most likely tokens to list; 0 none, -1 the whole vocabulary
    Returns    one TokenLogprobs per row. rank is 1 + the number of tokens of larger log probability, so that tied
               tokens share a rank; `top` orders equal log probabilities by token id
    """
    num_rows, vocab_size = logits.shape
    num_top = vocab_size if num_top < 0 else min(num_top, vocab_size)
    chunk_rows = max(1, _CHUNK_ELEMENTS // max(vocab_size, 1))
    found: list[TokenLogprobs] = []
    for first in range(0, num_rows, chunk_rows):
        part = slice(first, first + chunk_rows)
        found += _chunk_logprobs(logits[part], token_ids[part], num_top)
    return found


def _chunk_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits, dim=1, dtype=torch.float32)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = 1 + (logprobs > chosen).sum(1)
    tops = _top_tokens(logprobs, num_top)
    chosen_list, rank_list = chosen[:, 0].tolist(), ranks.tolist()
    return [
        TokenLogprobs(token_id, logprob, rank, top)
        for token_id, logprob, rank, top in zip(token_ids, chosen_list, rank_list, tops, strict=True)
    ]


def _top_tokens(logprobs: Tensor, num_top: int) -> list[tuple[tuple[int, float], ...]]:
    """Return the num_top best (token id, log probability) of each row, equal values by id."""
    num_rows, vocab_size = logprobs.shape
    if num_top == 0:
        return [()] * num_rows
    if num_top == vocab_size:
        return [_first_of_sorted(row, num_top) for row in logprobs]
    # One more than asked for shows whether a tie crosses the cut, where topk may take any of the tied tokens.
    values, ids = logprobs.topk(num_top + 1, dim=1)
    crosses = (values[:, num_top - 1] == values[:, num_top]).tolist()
    tops: list[tuple[tuple[int, float], ...]] = []
    for row, row_values in enumerate(values[:, :num_top].tolist()):
        if crosses[row]:
            tops.append(_first_of_sorted(logprobs[row], num_top))
        else:
            pairs = zip(ids[row, :num_top].tolist(), row_values, strict=True)
            tops.append(tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))))
    return tops


def _first_of_sorted(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    values, ids = torch.sort(logprobs, descending=True, stable=True)
    return tuple(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
