"""What an ingress replica and an engine replica of the Ray Serve application send each other; Ray pickles it."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.router.prompt import Prompt

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """One HTTP request for an engine's server. prompt: by which the replica is chosen; None for what no model computes."""

    method: str
    target: bytes
    headers: Headers = field(repr=False)
    body: bytes = field(default=b"", repr=False)
    prompt: Prompt | None = field(default=None, repr=False)
    is_streaming: bool = False


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The first item of an answer; the pieces of the body follow it. replica: whose it is, for the log."""

    status: int
    headers: Headers
    replica: str


@dataclass(frozen=True, slots=True)
class AnswerFailure:
    """The last item of an answer that broke off, or the only one where the engine's server did not answer."""

    message: str
    is_timeout: bool = False
