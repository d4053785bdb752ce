"""SamplingParams: how the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import math
import sys
from dataclasses import InitVar, dataclass
from typing import cast

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint, StructuredOutputsParams
from quire.contracts.kv_compression import KvCompression, as_kv_compression

MAX_BEAM_WIDTH = 64
MAX_STRINGS = 256
MAX_STRING_LENGTH = 4096
MAX_CHOICES = 128


def _check_number(name: str, value: object, low: float, high: float, low_open: bool = False, param: str | None = None) -> None:
    bounds = f"{'>' if low_open else '>='} {low:g}" + ("" if math.isinf(high) else f" and <= {high:g}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared with the largest float and not by math.isfinite, which overflows on a huge int; NaN fails every comparison.
    if not is_number or not low <= value <= min(high, sys.float_info.max) or (low_open and value == low):  # type: ignore[operator]
        raise RequestError(f"{name} must be a finite number {bounds}, got {value!r}", param or name)


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise RequestError, naming the field, unless it is an integer in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        allowed = f">= {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be an integer {allowed}, got {value!r}", name)


def check_flag(name: str, value: object) -> None:
    """Raise RequestError, naming the field, unless it is a bool."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, got {value!r}", name)


def _check_structured(name: str, value: object) -> None:
    if not isinstance(value, StructuredOutputsParams):
        raise RequestError(
            f"{name} must be a StructuredOutputsParams, such as StructuredOutputsParams(json=schema) (with regex, choice, "
            f"grammar, json_object or structural_tag in its place), got {type(value).__name__}",
            name,
        )


def _as_items(value: object) -> tuple[object, ...] | None:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(cast("list[object]", value)) if isinstance(value, list | tuple) else None


def _as_strings(name: str, value: object) -> tuple[str, ...]:
    items = _as_items(value)
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise RequestError(f"{name} must be a non-empty string or a list of them, got {value!r}", name)
    return cast("tuple[str, ...]", items)


def _as_token_ids(name: str, value: object) -> tuple[int, ...]:
    items = _as_items(value)
    if items is None or not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
        raise RequestError(f"{name} must be a list of token ids >= 0, got {value!r}", name)
    return cast("tuple[int, ...]", items)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request. Raises RequestError, with the field in `param`, when one is invalid.

    n                    choices to return; they share the prompt's KV blocks
    best_of              choices to generate (>= n); the n with the highest mean log probability are returned
    temperature          0 is greedy (ties go to the lowest token id); otherwise logits are divided by it
    top_p, top_k, min_p  nucleus mass in (0, 1]; number of candidates, 0 or -1 for all; share of the best probability
    typical_p            locally typical sampling (Meister et al., 2022), mass in (0, 1]
    repetition_penalty   > 1 divides positive and multiplies negative logits of tokens in prompt and output
    presence_penalty     subtracted from the logits of tokens in the output, [-2, 2]
    frequency_penalty    subtracted once per occurrence in the output, [-2, 2]
    logit_bias           token id -> value in [-100, 100] added to its logit
    allowed_token_ids    when given, no other token can be sampled
    bad_words            texts that the output never contains, however they are cut into tokens (white space before one aside)
    stop                 strings that end the output, which is cut before them (after, with include_stop_str_in_output)
    stop_token_ids       tokens that end the output, in addition to the model's own end-of-sequence tokens
    ignore_eos           do not end at the model's end-of-sequence tokens
    max_tokens           output tokens at most; None: until the model's length is reached
    min_tokens           no end-of-sequence or stop before this many output tokens; an output that a constraint has completed,
                         so that nothing can follow, ends all the same
    seed                 same seed, same tokens, whatever else is in the batch; None: drawn from the engine's seed
    logprobs             return this many most likely tokens and the chosen one per output token (the engine's max_logprobs,
                         20 by default, is the limit); -1: the whole vocabulary, where the engine allows it
    prompt_logprobs      likewise for each prompt token but the first
    detokenize           False leaves `text` empty, and stop strings are then refused
    skip_special_tokens  leave special tokens out of the text
    priority             lower runs first under the priority policy
    kv_compression       evict KV blocks, which changes the output, or leave keys unread: a KvCompression, or a dict of its
                         fields; None: keep and read all
    structured_outputs   what the output has to look like: a JSON schema, a regular expression, a grammar, ...
    guided_decoding      another name of structured_outputs, which holds it afterwards
    constraint           the same, as the engine runs it; follows from structured_outputs where that is given
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    priority: int = 0
    kv_compression: KvCompression | None = None
    structured_outputs: StructuredOutputsParams | None = None
    constraint: Constraint | None = None
    guided_decoding: InitVar[StructuredOutputsParams | None] = None

    def __post_init__(self, guided_decoding: StructuredOutputsParams | None) -> None:
        inf = math.inf
        if guided_decoding is not None:
            self._take_guided(guided_decoding)
        check_int("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None:
            check_int("best_of", self.best_of, self.n, MAX_CHOICES)
        _check_number("temperature", self.temperature, 0.0, inf)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_int("top_k", self.top_k, -1)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("typical_p", self.typical_p, 0.0, 1.0, low_open=True)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, inf, low_open=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._check_logit_bias()
        self._normalise_lists()
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            check_flag(name, getattr(self, name))
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), -1)
        check_int("priority", self.priority, -(2**31), 2**31 - 1)
        if self.stop and not self.detokenize:
            raise RequestError("stop needs the text: it cannot be used with detokenize=False", "stop")
        self._resolve_constraint()
        self._check_compression()
        if self.temperature == 0 and self.num_sequences > 1:
            raise RequestError(
                f"n and best_of must be 1 at temperature 0, where every choice would be the same, got {self.num_sequences}",
                "n" if self.n > 1 else "best_of",
            )

    def _take_guided(self, asked: object) -> None:
        _check_structured("guided_decoding", asked)
        if self.structured_outputs is not None:
            raise RequestError("guided_decoding is structured_outputs by another name: give one", "guided_decoding")
        object.__setattr__(self, "structured_outputs", asked)

    def _resolve_constraint(self) -> None:
        asked = self.structured_outputs
        if asked is not None:
            _check_structured("structured_outputs", asked)
            derived = asked.constraint()
            if self.constraint not in (None, derived):
                raise RequestError("structured_outputs and constraint exclude each other: give one", "structured_outputs")
            object.__setattr__(self, "constraint", derived)
        elif self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise RequestError(f"constraint must be a Constraint, got {type(self.constraint).__name__}", "constraint")

    def _check_compression(self) -> None:
        if self.kv_compression is None:
            return
        object.__setattr__(self, "kv_compression", as_kv_compression(self.kv_compression))
        if self.num_sequences > 1 and self.kv_compression.evicts:
            raise RequestError(
                f"kv_compression needs one choice, whose blocks no other choice reads: n and best_of must be 1, got "
                f"{self.num_sequences}",
                "kv_compression",
            )

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise RequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}", "logit_bias")
        _as_token_ids("logit_bias", list(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            _check_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, param="logit_bias")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller's own may change later

    def _normalise_lists(self) -> None:
        if self.allowed_token_ids is not None:
            allowed = _as_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError("allowed_token_ids must not be empty; leave it None to allow all", "allowed_token_ids")
            object.__setattr__(self, "allowed_token_ids", allowed)
        for name in ("stop", "bad_words"):
            strings = _as_strings(name, getattr(self, name))
            if len(strings) > MAX_STRINGS or any(len(string) > MAX_STRING_LENGTH for string in strings):
                raise RequestError(
                    f"{name} may hold {MAX_STRINGS} strings of {MAX_STRING_LENGTH} characters, got {len(strings)} strings, "
                    f"the longest of {max(map(len, strings))} characters",
                    name,
                )
            object.__setattr__(self, name, strings)
        object.__setattr__(self, "stop_token_ids", _as_token_ids("stop_token_ids", self.stop_token_ids))

    @property
    def num_sequences(self) -> int:
        """How many sequences the request runs: best_of, or n without it."""
        return self.n if self.best_of is None else self.best_of

    @property
    def needs_logprob(self) -> bool:
        """Whether the log probability of the chosen tokens has to be computed."""
        return self.logprobs is not None or self.num_sequences > self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`. Raises RequestError, with the field in `param`, when one is invalid.

    beam_width      hypotheses that are kept and returned, 1 to 64
    max_tokens      output tokens at most
    ignore_eos      do not end hypotheses at end-of-sequence tokens
    length_penalty  hypotheses rank by cumulative log probability / (number of output tokens ** length_penalty)
    structured_outputs  what every hypothesis has to look like; the probabilities stay the model's own, over all tokens
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_int("max_tokens", self.max_tokens, 1)
        check_flag("ignore_eos", self.ignore_eos)
        _check_number("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.structured_outputs is not None:
            _check_structured("structured_outputs", self.structured_outputs)
