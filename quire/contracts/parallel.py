"""ParallelConfig: how many ranks of which kind run one model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.base.errors import ConfigError

MAX_RANKS = 64
"""Of one group on one host: what the native barrier has room for."""

EXECUTOR_BACKENDS = ("spawn", "ray")

_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "attention_data_parallel_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How a model is divided among ranks. The sizes multiply. Raises ConfigError.

    tensor_parallel_size          ranks that each hold a shard of every layer
    pipeline_parallel_size        stages, each a range of layers
    data_parallel_size            replicas of the engine, which exchange nothing; not part of world_size
    decode_context_parallel_size  ranks that share the tokens of one sequence
    attention_data_parallel_size  groups of ranks that hold whole attention weights and attend to sequences of their own,
                                  and share the experts
    enable_expert_parallel        each rank of a stage holds some experts whole; otherwise each expert is sharded
    tensor_parallel_shares        what each tensor-parallel rank gets, as parts ((2, 1): two thirds and one third);
                                  None: equal shards
    pipeline_layers               the number of layers of each stage; None: decided by the model
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    tensor_parallel_shares: tuple[float, ...] | None = None
    pipeline_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
        if not isinstance(self.enable_expert_parallel, bool):
            raise ConfigError(f"enable_expert_parallel must be True or False, got {self.enable_expert_parallel!r}")
        if self.world_size > MAX_RANKS:
            sizes = " * ".join(str(getattr(self, name)) for name in _SIZES if name != "data_parallel_size")
            raise ConfigError(
                f"tensor_parallel_size * pipeline_parallel_size * decode_context_parallel_size * "
                f"attention_data_parallel_size must be at most {MAX_RANKS}, got {sizes} = {self.world_size} ranks"
            )
        if self.tensor_parallel_shares is not None:
            object.__setattr__(self, "tensor_parallel_shares", self._checked_shares())
        if self.pipeline_layers is not None:
            object.__setattr__(self, "pipeline_layers", self._checked_layers())
        if self.attention_data_parallel_size > 1 and not self.enable_expert_parallel:
            raise ConfigError(
                f"attention_data_parallel_size is {self.attention_data_parallel_size}: it needs enable_expert_parallel=True; "
                "without experts to share, use data_parallel_size (replicas)"
            )

    def _checked_shares(self) -> tuple[float, ...]:
        shares = self.tensor_parallel_shares
        if not isinstance(shares, (tuple, list)):
            raise ConfigError(f"tensor_parallel_shares must be None or a sequence of numbers > 0, got {shares!r}")
        for share in shares:
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if not is_number or not math.isfinite(share) or share <= 0:
                raise ConfigError(f"tensor_parallel_shares must be finite numbers > 0, got {share!r} in {shares!r}")
        if len(shares) != self.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_shares must have one number for each of the {self.tensor_parallel_size} tensor-parallel "
                f"ranks (tensor_parallel_size), got {len(shares)}: {shares!r}"
            )
        return tuple(shares)

    def _checked_layers(self) -> tuple[int, ...]:
        layers = self.pipeline_layers
        if not isinstance(layers, (tuple, list)):
            raise ConfigError(f"pipeline_layers must be None or a sequence of integers >= 1, got {layers!r}")
        for count in layers:
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigError(f"pipeline_layers must be integers >= 1, got {count!r} in {layers!r}")
        if len(layers) != self.pipeline_parallel_size:
            raise ConfigError(
                f"pipeline_layers must have one number for each of the {self.pipeline_parallel_size} stages "
                f"(pipeline_parallel_size), got {len(layers)}: {layers!r}"
            )
        return tuple(layers)

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return (
            self.tensor_parallel_size
            * self.decode_context_parallel_size
            * self.attention_data_parallel_size
            * self.pipeline_parallel_size
        )

    @property
    def shares(self) -> tuple[float, ...]:
        """What each tensor-parallel rank gets, also where all get the same."""
        return self.tensor_parallel_shares or (1.0,) * self.tensor_parallel_size
