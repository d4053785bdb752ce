"""The answers of /classify, /pooling, /v1/score and /v1/rerank."""

from __future__ import annotations

import msgspec

from quire.api.openai.answers import PromptUsage


class Classification(msgspec.Struct):
    """What one input is: the likeliest label, and a number for each class."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(msgspec.Struct):
    """All inputs."""

    id: str
    object: str
    created: int
    model: str
    data: list[Classification]
    usage: PromptUsage


class Pooled(msgspec.Struct):
    """One vector, or the scores of classes; as text it is base64 of little-endian 32-bit floats."""

    index: int
    object: str
    data: list[float] | str


class PooledList(msgspec.Struct):
    """All inputs."""

    id: str
    object: str
    created: int
    model: str
    data: list[Pooled]
    usage: PromptUsage


class Score(msgspec.Struct):
    """One pair."""

    index: int
    object: str
    score: float


class Scores(msgspec.Struct):
    """All pairs."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class RankedDocument(msgspec.Struct):
    """A document of the request."""

    text: str


class Ranked(msgspec.Struct, omit_defaults=True):
    """One document; index is its place in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(msgspec.Struct):
    """Documents, the best first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[Ranked]
