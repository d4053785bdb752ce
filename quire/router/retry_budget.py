"""RetryBudget: limits the retries of the router, so that more load never comes of failures alone."""

from __future__ import annotations


class RetryBudget:
    """Lets through `ratio` retries for each request, and up to `burst` at once."""

    def __init__(self, ratio: float, burst: float = 10.0) -> None:
        self._ratio = ratio
        self._burst = burst
        self._left = burst if ratio > 0 else 0.0

    def earn(self) -> None:
        """Note a request."""
        self._left = min(self._left + self._ratio, self._burst)

    def spend(self) -> bool:
        """Take one retry, if any is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
