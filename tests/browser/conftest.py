"""A real browser without a screen, and a real server for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.browser import Browser, open_browser
from tests.browser.scripted_server import ScriptedServer

START_TIMEOUT_S = 120.0
LISTENING = re.compile(r"listening on (http://\S+)")


class ServerProcess:
    """`quire serve` with the demo model, and a thread that reads what it says."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "quire", "serve", "demo", "--port", "0", "--host", "127.0.0.1", *options]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
        self.said: deque[str] = deque(maxlen=200)
        self.url = ""
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.said.append(line)
            found = LISTENING.search(line)
            if found:
                self.url = found[1]
            if " ready: " in f" {line}":
                self._is_ready.set()
        self._is_ready.set()

    def wait_until_ready(self) -> None:
        if not self._is_ready.wait(START_TIMEOUT_S) or self.process.poll() is not None:
            self.stop()
            pytest.fail("the server did not start:\n" + "".join(self.said))

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)


@pytest.fixture(scope="session")
def chromium() -> None:
    """Skips where there is no browser."""
    pytest.importorskip("selenium", reason="selenium is not installed")
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("chromium and its driver are not installed")


@pytest.fixture(scope="session")
def server(chromium: None) -> Iterator[ServerProcess]:
    """A server without keys. Small, so that batches and blocks can be seen."""
    started = ServerProcess("--max-num-seqs", "8")
    started.wait_until_ready()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def guarded_server(chromium: None) -> Iterator[ServerProcess]:
    """A server that wants a key."""
    started = ServerProcess("--api-key", "open-sesame")
    started.wait_until_ready()
    yield started
    started.stop()


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    """The page from a server whose answers the test writes."""
    with ScriptedServer() as started:
        yield started


@pytest.fixture(scope="session")
def chrome(chromium: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests, as each takes seconds to start."""
    started = open_browser(tmp_path_factory.mktemp("chrome"))
    yield started
    started.close()


@pytest.fixture
def browser(chrome: Browser, tmp_path: Path) -> Iterator[Browser]:
    """A browser that nobody has used; whatever it complained of fails the test at its end."""
    chrome.begin(tmp_path)
    yield chrome
    chrome.check_silence()
