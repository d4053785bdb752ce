"""DeviceStage: the layers of a GPU that has a stage of a pipeline, and the rows that it exchanges with its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import ModelSpec
from quire.model.pipeline_stages import PipelineStage

Value = TypeVar("Value")


class PointToPoint(Protocol):
    """The part of Communicator that stages need; a stage's rank is its index."""

    def send(self, x: Tensor, to: int) -> None:
        """See Communicator."""
        ...

    def recv(self, x: Tensor, source: int) -> None:
        """See Communicator."""
        ...


class DeviceStage:
    """The stage of a rank. All ranks run the same steps in the same order.

    Rows of the residual stream lie at one address, so that a CUDA graph may hold the layers; sending and receiving are launched
    around it.

    stage         the layers
    spec          the whole model
    rank_specs    the whole model as each tensor-parallel rank of a stage runs it: steps have the same arrays on all stages
    communicator  of the stages, on the model's device
    """

    def __init__(
        self, stage: PipelineStage, spec: ModelSpec, rank_specs: Sequence[ModelSpec], communicator: PointToPoint
    ) -> None:
        self.stage, self.spec, self.rank_specs = stage, spec, list(rank_specs)
        self._communicator = communicator
        self._rows = torch.empty(0)

    def take_parameters(self, parameters: MutableMapping[str, Value]) -> dict[str, Value]:
        """Return the parameters of the stage by their names there, and empty those of the whole model."""
        head = parameters.get("lm_head.weight")
        own = self.stage.select(parameters, head is None or head is parameters["embed.weight"])
        parameters.clear()
        return own

    def reserve_rows(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take the memory of the rows of the largest step, padding included."""
        self._rows = torch.zeros(num_tokens, self.spec.hidden_size, dtype=dtype, device=device)

    def take_rows(self, count: int, embedded: Tensor | None) -> Tensor:
        """Return the rows [count, hidden_size] that the layers change in place: those that were received, or on the first stage
        a copy of the embeddings."""
        if count > len(self._rows):
            raise InvariantError(f"a step has {count} rows, and a stage keeps {len(self._rows)}")
        rows = self._rows[:count]
        return rows if embedded is None else rows.copy_(embedded)

    @contextmanager
    def exchange(self, count: int) -> Iterator[None]:
        """Receive the rows of a step from the stage before, before the block, and send them to the stage behind after it."""
        rows, index = self._rows[:count], self.stage.index
        if not self.stage.is_first:
            self._communicator.recv(rows, index - 1)
        yield
        if not self.stage.is_last:
            self._communicator.send(rows, index + 1)
