"""PoolingParams: how the hidden states of a prompt become one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.base.errors import RequestError

_POOLINGS = ("last", "mean")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, got {value!r}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The parameters of an embedding. Raises RequestError, with the field in `param`, when one is invalid.

    Pooled are the hidden states after the final norm.

    pooling     "last": that of the last prompt token; "mean": the mean over all prompt tokens
    normalize   divide by the Euclidean length, so that a dot product is the cosine
    dimensions  keep the first so many values, 1 to the model's hidden size, before it is normalised; None: all. Only models
                trained for it (Matryoshka representation learning, Kusupati et al., 2022) put what matters there
    priority    lower runs first under the priority policy
    """

    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    dimensions: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if self.pooling not in _POOLINGS:
            raise RequestError(f"pooling must be one of {_POOLINGS}, got {self.pooling!r}", "pooling")
        if not isinstance(self.normalize, bool):
            raise RequestError(f"normalize must be True or False, got {self.normalize!r}", "normalize")
        if self.dimensions is not None:
            _check_int("dimensions", self.dimensions, 1, 2**31 - 1)
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)

    @property
    def needs_every_token(self) -> bool:
        """Whether the hidden states of all prompt tokens are pooled: none of them may then come from the prefix cache."""
        return self.pooling == "mean"
