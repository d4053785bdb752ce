"""PoolingParams: what is made of the hidden states of a prompt: a vector, or scores of classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from quire.base.errors import RequestError
from quire.contracts.sampling_params import check_flag, check_int

Pooling = Literal["last", "mean", "cls"]
PoolingTask = Literal["embed", "classify", "score"]
_POOLINGS = ("last", "mean", "cls")
_TASKS = ("embed", "classify", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The parameters of an embedding or a classification. Raises RequestError, with the field in `param`, when one is invalid.

    Pooled are the hidden states after the final norm.

    task            "embed": a vector; "classify": what the classification head makes of it, one number a class; "score": the
                    same of a head with one class
    pooling         "last": that of the last prompt token; "mean": the mean over all prompt tokens; "cls": that of the first
                    token, in models with bidirectional attention; None: as the checkpoint says, "last" where it says nothing
    normalize       divide by the Euclidean length, so that a dot product is the cosine; None: as the checkpoint says, or True
    dimensions      keep the first so many values, 1 to the size of a vector, before it is normalised; None: all. Only models
                    trained for it (Matryoshka representation learning, Kusupati et al., 2022) put what matters there
    use_activation  of a classification: apply the checkpoint's activation function, else return logits; None: True
    truncate_prompt_tokens  keep so many tokens of a longer prompt, its end is cut off, special tokens stay; -1: as many as
                    max_model_len; None: a prompt that is too long is refused
    priority        lower runs first under the priority policy
    """

    task: PoolingTask = "embed"
    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if self.task not in _TASKS:
            raise RequestError(f"task must be one of {_TASKS}, got {self.task!r}", "task")
        if self.pooling is not None and self.pooling not in _POOLINGS:
            raise RequestError(f"pooling must be one of {_POOLINGS}, got {self.pooling!r}", "pooling")
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1, 2**31 - 1)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31 - 1)
        check_int("priority", self.priority, -(2**31), 2**31 - 1)

    def resolved(self, pooling: Pooling, normalize: bool, use_activation: bool) -> PoolingParams:
        """Return the parameters with these values; see PoolerSpec.resolve."""
        return replace(self, pooling=pooling, normalize=normalize, use_activation=use_activation)

    @property
    def needs_every_token(self) -> bool:
        """Whether the hidden states of all prompt tokens are pooled: none of them may then come from the prefix cache."""
        return self.pooling not in (None, "last")
