"""A system that gives no more threads."""

import threading
from contextlib import contextmanager
from unittest import mock


@contextmanager
def no_threads(name):
    """Let no thread whose name begins so be started within the block."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", refuse):
        yield
