"""Perplexity: how well a model predicts a text, through the same path that serves requests."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from quire.base.errors import ConfigError, RequestError
from quire.bench.provenance import Provenance, find_provenance
from quire.contracts.config import EngineConfig
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.kv_compression import KvCompression
from quire.contracts.sampling_params import SamplingParams
from quire.engine.llm import LLM

_DEFAULT_CONTEXT = 512
_QUANTIZATIONS = ("none", "int8", "int4")
LOSSY_ROUTING = ("expert_capacity_factor", "expert_bias_rate", "expert_min_share")
"""Options that change which experts a token gets."""


@dataclass(frozen=True, slots=True)
class Windows:
    """How a text is split. Raises ConfigError.

    context     maximum tokens of a window; None: 512, or the model's maximum
    stride      tokens from the start of one window to the next; None: context, so that windows do not overlap. With
                overlap, a token is predicted from at least context - stride tokens, except at the start
    max_tokens  number of tokens used from the start of the text; None: all
    compressions  KV compressions that are measured in addition. All measurements then score only the tokens of a window that
                come after the first eviction: after_tokens, which is half of the context where it is not given
    """

    context: int | None = None
    stride: int | None = None
    max_tokens: int | None = None
    compressions: tuple[KvCompression, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("context", 2), ("stride", 1), ("max_tokens", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")

    def fit(self, max_model_len: int) -> tuple[int, int]:
        """Return context and stride for a model; a sequence has one token of output in addition to its window."""
        context = min(_DEFAULT_CONTEXT, max_model_len - 1) if self.context is None else self.context
        if context >= max_model_len:
            raise ConfigError(f"context must be less than max_model_len ({max_model_len}), got {context}")
        stride = context if self.stride is None else self.stride
        if stride > context:
            raise ConfigError(f"stride must be at most context ({context}), or tokens would be left out; got {stride}")
        return context, stride

    def fit_compression(self, compression: KvCompression | None, context: int) -> KvCompression | None:
        """Return a compression whose first eviction is within a window of `context` tokens. Raises ConfigError."""
        if compression is None:
            return None
        after = compression.after_tokens or max(1, context // 2)
        if after >= context:
            raise ConfigError(f"after_tokens of kv_compression must be less than context ({context}), got {after}")
        return replace(compression, after_tokens=after)

    def first_scored(self, context: int) -> int:
        """Return the first token of a window that is scored."""
        fitted = (self.fit_compression(compression, context) for compression in self.compressions)
        return max((one.after_tokens + 1 for one in fitted if one is not None and one.after_tokens is not None), default=1)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The results of one precision on one text.

    kv_cache_dtype  of the keys and values: the model's dtype or a quantised format
    nats_per_token  mean of -log p over the scored tokens; perplexity is e to the power of it
    kv_compression  what was evicted from the KV cache; None: nothing
    relative        perplexity relative to the first precision of the run, minus 1; None for the first itself
    routing         the options that change which experts are used, and what they have changed; None: there are none
    """

    model: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    nats_per_token: float
    perplexity: float
    num_scored_tokens: int
    num_tokens: int
    context: int
    stride: int
    relative: float | None = None
    kv_compression: str | None = None
    routing: str | None = None

    def describe(self) -> str:
        """Return the results as a readable line."""
        precision = self.dtype if self.quantization is None else f"{self.dtype}, {self.quantization}"
        if self.kv_cache_dtype != self.dtype:
            precision += f", KV cache {self.kv_cache_dtype}"
        if self.kv_compression is not None:
            precision += f", KV compression {self.kv_compression}"
        precision += "" if self.routing is None else f", {self.routing}"
        change = "" if self.relative is None else f", {self.relative:+.2%}"
        return (
            f"{self.model} ({precision}): {self.nats_per_token:.4f} nats/token, perplexity {self.perplexity:.3f}{change} over "
            f"{self.num_scored_tokens:,} tokens in windows of {self.context} every {self.stride}"
        )


@dataclass(frozen=True, slots=True)
class PerplexityRecord:
    """The results of a run and their provenance; `text` is the name of the text."""

    text: str
    results: tuple[Perplexity, ...]
    provenance: Provenance

    def describe(self) -> str:
        """Return the results as readable lines."""
        return "\n".join(result.describe() for result in self.results)

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), indent=2)


def cut_windows(num_tokens: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """Return windows (begin, end, first scored token) over a text: every token but the first of the text, and of windows
    without overlap the first of each, is scored exactly once. A last window of one token has nothing to predict.
    """
    windows: list[tuple[int, int, int]] = []
    scored = 0
    for begin in range(0, num_tokens - 1, stride):
        end = min(begin + context, num_tokens)
        windows.append((begin, end, max(scored, begin + 1)))
        scored = end
        if end == num_tokens:
            break
    return windows


def compare_perplexity(
    config: EngineConfig,
    text: str,
    name: str,
    windows: Windows,
    against: Sequence[str] = (),
    show_progress: bool = False,
    against_kv: Sequence[str] = (),
) -> PerplexityRecord:
    """Measure a precision, and others on the same tokens.

    name        name of the text in the record
    against     each "none", "int8" or "int4" (the option quantization), one of LOSSY_ROUTING with its value
                ("expert_capacity_factor=1.25"), or another model with the same tokenizer
    against_kv  each a value of kv_cache_dtype, with all else as in `config`

    Raises ConfigError, before anything is measured, for a format that there is not.
    """
    configs = [config, *(_variant(config, other) for other in against)]
    configs += [with_kv_format(config, other) for other in against_kv]
    variants: list[_Variant] = [_Variant(one) for one in configs]
    variants += [_Variant(config, compression) for compression in windows.compressions]
    results: list[Perplexity] = []
    tokens: list[int] = []
    for chosen in variants:
        result, tokens = _measure(chosen, text, tokens, windows, show_progress)
        if results:
            result = replace(result, relative=math.expm1(result.nats_per_token - results[0].nats_per_token))
        results.append(result)
    return PerplexityRecord(name, tuple(results), find_provenance())


class _Variant(NamedTuple):
    config: EngineConfig
    compression: KvCompression | None = None


def with_kv_format(config: EngineConfig, kv_format: str) -> EngineConfig:
    """Return a configuration with another kv_cache_dtype, and otherwise the same; "auto" has no layers to skip."""
    skipped = None if kv_format == "auto" else config.kv_cache_dtype_skip_layers
    return replace(config, kv_cache_dtype=kv_format, kv_cache_dtype_skip_layers=skipped)  # type: ignore[arg-type]


def _variant(config: EngineConfig, other: str) -> EngineConfig:
    if other == "none":
        return replace(config, quantization=None)
    if other in _QUANTIZATIONS:
        return replace(config, quantization=other)  # type: ignore[arg-type]
    name, is_option, value = other.partition("=")
    if is_option and name in LOSSY_ROUTING:
        try:
            return replace(config, **{name: float(value)})
        except ValueError:
            raise ConfigError(f"--against {other}: {name} must be a number, got {value!r}") from None
    return replace(config, model=other, quantization=None, revision=None)


def _measure(
    variant: _Variant, text: str, tokens: list[int], windows: Windows, show_progress: bool
) -> tuple[Perplexity, list[int]]:
    """Return the results of one engine, and the tokens of the text, which are computed if none are given."""
    config = variant.config
    llm = LLM(config)
    try:
        report = llm.llm_engine.report
        context, stride = windows.fit(report.memory.max_model_len)
        tokens = tokens or llm.get_tokenizer().encode(text)[: windows.max_tokens]
        if len(tokens) < 2:
            raise RequestError(f"the text has {len(tokens)} tokens; at least 2 are needed to predict one", "text")
        cuts = cut_windows(len(tokens), context, stride)
        compression, first_scored = windows.fit_compression(variant.compression, context), windows.first_scored(context)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, kv_compression=compression)
        prompts = [{"prompt_token_ids": tokens[begin:end]} for begin, end, _ in cuts]
        outputs = llm.generate(prompts, params, use_tqdm=show_progress)
        nats: list[float] = []
        for output, (begin, end, first) in zip(outputs, cuts, strict=True):
            if output.prompt_logprobs is None:
                raise RequestError(f"tokens {begin} to {end} could not be computed: {output.error}", "text")
            for position in range(max(first, begin + first_scored), end):
                entry = output.prompt_logprobs[position - begin]
                assert entry is not None
                nats.append(-entry[tokens[position]].logprob)
        if not nats:
            raise RequestError(f"the text has {len(tokens)} tokens, none of them after {first_scored} of a window", "text")
        routing = _describe_routing(config, llm.llm_engine.stats.experts)
    finally:
        llm.close()
    mean = math.fsum(nats) / len(nats)
    result = Perplexity(
        model=config.model,
        dtype=report.spec.dtype,
        quantization=config.quantization,
        kv_cache_dtype=report.memory.kv.format_name,
        nats_per_token=mean,
        perplexity=math.exp(mean) if mean < 700 else math.inf,
        num_scored_tokens=len(nats),
        num_tokens=len(tokens),
        context=context,
        stride=stride,
        kv_compression=None if compression is None else compression.describe(),
        routing=routing,
    )
    return result, tokens


def _describe_routing(config: EngineConfig, layers: Sequence[ExpertStats]) -> str | None:
    """Return the options that change which experts are used, and the shares of all choices that they have changed."""
    given = [f"{name} {getattr(config, name):g}" for name in LOSSY_ROUTING if getattr(config, name) is not None]
    if not given:
        return None
    overflowed, dropped = sum(one.num_overflowed for one in layers), sum(one.num_dropped for one in layers)
    weak = sum(one.num_weak for one in layers)
    total = max(1, sum(sum(one.tokens) for one in layers) + dropped + weak)
    shares = f"{overflowed / total:.1%} of choices moved, {dropped / total:.1%} dropped, {weak / total:.1%} weak"
    return f"{', '.join(given)} ({shares})"
