"""ConnectionLimit: a limit of connections by the process's open files, with an answer to refused connections."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.base.logging import get_logger
from quire.serving.errors import ApiError

try:
    import resource
except ImportError:  # not a Unix system: it has no such limit
    resource = None  # type: ignore[assignment]

logger = get_logger(__name__)

RESERVED_FILES = 128  # for other files: databases, uploads, the engine's socket, the event loop
TOO_MANY = ApiError(
    503, "the server has as many connections as its limit of open files allows", code="too_many_connections", retry_after_s=2.0
)
_LOG_INTERVAL_S = 10.0


def raise_open_file_limit() -> float:
    """Raise the limit of open files as far as possible and return it; infinite if there is none."""
    if resource is None:
        return math.inf
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and soft != resource.RLIM_INFINITY:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError) as error:  # some systems have a lower, undocumented maximum
            logger.debug("the limit of open files stays at %d: %s", soft, error)
    return math.inf if soft == resource.RLIM_INFINITY else soft


class ConnectionLimit:
    """The limit of a server's connections. Without it, connections are closed without an answer when no file can be opened."""

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._logged_s = -math.inf

    @classmethod
    def of_open_files(cls) -> ConnectionLimit:
        """Raise this process's limit of open files and return the limit of connections."""
        num_files = raise_open_file_limit()
        return cls(max(num_files - RESERVED_FILES, num_files / 2))

    def has_room(self, num_connections: int) -> bool:
        """Return whether this number of connections is allowed; refusals are logged from time to time."""
        if num_connections <= self.most:
            return True
        if self._clock() >= self._logged_s + _LOG_INTERVAL_S:
            self._logged_s = self._clock()
            logger.warning("connections are turned away: %d are open; raise the limit of open files (ulimit -n)", self.most)
        return False
