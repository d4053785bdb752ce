"""What launching costs on a GPU, for bench/gpu.py: a launch in a graph and by itself, ahead of its predecessor's end, and how
long the GPU waits between captured steps.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.bound import run_by_triton
from quire.kernels.triton.launching import Launch
from quire.worker.device.graphs import CudaGraphCapturer, GraphCapturer

Row = dict[str, object]
Stamp = TypeVar("Stamp")
_LAUNCHES = 200
_REPLAYS = 20


@triton.jit
def add_one(x_ptr: tl.tensor, IS_AHEAD: tl.constexpr) -> None:
    """Add 1 to the first number; IS_AHEAD: the kernel begins before the one before has ended, and waits for it."""
    if IS_AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(x_ptr, tl.load(x_ptr) + 1)


def launch_rows(device: torch.device) -> Iterator[Row]:
    """Yield the time of a kernel that does next to nothing, one behind the other, in us: what each launch adds to a step."""
    x = torch.zeros(1, dtype=torch.int32, device=device)
    if device.type != "cuda":
        _launch(x, is_ahead=False).run()
        yield {"section": "launches", "kind": "one by one", "us": None}
        return
    for name, is_ahead, is_captured, run in (
        ("in a graph", False, True, Launch.run),
        ("in a graph, ahead", True, True, Launch.run),
        ("one by one", False, False, Launch.run),
        ("one by one, by Triton", False, False, run_by_triton),
    ):
        x.zero_()
        seconds = _time_launches(x, is_ahead, is_captured, run)
        row: Row = {"section": "launches", "kind": name, "us": seconds * 1e6}
        yield row | {"is_right": int(x) % _LAUNCHES == 0 and int(x) > 0}


def _launch(x: Tensor, is_ahead: bool) -> Launch:
    return Launch(add_one, (1,), {"x_ptr": x}, {"IS_AHEAD": is_ahead}, num_warps=1, is_pdl=is_ahead)


def _time_launches(x: Tensor, is_ahead: bool, is_captured: bool, launch: Callable[[Launch], None]) -> float:
    """Return the median seconds of a launch, of so many one behind the other."""

    def run() -> None:
        for _ in range(_LAUNCHES):
            launch(_launch(x, is_ahead))

    run()
    torch.cuda.synchronize()
    if is_captured:
        run = CudaGraphCapturer(x.device).capture(run)
    times: list[float] = []
    for _ in range(_REPLAYS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1000 / _LAUNCHES)
    return sorted(times)[len(times) // 2]


class StampedCapturer(Generic[Stamp]):
    """Captures steps whose replays each stand between two stamps; see idle_share.

    errors  of captures
    """

    def __init__(self, capturer: GraphCapturer, stamp: Callable[[], Stamp]) -> None:
        self._capturer, self._stamp = capturer, stamp
        self.spans: list[tuple[Stamp, Stamp]] = []
        self.errors: list[str] = []

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture a step; see GraphCapturer. What it raises, with which steps go on one by one, is noted."""
        try:
            replay = self._capturer.capture(step)
        except Exception as error:
            self.errors.append(repr(error))
            raise

        def stamped() -> None:
            first = self._stamp()
            replay()
            self.spans.append((first, self._stamp()))

        return stamped


class RepeatingCapturer:
    """Stands for a capturer where nothing can be captured: launches a step again one by one."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return the step."""
        return step


DeviceCapturer = StampedCapturer[torch.cuda.Event] | StampedCapturer[float]


def stamped_capturer(device: torch.device) -> DeviceCapturer:
    """Return a capturer with stamps of the device's own clock, or of the host's where it is the host."""
    if device.type != "cuda":
        return StampedCapturer(RepeatingCapturer(), time.perf_counter)

    def stamp() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return StampedCapturer(CudaGraphCapturer(device), stamp)


def idle_share(spans: Sequence[tuple[Stamp, Stamp]], seconds_between: Callable[[Stamp, Stamp], float]) -> float:
    """Return which share of the time from the first step's beginning to the last one's end the GPU had no step to run.

    spans  of steps one behind the other, at least two, in order; the copy that a step begins with counts as idle
    """
    busy_s = sum(seconds_between(first, last) for first, last in spans)
    idle_s = sum(max(0.0, seconds_between(end, begin)) for (_, end), (begin, _) in itertools.pairwise(spans))
    return idle_s / (busy_s + idle_s)


def measured_idle_share(capturer: DeviceCapturer, num_steps: int) -> Row:
    """Return idle_share of the last so many replays of a capturer of `stamped_capturer`, once they are done, as part of a row;
    or why steps were not captured."""
    if capturer.errors:
        return {"error": f"{len(capturer.errors)} kinds of steps were not captured", "output": capturer.errors[0]}
    spans = capturer.spans[-num_steps:]
    if len(spans) < 2:
        return {"error": f"{len(spans)} steps were replayed"}
    if isinstance(spans[0][0], float):
        return {"idle_share": idle_share(spans, lambda first, last: last - first)}
    torch.cuda.synchronize()
    return {"idle_share": idle_share(spans, lambda first, last: first.elapsed_time(last) / 1000)}
