"""The HTTP sender: one POST per request, its stream recorded; refusals are retried if configured."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass
from typing import Any

from quire.bench.serving.http_client import Clock, HttpClient, Response
from quire.bench.serving.http_wire import HttpError
from quire.bench.serving.openai_stream import (
    JSON_ERRORS,
    StreamRecorder,
    chat_body,
    completion_body,
    decode_json,
    describe_error,
)
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.workload import Request

_REJECTIONS = (429, 503)
_MAX_RETRY_WAIT_S = 120.0
_FIRST_BACKOFF_S = 0.5


@dataclass(frozen=True, slots=True)
class Api:
    """How requests are encoded. path: of the endpoint; options: fields that override those of every request."""

    path: str
    model: str
    is_chat: bool
    options: dict[str, Any]

    def body(self, request: Request) -> bytes:
        """Return the JSON body of a request."""
        make = chat_body if self.is_chat else completion_body
        return make(self.model, request.prompt, request.num_output_tokens, self.options)


class HttpSender:
    """Sends requests to a server of the OpenAI API.

    Call prepare with all requests before a run, so that none is encoded while the clock runs.

    num_retries  attempts after a refusal (429 or 503), each after the wait that the server asked for, or a growing one
    timeout_s    of one attempt
    keeps_text   collect the outputs' text in `texts`, by index
    """

    def __init__(
        self, client: HttpClient, api: Api, clock: Clock, num_retries: int = 0, timeout_s: float = math.inf, seed: int = 0
    ) -> None:
        self.texts: dict[int, str] = {}
        self.keeps_text = False
        self._client = client
        self._api = api
        self._clock = clock
        self._num_retries = num_retries
        self._timeout_s = None if math.isinf(timeout_s) else timeout_s
        self._jitter = random.Random(seed)
        self._encoded: dict[int, bytes] = {}

    def prepare(self, requests: list[Request]) -> None:
        """Encode the requests of a run; they are later found by identity."""
        self._encoded = {id(request): self._encode(request) for request in requests}

    async def send(self, request: Request, record: RequestRecord) -> None:
        """Complete the record of one request, with its retries."""
        encoded = self._encoded.pop(id(request), None) or self._encode(request)
        record.sent_s = self._clock()
        while True:
            response = await self._attempt(encoded, record)
            if response is None or record.outcome != "rejected" or record.num_retries >= self._num_retries:
                return
            await asyncio.sleep(self._wait_s(response, record.num_retries))
            record.num_retries += 1
            record.outcome, record.error_kind, record.message = "running", "", ""

    async def _attempt(self, encoded: bytes, record: RequestRecord) -> Response | None:
        recorder = StreamRecorder(record, self.keeps_text)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.exchange(encoded, recorder)
        except TimeoutError:
            record.fail("timeout", f"no complete response within {self._timeout_s:g} s", self._clock())
            return None
        except HttpError as error:
            if record.outcome != "failed":  # an error in the stream is the better reason than how it was cut off
                record.fail(error.kind, str(error), self._clock())
            return None
        finally:
            if recorder.text is not None:
                self.texts[record.index] = "".join(recorder.text)
        record.status = response.status
        _judge(response, recorder, record)
        return response

    def _encode(self, request: Request) -> bytes:
        return self._client.encode("POST", self._api.path, self._api.body(request))

    def _wait_s(self, response: Response, num_before: int) -> float:
        asked = retry_after_s(response.headers)
        if asked is None:
            asked = _FIRST_BACKOFF_S * 2**num_before * (0.75 + 0.5 * self._jitter.random())
        return min(asked, _MAX_RETRY_WAIT_S)


def _judge(response: Response, recorder: StreamRecorder, record: RequestRecord) -> None:
    """Write the outcome of an attempt into the record."""
    kind = response.headers.get("content-type", "none")
    if response.status == 200 and kind.startswith("text/event-stream"):
        recorder.finish(response.end_s)
    elif response.status == 200:
        record.fail("no_stream", f"the server answered with content type {kind} and not with a stream", response.end_s)
    else:
        record.fail(f"http_{response.status}", _message_of(response.body), response.end_s)
        if response.status in _REJECTIONS:
            record.outcome = "rejected"


def _message_of(body: bytes) -> str:
    try:
        return describe_error(decode_json(body))
    except JSON_ERRORS:
        return describe_error(body.decode("utf-8", "replace"))


def retry_after_s(headers: dict[str, str]) -> float | None:
    """Return the wait that a refusal asks for, from retry-after-ms or retry-after; None if there is no number."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            wait = float(headers[name]) * unit
        except (KeyError, ValueError):
            continue  # absent, or a date
        if math.isfinite(wait) and wait >= 0:
            return wait
    return None
