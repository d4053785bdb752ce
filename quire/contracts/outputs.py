"""RequestOutput and its parts: what the engine hands out, with the names that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.contracts.request import FinishReason
from quire.contracts.timeline import RequestTimeline

PooledT = TypeVar("PooledT")

NOTHING_LEFT = "no token can follow: allowed_token_ids, bad_words and min_tokens exclude every token"
NOTHING_FITS = (
    "no token can follow: the constraint on the output, with allowed_token_ids, bad_words and min_tokens where they are given, "
    "excludes every token"
)
CONTRADICTIONS = frozenset((NOTHING_LEFT, NOTHING_FITS))
"""Errors of requests whose own parameters exclude each other, which nothing but the tokens so far could show."""


@dataclass(slots=True)
class Logprob:
    """The log probability of one token, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request.

    text                the output text: all of it so far, or only what is new in a delta
    token_ids           likewise
    cumulative_logprob  sum over all output tokens, None unless log probabilities were asked for
    logprobs            per output token a dict of token id -> Logprob, the chosen token always in it
    finish_reason       None while it runs; "stop" (end of sequence or stop), "length", "abort" or "error"
    stop_reason         the stop string or stop token id that ended it; None for end of sequence
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether this choice has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of time.monotonic(), and what it reused.

    num_cached_tokens      prompt tokens taken from the prefix cache
    num_preemptions        times that one of its sequences gave up its blocks
    num_evicted_tokens     tokens that kv_compression had evicted from the KV cache at the end
    num_unreturned_tokens  output tokens of the choices of best_of that are not returned; 0 until the request has ended
    timeline               what the engine did for it; None until the request has ended, and unless the engine records that
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_evicted_tokens: int = 0
    num_unreturned_tokens: int = 0
    timeline: RequestTimeline | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def decode_time_s(self) -> float | None:
        """Seconds from the first output token to the end."""
        if self.first_token_time is None or self.finished_time is None:
            return None
        return self.finished_time - self.first_token_time

    @property
    def time_in_queue_s(self) -> float | None:
        """Seconds from arrival to the first scheduled token."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: its prompt, its choices, and whether it has ended.

    prompt_token_ids one list shared by all outputs of the request: do not change it
    metrics          shared by outputs that follow each other until a figure changes: do not change them
    prompt_logprobs  per prompt token a dict of token id -> Logprob; the first token has None. None until the whole prompt
                     is computed; of deltas only the first one after that has them
    error            what went wrong, when a choice has finish_reason "error"
    error_param      the field at fault, where the request itself was: its constraint could not be compiled or cannot go on
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    error: str | None = None
    error_param: str | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one prompt.

    embedding      f32 values, as many as asked for; empty where finish_reason is not "stop"
    finish_reason  "stop", "abort" or "error"
    """

    embedding: list[float]
    finish_reason: FinishReason


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The only output of a request with PoolingParams: it comes when the whole prompt is computed, or the request has failed.

    error  what went wrong, when the finish_reason is "error"
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    metrics: RequestMetrics | None = None
    error: str | None = None


@dataclass(slots=True)
class ClassificationOutput:
    """What a classifier says of one prompt: probs has a number for each class, logits where no activation was asked for."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit together: of a classifier with one label, or the cosine of two embeddings."""

    score: float


@dataclass(slots=True)
class PoolingOutput:
    """What pooling gave of one prompt: a vector, or the scores of classes."""

    data: list[float]


@dataclass(slots=True)
class PoolingRequestOutput(Generic[PooledT]):
    """The output of `LLM.classify`, `LLM.score` or `LLM.encode` for one prompt, or one pair of texts.

    outputs           without numbers where it failed, the score is then NaN
    prompt_token_ids  of a pair those of the prompt made of both, or of one embedding after the other
    error             what went wrong
    """

    request_id: str
    outputs: PooledT
    prompt_token_ids: list[int]
    finished: bool = True
    error: str | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One hypothesis of a beam search; `tokens` starts with the prompt, `score` is after the length penalty."""

    tokens: list[int]
    cumulative_logprob: float
    score: float
    text: str
    finish_reason: FinishReason


@dataclass(slots=True)
class BeamSearchOutput:
    """The hypotheses of one prompt, best first."""

    sequences: list[BeamSearchSequence]
