"""PipelineStage: the range of layers that one stage of a model has, and how layers are divided among stages."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from quire.base.errors import ConfigError
from quire.contracts.model_spec import ModelSpec
from quire.model.lora.adapter import Adapter

Value = TypeVar("Value")

_EMBEDDING = ("embed.", "embed_norm.", "pos.")
_HEAD = ("lm_head.", "final_norm.")


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Layers [start, stop) of a model; the first stage also has the embedding, the last one the final norm and the LM head.

    A tied embedding is on both.
    """

    index: int
    num_stages: int
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the LM head."""
        return self.index == self.num_stages - 1

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.stop - self.start

    @classmethod
    def all_of(cls, layers: Sequence[int]) -> tuple[PipelineStage, ...]:
        """Return the stages with these numbers of layers, in order."""
        ends = list(itertools.accumulate(layers))
        return tuple(cls(index, len(ends), end - layers[index], end) for index, end in enumerate(ends))

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Return the model of its layers only; they are numbered from 0."""
        return replace(spec, layers=spec.layers[self.start : self.stop])

    def own_name(self, name: str, is_tied: bool) -> str | None:
        """Return the stage's name of a parameter of the whole model; None: the stage does not have it."""
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            number = int(index)
            return f"layers.{number - self.start}.{rest}" if self.start <= number < self.stop else None
        if name.startswith(_EMBEDDING):
            is_head = is_tied and name.startswith("embed.")
            return name if self.is_first or (self.is_last and is_head) else None
        if name.startswith(_HEAD):
            return name if self.is_last else None
        return name

    def whole_name(self, name: str) -> str:
        """Return the whole model's name of a parameter of the stage."""
        if not name.startswith("layers."):
            return name
        _, index, rest = name.split(".", 2)
        return f"layers.{int(index) + self.start}.{rest}"

    def select(self, parameters: Mapping[str, Value], is_tied: bool) -> dict[str, Value]:
        """Return the parameters of the stage by their names there."""
        named = ((self.own_name(name, is_tied), value) for name, value in parameters.items())
        return {name: value for name, value in named if name is not None}

    def adapter(self, adapter: Adapter) -> Adapter:
        """Return the part of a LoRA adapter that changes layers of the stage, by their names there."""
        return replace(adapter, pairs=self.select(adapter.pairs, False))

    def describe(self) -> str:
        """Return "stage 1 (layers 14 to 27)"."""
        return f"stage {self.index} (layers {self.start} to {self.stop - 1})"


def check_layers(layers: Sequence[int], num_layers: int) -> None:
    """Raise ConfigError unless the stages have all layers of a model together."""
    if sum(layers) != num_layers:
        given = " + ".join(map(str, layers))
        raise ConfigError(f"pipeline_layers must add up to the model's {num_layers} layers, got {given} = {sum(layers)}")


def divide_layers(costs: Sequence[float], num_stages: int, head_cost: float, bound: Collection[int] = ()) -> tuple[int, ...]:
    """Return the number of layers of each stage that minimises the cost of the most expensive stage; each has at least one.

    costs      of the layers
    head_cost  of the last stage, in addition to its layers
    bound      layers with which no stage begins: they are with the layer before

    Ties are resolved by the cost of the earlier stages, in the same way. Raises ConfigError for more
    stages than layers that can begin one.
    """
    num_layers = len(costs)
    starts = [index for index in range(1, num_layers) if index not in bound]
    if num_stages > 1 + len(starts):
        kept = f", {len(bound)} of which read what the one before has chosen" if bound else ""
        most = f"{1 + len(starts)} for a model of {num_layers} layers{kept}"
        raise ConfigError(f"pipeline_parallel_size must be at most {most}, got {num_stages}")
    sums = [0.0, *itertools.accumulate(costs)]
    # For each number of first layers: the minimal cost of the most expensive stage so far, and the ends of the stages.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in [num_layers] if is_last else starts:
            extra = head_cost if is_last else 0.0
            candidates = [
                (max(cost, sums[end] - sums[start] + extra), (*ends, end))
                for start, (cost, ends) in best.items()
                if start < end
            ]
            if candidates:
                after[end] = min(candidates)
        best = after
    ends = best[num_layers][1]
    return tuple(end - start for start, end in itertools.pairwise((0, *ends)))
