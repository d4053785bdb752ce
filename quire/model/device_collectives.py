"""Collectives: what a model's steps need of a communicator on GPUs; and gathers of columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.parallel.communicator import Transfer


class Collectives(Protocol):
    """The part of Communicator that a model's steps need."""

    size: int

    def all_gather(self, out: Tensor, part: Tensor, sizes: Sequence[int] | None = None) -> None:
        """See Communicator."""
        ...

    def all_reduce(self, x: Tensor, in_order: bool = True) -> None:
        """See Communicator."""
        ...

    def begin_all_to_all(self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> Transfer:
        """See Communicator."""
        ...

    def reduce_scatter(self, out: Tensor, x: Tensor, sizes: Sequence[int] | None = None) -> None:
        """See Communicator."""
        ...

    def wait_for(self, event: torch.cuda.Event) -> None:
        """See TorchCommunicator."""
        ...


def gather(communicator: Collectives, part: Tensor) -> Tensor:
    """Return the parts of all ranks [R, ...]; part: contiguous, of one shape on all ranks."""
    gathered = part.new_empty(communicator.size, *part.shape)
    communicator.all_gather(gathered.view(-1, *part.shape[1:]), part)
    return gathered


def gather_columns(communicator: Collectives, part: Tensor, sizes: Sequence[int], out: Tensor | None = None) -> Tensor:
    """Return the columns of all ranks one after the other, [T, sum(sizes)]; in `out` if that is given.

    part   [T, sizes[rank]], this rank's
    sizes  columns of each rank
    """
    most, num_tokens = max(sizes), len(part)
    sent = part
    if part.shape[1] < most:
        sent = part.new_zeros(num_tokens, most)
        sent[:, : part.shape[1]].copy_(part)
    gathered = gather(communicator, sent.contiguous())
    if num_tokens == 1 and out is None and min(sizes) == most:
        return gathered.view(1, -1)
    return torch.cat([gathered[rank, :, :size] for rank, size in enumerate(sizes)], 1, out=out)
