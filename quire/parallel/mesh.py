"""DeviceMesh: coordinates of ranks, and the groups that they form. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.base.errors import ConfigError
from quire.contracts.parallel import ParallelConfig

MeshDimension = Literal["tensor", "context", "pipeline"]
MeshGroup = Literal["tensor", "context", "pipeline", "stage", "world"]

_DIMENSIONS: tuple[MeshDimension, ...] = ("tensor", "context", "pipeline")
"""From the innermost, whose ranks are consecutive."""

_VARYING: dict[MeshGroup, tuple[MeshDimension, ...]] = {
    "tensor": ("tensor",),
    "context": ("context",),
    "pipeline": ("pipeline",),
    "stage": ("tensor", "context"),
    "world": _DIMENSIONS,
}


@dataclass(frozen=True, slots=True)
class MeshCoordinates:
    """Coordinates of a rank along each dimension, from 0."""

    tensor: int = 0
    context: int = 0
    pipeline: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """The ranks of one replica as a grid of three dimensions. Raises ConfigError for ranks outside of it."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @classmethod
    def of(cls, config: ParallelConfig) -> DeviceMesh:
        """Return the mesh of a configuration."""
        return cls(
            tensor=config.tensor_parallel_size,
            context=config.prefill_context_parallel_size,
            pipeline=config.pipeline_parallel_size,
        )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tensor * self.context * self.pipeline

    def coordinates(self, rank: int) -> MeshCoordinates:
        """Return the coordinates of a rank."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank must be from 0 to {self.size - 1}, got {rank}")
        at: dict[str, int] = {}
        for name in _DIMENSIONS:
            rank, at[name] = divmod(rank, getattr(self, name))
        return MeshCoordinates(**at)

    def rank_of(self, coordinates: MeshCoordinates) -> int:
        """Return the rank with these coordinates."""
        rank = 0
        for name in reversed(_DIMENSIONS):
            at, size = getattr(coordinates, name), getattr(self, name)
            if not 0 <= at < size:
                raise ConfigError(f"coordinate {name!r} must be from 0 to {size - 1}, got {at}")
            rank = rank * size + at
        return rank

    def group(self, rank: int, group: MeshGroup) -> tuple[int, ...]:
        """Return the ranks of one of a rank's groups, this rank included, in ascending order.

        "tensor", "context", "pipeline": the ranks that differ from it in this coordinate only; "stage": all of its pipeline
        stage; "world": all.
        """
        if group not in _VARYING:
            raise ConfigError(f"group must be one of {', '.join(_VARYING)}, got {group!r}")
        fixed = [name for name in _DIMENSIONS if name not in _VARYING[group]]
        own = self.coordinates(rank)

        def is_member(other: int) -> bool:
            at = self.coordinates(other)
            return all(getattr(at, name) == getattr(own, name) for name in fixed)

        return tuple(other for other in range(self.size) if is_member(other))
