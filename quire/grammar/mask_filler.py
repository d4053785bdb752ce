"""MaskFiller: fills the masks of constrained outputs in threads, while the model runs; none waits for a slow one."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.grammar.masks import MaskFill

_MAX_INLINE_S = 2e-4
"""Maximum cost of masks that the caller fills itself: waking a thread, which then needs the GIL too, takes longer."""
_SHARE_S = 5e-4
"""Minimum cost of masks for which another thread is woken."""
_HIDDEN_S = 2e-3
"""Total cost of masks that a step hides, or half of the step if that is more; the most expensive ones beyond it are filled
separately."""
_NUM_THREADS = 4
_CORES_PER_SLOW_THREAD = 4
"""Slow masks need few of the cores that the model uses. Their threads must not have a lower priority: they hold the GIL now and
then, and all threads wait for that."""


class MaskFiller:
    """Fills masks in its own threads. One thread calls start and wait.

    Outputs share threads, the cheapest mask first, as long as a step hides the total cost. If one is unexpectedly expensive,
    those after it can be moved to another thread (`start_again`). From then on its masks are filled by a few threads for slow
    ones, until they are cheap again.

    clock  CPU time of the calling thread in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.clock = clock
        num_cores = os.cpu_count() or 1
        self._max_shares = min(_NUM_THREADS, num_cores)
        self._quick = ThreadPoolExecutor(_NUM_THREADS, "quire-masks")
        num_slow = min(_NUM_THREADS, max(1, num_cores // _CORES_PER_SLOW_THREAD))
        self._slow = ThreadPoolExecutor(num_slow, "quire-slow-masks")
        self._news = threading.Condition()
        self._is_asked_for_any = False
        self._is_closed = False

    def start(self, fills: Sequence[MaskFill], step_s: float = 0.0, is_alone: bool = False) -> None:
        """Begin to fill; each fill reports when it is done.

        step_s    duration of the step that they are for
        is_alone  nothing else waits for the caller: masks that are very cheap are filled at once
        """
        if is_alone and len(fills) == 1 and fills[0].expected_s <= _MAX_INLINE_S:
            self._fill(fills)
            return
        left_s = max(_HIDDEN_S, step_s / 2)
        cheap: list[MaskFill] = []
        for fill in sorted(fills, key=_mask_s):
            mask_s = fill.cost.mask_s
            if math.isinf(mask_s):
                self._submit(self._quick, (fill,))
                continue
            left_s -= mask_s
            if left_s >= 0:
                cheap.append(fill)
            else:
                fill.is_slow = True
                self._submit(self._slow, (fill,))
        if not cheap:
            return
        total_s = sum([fill.expected_s for fill in cheap])
        num_shares = max(1, min(self._max_shares, len(cheap), int(total_s / _SHARE_S)))
        for index in range(num_shares):
            self._submit(self._quick, cheap[index::num_shares])

    def start_again(self, fills: Sequence[MaskFill]) -> None:
        """Restart fills that wait behind a slow one."""
        for fill in fills:
            if not fill.is_begun and not fill.is_slow:
                self._submit(self._quick, (fill,))

    def _submit(self, threads: ThreadPoolExecutor, fills: Sequence[MaskFill]) -> None:
        try:
            threads.submit(self._fill, fills)
        except RuntimeError:  # the system has no thread for it
            self._fill(fills)

    def _fill(self, fills: Sequence[MaskFill]) -> None:
        for fill in fills:
            with self._news:
                if fill.is_begun or self._is_closed:
                    continue
                fill.is_begun = True
            begin_s = self.clock()
            fill.run()
            fill.cost.note((self.clock() - begin_s) / max(1, fill.num_filled))
            with self._news:
                fill.is_done = True
                if self._is_asked_for_any:
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for_all(self, fills: Sequence[MaskFill], timeout_s: float | None) -> bool:
        """Wait until all are done or the timeout passes, None: no timeout; return whether all are done."""
        if all(fill.is_done for fill in fills):
            return True
        with self._news:
            return self._news.wait_for(lambda: all(fill.is_done for fill in fills), timeout_s)

    def wait_for_any(self, fills: Sequence[MaskFill], timeout_s: float) -> bool:
        """Wait until one is done or the timeout passes; return whether one is done."""
        with self._news:
            self._is_asked_for_any = True
            try:
                return self._news.wait_for(lambda: any(fill.is_done for fill in fills), timeout_s)
            finally:
                self._is_asked_for_any = False

    def close(self) -> None:
        """Stop the threads; masks that were not begun are not filled any more."""
        with self._news:
            self._is_closed = True
        for threads in (self._quick, self._slow):
            threads.shutdown(cancel_futures=True)


def _mask_s(fill: MaskFill) -> float:
    return fill.cost.mask_s
