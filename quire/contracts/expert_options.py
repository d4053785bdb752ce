"""Options of the experts of mixture models: their placement on ranks, its change while serving, and lossy routing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from quire.base.errors import ConfigError
from quire.contracts.json_options import check_keys, parse_object

if TYPE_CHECKING:
    from quire.contracts.config import EngineConfig
    from quire.contracts.model_spec import MoeSpec

FLOAT8_PAIRS = 32
"""Mean number of (token, expert) pairs of an expert above which products of float8 experts take their inputs in float8."""

EXPERT_PLACEMENTS = ("linear", "balanced")
"""Values of expert_placement that are not files."""

_MAX_STEPS = 10**12
_LOSSY_RANGES = {"expert_capacity_factor": (1.0, 8.0), "expert_bias_rate": (1e-6, 0.05), "expert_min_share": (0.001, 1.0)}
MAX_EXPERT_BIAS = 0.05
"""The largest absolute value of the biases of expert_bias_rate."""


def is_float8_step(mlp: MoeSpec, num_tokens: int) -> bool:
    """Return whether experts with float8 weights take inputs in float8 in a step of so many tokens on all ranks together."""
    return num_tokens * mlp.top_k > FLOAT8_PAIRS * mlp.num_experts and not mlp.weighs_inputs


def float8_row_bytes(width: int, group_size: int) -> int:
    """Return the bytes of a row of float8 values followed by an f32 scale for each group of columns: a multiple of 16."""
    return -(-(width + 4 * -(-width // group_size)) // 16) * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbConfig:
    """What `eplb_config` holds: how experts are moved between ranks while the engine runs. Raises ConfigError.

    window_size            the load is that of the last so many steps
    step_interval          steps from one rebalancing to the next
    num_redundant_experts  the same as EngineConfig.num_redundant_experts, where that is not given
    log_balancedness       log max/mean of the ranks' loads every step_interval steps, also where nothing is moved
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False

    def __post_init__(self) -> None:
        for name, low in (("window_size", 1), ("step_interval", 1), ("num_redundant_experts", 0)):
            value = getattr(self, name)
            if not _is_int(value) or not low <= value <= _MAX_STEPS:
                raise ConfigError(f"eplb_config: {name} must be an integer from {low} to {_MAX_STEPS}, got {value!r}")
        if not isinstance(self.log_balancedness, bool):
            raise ConfigError(f"eplb_config: log_balancedness must be true or false, got {self.log_balancedness!r}")

    @classmethod
    def read(cls, value: Self | dict[str, Any] | str) -> Self:
        """Return the configuration that JSON or a dict of it describes. Raises ConfigError."""
        if isinstance(value, cls):
            return value
        known = [field.name for field in dataclasses.fields(cls)]
        options = parse_object("eplb_config", value, f"the options {', '.join(known)}")
        check_keys("eplb_config", options, known)
        return cls(**options)


@dataclass(frozen=True, slots=True)
class LossyRouting:
    """Measures that even out the load of experts and change outputs; 0: off.

    capacity_factor  an expert takes at most this many times the mean of a step, at least four tokens
    bias_rate        step by which the selection scores of busy experts fall, and those of idle ones rise, to MAX_EXPERT_BIAS
    min_share        choices with less than this share of the weight of the token's best expert are left out
    """

    capacity_factor: float = 0.0
    bias_rate: float = 0.0
    min_share: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.capacity_factor or self.bias_rate or self.min_share)


def counts_experts(config: EngineConfig) -> bool:
    """Return whether statistics have the tokens of experts on every device; on a CPU they always have."""
    return config.enable_expert_parallel or config.save_expert_load is not None or bool(config.lossy_routing)


def take_redundant(config: EngineConfig) -> None:
    """Read eplb_config, and take its num_redundant_experts. Called while the configuration is made."""
    if config.eplb_config is None:
        return
    eplb = EplbConfig.read(config.eplb_config)
    object.__setattr__(config, "eplb_config", eplb)
    if not eplb.num_redundant_experts:
        return
    if config.num_redundant_experts not in (0, eplb.num_redundant_experts):
        raise ConfigError(
            f"num_redundant_experts is {config.num_redundant_experts}, but eplb_config has {eplb.num_redundant_experts}: give "
            "one of them"
        )
    object.__setattr__(config, "num_redundant_experts", eplb.num_redundant_experts)


def check_experts(config: EngineConfig) -> None:
    """Check the options of experts among each other; which layers have experts is not known here. Raises ConfigError."""
    placement, redundant = config.expert_placement, config.num_redundant_experts
    if not isinstance(placement, str) or not placement:
        raise ConfigError(f"expert_placement must be 'linear', 'balanced' or a file, got {placement!r}")
    if not _is_int(redundant) or redundant < 0:
        raise ConfigError(f"num_redundant_experts must be an integer >= 0, got {redundant!r}")
    if not isinstance(config.enable_eplb, bool):
        raise ConfigError(f"enable_eplb must be True or False, got {config.enable_eplb!r}")
    for name, default in (
        ("expert_placement", "linear"),
        ("expert_load", None),
        ("num_redundant_experts", 0),
        ("enable_eplb", False),
        ("save_expert_placement", None),
    ):
        value = getattr(config, name)
        if value != default and not config.enable_expert_parallel:
            raise ConfigError(f"{name} is {value!r}, but enable_expert_parallel is False: turn it on, or leave {name} out")
    if config.eplb_config is not None and not config.enable_eplb:
        raise ConfigError("eplb_config is given, but enable_eplb is False: turn it on, or leave eplb_config out")
    if (placement == "balanced") != (config.expert_load is not None):
        raise ConfigError(
            f"expert_placement is {placement!r} and expert_load {config.expert_load!r}: 'balanced', and only that, needs a "
            "file of loads, as save_expert_load writes it"
        )
    if redundant and placement not in EXPERT_PLACEMENTS:
        raise ConfigError(
            f"num_redundant_experts is {redundant}, but the file of expert_placement ({placement!r}) says which experts "
            "have copies: leave one of them out"
        )
    _check_engines(config)
    _check_lossy(config)


def _check_engines(config: EngineConfig) -> None:
    """Check against options of ranks with the whole model, each of which counts its own rows, and of replicas."""
    other = "prefill_context_parallel_size"
    size = getattr(config, other)
    for name in ("enable_expert_parallel", "save_expert_load") if size > 1 else ():
        if getattr(config, name) not in (None, False):
            raise ConfigError(f"{name} and {other} {size}: both together are not supported; leave one of them out")
    if config.enable_expert_parallel and config.tensor_parallel_size == 1:
        raise ConfigError(
            "enable_expert_parallel is True, but tensor_parallel_size is 1, and one rank holds all experts anyway: raise "
            "tensor_parallel_size, or leave enable_expert_parallel out"
        )
    for name in ("save_expert_load", "save_expert_placement"):
        if getattr(config, name) is not None and config.data_parallel_size > 1:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but data_parallel_size is {config.data_parallel_size}, and all "
                "replicas would write the same file: run one engine"
            )


def _check_lossy(config: EngineConfig) -> None:
    """Check the options that change outputs."""
    for name, (low, high) in _LOSSY_RANGES.items():
        value = getattr(config, name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise ConfigError(f"{name} must be None or a number from {low:g} to {high:g}, got {value!r}")
        for other, is_refused, instead in (
            ("deterministic", config.deterministic, "a token's experts then depend on the other tokens of the step"),
            ("pipeline_parallel_size", config.pipeline_parallel_size > 1, "stages do not support it"),
            ("prefill_context_parallel_size", config.prefill_context_parallel_size > 1, "its ranks route rows apart"),
            ("model_impl", config.model_impl == "transformers", "the library chooses the experts"),
        ):
            if is_refused:
                raise ConfigError(f"{name} is {value!r}, but {other} is {getattr(config, other)!r}: {instead}; leave one out")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
