"""StepGraphs: decode steps recorded once, and launched again as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from quire.base.collector import paused_collector
from quire.base.logging import get_logger
from quire.worker.device.host_step import Sampling

logger = get_logger(__name__)

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_FIRST_CONTEXT = 1024
_CONTEXT_RATIO = 4


class GraphKey(NamedTuple):
    """What a recorded step is for: so many sequences, padding included, of at most so many tokens each."""

    num_rows: int
    max_context_len: int
    sampling: Sampling


class GraphGrid:
    """The keys that there are: few, so that few steps are recorded; a step takes the next larger one."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        most = min(max_num_seqs, _ROWS[-1])
        self._rows = [*(count for count in _ROWS if count < most), most]
        self._contexts = [max_model_len]
        context = _FIRST_CONTEXT
        while context < max_model_len:
            self._contexts.insert(-1, context)
            context *= _CONTEXT_RATIO

    @property
    def max_rows(self) -> int:
        """The most sequences of a recorded step; a larger step is launched one by one."""
        return self._rows[-1]

    def key(self, num_rows: int, context_len: int, sampling: Sampling) -> GraphKey:
        """Return the smallest key that holds a step; num_rows <= max_rows, context_len <= max_model_len."""
        rows = next(count for count in self._rows if count >= num_rows)
        return GraphKey(rows, next(most for most in self._contexts if most >= context_len), sampling)

    @property
    def largest(self) -> GraphKey:
        """The key whose step takes most memory."""
        return GraphKey(self._rows[-1], self._contexts[-1], "cuts")


class GraphRecorder(Protocol):
    """Records what is launched."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record what a step launches, without running it, and return what launches it again, on the same memory."""
        ...


class StepGraphs:
    """Runs decode steps: each kind once as it is, and from then on, with a recorder, as a recorded whole.

    So the first step of a kind compiles its kernels, which no recording may do, and nothing is recorded that is never needed.
    """

    def __init__(self, recorder: GraphRecorder | None = None) -> None:
        self._recorder = recorder
        self._recorded: dict[GraphKey, Callable[[], None]] = {}

    @property
    def num_recorded(self) -> int:
        """Kinds of steps that are launched as a whole."""
        return len(self._recorded)

    def run(self, key: GraphKey, step: Callable[[], None]) -> None:
        """Run a step: all that its launches read and write must lie at the same addresses for the same key."""
        replay = self._recorded.get(key)
        if replay is not None:
            replay()
            return
        step()
        if self._recorder is None:
            return
        try:
            self._recorded[key] = self._recorder.record(step)
        except RuntimeError:
            # The step itself has run. Steps are then slower, and right.
            logger.exception("a step of %d sequences cannot be recorded: from now on no step is", key.num_rows)
            self._recorder = None

    def clear(self) -> None:
        """Forget what was recorded, before its memory goes."""
        self._recorded.clear()


class CudaGraphRecorder:
    """Records CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record a step that has run before; see GraphRecorder."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # What other threads ask of the device meanwhile, as a caller's own model does, must not end the recording.
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        try:
            with paused_collector(), recording:
                step()
        finally:
            torch.cuda.set_stream(stream)  # a recording that fails leaves its own
        return graph.replay
