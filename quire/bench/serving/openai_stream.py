"""Request bodies of the OpenAI API, and the parser of their streams, which writes a RequestRecord."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from quire.bench.serving.records import RequestRecord


class EventSplitter:
    """Splits a stream into the data of its events. Comments, and fields other than `data`, are ignored."""

    def __init__(self) -> None:
        self._rest = b""
        self._held = b""
        self._is_start = True

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are complete now, lines joined by newlines."""
        if self._held or b"\r" in data:
            data = self._normalise(data)
        if self._rest:
            data = self._rest + data
        if self._is_start and len(data) >= 3:
            self._is_start = False
            data = data.removeprefix(b"\xef\xbb\xbf")
        *blocks, self._rest = data.split(b"\n\n")
        events = [_data_of(block) for block in blocks]
        return [event for event in events if event is not None]

    def finish(self) -> list[bytes]:
        """Return the data of a last event without a terminating empty line."""
        rest, self._rest, self._held = self._rest, b"", b""
        event = _data_of(rest)
        return [] if event is None else [event]

    def _normalise(self, data: bytes) -> bytes:
        """Return the bytes with all line ends as newlines; a final carriage return waits for the next byte."""
        data = self._held + data
        self._held = b""
        if data.endswith(b"\r"):
            self._held = b"\r"
            data = data[:-1]
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data_of(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


try:
    import msgspec
except ImportError:  # an extra; the standard library is slower but equivalent
    JSON_PARSER = "json"
    decode_json: Callable[[bytes], Any] = json.loads
    JSON_ERRORS: tuple[type[Exception], ...] = (ValueError, RecursionError)
else:
    JSON_PARSER = "msgspec"
    decode_json = msgspec.json.Decoder().decode
    JSON_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)

_MAX_MESSAGE = 300
_VISIBLE = (None, "content", "refusal")
_CONTENT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


class StreamRecorder:
    """Writes the events of one response into its record, each with the time of the bytes that completed it.

    keeps_text  also collect the text of the output, to count its tokens after the run
    """

    def __init__(self, record: RequestRecord, keeps_text: bool = False) -> None:
        self.text: list[str] | None = [] if keeps_text else None
        self._record = record
        self._splitter = EventSplitter()

    def on_body(self, data: bytes, now: float) -> None:
        """Process a part of the body that came at `now`."""
        for event in self._splitter.feed(data):
            self._take(event, now)

    def finish(self, now: float) -> None:
        """Judge the stream at its regular end: it must have reported how it ended."""
        record = self._record
        for event in self._splitter.finish():
            self._take(event, now)
        if record.outcome == "failed":
            return
        if record.finish_reason is None and not record.has_done:
            record.fail("incomplete", "the stream ended without a finish_reason and without [DONE]", now)
        elif record.finish_reason == "error":
            record.fail("stream_error", "the stream ended with finish_reason error", now)
        elif record.first_choice_s is None:
            record.fail("empty", "the stream ended without any choice", now)
        else:
            record.outcome = "ok"
            record.end_s = now

    def _take(self, event: bytes, now: float) -> None:
        record = self._record
        if event == b"[DONE]":
            record.has_done = True
            return
        if record.outcome == "failed":
            return
        record.num_events += 1
        try:
            chunk = decode_json(event)
            self._read(chunk, now)
        except JSON_ERRORS as error:
            record.fail("bad_json", f"an event is not JSON ({error}): {event[:80]!r}", now)
        except (AttributeError, TypeError, KeyError, IndexError) as error:
            record.fail("bad_event", f"an event is not of the API ({type(error).__name__}: {error}): {event[:80]!r}", now)

    def _read(self, chunk: dict[str, Any], now: float) -> None:
        record = self._record
        error = chunk.get("error")
        if error:
            record.fail("stream_error", describe_error(error), now)
            return
        choices = chunk.get("choices")
        has_content = False
        if choices:
            if record.first_choice_s is None:
                record.first_choice_s = now
            record.last_choice_s = now
            for choice in choices:
                kind = self._read_choice(choice)
                has_content = has_content or kind is not None
                if kind == "visible" and record.first_visible_s is None:
                    record.first_visible_s = now
            if has_content:
                record.content_s.append(now)
        usage = chunk.get("usage")
        if usage:
            self._read_usage(usage, has_content)

    def _read_choice(self, choice: dict[str, Any]) -> Literal["visible", "hidden"] | None:
        """Return whether a choice has content that people see, or reasoning or a tool call; None: it has none."""
        reason = choice.get("finish_reason")
        if reason is not None:
            self._record.finish_reason = reason
        delta = choice.get("delta")
        name = None if delta is None else next((name for name in _CONTENT_FIELDS if delta.get(name)), "content")
        piece = choice.get("text") if delta is None or name is None else delta.get(name)
        if not piece:
            return None
        if self.text is not None:
            self.text.append(piece if isinstance(piece, str) else json.dumps(piece))
        return "visible" if name in _VISIBLE else "hidden"

    def _read_usage(self, usage: dict[str, Any], has_content: bool) -> None:
        record = self._record
        record.usage_prompt_tokens = _count(usage, "prompt_tokens", record.usage_prompt_tokens)
        record.usage_output_tokens = _count(usage, "completion_tokens", record.usage_output_tokens)
        details = usage.get("prompt_tokens_details")
        if details:
            record.usage_cached_tokens = _count(details, "cached_tokens", record.usage_cached_tokens)
        if has_content and record.usage_output_tokens is not None:
            record.content_tokens.append(record.usage_output_tokens)


def _count(fields: dict[str, Any], name: str, before: int | None) -> int | None:
    """Return a token count, or the previous one if it is absent. Raises TypeError for other types."""
    value = fields.get(name)
    if value is None:
        return before
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}")
    return value


def describe_error(error: Any) -> str:
    """Return the message of an `error` field, or of a whole error body, truncated to a line."""
    if isinstance(error, dict):
        error = error.get("error", error)
    if isinstance(error, dict):
        error = error.get("message", error)
    return " ".join(str(error).split())[:_MAX_MESSAGE]


def completion_body(model: str, prompt: Any, num_tokens: int, options: dict[str, Any]) -> bytes:
    """Return the JSON of POST /v1/completions, streamed. prompt: text or token ids; options override other fields."""
    return _encode({"model": model, "prompt": prompt, "max_tokens": num_tokens}, options)


def chat_body(model: str, messages: Any, num_tokens: int, options: dict[str, Any]) -> bytes:
    """Return the JSON of POST /v1/chat/completions, streamed. messages: a user's text, or a list of messages."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return _encode({"model": model, "messages": messages, "max_completion_tokens": num_tokens}, options)


def _encode(body: dict[str, Any], options: dict[str, Any]) -> bytes:
    whole = {**body, "stream": True, "stream_options": {"include_usage": True}, **options}
    return json.dumps(whole, separators=(",", ":")).encode()
