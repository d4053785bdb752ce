"""Proxy: sends a request to a backend and its answer back, to another backend where that fails before the first byte."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

from quire.base.logging import get_logger
from quire.router.backend import Backend, BackendTable, Flight
from quire.router.config import RouterConfig
from quire.router.incoming import Incoming, end_with_error
from quire.router.metrics import RouterMetrics
from quire.router.owners import ObjectOwners
from quire.router.paths import RETRY_STATUSES
from quire.router.policy import Choice, Choose
from quire.router.prompt import Prompt
from quire.router.resumable import PATHS, ResumableStream
from quire.router.retry_budget import RetryBudget
from quire.router.upstream import Headers, UpstreamAnswer, UpstreamError
from quire.serving.errors import ApiError

logger = get_logger(__name__)

RETRY_AFTER_S = 2.0
_MAX_REFUSAL_BYTES = 64 << 10
_EVENT_END = (b"\n\n", b"\r\n\r\n")
_BROKEN = "the backend failed in the middle of its answer"
_WRONG_ROLE = b'"wrong_role"'


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What backends are sent.

    body             bytes, or pieces as they come, which can be sent once only
    prompt           None for what no model computes
    learns_owner     whether the answer describes an object that its backend keeps
    """

    method: str
    target: bytes
    headers: Headers
    body: bytes | AsyncIterator[bytes]
    prompt: Prompt | None = None
    is_streaming: bool = False
    learns_owner: bool = False
    received_s: float = 0.0


class _NotTakenError(Exception):
    """A backend failed, or refused, before anything of its answer went to the client."""

    def __init__(
        self,
        backend: Backend,
        error: ApiError,
        refusal: _Refusal | None = None,
        *,
        may_retry: bool = True,
        has_changed_role: bool = False,
    ) -> None:
        super().__init__(error.message)
        self.backend = backend
        self.error = error
        self.refusal = refusal
        self.may_retry = may_retry
        self.has_changed_role = has_changed_role


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A backend's own words, passed on where no other backend is left."""

    status: int
    headers: Headers
    body: bytes


class _BrokenStreamError(Exception):
    """A backend failed in the middle of a stream that another one can continue."""

    def __init__(self, backend: Backend, error: UpstreamError) -> None:
        super().__init__(str(error))
        self.backend = backend


class Proxy:
    """Sends requests on. Nothing is kept of an answer but the piece at hand, and a slow client slows its backend down."""

    def __init__(
        self, config: RouterConfig, table: BackendTable, choose: Choose, metrics: RouterMetrics, owners: ObjectOwners
    ) -> None:
        self._config = config
        self._table = table
        self._choose = choose
        self._metrics = metrics
        self._owners = owners
        self._budget = RetryBudget(config.retry_ratio)

    async def send_to_any(self, incoming: Incoming, outgoing: Outgoing, candidates: Collection[Backend]) -> str:
        """Send to the backend that the policy chooses, and to others where it fails; return the name of whose answer it is.

        candidates  that serve the model; those that are not available are left out
        Raises ApiError where none is available, or all fail.
        """
        self._budget.earn()
        tried: list[Backend] = []
        stream = ResumableStream() if self._is_resumable(incoming, outgoing) else None
        while True:
            usable = self._usable(candidates, tried)
            choice = self._choose_one(usable, outgoing.prompt)
            self._note_choice(choice, outgoing.prompt)
            try:
                return await self._attempt(incoming, outgoing, choice, stream)
            except _BrokenStreamError as broken:
                return await self._resume(incoming, outgoing, candidates, stream, broken)
            except _NotTakenError as failure:
                tried.append(choice.backend)
                if not self._may_retry(failure, candidates, tried):
                    return await self._give_up(incoming, failure)
                self._metrics.retries.labels(choice.backend.name).add()
                logger.warning("a request goes to another backend: %s: %s", choice.backend.name, failure)

    def _is_resumable(self, incoming: Incoming, outgoing: Outgoing) -> bool:
        is_told = outgoing.is_streaming and incoming.path in PATHS and isinstance(outgoing.body, bytes)
        return is_told and self._config.max_resumes > 0

    async def _resume(
        self,
        incoming: Incoming,
        outgoing: Outgoing,
        candidates: Collection[Backend],
        stream: ResumableStream | None,
        broken: _BrokenStreamError,
    ) -> str:
        """Let other backends continue a stream; end it with an error event where none can. Return the last one's name."""
        name, last, resumes = broken.backend.name, broken.backend, 0
        candidates = [one for one in candidates if one.model_content in ("", last.model_content) or not last.model_content]
        failed = [last]
        while stream is not None and resumes < self._config.max_resumes:
            resumes += 1
            stream.drop_kept()
            try:
                usable = self._usable(candidates, failed)
                if not self._budget.spend():
                    self._metrics.retries_denied.labels().add()
                    break
                choice = self._choose_one(usable, outgoing.prompt)
                self._note_choice(choice, outgoing.prompt)
                last = choice.backend
                logger.warning("a stream of %s goes on at %s after %d tokens", name, last.name, len(stream.token_ids))
                self._metrics.resumes.labels(last.name).add()
                return await self._attempt(incoming, outgoing, choice, stream)
            except _BrokenStreamError:
                failed = [last]
            except _NotTakenError:
                failed.append(last)
            except ApiError:  # no backend is left
                break
        self._metrics.broken.labels(name).add()
        await end_with_error(incoming, _BROKEN)
        return last.name

    async def send_to(self, incoming: Incoming, outgoing: Outgoing, backend: Backend) -> str:
        """Send to one backend, which has what the request is about. Raises ApiError where it fails."""
        choice = Choice(backend, "owner")
        self._note_choice(choice, outgoing.prompt)
        try:
            return await self._attempt(incoming, outgoing, choice)
        except _NotTakenError as failure:
            return await self._give_up(incoming, failure)

    def _usable(self, candidates: Collection[Backend], tried: list[Backend]) -> list[Backend]:
        """Return those that may be asked, the ones that failed a moment ago only where there are no others."""
        left = [one for one in candidates if one.is_in_service and one not in tried]
        found = [one for one in left if one.is_available] or left
        if not found:
            raise ApiError(
                503,
                f"none of the {len(candidates)} backends that could answer is available",
                code="no_backend_available",
                retry_after_s=RETRY_AFTER_S,
            )
        return found

    def _choose_one(self, usable: list[Backend], prompt: Prompt | None) -> Choice:
        return self._choose(usable, prompt if prompt is not None else Prompt(0, (), b"", 1))

    def _note_choice(self, choice: Choice, prompt: Prompt | None) -> None:
        metrics = self._metrics
        metrics.chosen.labels(choice.reason).add()
        if prompt is not None:
            choice.backend.prompt_counts.sent += prompt.num_tokens
            choice.backend.prompt_counts.predicted += choice.num_cached_tokens
            choice.backend.prefixes.add(prompt.keys)
        if choice.predicted_s is not None:
            metrics.predicted.labels().observe(choice.predicted_s)

    def _may_retry(self, failure: _NotTakenError, candidates: Collection[Backend], tried: list[Backend]) -> bool:
        if not failure.may_retry or len(tried) > self._config.max_retries:
            return False
        if not any(one.is_in_service and one not in tried for one in candidates):
            return False
        if failure.has_changed_role or self._budget.spend():  # a change is no failure, and cannot grow into many retries
            return True
        self._metrics.retries_denied.labels().add()
        return False

    @staticmethod
    async def _give_up(incoming: Incoming, failure: _NotTakenError) -> str:
        refusal = failure.refusal
        if refusal is None:
            raise failure.error
        await incoming.start(refusal.status, refusal.headers)
        await incoming.finish(refusal.body)
        return failure.backend.name

    async def _attempt(
        self, incoming: Incoming, outgoing: Outgoing, choice: Choice, stream: ResumableStream | None = None
    ) -> str:
        """Send to one backend and pass its answer on. Raises _NotTakenError while the client has had nothing of it, and
        _BrokenStreamError after the start of a stream that another backend can continue.
        """
        backend = choice.backend
        num_new = max(outgoing.prompt.num_tokens - choice.num_cached_tokens, 1) if outgoing.prompt is not None else 0
        flight = backend.begin(num_new, outgoing.is_streaming)
        is_good = False
        try:
            answer = await self._open(backend, outgoing, stream)
            async with answer:
                piece = await self._first_piece(backend, outgoing, answer)
                is_marked = stream is not None and stream.is_marked(answer.status, answer.headers)
                if stream is not None and stream.has_started and not is_marked:
                    refusal = ApiError(502, f"a backend cannot continue a stream: status {answer.status}")
                    raise _NotTakenError(backend, refusal)
                self._note_first_byte(backend, flight, outgoing, answer.status)
                if stream is not None and is_marked:
                    is_good = await self._pass_on_marked(incoming, backend, stream, answer, piece)
                else:
                    is_good = await self._pass_on(incoming, backend, outgoing, answer, piece)
        finally:
            backend.end(flight, is_good=is_good and outgoing.prompt is not None)
        return backend.name

    async def _pass_on_marked(
        self, incoming: Incoming, backend: Backend, stream: ResumableStream, answer: UpstreamAnswer, piece: bytes
    ) -> bool:
        """Send the whole deltas of a stream to the client. Raises _BrokenStreamError where it ends early."""
        if not stream.has_started:
            stream.has_started = True
            await incoming.start(answer.status, stream.shown_headers(answer.headers))
        try:
            while piece:
                found = stream.feed(piece)
                if found:
                    await incoming.write(found)
                piece = await answer.next_piece()
            if stream.is_engine_lost:
                raise UpstreamError("a stream ended early, or with an error of the engine")
        except UpstreamError as error:
            logger.warning("an answer of backend %s broke off: %s", backend.name, error)
            self._metrics.failures.labels(backend.name).add()
            backend.note_failure(str(error), is_refused=False)
            raise _BrokenStreamError(backend, error) from None
        await incoming.finish(stream.rest())
        return stream.has_ended

    async def _open(self, backend: Backend, outgoing: Outgoing, stream: ResumableStream | None = None) -> UpstreamAnswer:
        if outgoing.received_s:
            self._metrics.overhead.labels().observe(time.monotonic() - outgoing.received_s)
        headers, body = outgoing.headers, outgoing.body
        if stream is not None and isinstance(body, bytes):
            headers, body = stream.headers(headers), stream.body(body)
        try:
            return await backend.upstream.send(
                outgoing.method,
                outgoing.target,
                headers,
                body,
                idle_timeout_s=self._config.idle_timeout_s,
            )
        except UpstreamError as error:
            raise self._failed(backend, outgoing, error) from None

    async def _first_piece(self, backend: Backend, outgoing: Outgoing, answer: UpstreamAnswer) -> bytes:
        """Return the first bytes of the body; with them in hand the client may be answered."""
        try:
            if answer.status in RETRY_STATUSES:
                body = await answer.read(_MAX_REFUSAL_BYTES)
                refusal = _Refusal(answer.status, [*_without_length(answer.headers), _length(body)], body)
                error = ApiError(answer.status, f"a backend answers {answer.status}")
                is_new_prefill = answer.status == 503 and _WRONG_ROLE in body
                if is_new_prefill:
                    backend.role = "prefill"  # the next load report would say so
                may_retry = isinstance(outgoing.body, bytes)
                raise _NotTakenError(backend, error, refusal, may_retry=may_retry, has_changed_role=is_new_prefill)
            return await answer.next_piece()
        except UpstreamError as error:
            raise self._failed(backend, outgoing, error) from None

    def _failed(self, backend: Backend, outgoing: Outgoing, error: UpstreamError) -> _NotTakenError:
        """Note a failure. One that took too long is not tried again: the client has waited for long enough."""
        self._metrics.failures.labels(backend.name).add()
        backend.note_failure(str(error), is_refused=error.is_refused)
        if error.is_timeout:
            api_error = ApiError(504, "the backend did not answer in time", code="backend_timeout")
        elif error.is_refused:
            api_error = ApiError(
                503, "the backend is not available now", code="backend_unavailable", retry_after_s=RETRY_AFTER_S
            )
        else:
            api_error = ApiError(502, "the backend failed on this request", code="backend_failed")
        logger.warning("backend %s failed: %s", backend.name, error)
        return _NotTakenError(backend, api_error, may_retry=not error.is_timeout and isinstance(outgoing.body, bytes))

    def _note_first_byte(self, backend: Backend, flight: Flight, outgoing: Outgoing, status: int) -> None:
        took_s = backend.first_byte(flight, is_good=status == 200)
        backend.note_success()
        if outgoing.prompt is not None and status == 200:
            self._metrics.ttft.labels().observe(took_s)

    async def _pass_on(
        self, incoming: Incoming, backend: Backend, outgoing: Outgoing, answer: UpstreamAnswer, piece: bytes
    ) -> bool:
        """Send an answer to the client piece by piece; return whether it was a good one, and whole."""
        searched = b""
        await incoming.start(answer.status, answer.headers)
        last = b""
        while piece:
            if outgoing.learns_owner and searched is not None and answer.status < 300:
                searched += piece
                searched = None if self._owners.learn(searched, backend) or len(searched) > _MAX_REFUSAL_BYTES else searched
            await incoming.write(piece)
            last = piece
            try:
                piece = await answer.next_piece()
            except UpstreamError as error:
                await self._break_off(incoming, backend, answer, last, error)
                return False
        await incoming.finish()
        return answer.status == 200

    async def _break_off(
        self, incoming: Incoming, backend: Backend, answer: UpstreamAnswer, last: bytes, error: UpstreamError
    ) -> None:
        """Tell the client that its answer will not be whole: by an event where it is between two, else by the close."""
        logger.warning("an answer of backend %s broke off: %s", backend.name, error)
        self._metrics.broken.labels(backend.name).add()
        backend.note_failure(str(error), is_refused=False)
        media_type = next((value for name, value in answer.headers if name == b"content-type"), b"")
        has_length = any(name == b"content-length" for name, _ in answer.headers)
        if media_type.startswith(b"text/event-stream") and not has_length and last.endswith(_EVENT_END):
            await end_with_error(incoming, _BROKEN)


def _without_length(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name not in (b"content-length", b"transfer-encoding")]


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()
