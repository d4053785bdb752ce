"""Recurrent mixers of tokens: causal convolutions and states with decay, over runs of several sequences in one call.

The state of a sequence is a row of a pool [rows, ...]. A run starts from one row and writes others, after given numbers of its
tokens, so that a state can be kept at a block border, and before each draft that may be rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import InvariantError

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


def place_saves(rows: StateRows, starts: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return S sources, and of each of the T tokens the row that gets the state after it, and a further such row; -1: none.

    starts  S + 1 offsets of the runs
    Raises InvariantError for more than two rows after one token, or one before all.
    """
    saves, checkpoints = [-1] * starts[-1], [-1] * starts[-1]
    for start, wanted in zip(starts, rows.saves, strict=False):
        for count, row in wanted:
            place = start + count - 1
            if count < 1 or checkpoints[place] >= 0:
                raise InvariantError(f"state {row} is to be saved after {count} tokens, which the kernels cannot do")
            (saves if saves[place] < 0 else checkpoints)[place] = row
    return list(rows.sources), saves, checkpoints


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, starts: list[int], rows: StateRows) -> Tensor:
    """Convolve each channel over the tokens of each sequence. Taps are summed in f32, in order: runs may be cut anywhere.

    x        [T, C]
    weight   [C, K], the last tap is that of the token itself; bias [C]
    pool     [rows, C, K - 1], the last inputs, oldest first
    starts   S + 1 offsets of the runs
    Returns  [T, C] in the dtype of x
    """
    out = torch.empty_like(x)
    before, width = rows.initial(pool), weight.shape[1] - 1
    taps, base = weight.float().T, None if bias is None else bias.float()
    for index in range(len(starts) - 1):
        run = slice(starts[index], starts[index + 1])
        inputs = torch.cat((before[index].T, x[run]))  # [K - 1 + tokens, C]
        wide, count = inputs.float(), run.stop - run.start
        total = wide[:count] * taps[0]
        for tap in range(1, width + 1):
            total += wide[tap : tap + count] * taps[tap]
        out[run] = total if base is None else total + base
        for saved, row in rows.saves[index]:
            pool[row] = inputs[saved : saved + width].T
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


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What takes the state S [Hv, Dk, Dv] of a sequence from token to token, all f32.

    S = decay * S, then S += k v'^T, and the token's output is S^T q, where v' is v, or beta * (v - S^T k) with a beta.

    q, k   [T, Hk, Dk]; Hv is a multiple of Hk, and heads of equal groups share them
    v      [T, Hv, Dv]
    decay  [T, Hv]: of all of S; [T, Hv, Dk]: of each row; with rates [T, Hv, Dv]: S is multiplied by exp(rates * decay)
    beta   [T, Hv] or None
    rates  [Hv, Dk, Dv] or None; not together with beta
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None = None
    rates: Tensor | None = None

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the state of one sequence: Hv, Dk, Dv."""
        return self.v.shape[1], self.k.shape[2], self.v.shape[2]

    def factors(self, tokens: Tensor) -> Tensor:
        """Return what the states of N sequences are multiplied with at these tokens, to be broadcast to [N, Hv, Dk, Dv]."""
        decay = self.decay[tokens]
        if self.rates is not None:
            return (self.rates * decay[:, :, None]).exp()
        return decay[..., None, None] if decay.ndim == 2 else decay[..., None]


def recur(inputs: Recurrence, pool: Tensor, starts: list[int], rows: StateRows) -> Tensor:
    """Take the states of sequences through their tokens.

    pool     [rows, Hv, Dk, Dv] f32
    Returns  the output of each token [T, Hv, Dv] f32
    """
    num_repeats = inputs.v.shape[1] // inputs.q.shape[1]
    q, k = (part.repeat_interleave(num_repeats, 1) for part in (inputs.q, inputs.k))
    out = torch.empty_like(inputs.v)

    def update(states: Tensor, tokens: Tensor) -> Tensor:
        states = states * inputs.factors(tokens)
        key, value = k[tokens], inputs.v[tokens]
        if inputs.beta is not None:
            value = (value - torch.einsum("nhkv,nhk->nhv", states, key)) * inputs.beta[tokens][..., None]
        states = states + key[..., None] * value[..., None, :]
        out[tokens] = torch.einsum("nhkv,nhk->nhv", states, q[tokens])
        return states

    scan(update, pool, starts, rows)
    return out


def gated_delta_inputs(qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor) -> Recurrence:
    """Return what computes S = exp(decay) * S + k (beta * (v - exp(decay) * S^T k))^T and S^T q for each token.

    qkv    q and k [T, Hk, Dk], which are normalised here, and v [T, Hv, Dv]; Hv is a multiple of Hk
    decay  [T, Hv] or, of each row of S, [T, Hv, Dk], f32 and at most 0
    beta   [T, Hv]
    """
    q, k, v = (part.float() for part in qkv)
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _L2_EPS) for x in (q, k))
    return Recurrence(q * q.shape[-1] ** -0.5, k, v, decay.exp(), beta.float())
