"""Ports that a test has to know before anything listens on them."""

import os
import random
import socket

FIRST, LAST = 20_000, 32_000
"""Below the range from which the system takes the ports of outgoing connections: none of another test takes them meanwhile."""

_numbers = random.Random(os.getpid())


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing uses, drawn by this process."""
    while True:
        port = _numbers.randrange(FIRST, LAST)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
