"""A real `quire router` process on a free port, for tests."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx


class RouterProcess:
    """Starts the command in front of servers, and ends it."""

    def __init__(self, *servers, options=()):
        backends = [word for server in servers for word in ("--backend", server.url)]
        command = [sys.executable, "-m", "quire", "router", "--port", "0", "--health-interval", "0.2", *backends, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        self.log = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        found = self.wait_for(
            lambda: next((hit for line in list(self.log) if (hit := re.search(r"listening on (http://[\d.:]+)", line))), None)
        )
        self.url = found[1]

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)

    def wait_for(self, condition, timeout_s=60):
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, "".join(self.log)
            time.sleep(0.05)
        raise AssertionError("waited in vain:\n" + "".join(self.log[-30:]))

    def get(self, path, **options):
        return httpx.get(self.url + path, timeout=30, **options)

    def post(self, path, body, **options):
        return httpx.post(self.url + path, json=body, timeout=120, **options)

    def num_ready(self):
        return self.get("/health").json()["num_backends_ready"]

    def metric(self, name, **labels):
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == f"quire_router:{name}" and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total += float(value)
        return total

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        self.process.stderr.close()


@contextlib.contextmanager
def routing(*servers, options=()):
    """Yield a router whose backends are all ready, and stop it."""
    router = RouterProcess(*servers, options=options)
    try:
        router.wait_for(lambda: router.num_ready() == len(servers))
        yield router
    finally:
        router.kill()
