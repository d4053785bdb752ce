"""watch_loop: how late the event loop comes round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def watch_loop(report: Callable[[float], None], period_s: float = 0.25) -> None:
    """Report every `period_s`, until cancelled, how many seconds later than asked for a timer of the running loop went off."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + period_s
        await asyncio.sleep(period_s)
        report(max(loop.time() - due_s, 0.0))
