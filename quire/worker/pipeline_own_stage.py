"""OwnStage: the first pipeline stage, in a thread of the leader's process, where a launcher starts a process per stage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from quire.base.errors import QuireError
from quire.parallel.barrier import AbortReason, ProcessBarrier
from quire.parallel.ring import RingMessage, decode_message, encode_message, message_bytes
from quire.worker.parallel_messages import Call, Encoded
from quire.worker.pipeline_memory import PipelineMemory
from quire.worker.pipeline_worker import StageExecutor

_LEAVE_S = 2.0


class OwnStage:
    """Makes the calls that the leader sends, in order, as the process of a stage does.

    executor  of the stage; closed with this
    memory    of the stage
    barrier   of the leader: it gets the reason where a call fails
    timeout_s until the stages of other hosts must have computed a step; None: they are on this host, where they are watched
    """

    def __init__(
        self, executor: StageExecutor, memory: PipelineMemory, barrier: ProcessBarrier, timeout_s: float | None
    ) -> None:
        self.memory, self.timeout_s = memory, timeout_s
        self._executor, self._barrier = executor, barrier
        self._messages: SimpleQueue[RingMessage | Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-stage-0", daemon=True)
        self._thread.start()

    def send(self, message: Encoded) -> None:
        """Make a call after those that were sent before."""
        header, arrays = message
        body = np.empty(message_bytes(arrays), np.uint8)
        encode_message(body, header, arrays)
        self._messages.put(decode_message(body))

    def wait(self) -> None:
        """Wait until all calls are made. Raises WorkerError if the group ends."""
        is_done = threading.Event()
        self._messages.put(is_done.set)
        while not is_done.wait(0.1):
            self._barrier.check()

    def _run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                if not isinstance(message, RingMessage):
                    message()
                elif not self._executor.follow(Call(int(message.header[0]))):
                    self._executor.make_call(message)
        except Exception as error:  # noqa: BLE001 - told by the barrier
            text = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
            self._barrier.abort(0, AbortReason.FAILED, f"{self._barrier.describe_rank(0)} failed: {text}")

    def close(self) -> None:
        """End the thread, and release the stage."""
        self._messages.put(None)
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive():  # it may wait for a rank of its stage, or be sending to a stage, that is stopped
            self._barrier.abort(0, AbortReason.FAILED, "rank 0 was closed while its pipeline stage computed")
            self._executor.close_links()
        self._thread.join()
        self._executor.close()
