"""enable_lora is refused where adapters are not supported, with the option at fault."""

import pytest

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig


@pytest.mark.parametrize(
    "other",
    [
        {"model_impl": "transformers"},
        {"prefill_context_parallel_size": 2},
    ],
    ids=lambda other: next(iter(other)),
)
def test_options_without_adapters_are_refused(other):
    ((name, _),) = other.items()
    EngineConfig(model="demo", **other)
    with pytest.raises(ConfigError, match=rf"{name} is .* enable_lora"):
        EngineConfig(model="demo", enable_lora=True, **other)


def test_memory_for_experts_is_taken_only_with_adapters():
    EngineConfig(model="demo", enable_lora=True, enable_lora_experts=True)
    with pytest.raises(ConfigError, match="enable_lora_experts must be False without enable_lora, got True"):
        EngineConfig(model="demo", enable_lora_experts=True)


@pytest.mark.parametrize("name", ["max_loras", "max_lora_rank"])
def test_limits_are_at_least_one(name):
    with pytest.raises(ConfigError, match=f"{name} must be an integer >= 1, got 0"):
        EngineConfig(model="demo", enable_lora=True, **{name: 0})


@pytest.mark.parametrize("name", ["max_loras", "max_lora_rank"])
def test_limits_are_refused_without_adapters(name):
    EngineConfig(model="demo", enable_lora=True, **{name: 3})
    with pytest.raises(ConfigError, match=f"{name} must be .*, its default, without enable_lora, got 3"):
        EngineConfig(model="demo", **{name: 3})
