"""ParallelConfig: how many ranks of which kind run one model."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from quire.base.errors import ConfigError

MAX_RANKS = 64
"""Of one group on one host: what the native barrier has room for."""

LEAST_DIVIDED_TOKENS = 64
"""Tokens of a sequence in a step from which on ranks divide them (-pcp), or gather the keys of prompts (-dcp); in native code
MIN_DIVIDED_TOKENS. Of other steps CPU ranks divide the sequences, GPU ranks nothing."""

EXECUTOR_BACKENDS = ("spawn", "ray")
"""Who starts ranks."""

REPLICA_BACKENDS = ("mp", "ray")
"""Who starts replicas."""

_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
)
"""What multiplies to the number of ranks, but for the replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How a model is divided among ranks. The sizes multiply. Raises ConfigError.

    tensor_parallel_size          ranks that each hold a shard of every layer
    pipeline_parallel_size        stages, each a range of layers
    data_parallel_size            replicas of the engine, which exchange nothing; not part of world_size
    decode_context_parallel_size  tensor-parallel ranks that share the tokens of one sequence: each holds the keys and values
                                  of some of them. It divides tensor_parallel_size, and adds no ranks
    prefill_context_parallel_size  groups of tensor_parallel_size ranks that each have the whole model, and compute some of the
                                  tokens of a step
    enable_dp_attention           each tensor-parallel rank has the whole attention weights and is the home of some sequences:
                                  it attends to these, and holds their keys and values. All other weights are sharded as
                                  usual. It adds no ranks
    dp_attention_size             homes, of equally many consecutive ranks, which divide the attention heads; None: one for each
                                  rank
    enable_expert_parallel        each tensor-parallel rank holds some experts whole; otherwise each expert is sharded
    tensor_parallel_shares        what each tensor-parallel rank gets, as parts ((2, 1): two thirds and one third);
                                  None: equal shards
    pipeline_layers               the number of layers of each stage; None: decided by the model
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    enable_dp_attention: bool = False
    dp_attention_size: int | None = None
    enable_expert_parallel: bool = False
    tensor_parallel_shares: tuple[float, ...] | None = None
    pipeline_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in (*_SIZES, "decode_context_parallel_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
        for name in ("enable_expert_parallel", "enable_dp_attention"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.world_size > MAX_RANKS:
            sizes = " * ".join(str(getattr(self, name)) for name in _SIZES if name != "data_parallel_size")
            raise ConfigError(
                "tensor_parallel_size * pipeline_parallel_size * prefill_context_parallel_size must be at most "
                f"{MAX_RANKS}, got {sizes} = {self.world_size} ranks"
            )
        if self.enable_dp_attention:
            self._check_homes()
        elif self.dp_attention_size is not None:
            raise ConfigError(
                f"dp_attention_size is {self.dp_attention_size!r}, but enable_dp_attention False: set it to True, or leave "
                "dp_attention_size at None"
            )
        self._check_context()
        if self.tensor_parallel_shares is not None:
            object.__setattr__(self, "tensor_parallel_shares", self._checked_shares())
        if self.pipeline_layers is not None:
            object.__setattr__(self, "pipeline_layers", self._checked_layers())

    def _check_homes(self) -> None:
        if self.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_dp_attention is True, but tensor_parallel_size is 1: the homes of sequences are its ranks; raise it, "
                "or leave enable_dp_attention out"
            )
        num_homes = self.dp_attention_size
        is_number = isinstance(num_homes, int) and not isinstance(num_homes, bool) and num_homes > 1
        if num_homes is not None and (not is_number or self.tensor_parallel_size % num_homes):
            raise ConfigError(
                f"dp_attention_size must be None or an integer >= 2 that divides tensor_parallel_size, got {num_homes!r} and "
                f"{self.tensor_parallel_size}"
            )
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size"):
            value = getattr(self, name)
            if value > 1:
                raise ConfigError(
                    f"enable_dp_attention is True and {name} {value}: both together are not supported; leave one of them out"
                )

    def _check_context(self) -> None:
        size = self.decode_context_parallel_size
        if self.tensor_parallel_size % size != 0:
            raise ConfigError(
                f"decode_context_parallel_size must divide tensor_parallel_size, whose ranks hold the tokens, got {size} and "
                f"{self.tensor_parallel_size}"
            )
        if self.prefill_context_parallel_size == 1:
            return
        for name in ("decode_context_parallel_size", "pipeline_parallel_size"):
            value = getattr(self, name)
            if value > 1:
                raise ConfigError(
                    f"prefill_context_parallel_size is {self.prefill_context_parallel_size} and {name} {value}: both together "
                    "are not supported; set one of them to 1"
                )

    def _checked_shares(self) -> tuple[float, ...]:
        shares = self.tensor_parallel_shares
        if not isinstance(shares, (tuple, list)):
            raise ConfigError(f"tensor_parallel_shares must be None or a sequence of numbers > 0, got {shares!r}")
        for share in shares:
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if not is_number or not 0 < share <= sys.float_info.max:
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
        return self.tensor_parallel_size * self.prefill_context_parallel_size * self.pipeline_parallel_size

    @property
    def num_homes(self) -> int:
        """Ranks, or groups of ranks, that attend to sequences of their own; 1: all ranks attend to all sequences."""
        return (self.dp_attention_size or self.tensor_parallel_size) if self.enable_dp_attention else 1

    @property
    def home_size(self) -> int:
        """Ranks of each home of sequences; 0: there are no homes."""
        return self.tensor_parallel_size // self.num_homes if self.enable_dp_attention else 0

    @property
    def shares(self) -> tuple[float, ...]:
        """What each tensor-parallel rank gets, also where all get the same."""
        return self.tensor_parallel_shares or (1.0,) * self.tensor_parallel_size
