"""AsyncLLM: the engine in a thread of its own, its outputs as asynchronous iterators."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from quire.base.errors import QuireError, WorkerError
from quire.base.logging import get_logger
from quire.contracts.outputs import RequestOutput
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.engine.config import make_config
from quire.engine.llm_engine import LLMEngine
from quire.engine.request_factory import PromptLike

logger = get_logger(__name__)

_Item = RequestOutput | QuireError


class AsyncLLM:
    """Serve many requests of one event loop or several; while none is there, the engine's thread sleeps.

    model, options  as for LLM
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LLMEngine(make_config(model=model, **options))
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Callable[[_Item], None]] = {}
        self._ids = itertools.count()
        self._failure: QuireError | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: PromptLike, sampling_params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request as deltas, the last with finished=True.

        Leaving the iteration early aborts the request. Raises RequestError when it is invalid or can never fit, and
        WorkerError when the engine has stopped.
        """
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        request = await asyncio.to_thread(self.engine.make_request, request_id, prompt, sampling_params)
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[_Item] = asyncio.Queue()

        def sink(item: _Item) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(items.put_nowait, item)

        self._send(lambda: self._submit(request, sink))
        is_finished = False
        try:
            while not is_finished:
                item = await items.get()
                if isinstance(item, QuireError):
                    is_finished = True
                    raise item
                is_finished = item.finished
                yield item
        finally:
            if not is_finished and self._failure is None:
                self._send(lambda: self._abort(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last output with finish_reason "abort". Unknown ids are ignored."""
        self._send(lambda: self._abort(request_id))

    def close(self) -> None:
        """Abort what runs, stop the thread and release the memory."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join()

    def _send(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._commands.put(command)

    def _submit(self, request: Request, sink: Callable[[_Item], None]) -> None:
        try:
            self.engine.submit(request, "delta")
        except QuireError as error:
            sink(error)
            return
        self._sinks[request.request_id] = sink

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort_request(request_id)
        if output is not None:
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        sink = self._sinks[output.request_id]
        if output.finished:
            del self._sinks[output.request_id]
        sink(output)

    def _run(self) -> None:
        try:
            while self._obey():
                for output in self.engine.step():
                    self._deliver(output)
            failure = WorkerError("the engine has been closed")
        except Exception as error:
            logger.exception("the engine stopped")
            failure = WorkerError(f"the engine stopped: {type(error).__name__}: {error}")
        with self._lock:
            self._failure = failure
        self._drain()
        for request_id, sink in self._sinks.items():
            logger.warning("request %s ends unfinished: %s", request_id, failure)
            sink(failure)
        self._sinks.clear()
        self.engine.close()

    def _obey(self) -> bool:
        """Carry out the commands that wait, sleeping until there is one when there is nothing else to do."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _drain(self) -> None:
        """Take in the requests that arrived while the engine stopped, so that they hear of it; no more can follow."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
