"""Legs: which copies of rows go to which rank in the exchanges of a mixture of experts; arithmetic on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Leg:
    """One all-to-all of copies of rows, as one rank takes part in it. Rows are numbered over all ranks.

    sent, receivers  [C] i64, the rows that this rank sends and the ranks they go to, in the order of receivers, then rows
    received         [D] i64, the rows that it gets, in the order of senders, then rows
    sent_pairs       [C] i64, how many choices of each sent row are at its receiver, or behind it
    sizes, out_sizes            copies that go to each rank, and that come from each
    pair_sizes, pair_out_sizes  the pairs (row, choice) of these
    """

    sent: Tensor
    receivers: Tensor
    received: Tensor
    sent_pairs: Tensor
    sizes: list[int]
    out_sizes: list[int]
    pair_sizes: list[int]
    pair_out_sizes: list[int]

    def position(self, num_rows: int) -> Tensor:
        """Return [num_rows] i64, for each received row which one of them it is."""
        found = self.received.new_zeros(num_rows)
        found[self.received] = torch.arange(len(self.received), device=found.device)
        return found


@dataclass(frozen=True, slots=True)
class _Sends:
    """What all ranks send in a leg: senders [T, R] i64, of the copy of a row to each rank, -1: there is none; and its pairs."""

    senders: Tensor
    num_pairs: Tensor


class LegMaker:
    """Makes the legs of one rank: one of them where all ranks are on one host, or each on its own; otherwise two.

    With two a row goes once to each host that has experts of it, to one of its ranks (on the row's own host: it stays), and
    that rank sends it to the others. The ranks of a host take turns by the rank that the row is from.

    hosts  of the ranks: equal for ranks of one host
    read   returns numbers of the device as lists; None: torch does
    """

    def __init__(
        self, rank: int, hosts: Sequence[int], device: torch.device, read: Callable[[Tensor], list[Any]] | None = None
    ) -> None:
        self._read = read
        size = len(hosts)
        self._rank, self._ranks = rank, torch.arange(size, device=device)
        members = {host: [each for each in range(size) if hosts[each] == host] for host in hosts}
        relays = [
            [source if hosts[source] == host else members[host][source % len(members[host])] for host in hosts]
            for source in range(size)
        ]
        self.has_two_legs = len(members) > 1 and len(members) < size
        self._relays = torch.tensor(relays, device=device)  # [from, to]
        self._is_near = torch.tensor([[float(a == b) for b in hosts] for a in hosts], device=device)
        hop = self._relays[rank] * size if self.has_two_legs else 0
        self.return_order = hop + self._ranks
        """[R] i64: pairs come back in ascending order of this number of the rank that computed them, of equal ones in order."""

    def make(self, num_pairs: Tensor, source: Tensor, parts: Sequence[Tensor]) -> list[list[Leg]]:
        """Return the legs of each part of the rows, in their order. The host waits once, for the numbers of rows.

        num_pairs  [T, R] i64, how many choices of each row each rank computes
        source     [T] i64, the rank that each row is from
        parts      [T] bool each, the rows of a part
        """
        sends = [each for part in parts for each in self._sends(num_pairs, source, part)]
        told = torch.stack([self._counts(each) for each in sends])
        counts: list[Any] = told.tolist() if self._read is None else self._read(told)
        legs = [self._leg(each, *numbers) for each, numbers in zip(sends, counts, strict=True)]
        count = len(legs) // len(parts)
        return [legs[first : first + count] for first in range(0, len(legs), count)]

    def _sends(self, num_pairs: Tensor, source: Tensor, part: Tensor) -> list[_Sends]:
        near = num_pairs * part[:, None]
        if not self.has_two_legs:
            return [_Sends(source[:, None].where(near > 0, -1), near)]
        relays = self._relays[source]
        at_host = (near.float() @ self._is_near).long() * (relays == self._ranks)
        return [_Sends(source[:, None].where(at_host > 0, -1), at_host), _Sends(relays.where(near > 0, -1), near)]

    def _counts(self, each: _Sends) -> Tensor:
        """Return [4, R]: copies that go to each rank and come from it, and the pairs of both."""
        is_mine = each.senders == self._rank
        is_from = each.senders[:, self._rank, None] == self._ranks
        own = each.num_pairs[:, self._rank, None]
        return torch.stack((is_mine.sum(0), is_from.sum(0), (each.num_pairs * is_mine).sum(0), (own * is_from).sum(0)))

    def _leg(
        self, each: _Sends, sizes: list[int], out_sizes: list[int], pair_sizes: list[int], pair_out_sizes: list[int]
    ) -> Leg:
        receivers, sent = torch.nonzero_static((each.senders == self._rank).T, size=sum(sizes)).T
        is_from = each.senders[:, self._rank] == self._ranks[:, None]
        received = torch.nonzero_static(is_from, size=sum(out_sizes))[:, 1]
        pairs = each.num_pairs[sent, receivers]
        return Leg(sent, receivers, received, pairs, sizes, out_sizes, pair_sizes, pair_out_sizes)
