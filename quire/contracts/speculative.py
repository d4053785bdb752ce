"""SpeculativeConfig: how tokens are drafted ahead of the model, which then verifies several in one step."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from quire.base.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64
_METHODS = ("ngram", "suffix", "draft_model")
_KNOWN_ELSEWHERE = ("eagle", "eagle3", "medusa", "mtp", "deepseek_mtp", "mlp_speculator", "lookahead", "self")
_DEFAULT_TOKENS = {"ngram": 6, "suffix": 12, "draft_model": 4}


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"speculative_config: {name} must be an integer from {low} to {high}, got {value!r}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= cast("float", value) <= high:
        raise ConfigError(f"speculative_config: {name} must be a number from {low:g} to {high:g}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What `speculative_config` holds. Raises ConfigError. Tokens are those of plain decoding whatever stands here.

    method                  "ngram": what followed the last tokens where they stood before in the request; "suffix": likewise by
                            vote of all places, in the request and in past responses of its cache_salt; "draft_model": a
                            smaller model with the same vocabulary. None: "draft_model" where a model is given
    num_speculative_tokens  drafts of a sequence in a step at most; None: a number that suits the method
    model                   of "draft_model": a folder, a hub id or the name of a bundled model
    quantization            of "draft_model": "int8" or "int4" quantises its weights when they are loaded, so that drafts come
                            sooner; None leaves them as they are stored
    adaptive                measure what drafts cost and gain, and draft as many as pay; False: always as many as possible
    prompt_lookup_min, prompt_lookup_max
                            tokens that must stand there before, and that are compared at most; of "ngram", the former of
                            "suffix" too
    suffix_decoding_max_tree_depth       tokens that are compared at most
    suffix_decoding_max_cached_requests  past responses that are kept, of all salts together; 0: only the request itself
    suffix_decoding_max_spec_factor      drafts per token that was found equal
    suffix_decoding_min_token_prob       the least share of the places that must go on so
    """

    method: Literal["ngram", "suffix", "draft_model"] | None = None
    num_speculative_tokens: int | None = None
    model: str | None = None
    quantization: Literal["int8", "int4"] | None = None
    adaptive: bool = True
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 8
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 1000
    suffix_decoding_max_spec_factor: float = 2.0
    suffix_decoding_min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        if self.method is None and self.model is not None:
            object.__setattr__(self, "method", "draft_model")
        if self.method not in _METHODS:
            state = "is not supported yet" if str(self.method) in _KNOWN_ELSEWHERE else "is none"
            raise ConfigError(f"speculative_config: method {self.method!r} {state}; the methods are {', '.join(_METHODS)}")
        if (self.method == "draft_model") != (self.model is not None):
            raise ConfigError(
                f"speculative_config: method {self.method!r} takes {'a' if self.method == 'draft_model' else 'no'} model, got "
                f"{self.model!r}"
            )
        if self.quantization is not None and (self.model is None or self.quantization not in ("int8", "int4")):
            raise ConfigError(
                "speculative_config: quantization must be int8, int4 or null, and is of a draft model, got "
                f"{self.quantization!r} with model {self.model!r}"
            )
        if self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", _DEFAULT_TOKENS[self.method])
        _check_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative_config: adaptive must be true or false, got {self.adaptive!r}")
        _check_int("prompt_lookup_min", self.prompt_lookup_min, 1, 64)
        _check_int("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, 1024)
        _check_int("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, self.prompt_lookup_min, 1024)
        _check_int("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0, 1_000_000)
        _check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0, 100.0)
        _check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0)

    @property
    def max_tokens(self) -> int:
        """Drafts of a sequence in a step at most; never None."""
        return self.num_speculative_tokens or 0

    @classmethod
    def read(cls, value: Self | dict[str, Any] | str) -> Self:
        """Return the configuration that JSON or a dict of it describes. Raises ConfigError."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"speculative_config is not JSON ({error}), got {value!r}") from error
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(value, dict):
            raise ConfigError(f"speculative_config must be an object with method and its options, got {value!r}")
        unknown = sorted(str(name) for name in set(value) - set(known))
        if unknown:
            raise ConfigError(f"speculative_config has no option {', '.join(unknown)}; the options are {', '.join(known)}")
        return cls(**value)
