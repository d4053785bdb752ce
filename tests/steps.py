"""Steps of an engine that wait for a test."""

import itertools
import threading
from typing import Any


def hold_after(llm: Any, num_steps: int, is_released: threading.Event) -> None:
    """Let an engine make ``num_steps`` steps, and the next ones after ``is_released`` is set (or 60 seconds).

    A test that aborts a running request needs this: without it the request may end first.

    Args:
        llm: An :class:`~quire.AsyncLLM`; its engine's ``step`` is replaced.
        num_steps: How many steps are made at once.
        is_released: The event that the later steps wait for.
    """
    real, number = llm.engine.step, itertools.count()

    def step() -> Any:
        if next(number) >= num_steps:
            is_released.wait(60)
        return real()

    llm.engine.step = step
