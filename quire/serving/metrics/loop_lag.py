"""watch_loop: measures the lag of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

IDLE_PERIOD_S = 0.25
BUSY_PERIOD_S = 0.02


async def watch_loop(report: Callable[[float], None], is_busy: Callable[[], bool] = lambda: False) -> None:
    """Report repeatedly, until cancelled, by how many seconds a timer of the running loop was late.

    is_busy  whether there is work; the lag is then measured more often
    """
    loop = asyncio.get_running_loop()
    while True:
        period_s = BUSY_PERIOD_S if is_busy() else IDLE_PERIOD_S
        due_s = loop.time() + period_s
        await asyncio.sleep(period_s)
        report(max(loop.time() - due_s, 0.0))
