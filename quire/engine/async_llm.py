"""AsyncLLM: the engine in its own thread, with outputs as asynchronous iterators."""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from quire.base.errors import InvariantError, QuireError, RequestError, WorkerError
from quire.base.logging import get_logger, show_log
from quire.contracts.config import EngineConfig
from quire.contracts.lora import LoRARequest
from quire.contracts.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.engine.llm_engine import EngineOutput, LLMEngine
from quire.engine.request_factory import PromptLike, check_request_id

logger = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Ticket:
    """The destination of the outputs of one call of generate or embed. Outputs after the end of its request are dropped."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[EngineOutput | QuireError]
    is_cancelled: bool = False

    def send(self, item: EngineOutput | QuireError) -> bool:
        """Send an output to the caller's event loop; False if the loop is closed. Called by the engine's thread."""
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:
            return False
        return True


class _Answer:
    """The end of one call of sleep or wake_up: a future of the caller's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future: asyncio.Future[None] = loop.create_future()

    def send(self, error: Exception | None = None) -> None:
        """End the call, with an error if there is one. Called by the engine's thread."""
        _call_in(self._loop, lambda: self._settle(error))

    def _settle(self, error: Exception | None) -> None:
        if self.future.done():  # cancelled
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class AsyncLLM:
    """Serve many requests of one or several event loops; without requests the engine's thread sleeps.

    Holds its memory until `close`, which is also called when the program ends.
    model, options  as for LLM
    """

    def __init__(self, model: str | EngineConfig, **options: Any) -> None:
        show_log()
        self.engine = LLMEngine(model, **options)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of _tickets, _failure and _answers
        self._tickets: dict[str, _Ticket] = {}
        self._failure: str | None = None
        self._answers: list[_Answer] = []  # that callers of sleep and wake_up wait for; changed under the lock
        self._sleepers: list[_Answer] = []  # of calls of sleep, until the engine is asleep; used only by the engine's thread
        self._running: dict[str, _Ticket] = {}  # used only by the engine's thread
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.engine.close()
            raise
        atexit.register(self.close)  # a thread inside torch must not outlive the interpreter

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request as deltas, the last with finished=True.

        Without sampling_params the checkpoint's defaults are used, without lora_request the base model. Leaving the
        iteration early aborts the request.
        Raises RequestError if it is invalid, can never fit or has an id that is in use, and WorkerError if the engine
        has stopped.
        """
        if isinstance(sampling_params, PoolingParams):
            raise RequestError("sampling_params must be a SamplingParams, got PoolingParams: use embed", "sampling_params")
        ticket = self._register(request_id)
        is_finished = False
        try:
            request = await asyncio.to_thread(
                self.engine.make_request, ticket.request_id, prompt, sampling_params, lora_request
            )
            request = await self._compile(request)
            self._send(lambda: self._submit(request, ticket))
            while not is_finished:
                item = await ticket.items.get()
                is_finished = isinstance(item, QuireError) or item.finished
                if isinstance(item, QuireError):
                    raise item
                yield item
        finally:
            self._leave(ticket, is_finished)

    async def embed(
        self, prompt: PromptLike, pooling_params: PoolingParams | None = None, request_id: str | None = None
    ) -> EmbeddingRequestOutput:
        """Return the embedding of a prompt: the last token's hidden state, normalised, unless pooling_params say otherwise.

        Cancelling the call aborts the request; after `abort` the output has finish_reason "abort". Raises as generate does.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise RequestError(f"pooling_params must be a PoolingParams, got {type(params).__name__}", "pooling_params")
        ticket = self._register(request_id)
        is_finished = False
        try:
            request = await asyncio.to_thread(self.engine.make_request, ticket.request_id, prompt, params)
            self._send(lambda: self._submit(request, ticket))
            item = await ticket.items.get()
            is_finished = True
            if isinstance(item, QuireError):
                raise item
            if not isinstance(item, EmbeddingRequestOutput):
                raise InvariantError(f"a request with PoolingParams got a {type(item).__name__}")
            return item
        finally:
            self._leave(ticket, is_finished)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last output with finish_reason "abort". Unknown ids are ignored."""
        with self._lock:
            ticket = self._tickets.get(request_id) if isinstance(request_id, str) else None
        if ticket is not None:
            self._cancel(ticket)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release memory until `wake_up`; return when the engine is asleep. Calls of generate and embed raise WorkerError
        meanwhile.

        level  1: the KV cache is freed, and weights on a GPU are moved to host memory. 2: the weights are dropped, and
               `wake_up` reads them from the checkpoint again
        mode   "abort": unfinished requests end now, with finish_reason "abort". "wait": they are finished first

        The prefix cache is emptied; what KV tiers hold stays. Without an effect if the engine sleeps at this level or a higher
        one. Raises RequestError for other arguments, UnsupportedError if this engine cannot sleep so, and WorkerError if
        wake_up is called before it sleeps.
        """
        answer = _Answer(asyncio.get_running_loop())
        self._send(lambda: self._begin_sleep(level, mode, answer), answer)
        await answer.future

    async def wake_up(self) -> None:
        """Load what sleeping released. Without an effect while the engine is awake.

        Raises ModelFormatError or ConfigError if the model cannot be loaded again; the engine then stays asleep.
        """
        answer = _Answer(asyncio.get_running_loop())
        self._send(lambda: self._wake_up(answer), answer)
        await answer.future

    async def is_sleeping(self) -> bool:
        """Return whether the engine is asleep."""
        return self.engine.is_sleeping

    def close(self) -> None:
        """Abort what runs, stop the thread and release the memory."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join()

    async def _compile(self, request: Request) -> Request:
        """Return the request with its compiled constraint, without blocking a thread. Raises RequestError."""
        compilation = self.engine.start_compilation(request)
        if compilation is None:
            return request
        loop = asyncio.get_running_loop()
        is_done = asyncio.Event()
        compilation.notify(lambda: _call_in(loop, is_done.set))
        await is_done.wait()
        return replace(request, grammar=compilation.result())

    def _register(self, request_id: str | None) -> _Ticket:
        name = f"async-{uuid.uuid4().hex}" if request_id is None else request_id
        check_request_id(name)
        ticket = _Ticket(name, asyncio.get_running_loop(), asyncio.Queue())
        with self._lock:
            if self._failure is not None:
                raise WorkerError(self._failure)
            if name in self._tickets:
                raise RequestError(f"request_id {name!r} is in use", "request_id")
            self._tickets[name] = ticket
        return ticket

    def _leave(self, ticket: _Ticket, is_finished: bool) -> None:
        if not is_finished:
            self._cancel(ticket)
        self._forget(ticket)

    def _forget(self, ticket: _Ticket) -> None:
        with self._lock:
            if self._tickets.get(ticket.request_id) is ticket:
                del self._tickets[ticket.request_id]

    def _cancel(self, ticket: _Ticket) -> None:
        ticket.is_cancelled = True
        with self._lock:
            if self._failure is None:
                self._commands.put(lambda: self._abort(ticket))

    def _send(self, command: Callable[[], None], answer: _Answer | None = None) -> None:
        with self._lock:
            if self._failure is not None:
                raise WorkerError(self._failure)
            if answer is not None:
                self._answers.append(answer)
            self._commands.put(command)

    # What follows runs in the engine's thread.

    def _submit(self, request: Request, ticket: _Ticket) -> None:
        if ticket.is_cancelled:
            ticket.send(_aborted(request))
            return
        try:
            self.engine.submit(request, "delta")
        except Exception as error:  # noqa: BLE001 - it must reach its caller, and nobody else
            ticket.send(error if isinstance(error, QuireError) else WorkerError(f"{type(error).__name__}: {error}"))
            return
        self._running[request.request_id] = ticket

    def _abort(self, ticket: _Ticket) -> None:
        if self._running.get(ticket.request_id) is ticket:
            output = self.engine.abort_request(ticket.request_id)
            if output is not None:
                self._deliver(output)

    def _deliver(self, output: EngineOutput) -> None:
        ticket = self._running.get(output.request_id)
        if ticket is None:  # its caller ended during this step
            return
        if output.finished:
            del self._running[output.request_id]
        if not ticket.send(output):
            logger.warning("request %s is aborted: its event loop is closed", ticket.request_id)
            self._running.pop(ticket.request_id, None)
            self.engine.abort_request(ticket.request_id)
            self._forget(ticket)

    def _begin_sleep(self, level: int, mode: str, answer: _Answer) -> None:
        try:
            self.engine.begin_sleep(level, mode)
        except QuireError as error:
            self._answer(answer, error)
            return
        self._sleepers.append(answer)
        self._end_sleepers()

    def _end_sleepers(self) -> None:
        """Answer the calls of sleep if the engine is asleep."""
        if self._sleepers and self.engine.is_sleeping and not self.engine.has_unfinished_requests():
            sleepers, self._sleepers = self._sleepers, []
            for answer in sleepers:
                self._answer(answer)

    def _wake_up(self, answer: _Answer) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            self._answer(sleeper, WorkerError("wake_up was called before the engine was asleep"))
        try:
            self.engine.wake_up()
        except QuireError as error:
            self._answer(answer, error)
            return
        self._answer(answer)

    def _answer(self, answer: _Answer, error: Exception | None = None) -> None:
        with self._lock:
            self._answers.remove(answer)
        answer.send(error)

    def _run(self) -> None:
        try:
            while self._handle_command():
                for output in self.engine.step():
                    self._deliver(output)
                self._end_sleepers()
            failure = "the engine has been closed"
        except Exception as error:  # the thread ends here; every caller must get the reason
            logger.exception("the engine stopped")
            failure = f"the engine stopped: {type(error).__name__}: {error}"
        with self._lock:
            self._failure = failure
            tickets, answers = list(self._tickets.values()), list(self._answers)
        for ticket in tickets:
            ticket.send(WorkerError(failure))
        for answer in answers:
            answer.send(WorkerError(failure))
        try:
            self.engine.close()
        except Exception:  # already broken and logged above; the memory is freed with the process
            logger.exception("the engine could not be closed")

    def _handle_command(self) -> bool:
        """Execute pending commands; if the engine is idle, sleep until there is one."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Schedule a call in an event loop; ignored if the loop is closed, since then no caller waits."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


def _aborted(request: Request) -> EngineOutput:
    """Return the only output of a request that was aborted before the engine saw it."""
    if request.pooling is not None:
        nothing = EmbeddingOutput([], "abort")
        return EmbeddingRequestOutput(request.request_id, request.prompt, list(request.prompt_token_ids), nothing)
    choices = [CompletionOutput(index, "", [], finish_reason="abort") for index in range(request.params.n)]
    return RequestOutput(request.request_id, request.prompt, list(request.prompt_token_ids), choices, finished=True)
