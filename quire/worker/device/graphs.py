"""StepGraphs: steps captured once as CUDA graphs, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import product
from typing import Literal, NamedTuple, Protocol
from weakref import WeakSet

import torch

from quire.base.gc_policy import paused_collector
from quire.base.logging import get_logger
from quire.parallel.communicator import CountingCommunicator
from quire.worker.device.faults import is_out_of_memory, release_unused
from quire.worker.device.host_step import SAMPLINGS, Sampling

logger = get_logger(__name__)

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class GraphKey(NamedTuple):
    """What a CUDA graph is for: the number of sequences, of any length; how they are sampled; whether some have adapters; and
    how many are at each home, 0: sequences have no homes. Numbers include padding."""

    num_rows: int
    sampling: Sampling
    has_adapters: bool = False
    home_rows: int = 0

    def __str__(self) -> str:
        more = (", adapters" if self.has_adapters else "") + (f", {self.home_rows} at a home" if self.home_rows else "")
        return f"{self.num_rows} sequences ({self.sampling}{more})"


class CaptureSizes:
    """The keys of decode steps: few, so that few steps are captured; a step takes the next larger one.

    samplings  those of the steps, what takes most memory first
    num_homes  home ranks of sequences; 1: they have no homes
    """

    def __init__(self, max_num_seqs: int, samplings: Sequence[Sampling] = SAMPLINGS[1:3], num_homes: int = 1) -> None:
        self._samplings, self._num_homes = samplings, num_homes
        most = min(max_num_seqs, _ROWS[-1])
        self._rows = [*(count for count in _ROWS if count < most), most] if most else []

    @property
    def max_rows(self) -> int:
        """The most sequences of a CUDA graph, 0: there is none; a larger step is launched one by one."""
        return self._rows[-1] if self._rows else 0

    @property
    def keys(self) -> list[GraphKey]:
        """All keys, the one whose step takes most memory first."""
        found = product(reversed(self._rows), self._samplings)
        return [
            GraphKey(count, sampling, False, at_home) for count, sampling in found for at_home in reversed(self._at_home(count))
        ]

    def key(self, num_rows: int, sampling: Sampling, most_at_home: int = 0) -> GraphKey:
        """Return the smallest key that holds a step; num_rows <= max_rows; most_at_home: sequences of one home at most."""
        count = self._least(num_rows)
        return GraphKey(count, sampling, False, next(rows for rows in self._at_home(count) if rows >= most_at_home))

    def _at_home(self, num_rows: int) -> list[int]:
        """Return for how many sequences of each home there are steps: equally many, twice as many, or all."""
        if self._num_homes == 1:
            return [0]
        even = -(-num_rows // self._num_homes)
        return sorted({self._least(min(count, num_rows)) for count in (even, 2 * even, num_rows)})

    def _least(self, num_rows: int) -> int:
        return next(count for count in self._rows if count >= num_rows)


ShortRuns = Literal["any", "single", "none"]
"""The sequences of few queries in a step: any; all of one query; none. A graph for one also serves those after it."""

SHORT_RUNS: tuple[ShortRuns, ...] = ("any", "single", "none")
_FEWEST_TOKENS, _FEWEST_OF_DRAFTS, _DOUBLED_TO, _PARTS_OF_DOUBLING = 64, 8, 256, 4


class PromptKey(NamedTuple):
    """What a CUDA graph with tokens of prompts is for: the number of tokens, padding included; the longest context; which short
    runs of queries there may be; whether drafts may be trees; and whether some tokens have LoRA adapters."""

    num_tokens: int
    max_context_len: int
    short_runs: ShortRuns
    has_trees: bool = False
    has_adapters: bool = False

    def __str__(self) -> str:
        more = (", trees" if self.has_trees else "") + (", adapters" if self.has_adapters else "")
        return f"{self.num_tokens} tokens of contexts up to {self.max_context_len} ({self.short_runs} short runs{more})"


class PromptCaptureSizes:
    """The keys of steps with prompts: tokens by doubling, then by quarters of it, so that at most a fifth of a step is padding.

    max_tokens        the most of a CUDA graph; 0: there is none
    max_context_lens  rising
    has_drafts        whether steps with few drafts are to be expected, which are smaller than those with prompts
    has_trees         whether some of these are trees
    """

    def __init__(
        self, max_tokens: int, max_context_lens: Sequence[int], has_drafts: bool = False, has_trees: bool = False
    ) -> None:
        self.max_tokens, self._max_context_lens, self._has_trees = max_tokens, max_context_lens, has_trees
        self._tokens: list[int] = []
        count = min(_FEWEST_OF_DRAFTS if has_drafts else _FEWEST_TOKENS, max_tokens)
        while count and count < max_tokens:
            self._tokens.append(count)
            power = 1 << count.bit_length() - 1
            count += power if power < _DOUBLED_TO else power // _PARTS_OF_DOUBLING
        if max_tokens:
            self._tokens.append(max_tokens)

    @property
    def keys(self) -> list[PromptKey]:
        """All keys, the one whose step takes most memory first."""
        kinds = [("any", True)] if self._has_trees else []
        kinds += [(short_runs, False) for short_runs in SHORT_RUNS]
        found = product(reversed(self._tokens), reversed(self._max_context_lens), kinds)
        return [PromptKey(num_tokens, length, *kind) for num_tokens, length, kind in found]

    def key(self, num_tokens: int, longest: int, short_runs: ShortRuns, has_trees: bool = False) -> PromptKey | None:
        """Return the smallest key that holds a step; None: it is launched one by one."""
        if has_trees:
            if not self._has_trees:
                return None
            short_runs = "any"
        count = next((count for count in self._tokens if count >= num_tokens), None)
        most = next((length for length in self._max_context_lens if length >= longest), None)
        return None if count is None or most is None else PromptKey(count, most, short_runs, has_trees)


class GraphCapturer(Protocol):
    """Captures what is launched."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture what a step launches, without running it, and return what launches it again, on the same memory."""
        ...


class CountedCapturer:
    """Captures with another capturer, and counts the collectives of a graph each time that it is launched."""

    def __init__(self, inner: GraphCapturer, communicator: CountingCommunicator) -> None:
        self._inner, self._communicator = inner, communicator

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """See GraphCapturer."""
        return self._communicator.captured(self._inner.capture, step)


class StepGraphs:
    """Runs steps: each kind once as it is, and from then on, with a capturer, as a CUDA graph.

    So the first step of a kind loads its kernels, which no capture may do, and nothing is captured that is never needed.

    agree  returns whether all ranks say yes, which run the same steps: where one cannot capture a kind, all launch it one by
           one, as a collective must be in the graphs of all
    """

    def __init__(self, capturer: GraphCapturer | None = None, agree: Callable[[bool], bool] | None = None) -> None:
        self._capturer, self._agree = capturer, agree
        self._captured: dict[Hashable, Callable[[], None]] = {}
        self._more: list[Callable[[], None]] = []
        self._one_by_one: set[Hashable] = set()  # what cannot be captured

    @property
    def is_enabled(self) -> bool:
        """Whether steps are captured at all; otherwise all are launched one by one."""
        return self._capturer is not None

    @property
    def num_captured(self) -> int:
        """Kinds of steps that are launched as a whole."""
        return len(self._captured)

    def run(self, key: Hashable, step: Callable[[], None], exchange: AbstractContextManager[None] | None = None) -> None:
        """Run a step: all that its launches read and write must lie at the same addresses for the same key.

        exchange  receives what the step reads, and sends on what it wrote before ranks agree: capturing may wait for the device
                  of a rank, which waits for what another one sends

        A kind that cannot be captured, or whose graph finds no memory at its first launch, is launched one by one from then on.
        What the step itself raises is raised.
        """
        captured: Callable[[], None] | None = None
        with nullcontext() if exchange is None else exchange:
            replay = self._captured.get(key)
            if replay is not None and self._replay(key, replay):
                return
            step()
            if self._capturer is None or key in self._one_by_one:
                return
            try:
                captured = self._capturer.capture(step)
            except Exception as error:  # noqa: BLE001 - the step itself has run, and the log says what is wrong
                self._give_up(key, error)
        if self._agree is not None and not self._agree(captured is not None) and captured is not None:
            logger.warning("another rank cannot capture steps of %s: they are launched one by one on all ranks", key)
            self._one_by_one.add(key)
        elif captured is not None:
            self._captured[key] = captured

    def capture_more(self, key: Hashable, step: Callable[[], None], count: int) -> None:
        """Capture a step `count` times more, and run each, to see what they take; they are kept until `clear`.

        Nothing where its kind is not captured. What capturing raises is raised.
        """
        if self._capturer is None or key not in self._captured:
            return
        for _ in range(count):
            self._more.append(self._capturer.capture(step))
            self._more[-1]()

    def _replay(self, key: Hashable, replay: Callable[[], None]) -> bool:
        """Run a graph, and return whether there was memory for that; without, nothing has run."""
        try:
            replay()
        except RuntimeError as error:
            # Other ranks may have launched their graphs, and wait in them for this one.
            if not is_out_of_memory(error) or self._agree is not None:
                raise
            del self._captured[key]
            self._give_up(key, error)
            return False
        return True

    def _give_up(self, key: Hashable, error: Exception) -> None:
        self._one_by_one.add(key)
        if is_out_of_memory(error):
            logger.warning(
                "no memory is left to capture steps of %s: they stay slower; lower gpu_memory_utilization where others use the "
                "device too (%s)",
                key,
                error,
            )
        else:
            logger.error("steps of %s cannot be captured: they stay slower", key, exc_info=error)

    def clear(self) -> None:
        """Forget what was captured, before its memory goes."""
        self._captured.clear()
        self._more.clear()
        self._one_by_one.clear()


class CudaGraphCapturer:
    """Captures CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool: tuple[int, int] | None = None

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture a step that has run before; see GraphCapturer.

        Waits for the device only where memory ends: the allocator then gives back what it caches, which it cannot do in a
        capture, and the step is captured once more.
        """
        try:
            return self._capture(step)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        release_unused(self._device)
        return self._capture(step)

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        pool = self._shared_pool()
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with paused_collector(), torch.cuda.stream(self._stream):
            try:
                # Other threads, such as a caller's own model, may use the device meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    step()
                except BaseException:
                    with suppress(RuntimeError):  # what ended the capture is raised, not that it is incomplete
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException:
                self._leave(pool)
                raise
        current.wait_stream(self._stream)
        self._graphs.add(graph)
        return graph.replay

    def _leave(self, pool: tuple[int, int]) -> None:
        """Tell the allocator that a capture has ended. Some versions of torch do not where it failed, and would never give back
        memory again."""
        end = vars(torch._C).get("_cuda_endAllocateToPool")
        if end is not None:
            with suppress(RuntimeError):  # it knows already
                end(torch.cuda.current_device() if self._device.index is None else self._device.index, pool)

    def _shared_pool(self) -> tuple[int, int]:
        """Return the pool of the graphs that there are, else a new one: torch lets nobody use one whose last graph has gone."""
        if self._pool is None or not self._graphs:
            if self._pool is not None:
                torch.cuda.empty_cache()  # what the graphs that went had of the device
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool
