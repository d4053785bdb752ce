"""ResumableStream: the tokens of a stream that were passed on, so that another backend can continue it.

quire tells the tokens of the frames before it in a comment (see quire.serving.resume_wire). What has come without such a
comment is kept back, so the client has whole deltas only, and a backend that goes on from their tokens sends what follows.
"""

from __future__ import annotations

import secrets
import time

from quire.router.upstream import Headers, UpstreamError
from quire.serving.resume_wire import (
    END_COMMENT,
    RESUMABLE_HEADER,
    RESUME_HEADER,
    TOKENS_COMMENT,
    pack_tokens,
    read_tokens_comment,
)

PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages"})
"""Of the APIs whose streams quire can continue."""
_RESUMABLE = RESUMABLE_HEADER.encode()
_RESUME = RESUME_HEADER.encode()
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_EVENT_END = b"\n\n"
_MAX_KEPT_BYTES = 16 << 20
_KEEP_ALIVE = b": keep-alive\n\n"
_ENGINE_LOST = (b'"code":"engine_unavailable"', b'"code":"engine_error"', b'"code":"draining"', b'"code":"server_shutdown"')
"""Errors after which another backend may go on."""


class ResumableStream:
    """One stream over all backends that serve it. token_ids: those of the frames that `feed` has returned."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.has_started = False
        self.has_ended = False
        seed, suffix = secrets.randbits(63), "".join(secrets.choice(_LETTERS) for _ in range(29))
        self._head = f"{seed} {suffix} {int(time.time())}".encode()
        self._kept = bytearray()
        self._num_parsed = self._num_searched = 0

    def headers(self, headers: Headers) -> Headers:
        """Return the headers for the next backend."""
        added = [(_RESUMABLE, self._head)]
        if self.token_ids:
            added.append((_RESUME, b"%d" % len(self.token_ids)))
        return [*headers, *added]

    def body(self, body: bytes) -> bytes:
        """Return the body for the next backend: the output so far follows it."""
        return body + pack_tokens(self.token_ids)

    @staticmethod
    def is_marked(status: int, headers: Headers) -> bool:
        """Return whether a backend's answer is such a stream; others than quire know none."""
        return status == 200 and any(name == _RESUMABLE for name, _ in headers)

    @staticmethod
    def shown_headers(headers: Headers) -> Headers:
        """Return the headers for the client."""
        return [(name, value) for name, value in headers if name != _RESUMABLE]

    def feed(self, piece: bytes) -> bytes:
        """Take in what a backend sent; return what the client may have now. Raises UpstreamError for a broken comment."""
        kept = self._kept
        kept += piece
        if len(kept) > _MAX_KEPT_BYTES:
            raise UpstreamError("a stream does not tell its tokens")
        found = bytearray()
        while (end := kept.find(_EVENT_END, self._num_searched)) >= 0:
            begin, end = self._num_parsed, end + len(_EVENT_END)
            frame = bytes(kept[begin:end])
            if frame.startswith(TOKENS_COMMENT):
                self._take_tokens(frame)
                found += kept[:begin]
                del kept[:end]
                end = 0
            elif frame == END_COMMENT:
                self.has_ended = True
                del kept[begin:end]
                end = begin
            elif frame == _KEEP_ALIVE and begin == 0:
                found += frame
                del kept[:end]
                end = 0
            self._num_parsed = self._num_searched = end
        self._num_searched = max(self._num_parsed, len(kept) - 1)
        return bytes(found)

    def _take_tokens(self, comment: bytes) -> None:
        try:
            self.token_ids += read_tokens_comment(comment)
        except ValueError:
            raise UpstreamError("a comment does not tell tokens") from None

    def rest(self) -> bytes:
        """Return what came after the last comment, at the end of an answer: nothing, or an error that the backend tells."""
        return bytes(self._kept)

    @property
    def is_engine_lost(self) -> bool:
        """Whether the answer ended early, or with an error of the backend's engine, after which another one may go on."""
        return not self.has_ended and (b'"error"' not in self._kept or any(code in self._kept for code in _ENGINE_LOST))

    def drop_kept(self) -> None:
        """Forget what the client has not had: another backend will send it."""
        self._kept.clear()
        self._num_parsed = self._num_searched = 0
