"""PageSupply: takes the memory of KV pools from the system before their blocks are written."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from quire.base.logging import get_logger
from quire.kernels.cpu.pages import take_pages
from quire.kv.pool import KvPool

logger = get_logger(__name__)

_AHEAD_TOKENS, _AHEAD_BYTES = 4096, 512 << 20
"""What is kept ready behind the last block that was used: the less of both."""
_CHUNK_BYTES = 2 << 20
"""Of one array: a huge page."""
_START_S = 0.3
"""How long a start may be held up."""
_IDLE_S = 0.02
"""After so long without a step the machine is taken to be idle."""


class PageSupply:
    """Keeps pages ready behind the blocks that will be used next, while no step runs.

    The system finds and clears a page when it is first written. That is in the middle of a step, in every layer, and takes
    milliseconds for a huge page, more under a hypervisor. Blocks that were never used are given out in order, so that what
    is needed next is known. Under a load that never pauses steps take pages themselves.

    others  pools whose blocks have the same ids, those of what drafts
    """

    def __init__(self, pool: KvPool, *others: KvPool) -> None:
        pools = (pool, *others)
        self._arrays = [array for one in pools for array in one.arrays() if array.device.type == "cpu"]
        self._num_blocks = pool.num_blocks
        bytes_per_block = max((array.nbytes // pool.num_blocks for array in self._arrays), default=_CHUNK_BYTES)
        self._chunk = max(1, _CHUNK_BYTES // bytes_per_block)
        all_bytes = max(1, sum(one.spec.bytes_per_block for one in pools))  # 0 where no layer has attention
        ahead = min(_AHEAD_TOKENS // pool.spec.block_size, _AHEAD_BYTES // all_bytes)
        self._ahead = max(self._chunk, ahead)
        self._num_ready = 0
        self._num_wanted = min(self._ahead, self._num_blocks)
        self._num_steps = self._num_seen = 0
        self._is_stepping = self._is_closed = False
        # Lives while there is something to do: a pool that is dropped and not closed is not held by it.
        self._thread: threading.Thread | None = None

    @property
    def num_ready(self) -> int:
        """Blocks whose pages were taken, from the first on."""
        return self._num_ready

    def start(self) -> None:
        """Take pages for as long as a start may be held up, and then beside what comes."""
        end_s = time.monotonic() + _START_S
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            while self._num_ready < self._num_wanted and time.monotonic() < end_s:
                last = self._chunk_end()
                if not all(threads.map(partial(self._take, last), self._arrays)):
                    self._give_up()
                    return
                self._num_ready = last
        if self._num_ready < self._num_wanted:
            self._go_on()

    def __enter__(self) -> None:
        """Take note that a step runs; no pages are taken until it has ended."""
        self._is_stepping = True
        self._num_steps += 1

    def __exit__(self, *_: object) -> None:
        """Take note that the step has ended."""
        self._is_stepping = False

    def use(self, block_ids: Sequence[int]) -> None:
        """Take note of blocks that a step gives out."""
        num_used = max(block_ids, default=-1) + 1
        if self._num_ready - num_used >= self._ahead // 2 or self._num_wanted == self._num_blocks:
            return
        self._num_wanted = min(max(self._num_wanted, num_used + self._ahead), self._num_blocks)
        if self._thread is None or not self._thread.is_alive():
            self._num_ready = max(self._num_ready, num_used)
            self._go_on()

    def close(self) -> None:
        """End what runs beside: it must not touch the pool any more."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()
        self._arrays = []

    def _go_on(self) -> None:
        thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread for it
            self._give_up()
        else:
            self._thread = thread

    def _run(self) -> None:
        try:
            self._take_ahead()
        except Exception:
            logger.exception("taking pages of the KV cache ahead failed unexpectedly")
            self._give_up()

    def _take_ahead(self) -> None:
        while self._num_ready < self._num_wanted:
            last = self._chunk_end()
            for array in self._arrays:
                self._wait_until_idle()
                if self._is_closed:
                    return
                if not self._take(last, array):
                    self._give_up()
                    return
            self._num_ready = last

    def _wait_until_idle(self) -> None:
        while not self._is_closed:
            num_steps = self._num_steps
            if not self._is_stepping and self._num_seen == num_steps:
                return
            self._num_seen = num_steps
            time.sleep(_IDLE_S)

    def _chunk_end(self) -> int:
        return min(self._num_ready + self._chunk, self._num_blocks)

    def _take(self, last: int, array: torch.Tensor) -> bool:
        blocks = array[self._num_ready : last]
        return take_pages(blocks.data_ptr(), blocks.nbytes)

    def _give_up(self) -> None:
        logger.debug("no pages are taken ahead: steps take them when they write them")
        self._num_wanted = self._num_blocks  # nothing more is asked for
