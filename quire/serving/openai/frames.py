"""Server-sent events of the OpenAI API, and the usage in them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.api.openai.answers import CachedTokens, ReasoningTokens, Usage
from quire.serving.core.events import UsageEnd

DONE = b"data: [DONE]\n\n"
encode_json = msgspec.json.encode


def frame(body: object) -> bytes:
    """Return one event."""
    return b"data: " + encode_json(body) + b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The common fields of all chunks of an answer."""

    id: str
    created: int
    model: str
    fingerprint: str
    service_tier: str | None = None

    def opening(self, kind: str) -> bytes:
        """Return the beginning of a JSON object of this kind, up to "choices"."""
        fields = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        fields["system_fingerprint"] = self.fingerprint
        if self.service_tier is not None:
            fields["service_tier"] = self.service_tier
        return encode_json(fields)[:-1] + b","


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of a stream other than its choices."""

    includes_usage: bool = False
    has_continuous_usage: bool = False


def usage_of(end: UsageEnd) -> Usage:
    """Return the usage of a whole answer."""
    return Usage(
        end.num_prompt,
        end.num_completion,
        end.num_prompt + end.num_completion,
        CachedTokens(end.num_cached, end.num_evicted),
        ReasoningTokens(end.num_reasoning),
    )


class ChunkWriter:
    """Writes the chunks of one stream; the JSON around a choice is encoded only once.

    num_prompt_tokens  for the usage so far
    """

    def __init__(self, head: AnswerHead, kind: str, options: StreamOptions, num_prompt_tokens: int) -> None:
        self._opening = b"data: " + head.opening(kind)
        self._options = options
        self._num_prompt = num_prompt_tokens
        self._num_completion = 0
        self._num_told = 0  # output tokens in the last chunk with usage
        self._closing = b"]"
        if options.includes_usage and not options.has_continuous_usage:
            self._closing += b',"usage":null'
        self._closing += b"}\n\n"

    @property
    def prefix(self) -> bytes:
        """The JSON before the choice of a chunk."""
        return self._opening + b'"choices":['

    @property
    def suffix(self) -> bytes | None:
        """The JSON after the choice of a chunk; None if it is not the same for all chunks."""
        return None if self._options.has_continuous_usage else self._closing

    def add_tokens(self, count: int) -> None:
        """Count output tokens for the usage so far."""
        self._num_completion += count

    def chunk(self, choice: bytes, extra: bytes = b"", has_tokens: bool = True) -> bytes:
        """Return a chunk with one encoded choice; extra is additional JSON of the chunk, with a comma after each field.

        has_tokens  False: the chunk precedes the tokens that were counted last, which its usage excludes
        """
        return b"".join((self._opening, extra, b'"choices":[', choice, self._end(has_tokens)))

    def close(self, usage: UsageEnd) -> bytes:
        """Return the end of the stream."""
        if not self._options.includes_usage:
            return DONE
        return b"".join((self._opening, b'"choices":[],"usage":', encode_json(usage_of(usage)), b"}\n\n", DONE))

    def _end(self, has_tokens: bool) -> bytes:
        if not self._options.has_continuous_usage:
            return self._closing
        if has_tokens:
            self._num_told = self._num_completion
        usage = Usage(self._num_prompt, self._num_told, self._num_prompt + self._num_told)
        return b'],"usage":' + encode_json(usage) + b"}\n\n"


class TextSplicer:
    """Encodes a chunk that has only new text, the most frequent kind: only the text is escaped."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    def chunk(self, text: str) -> bytes:
        """Return the chunk."""
        return self._before + encode_json(text) + self._after
