"""watch_loop: how late the event loop comes round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

IDLE_PERIOD_S = 0.25
BUSY_PERIOD_S = 0.02


async def watch_loop(report: Callable[[float], None], is_busy: Callable[[], bool] = lambda: False) -> None:
    """Report again and again, until cancelled, how many seconds later than asked for a timer of the running loop went off.

    is_busy  whether there is work that makes it worth looking more often
    """
    loop = asyncio.get_running_loop()
    while True:
        period_s = BUSY_PERIOD_S if is_busy() else IDLE_PERIOD_S
        due_s = loop.time() + period_s
        await asyncio.sleep(period_s)
        report(max(loop.time() - due_s, 0.0))
