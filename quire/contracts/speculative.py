"""SpeculativeConfig: how tokens are drafted ahead of the model, which then verifies several in one step."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from quire.base.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64
_HEADS = ("eagle", "eagle3", "medusa", "mtp", "deepseek_mtp")
METHODS = ("ngram", "suffix", "draft_model", "lookahead", "self", *_HEADS)
_KNOWN_ELSEWHERE = ("mlp_speculator",)
_DEFAULT_TOKENS = {
    **{"ngram": 6, "suffix": 12, "draft_model": 4, "self": 4},
    **{"eagle": 4, "eagle3": 4, "medusa": 4, "mtp": 3, "deepseek_mtp": 3},
}
_ALONE = ("lookahead", *_HEADS)
_WITH_MODEL = ("draft_model", "eagle", "eagle3", "medusa")
_PERHAPS_WITH_MODEL = ("mtp", "deepseek_mtp")


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
                            smaller model with the same vocabulary; "lookahead": guesses that the model itself improves from
                            step to step beside its tokens; "self": the model without some of its layers; "eagle", "eagle3",
                            "medusa": a head that was trained for the model; "mtp" or "deepseek_mtp": its layer for multi-token
                            prediction. None: "draft_model" where a model is given. Several, in a list: what they draft is
                            merged into one tree
    num_speculative_tokens  drafts of a sequence in a step at most; None: a number that suits the method
    model                   of "draft_model", "eagle", "eagle3" and "medusa": a folder, a hub id or the name of a bundled model;
                            of "mtp" only where the layer is not in the model's own folder
    quantization            of "draft_model", "eagle", "eagle3" and "mtp": "int8" or "int4" quantises the weights that draft
                            when they are loaded, so that drafts come sooner; None leaves them as they are stored
    adaptive                measure what drafts cost and gain, and draft as many as pay; False: always as many as possible
    prompt_lookup_min, prompt_lookup_max
                            tokens that must stand there before, and that are compared at most; of "ngram", the former of
                            "suffix" too
    suffix_decoding_max_tree_depth       tokens that are compared at most
    suffix_decoding_max_cached_requests  past responses that are kept, of all salts together; 0: only the request itself
    suffix_decoding_max_spec_factor      drafts per token that was found equal
    suffix_decoding_min_token_prob       the least share of the places that must go on so
    lookahead_window        of "lookahead": places ahead that are guessed at once
    lookahead_ngram         of "lookahead": tokens of the runs that are collected, the first one included
    lookahead_guesses       of "lookahead": runs that are verified in a step at most. All in all a sequence has
                            (lookahead_window + lookahead_guesses) * (lookahead_ngram - 1) drafts
    draft_top_k             of "medusa": tokens of a head that are tried behind each of the head before; above 1: as a tree
    skipped_layers          of "self": layers that the model drafts without, from 0; `quire calibrate-layers` finds them
    """

    method: str | tuple[str, ...] | None = None
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
    lookahead_window: int = 5
    lookahead_ngram: int = 4
    lookahead_guesses: int = 5
    draft_top_k: int = 1
    skipped_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.method is None and self.model is not None:
            object.__setattr__(self, "method", "draft_model")
        for name in ("method", "skipped_layers"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(cast("list[Any]", value)))
        self._check_methods()
        self._check_layers()
        _check_int("lookahead_window", self.lookahead_window, 1, MAX_SPECULATIVE_TOKENS)
        _check_int("lookahead_ngram", self.lookahead_ngram, 2, MAX_SPECULATIVE_TOKENS)
        _check_int("lookahead_guesses", self.lookahead_guesses, 1, MAX_SPECULATIVE_TOKENS)
        self._check_what_drafts()
        if self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", self._default_tokens())
        _check_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative_config: adaptive must be true or false, got {self.adaptive!r}")
        _check_int("prompt_lookup_min", self.prompt_lookup_min, 1, 64)
        _check_int("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, 1024)
        _check_int("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, self.prompt_lookup_min, 1024)
        _check_int("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0, 1_000_000)
        _check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0, 100.0)
        _check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0)

    def _check_methods(self) -> None:
        for method in self.methods or (None,):
            if method not in METHODS:
                state = "is not supported yet" if str(method) in _KNOWN_ELSEWHERE else "is unknown"
                what = "method is missing" if method is None else f"method {method!r} {state}"
                raise ConfigError(f"speculative_config: {what}; the methods are {', '.join(METHODS)}")
        if len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"speculative_config: a method stands twice in {list(self.methods)}; name each once")
        alone = [method for method in self.methods if method in _ALONE]
        if alone and len(self.methods) > 1:
            raise ConfigError(f"speculative_config: method {alone[0]!r} cannot be merged with others; take it alone")
        takes_model = any(method in _WITH_MODEL for method in self.methods)
        if takes_model != (self.model is not None) and not any(method in _PERHAPS_WITH_MODEL for method in self.methods):
            raise ConfigError(
                f"speculative_config: method {self.method!r} takes {'a' if takes_model else 'no'} model, got {self.model!r}"
            )

    def _check_what_drafts(self) -> None:
        has_layers = self.model is not None or self.methods[0] in _PERHAPS_WITH_MODEL
        has_layers = has_layers and "medusa" not in self.methods
        if self.quantization is not None and (not has_layers or self.quantization not in ("int8", "int4")):
            raise ConfigError(
                "speculative_config: quantization must be int8, int4 or null, of a draft model or of a head with a layer, "
                f"got {self.quantization!r} with method {self.method!r} and model {self.model!r}"
            )
        _check_int("draft_top_k", self.draft_top_k, 1, MAX_SPECULATIVE_TOKENS)
        if self.draft_top_k > 1 and self.methods != ("medusa",):
            raise ConfigError(
                f"speculative_config: draft_top_k is {self.draft_top_k}, but only method 'medusa' drafts trees with it (yet); "
                "leave it out"
            )

    def _check_layers(self) -> None:
        layers = self.skipped_layers
        if ("self" in self.methods) != (layers is not None):
            need = "needs" if layers is None else "alone takes"
            raise ConfigError(
                f"speculative_config: method 'self' {need} skipped_layers, got {self.method!r} with {layers!r}; "
                "quire calibrate-layers finds layers that may be skipped"
            )
        if layers is None:
            return
        if not isinstance(layers, tuple) or not layers or len(set(layers)) < len(layers):
            raise ConfigError(f"speculative_config: skipped_layers must be a list of different layers, got {layers!r}")
        for layer in layers:
            _check_int("a layer of skipped_layers", layer, 0, 100_000)

    def _default_tokens(self) -> int:
        if self.methods == ("lookahead",):
            count = (self.lookahead_window + self.lookahead_guesses) * (self.lookahead_ngram - 1)
            if count > MAX_SPECULATIVE_TOKENS:
                raise ConfigError(
                    f"speculative_config: (lookahead_window + lookahead_guesses) * (lookahead_ngram - 1) is {count}, more than "
                    f"the {MAX_SPECULATIVE_TOKENS} drafts that can be verified at once; lower one of them"
                )
            return count
        return min(MAX_SPECULATIVE_TOKENS, sum(_DEFAULT_TOKENS[method] for method in self.methods))

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods, mostly one."""
        if self.method is None:
            return ()
        return self.method if isinstance(self.method, tuple) else (self.method,)

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
