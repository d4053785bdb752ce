"""BatchRunner: runs the lines of batches in a window, beside the online requests and behind them."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from quire.api.decode import LARGE_BYTES
from quire.base.logging import get_logger
from quire.serving.answers import Ready
from quire.serving.batch.line_places import LinePlaces
from quire.serving.batch.lines import body_of
from quire.serving.batch.records import BatchRecord
from quire.serving.batch.store import NO_USAGE, BatchStore, LineResult, TodoLine, TokenUsage
from quire.serving.errors import ApiError
from quire.serving.http.sending import as_api_error
from quire.serving.ignored import IGNORED_HEADER

logger = get_logger(__name__)

MAX_TRIES = 3  # lines that were in flight at so many deaths of the engine are taken to be the cause
COMMIT_SIZE = 64
COMMIT_INTERVAL_S = 0.05
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 10.0
ENGINE_DIED = "engine_error"


class Execute(Protocol):
    """Runs one body in the class of batches, as the online route would run it."""

    def __call__(self, record: BatchRecord, body: bytes) -> Awaitable[Ready]:
        """Return the route's answer. Raises ApiError; cancelling it aborts the request."""
        ...


class _Usage(msgspec.Struct):
    """The tokens in an answer, whichever API it is of."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    input_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None
    output_tokens_details: dict[str, Any] | None = None


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

    What a header would say of unknown fields of the body, a line has beside the body.
    """
    response = {
        "status_code": answer.status,
        "request_id": f"req_{secrets.token_hex(13)}",
        "body": msgspec.Raw(answer.body or b"null"),
    }
    if IGNORED_HEADER in answer.headers:
        response["ignored_params"] = answer.headers[IGNORED_HEADER].split(",")
    return msgspec.json.encode({"id": _request_id(), "custom_id": custom_id, "response": response, "error": None})


def usage_of(body: bytes | None) -> TokenUsage:
    """Return the tokens that an answer says it used."""
    usage = _read_answer(body).usage if body else None
    if usage is None:
        return NO_USAGE
    inputs = usage.prompt_tokens_details or usage.input_tokens_details or {}
    outputs = usage.completion_tokens_details or usage.output_tokens_details or {}
    return TokenUsage(
        usage.prompt_tokens or usage.input_tokens,
        inputs.get("cached_tokens") or 0,
        usage.completion_tokens or usage.output_tokens,
        outputs.get("reasoning_tokens") or 0,
    )


def _request_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


async def run_body(run: Callable[[], Awaitable[Ready]], name: str, count_try: Callable[[], Awaitable[int]]) -> Ready:
    """Return the answer to one body, an error of its own included; what says "come back later" is tried until it is answered.

    run        runs the body once
    name       of the line, for the log
    count_try  notes that the engine died of, or during, this body, and returns how often that was
    """
    wait_s = FIRST_WAIT_S
    while True:
        try:
            return await run()
        except ApiError as error:
            if error.code == ENGINE_DIED:
                is_retried = await count_try() < MAX_TRIES
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
    """The lines of one owner's batches that have begun and not ended, and whose turn it is to begin more."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.num_batches = 0
        self._num_begun = 0
        self._ended = asyncio.Event()

    async def begin(self, max_lines: int) -> None:
        """Count one more, when there are fewer than max_lines; only for whoever has the turn."""
        while self._num_begun >= max_lines:
            self._ended.clear()
            await self._ended.wait()
        self._num_begun += 1

    def end(self) -> None:
        """Count one less."""
        self._num_begun -= 1
        self._ended.set()


class BatchRunner:
    """Runs batches: those of one owner in the order in which they came, those of several owners beside each other.

    A batch of an owner begins when all lines of the one before have begun. As many lines of an owner are begun as might run
    at once; a line holds one of the places that all owners share only while it runs, and not while it waits to be tried again.

    call_store   runs a method of the store in its thread
    max_running  how many lines may run at once, asked anew for each; see LinePlaces
    """

    def __init__(self, call_store: Callable[..., Awaitable[Any]], execute: Execute, max_running: Callable[[], int]) -> None:
        self._call_store = call_store
        self._execute = execute
        self._max_running = max_running
        self._places = LinePlaces(max_running)
        self._owners: dict[str, _OwnersLines] = {}

    async def run(self, record: BatchRecord) -> None:
        """Run every line of a batch that has not ended yet. When cancelled, what is running is aborted and stays to be run."""
        saver = _Saver(self._call_store)
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
            await asyncio.shield(saving)

    async def _begin_lines(self, record: BatchRecord, owner: _OwnersLines, saver: _Saver, group: asyncio.TaskGroup) -> None:
        after = -1
        async with owner.turn:
            while lines := await self._call_store(BatchStore.todo, record.id, after, 256):
                for line in lines:
                    await owner.begin(max(1, self._max_running()))
                    task = group.create_task(self._run_line(record, line, saver))
                    task.add_done_callback(lambda _task: owner.end())
                after = lines[-1].n

    async def _run_line(self, record: BatchRecord, line: TodoLine, saver: _Saver) -> None:
        async def run() -> Ready:
            async with self._places.place(record.owner):
                body = body_of(await self._call_store(BatchStore.read_line, record.input_file_id, line))
                return await self._execute(record, body)

        async def count_try() -> int:
            return await self._call_store(BatchStore.count_try, record.id, line.n)

        answer = await run_body(run, f"{line.custom_id[:100]!r} of {record.id}", count_try)
        is_success = answer.status == 200

        def result() -> LineResult:
            usage = usage_of(answer.body) if is_success else NO_USAGE
            return LineResult(record.id, line.n, is_success, answer_line(line.custom_id, answer), usage)

        is_large = len(answer.body or b"") > LARGE_BYTES
        saver.add(await asyncio.to_thread(result) if is_large else result())


class _Saver:
    """Commits results in groups: at 64, or 50 ms after the first."""

    def __init__(self, call_store: Callable[..., Awaitable[Any]]) -> None:
        self._call_store = call_store
        self._pending: deque[LineResult] = deque()
        self._wake = asyncio.Event()
        self._is_finished = False
        self._failure: BaseException | None = None

    def add(self, result: LineResult) -> None:
        """Take a result in; it is on the disk within 50 ms, or run ends with the error, which the next call raises, too."""
        if self._failure is not None:
            raise self._failure
        self._pending.append(result)
        self._wake.set()

    def finish(self) -> None:
        """Save what is there, and end."""
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
                    await self._call_store(BatchStore.save_results, group)
        except BaseException as error:
            self._failure = error
            raise
