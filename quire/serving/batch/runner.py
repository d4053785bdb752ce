"""BatchRunner: runs a window of batch lines with lower priority than online requests."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.api.decode import LARGE_BYTES
from quire.base.logging import get_logger
from quire.serving.answers import Ready
from quire.serving.batch.concurrency import LinePlaces
from quire.serving.batch.lines import body_of
from quire.serving.batch.records import BatchRecord
from quire.serving.batch.store import NO_USAGE, BatchStore, LineResult, TodoLine, TokenUsage
from quire.serving.errors import ApiError, as_api_error
from quire.serving.ignored import IGNORED_HEADER

logger = get_logger(__name__)

MAX_TRIES = 3  # a line that was running at this many engine crashes is assumed to be the cause
COMMIT_SIZE = 64
COMMIT_INTERVAL_S = 0.05
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 10.0
ENGINE_DIED = "engine_error"
LINE_UNREADABLE = "line_unreadable"


class Execute(Protocol):
    """Runs one body with the priority class "batch", as its online route does."""

    def __call__(self, record: BatchRecord, body: bytes) -> Awaitable[Ready]:
        """Return the route's answer. Raises ApiError; cancelling it aborts the request."""
        ...


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The token counts in an answer of any API."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_read_answer = msgspec.json.Decoder(_Answer).decode


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """Return a line of the error file for a request that had no answer."""
    line = {
        "id": _request_id(),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return msgspec.json.encode(line)


def answer_line(custom_id: str, answer: Ready) -> bytes:
    """Return a line of the output file, or of the error file where the status is not 200.

    Unknown fields, which online requests report in a header, are listed next to the body.
    """
    response = {
        "status_code": answer.status,
        "request_id": f"req_{secrets.token_hex(13)}",
        "body": msgspec.Raw(answer.body or b"null"),
    }
    if IGNORED_HEADER in answer.headers:
        response["ignored_params"] = answer.headers[IGNORED_HEADER].split(",")
    return msgspec.json.encode({"id": _request_id(), "custom_id": custom_id, "response": response, "error": None})


def usage_of(body: bytes | None, name: str) -> TokenUsage:
    """Return the token usage in an answer; if it cannot be read, zero, with a log line that has `name`."""
    try:
        usage = _read_answer(body).usage if body else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.warning("the usage in the answer to %s cannot be read: %s", name, error)
        return NO_USAGE
    if usage is None:
        return NO_USAGE
    inputs = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    outputs = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return TokenUsage(
        usage.prompt_tokens or usage.input_tokens,
        inputs.cached_tokens or 0,
        usage.completion_tokens or usage.output_tokens,
        outputs.reasoning_tokens or 0,
    )


class LineEnd(NamedTuple):
    """How a line ended: `result` is its line of the output file, or of the error file."""

    is_success: bool
    result: bytes
    usage: TokenUsage


def line_end(custom_id: str, answer: Ready, name: str) -> LineEnd:
    """Return how a line ended; an answer that cannot be written is an error of that line only."""
    is_success = answer.status == 200
    try:
        return LineEnd(is_success, answer_line(custom_id, answer), usage_of(answer.body, name) if is_success else NO_USAGE)
    except Exception:
        logger.exception("the answer to %s cannot be written", name)
        return LineEnd(False, error_line(custom_id, "internal_error", "the answer could not be written"), NO_USAGE)


def _request_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


async def run_body(run: Callable[[], Awaitable[Ready]], name: str, count_try: Callable[[], Awaitable[int]]) -> Ready:
    """Return the answer to one body, including its errors. Answers that ask to retry later are retried.

    run        runs the body once
    name       of the line, for the log
    count_try  records that the engine died while it ran this body, and returns how often that happened
    """
    wait_s, num_unread = FIRST_WAIT_S, 0
    while True:
        try:
            return await run()
        except ApiError as error:
            if error.code == ENGINE_DIED:
                is_retried = await count_try() < MAX_TRIES
            elif error.code == LINE_UNREADABLE:
                num_unread += 1
                is_retried = num_unread < MAX_TRIES
            else:
                is_retried = error.status in (429, 503) and error.should_retry is not False
            if not is_retried:
                return Ready(msgspec.json.encode(error.openai_body()), error.status)
            await asyncio.sleep(min(error.retry_after_s or wait_s, wait_s))
            wait_s = min(MAX_WAIT_S, 2 * wait_s)
        except Exception as error:  # noqa: BLE001 - one line that cannot be run must not keep the others from it
            failure = as_api_error(error, name)
            return Ready(msgspec.json.encode(failure.openai_body()), failure.status)


class _OwnersLines:
    """The running lines of one owner's batches, and which batch may begin more."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.num_batches = 0
        self._num_begun = 0
        self._ended = asyncio.Event()

    async def begin(self, max_lines: int) -> None:
        """Count one more line, if there are fewer than max_lines; only for the batch that has the turn."""
        while self._num_begun >= max_lines:
            self._ended.clear()
            await self._ended.wait()
        self._num_begun += 1

    def end(self) -> None:
        """Count one less."""
        self._num_begun -= 1
        self._ended.set()


class BatchRunner:
    """Runs batches: those of one owner in order of creation, those of different owners concurrently.
    A batch begins when all lines of the owner's previous batch have begun. An owner begins as many lines as may run at once. A
    line holds one of the places that all owners share only while it runs, not while it waits for a retry.

    call_store   runs a method of the store in its thread
    max_running  returns how many lines may run at once; called for each line, see LinePlaces
    """

    def __init__(self, call_store: Callable[..., Awaitable[Any]], execute: Execute, max_running: Callable[[], int]) -> None:
        self.call_store = call_store
        self._execute = execute
        self._max_running = max_running
        self._places = LinePlaces(max_running)
        self._owners: dict[str, _OwnersLines] = {}

    async def run(self, record: BatchRecord) -> None:
        """Run every unfinished line of a batch. When cancelled, running lines are aborted and stay unfinished."""
        saver = _Saver(self.call_store)
        saving = asyncio.create_task(saver.run())
        owner = self._owners.setdefault(record.owner, _OwnersLines())
        owner.num_batches += 1
        try:
            async with asyncio.TaskGroup() as group:
                await self._begin_lines(record, owner, saver, group)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            owner.num_batches -= 1
            if not owner.num_batches:
                del self._owners[record.owner]
            saver.finish()
            try:
                await asyncio.shield(saving)
            except asyncio.CancelledError:
                await asyncio.gather(saving, return_exceptions=True)  # save the finished lines in any case
                raise

    async def _begin_lines(self, record: BatchRecord, owner: _OwnersLines, saver: _Saver, group: asyncio.TaskGroup) -> None:
        after = -1
        async with owner.turn:
            while lines := await self.call_store(BatchStore.todo, record.id, after, 256):
                for line in lines:
                    await owner.begin(max(1, self._max_running()))
                    task = group.create_task(self._run_line(record, line, saver))
                    task.add_done_callback(lambda _task: owner.end())
                after = lines[-1].n

    async def _run_line(self, record: BatchRecord, line: TodoLine, saver: _Saver) -> None:
        async def run() -> Ready:
            async with self._places.place(record.owner):
                return await self._execute(record, body_of(await self.call_store(_read, record.input_file_id, line)))

        async def count_try() -> int:
            return await self.call_store(BatchStore.count_try, record.id, line.n)

        name = f"{line.custom_id[:100]!r} of {record.id}"
        answer = await run_body(run, name, count_try)
        is_large = len(answer.body or b"") > LARGE_BYTES
        end = (
            await asyncio.to_thread(line_end, line.custom_id, answer, name)
            if is_large
            else line_end(line.custom_id, answer, name)
        )
        saver.add(LineResult(record.id, line.n, *end))


def _read(store: BatchStore, file_id: str, line: TodoLine) -> bytes:
    """Return the bytes of a line. Raises ApiError for this line only; other lines may still be readable."""
    try:
        return store.read_line(file_id, line)
    except OSError as error:
        logger.warning("the line %d of %s cannot be read: %s", line.n, file_id, error)
        raise ApiError(500, "the line could not be read from the input file", code=LINE_UNREADABLE) from None


class _Saver:
    """Commits results in groups: at 64, or 50 ms after the first."""

    def __init__(self, call_store: Callable[..., Awaitable[Any]]) -> None:
        self.call_store = call_store
        self._pending: deque[LineResult] = deque()
        self._wake = asyncio.Event()
        self._is_finished = False
        self._failure: BaseException | None = None

    def add(self, result: LineResult) -> None:
        """Add a result. It is on disk within 50 ms; otherwise `run` ends with the error, which the next call raises too."""
        if self._failure is not None:
            raise self._failure
        self._pending.append(result)
        self._wake.set()

    def finish(self) -> None:
        """Save the remaining results, and end."""
        self._is_finished = True
        self._wake.set()

    async def run(self) -> None:
        """Save until finish is called and nothing is left."""
        try:
            while not self._is_finished or self._pending:
                await self._wake.wait()
                self._wake.clear()
                if len(self._pending) < COMMIT_SIZE and not self._is_finished:
                    await asyncio.sleep(COMMIT_INTERVAL_S)
                while self._pending:
                    group = [self._pending.popleft() for _ in range(min(COMMIT_SIZE, len(self._pending)))]
                    await self.call_store(BatchStore.save_results, group)
        except BaseException as error:
            self._failure = error
            raise
