"""Read adapter_config.json of a LoRA adapter in the layout of PEFT."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.model.config_reader import read_json_object
from quire.quant.patterns import MatchingBudget, ModulePattern

CONFIG_FILE = "adapter_config.json"
_MAX_RANK = 1 << 16

_REFUSED = (
    ("use_dora", (False, None), "DoRA also scales the columns of the merged weight"),
    ("bias", ("none", None), "biases of the base model would differ between requests"),
    ("lora_bias", (False, None), "only products of two matrices are added"),
    ("modules_to_save", (None, []), "these are whole weights in place of the base model's"),
    ("layer_replication", (None, []), "the adapter is for a model with other layers"),
    ("trainable_token_indices", (None, [], {}), "only linear layers are adapted"),
    ("alora_invocation_tokens", (None, []), "the adapter would start in the middle of a prompt"),
    ("use_qalora", (False, None), "its first matrix reads pooled inputs"),
)
"""Fields of PEFT whose other values change what the adapter computes: (name, allowed values, reason)."""

_CHANGED_BASES = ("pissa", "olora", "corda", "loftq")
"""Values of init_lora_weights with which training starts from a changed base model."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What adapter_config.json says about an adapter.

    rank, alpha                  of the modules that no pattern names
    rank_patterns, alpha_patterns  (pattern of module names, value); the first that matches counts
    is_rank_stabilized           rsLoRA: alpha is divided by the square root of the rank, not by the rank
    base_model                   the name of the base model, for messages; may be empty
    """

    rank: int
    alpha: float
    rank_patterns: tuple[tuple[ModulePattern, int], ...]
    alpha_patterns: tuple[tuple[ModulePattern, float], ...]
    is_rank_stabilized: bool
    base_model: str

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, given its name in the base model."""
        return next((rank for pattern, rank in self.rank_patterns if pattern.matches(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor on the product of a module's matrices."""
        alpha = next((alpha for pattern, alpha in self.alpha_patterns if pattern.matches(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def read_adapter_config(folder: Path, max_rank: int) -> AdapterConfig:
    """Return the configuration of an adapter's folder.

    max_rank  the largest rank that is allowed
    Raises ModelFormatError or UnsupportedError, naming the file, the field and what is allowed.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ModelFormatError(f"{folder} is no LoRA adapter: it has no {CONFIG_FILE}; give a folder that PEFT has saved")
    config = read_json_object(file)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{file}: peft_type is {kind!r}, but only 'LORA' is supported")
    for name, allowed, reason in _REFUSED:
        value = config.get(name)
        if not any(value is one or value == one for one in allowed):
            raise UnsupportedError(f"{file}: {name} is {value!r}, which is not supported: {reason}; allowed: {allowed[0]!r}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise UnsupportedError(
            f"{file}: init_lora_weights is {start!r}: such adapters are for a base model with changed weights; convert it to "
            "LoRA first (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    rank = _rank(config.get("r"), "r", file, max_rank)
    is_stabilized = config.get("use_rslora", False)
    if is_stabilized not in (True, False, None):
        raise ModelFormatError(f"{file}: use_rslora must be true or false, got {is_stabilized!r}")
    base_model, budget = config.get("base_model_name_or_path"), MatchingBudget()
    ranks, alphas = _patterns(config, "rank_pattern", file), _patterns(config, "alpha_pattern", file)
    return AdapterConfig(
        rank=rank,
        alpha=_alpha(config.get("lora_alpha"), "lora_alpha", file),
        rank_patterns=tuple(
            (_pattern(key, budget, file), _rank(value, f"rank_pattern[{key!r:.80}]", file, max_rank))
            for key, value in ranks.items()
        ),
        alpha_patterns=tuple(
            (_pattern(key, budget, file), _alpha(value, f"alpha_pattern[{key!r:.80}]", file)) for key, value in alphas.items()
        ),
        is_rank_stabilized=bool(is_stabilized),
        base_model=base_model if isinstance(base_model, str) else "",
    )


def _patterns(config: Mapping[str, object], name: str, file: Path) -> Mapping[str, object]:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelFormatError(f"{file}: {name} must be an object of module names and numbers, got {type(value).__name__}")
    return value


def _pattern(key: str, budget: MatchingBudget, file: Path) -> ModulePattern:
    """Return the pattern that PEFT matches a key of rank_pattern or alpha_pattern as."""
    try:
        return ModulePattern(rf"(.*\.)?({key})$", budget)
    except UnsupportedError as error:
        raise UnsupportedError(f"{file}: the key {key!r:.80} of rank_pattern or alpha_pattern: {error}") from error


def _rank(value: object, name: str, file: Path, max_rank: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_RANK:
        raise ModelFormatError(f"{file}: {name} must be an integer from 1 to {_MAX_RANK}, got {value!r}")
    if value > max_rank:
        raise UnsupportedError(
            f"{file}: {name} is {value}, but max_lora_rank is {max_rank}: raise it (--max-lora-rank {value}), or take an "
            "adapter of a lower rank"
        )
    return value


def _alpha(value: object, name: str, file: Path) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise ModelFormatError(f"{file}: {name} must be a finite number, got {value!r}")
    return float(value)
