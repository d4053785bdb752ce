"""Recurrent mixers of tokens: causal convolutions and the gated delta rule, over runs of several sequences in one call.

The state of a sequence is a row of a pool [rows, ...]. A run starts from one row and writes others, after given numbers of its
tokens, so that a state can be kept at a block border, and before each draft that may be rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which rows of the state pools the S sequences of a step read and write. All are read before any is written.

    sources  S rows that their runs start from; -1: from zeros
    saves    of each sequence: (number of tokens of its run, and the row that gets the state after them)
    """

    sources: Sequence[int]
    saves: Sequence[Sequence[tuple[int, int]]]

    @classmethod
    def none(cls, num_sequences: int) -> StateRows:
        """Return rows for sequences that all start, and of which nothing is kept."""
        return cls([-1] * num_sequences, [()] * num_sequences)

    def initial(self, pool: Tensor) -> Tensor:
        """Return the states that the runs start from [S, ...], a copy."""
        sources = torch.tensor(self.sources, dtype=torch.int64)
        states = pool[sources.clamp(min=0)] if len(pool) else pool.new_zeros((len(self.sources), *pool.shape[1:]))
        states[sources < 0] = 0
        return states


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, starts: list[int], rows: StateRows) -> Tensor:
    """Convolve each channel over the tokens of each sequence.

    x        [T, C]
    weight   [C, K], the last tap is that of the token itself; bias [C]
    pool     [rows, C, K - 1], the last inputs, oldest first
    starts   S + 1 offsets of the runs
    Returns  [T, C] in the dtype of x
    """
    out = torch.empty_like(x)
    before, width = rows.initial(pool), weight.shape[1] - 1
    for index in range(len(starts) - 1):
        run = slice(starts[index], starts[index + 1])
        inputs = torch.cat((before[index], x[run].T), 1)  # [C, K - 1 + tokens]
        out[run] = F.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0].T
        for count, row in rows.saves[index]:
            pool[row] = inputs[:, count : count + width]
    return out


def scan(update: Callable[[Tensor, Tensor], Tensor], pool: Tensor, starts: list[int], rows: StateRows) -> None:
    """Take the states of all sequences through their runs, token by token.

    update  (states [N, ...], tokens [N]) -> the states after these tokens, one of each of N sequences
    """
    counts = [starts[index + 1] - starts[index] for index in range(len(starts) - 1)]
    order = sorted(range(len(counts)), key=lambda index: -counts[index])
    first = torch.tensor([starts[index] for index in order], dtype=torch.int64)
    states = rows.initial(pool)[torch.tensor(order, dtype=torch.int64)]
    saves: dict[int, list[tuple[int, int]]] = {}
    for place, index in enumerate(order):
        for count, row in rows.saves[index]:
            saves.setdefault(count, []).append((place, row))
    for place, row in saves.get(0, ()):
        pool[row] = states[place]
    num_going = len(order)
    for done in range(max(counts, default=0)):
        while counts[order[num_going - 1]] <= done:
            num_going -= 1
        states = update(states[:num_going], first[:num_going] + done)
        for place, row in saves.get(done + 1, ()):
            pool[row] = states[place]


def gated_delta_rule(
    qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor, pool: Tensor, starts: list[int], rows: StateRows
) -> Tensor:
    """Compute S = exp(decay) * S + k (beta * (v - exp(decay) * S^T k))^T and S^T q for each token, in f32.

    qkv          q and k [T, Hk, Dk], which are normalised here, and v [T, Hv, Dv]; Hv is a multiple of Hk
    decay, beta  [T, Hv]; decay is f32, and at most 0
    pool         [rows, Hv, Dk, Dv] f32
    Returns      [T, Hv, Dv] in the dtype of v
    """
    q, k, v = (part.float() for part in qkv)
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _L2_EPS) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    num_repeats = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(num_repeats, 1) for x in (q, k))
    factors, beta = decay.exp(), beta.float()
    out = torch.empty_like(v)

    def update(states: Tensor, tokens: Tensor) -> Tensor:
        states = states * factors[tokens][..., None, None]
        key = k[tokens]
        delta = (v[tokens] - torch.einsum("nhkv,nhk->nhv", states, key)) * beta[tokens][..., None]
        states = states + key[..., None] * delta[..., None, :]
        out[tokens] = torch.einsum("nhkv,nhk->nhv", states, q[tokens])
        return states

    scan(update, pool, starts, rows)
    return out.to(qkv[2].dtype)
