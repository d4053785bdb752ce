"""SpeculativeConfig: how tokens are drafted ahead of the model, which then verifies several in one step."""

from __future__ import annotations

import dataclasses
from dataclasses import InitVar, dataclass
from typing import Any, Literal, Self, cast

from quire.base.errors import ConfigError
from quire.base.renamed_option import take_old_name
from quire.contracts.json_options import check_keys, parse_object
from quire.contracts.medusa_choices import Choices, read_choices
from quire.contracts.speculative_names import renamed
from quire.contracts.speculative_ranges import LOOKUP, MAX_SPECULATIVE_TOKENS, check_int, check_number

__all__ = ["MAX_SPECULATIVE_TOKENS", "METHODS", "SpeculativeConfig"]

_HEADS = ("eagle", "eagle3", "medusa", "mtp", "deepseek_mtp")
METHODS = ("ngram", "suffix", "draft_model", "lookahead", "self", *_HEADS)
_KNOWN_ELSEWHERE = ("mlp_speculator", "dflash", "dspark", "extract_hidden_states", "custom_class")
_DEFAULT_TOKENS = {
    **{"ngram": 6, "suffix": 12, "draft_model": 4, "self": 4},
    **{"eagle": 4, "eagle3": 4, "medusa": 4, "mtp": 3, "deepseek_mtp": 3},
}
_ONE_BY_ONE = ("draft_model", "eagle", "eagle3", "mtp", "deepseek_mtp")
_P_MIN = 0.35
_OF_METHODS = {
    "prompt_lookup_min": ("ngram", "suffix"),
    "prompt_lookup_max": ("ngram",),
    **{
        f"suffix_decoding_{name}": ("suffix",)
        for name in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob", "use_tree_spec")
    },
    **{f"lookahead_{name}": ("lookahead",) for name in ("window", "ngram", "guesses")},
    "max_model_len": _ONE_BY_ONE,
}
"""Options that mean nothing to other methods."""

_WITH_MODEL = ("draft_model", "eagle", "eagle3", "medusa")
_PERHAPS_WITH_MODEL = ("mtp", "deepseek_mtp")
_DEFAULT_DEPTH = 5
_TREE_TOKENS = 12
_ACCEPTANCE_METHODS = ("rejection_sampler", "typical_acceptance_sampler")
_POSTERIOR = (0.09, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What `speculative_config` holds. Raises ConfigError.

    Tokens are those of plain decoding whatever stands here, but for acceptance_method "typical_acceptance_sampler".

    method                  "ngram": what followed the last tokens where they stood before in the request; "suffix": likewise by
                            vote of all places, in the request and in past responses of its cache_salt; "draft_model": a
                            smaller model with the same vocabulary; "lookahead": guesses that the model itself improves from
                            step to step next to its tokens; "self": the model without some of its layers; "eagle", "eagle3",
                            "medusa": a head that was trained for the model; "mtp" or "deepseek_mtp": its layer for multi-token
                            prediction. None, where a model is given: what its folder holds, a head of one of these kinds, or
                            "draft_model". Several, in a list: what they draft is merged into one tree
    num_speculative_tokens  drafts of a sequence in a step at most; None: a number that suits the method. "lookahead" needs
                            2 * (lookahead_ngram - 1)
    model                   of "draft_model", "eagle", "eagle3" and "medusa": a folder, a hub id or the name of a bundled model;
                            of "mtp" only where the layer is not in the model's own folder. Where several methods draft with a
                            model or a head, an object: method -> model
    revision                of `model`, where it is one hub id: branch, tag or commit
    max_model_len           of a draft model or a head with a layer: longer sequences get no drafts of it; None: the model's
    quantization            of "draft_model" and of heads: "int8" or "int4" quantises the weights that draft
                            when they are loaded, so that drafts come sooner; None leaves them as they are stored
    adaptive                measure what drafts cost and gain, and draft as many as pay; False: always as many as possible
    acceptance_method       "rejection_sampler": lossless, every token is the one that plain decoding samples.
                            "typical_acceptance_sampler" is lossy and changes outputs: of sampled requests a draft is also taken
                            where its probability exceeds min(posterior_threshold, posterior_alpha * exp(-entropy)), the
                            likeliest if there are several; outputs depend on what is drafted then, and the seed does not
                            determine them. Greedy requests stay exact, constraints are kept
    posterior_threshold, posterior_alpha
                            of the latter
    prompt_lookup_min, prompt_lookup_max
                            tokens that must stand there before, and that are compared at most; of "ngram", the former of
                            "suffix" too
    suffix_decoding_max_tree_depth       tokens that are compared at most
    suffix_decoding_max_cached_requests  past responses that are kept, of all salts together, a million tokens
                            at most; 0: only the request itself
    suffix_decoding_max_spec_factor      drafts per token that was found equal
    suffix_decoding_min_token_prob       the least share of the places that must go on so
    suffix_decoding_use_tree_spec        draft a tree of all continuations, the likeliest first, where a chain takes one
    lookahead_window        of "lookahead": places ahead that are guessed at once
    lookahead_ngram         of "lookahead": tokens of the runs that are collected, the first one included
    lookahead_guesses       of "lookahead": runs that are verified in a step at most. All in all a sequence has
                            (lookahead_window + lookahead_guesses) * (lookahead_ngram - 1) drafts
    draft_top_k             of heads: tokens that are tried after each token. 1, or None: a chain; more: a tree, of which the
                            num_speculative_tokens likeliest tokens are drafted. "eagle", "eagle3" and "mtp" grow it level by
                            level, from as many tokens of each at most (EAGLE-2). Elsewhere speculative_eagle_topk
    draft_depth             of heads: levels of a tree, or tokens of a chain, at most; None: all of "medusa", 5 of the others'
                            trees. Elsewhere speculative_num_steps
    draft_p_min             of a draft model and of heads that draft chains, one token after the other: greedy drafts end before
                            the first with which all of them are less likely than this, by the logits of what drafts them
                            times 4; from 0, all are made, to 1. None: 0.35 of heads, 0 of a draft model
    medusa_choices          of "medusa": the tree, as a list of paths of ranks, the best first ([[0], [0, 0], [1]]); of these as
                            many are drafted as there is room for. None: the tree that is stored with the heads, unless there
                            is none or draft_top_k is given; `quire calibrate-tree` finds and stores the best
    skipped_layers          of "self": layers that the model drafts without, from 0; `quire calibrate-layers` finds them
    """

    method: str | tuple[str, ...] | None = None
    num_speculative_tokens: int | None = None
    model: str | dict[str, str] | None = None
    revision: str | None = None
    max_model_len: int | None = None
    quantization: Literal["int8", "int4"] | None = None
    adaptive: bool = True
    acceptance_method: Literal["rejection_sampler", "typical_acceptance_sampler"] = "rejection_sampler"
    posterior_threshold: float = _POSTERIOR[0]
    posterior_alpha: float = _POSTERIOR[1]
    prompt_lookup_min: int = LOOKUP[0]
    prompt_lookup_max: int = LOOKUP[1]
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 1000
    suffix_decoding_max_spec_factor: float = 2.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_use_tree_spec: bool = False
    lookahead_window: int = 5
    lookahead_ngram: int = 4
    lookahead_guesses: int = 5
    draft_top_k: int | None = None
    draft_depth: int | None = None
    draft_p_min: float | None = None
    medusa_choices: Choices | None = None
    skipped_layers: tuple[int, ...] | None = None
    draft_min_share: InitVar[float | None] = None  # the old name of draft_p_min

    def __post_init__(self, draft_min_share: float | None) -> None:
        take_old_name(self, "draft_min_share", draft_min_share, "draft_p_min", "speculative_config: ")
        for name in ("method", "skipped_layers"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(cast("list[Any]", value)))
        self._check_methods()
        self._check_belonging()
        self._check_layers()
        check_int("lookahead_window", self.lookahead_window, 1, MAX_SPECULATIVE_TOKENS)
        check_int("lookahead_ngram", self.lookahead_ngram, 2, MAX_SPECULATIVE_TOKENS)
        check_int("lookahead_guesses", self.lookahead_guesses, 1, MAX_SPECULATIVE_TOKENS)
        self._check_what_drafts()
        self._check_choices()
        self._check_acceptance()
        if self.num_speculative_tokens is None and self.method is not None:
            object.__setattr__(self, "num_speculative_tokens", self._default_tokens())
        check_int("num_speculative_tokens", self.max_tokens, 1, MAX_SPECULATIVE_TOKENS)
        self._check_room()
        for name in ("adaptive", "suffix_decoding_use_tree_spec"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"speculative_config: {name} must be true or false, got {value!r}")
        check_int("prompt_lookup_min", self.prompt_lookup_min, 1, 64)
        check_int("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min if "ngram" in self.methods else 1, 1024)
        check_int("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, self.prompt_lookup_min, 1024)
        check_int("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0, 1_000_000)
        check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0, 100.0)
        if self.draft_p_min is not None:
            check_number("draft_p_min", self.draft_p_min, 0.0, 1.0)
        check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0)

    @property
    def has_draft_heads(self) -> bool:
        """Whether a method drafts with a head, which may read the model's embedding and LM head."""
        return any(method in _HEADS for method in self.methods)

    def _check_methods(self) -> None:
        for method in self.methods or (None,):
            if method not in METHODS:
                state = "is not supported yet" if str(method) in _KNOWN_ELSEWHERE else "is unknown"
                what = "method is missing" if method is None else f"method {method!r} {state}"
                raise ConfigError(f"speculative_config: {what}; the methods are {', '.join(METHODS)}")
        if len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"speculative_config: a method stands twice in {list(self.methods)}; name each once")
        self._check_models([method for method in self.methods if method in (*_WITH_MODEL, *_PERHAPS_WITH_MODEL)])

    def _check_models(self, methods: list[str]) -> None:
        """Check the model against the methods that draft with a model or a head; an object for one method becomes its text."""
        model: object = self.model
        if isinstance(model, dict) and self.method is None:
            raise ConfigError(f"speculative_config: beside a model for each method name the methods, got {model!r} alone")
        if len(methods) > 1 and not isinstance(model, dict) and (model is not None or set(methods) & set(_WITH_MODEL)):
            raise ConfigError(
                f"speculative_config: {' and '.join(methods)} draft with a model or a head: give `model` as an object with "
                f'one for each, {{"{methods[0]}": ..., "{methods[1]}": ...}}, got {model!r}'
            )
        given = cast("dict[object, object]", model) if isinstance(model, dict) else dict.fromkeys(methods[:1], model)
        given = {method: one for method, one in given.items() if isinstance(model, dict) or one is not None}
        for method, one in given.items():
            if method not in methods:
                raise ConfigError(
                    f"speculative_config: model has one for {method!r}; those of the methods that draft with one are {methods}"
                )
            if not isinstance(one, str):
                raise ConfigError(f"speculative_config: model must be text: a folder, a hub id or a bundled model, got {one!r}")
        lacking = [method for method in methods if method in _WITH_MODEL and method not in given]
        if lacking or (not methods and model is not None):
            name = repr(lacking[0]) if lacking else repr(self.method)
            wanted = "a model: a folder, a hub id or a bundled one" if lacking else "no model"
            raise ConfigError(f"speculative_config: method {name} takes {wanted}, got {model!r}")
        if isinstance(model, dict) and len(methods) == 1:
            object.__setattr__(self, "model", given[methods[0]] if given else None)

    def _check_belonging(self) -> None:
        for field in dataclasses.fields(self):
            methods, value = _OF_METHODS.get(field.name), getattr(self, field.name)
            if methods is not None and value != field.default and not set(methods) & set(self.methods):
                raise ConfigError(
                    f"speculative_config: {field.name} is {value!r}, but it is of {', '.join(methods)} alone, got method "
                    f"{self.method!r}; leave it out"
                )
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 1, 1 << 40)
        if self.revision is not None and (not isinstance(self.revision, str) or not isinstance(self.model, str)):
            raise ConfigError(
                f"speculative_config: revision must be text, of one model on the hub, got {self.revision!r} with model "
                f"{self.model!r}"
            )

    def _check_what_drafts(self) -> None:
        has_weights = self.model is not None or any(method in _PERHAPS_WITH_MODEL for method in self.methods)
        if self.quantization is not None and (not has_weights or self.quantization not in ("int8", "int4")):
            raise ConfigError(
                "speculative_config: quantization must be int8, int4 or null, of a draft model or of heads, "
                f"got {self.quantization!r} with method {self.method!r} and model {self.model!r}"
            )
        if self.draft_top_k is not None:
            check_int("draft_top_k", self.draft_top_k, 1, MAX_SPECULATIVE_TOKENS)
        if self.draft_depth is not None:
            check_int("draft_depth", self.draft_depth, 1, MAX_SPECULATIVE_TOKENS)
        if self.draft_p_min and (self.top_k > 1 or not any(method in _ONE_BY_ONE for method in self.methods)):
            raise ConfigError(
                f"speculative_config: draft_p_min is {self.draft_p_min}, but only {', '.join(_ONE_BY_ONE)} draft "
                f"chains that end with it, got {self.method!r}{' and a tree' if self.top_k > 1 else ''}; leave it out"
            )
        for name in ("draft_top_k", "draft_depth"):
            if getattr(self, name) is not None and not any(method in _HEADS for method in self.methods):
                raise ConfigError(
                    f"speculative_config: {name} is {getattr(self, name)}, but of the methods only {', '.join(_HEADS)} draft "
                    f"trees with it, got {self.method!r}; leave it out"
                )

    def _check_choices(self) -> None:
        if self.medusa_choices is None:
            return
        if "medusa" not in self.methods or self.draft_top_k is not None:
            raise ConfigError(
                "speculative_config: medusa_choices are of method 'medusa', without draft_top_k, got them with "
                f"{self.method!r} and draft_top_k {self.draft_top_k!r}"
            )
        choices = read_choices(self.medusa_choices, "speculative_config", MAX_SPECULATIVE_TOKENS)
        object.__setattr__(self, "medusa_choices", choices)

    def _check_acceptance(self) -> None:
        if self.acceptance_method not in _ACCEPTANCE_METHODS:
            raise ConfigError(
                f"speculative_config: acceptance_method must be one of {', '.join(_ACCEPTANCE_METHODS)}, got "
                f"{self.acceptance_method!r}"
            )
        check_number("posterior_threshold", self.posterior_threshold, 0.0, 1.0)
        check_number("posterior_alpha", self.posterior_alpha, 0.0, 1.0)
        given = (self.posterior_threshold, self.posterior_alpha)
        if self.acceptance_method == "rejection_sampler" and given != _POSTERIOR:
            raise ConfigError(
                "speculative_config: posterior_threshold and posterior_alpha are of acceptance_method "
                "'typical_acceptance_sampler', which changes outputs; name it, or leave them out"
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
            check_int("a layer of skipped_layers", layer, 0, 100_000)

    def _default_tokens(self) -> int:
        return min(MAX_SPECULATIVE_TOKENS, sum(self._default_tokens_of(method) for method in self.methods))

    def _check_room(self) -> None:
        """Raise ConfigError where "lookahead" has no room for a column to guess in and a run of guesses to verify."""
        least = 2 * (self.lookahead_ngram - 1)
        if "lookahead" in self.methods and self.max_tokens < least:
            raise ConfigError(
                "speculative_config: with method 'lookahead' num_speculative_tokens must be 2 * (lookahead_ngram - 1), "
                f"{least}, or more, to guess and to verify, got {self.max_tokens}; raise it, or lower lookahead_ngram"
            )

    def _default_tokens_of(self, method: str) -> int:
        if method == "medusa" and self.medusa_choices is not None:
            return len(self.medusa_choices)
        if method == "lookahead":
            count = (self.lookahead_window + self.lookahead_guesses) * (self.lookahead_ngram - 1)
            if count > MAX_SPECULATIVE_TOKENS:
                raise ConfigError(
                    f"speculative_config: (lookahead_window + lookahead_guesses) * (lookahead_ngram - 1) is {count}, more than "
                    f"the {MAX_SPECULATIVE_TOKENS} drafts that can be verified at once; lower one of them"
                )
            return count
        is_tree = method in _HEADS and self.top_k > 1
        return _TREE_TOKENS if is_tree and method != "medusa" else _DEFAULT_TOKENS[method]

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods, mostly one."""
        if self.method is None:
            return () if self.model is None else ("draft_model",)
        return self.method if isinstance(self.method, tuple) else (self.method,)

    @property
    def is_typical(self) -> bool:
        """Whether drafts are taken that were not sampled, which changes outputs."""
        return self.acceptance_method == "typical_acceptance_sampler"

    @property
    def top_k(self) -> int:
        """Tokens that a head tries after each token; never None."""
        return self.draft_top_k or 1

    def model_of(self, method: str) -> str | None:
        """Return the model of a method; None: it has none, or lies in the folder of the model that is drafted for."""
        return self.model.get(method) if isinstance(self.model, dict) else self.model

    def depth_of(self, method: str) -> int:
        """Return how many levels a tree of a head, or tokens a chain of it, has at most."""
        return self.draft_depth or (_DEFAULT_DEPTH if self.top_k > 1 and method != "medusa" else MAX_SPECULATIVE_TOKENS)

    def p_min_of(self, method: str) -> float:
        """Return how likely the drafts of a method have to be for going on with them."""
        if self.draft_p_min is not None:
            return self.draft_p_min
        return 0.0 if method == "draft_model" else _P_MIN

    @property
    def max_tokens(self) -> int:
        """Drafts of a sequence in a step at most; never None."""
        return self._default_tokens() if self.num_speculative_tokens is None else self.num_speculative_tokens

    @classmethod
    def read(cls, value: Self | dict[str, Any] | str) -> Self:
        """Return the configuration that JSON or a dict of it describes. Raises ConfigError."""
        if isinstance(value, cls):
            return value
        hint = f'; give {{"method": "{value}"}}' if isinstance(value, str) and value in METHODS else ""
        options = renamed(parse_object("speculative_config", value, "method and its options", hint))
        check_keys("speculative_config", options, [field.name for field in dataclasses.fields(cls)], ["draft_min_share"])
        return cls(**options)
