"""A real `quire router` process on a free port, for tests."""

import contextlib
import sys

import httpx

from tests.e2e.server_process import LoggedProcess


class RouterProcess(LoggedProcess):
    """A router in front of servers."""

    def __init__(self, *servers, options=()):
        backends = [word for server in servers for word in ("--backend", server.url)]
        command = [sys.executable, "-m", "quire", "router", "--port", "0", "--health-interval", "0.2", *backends, *options]
        super().__init__(command)
        self.url = self.wait_for_log(r"listening on (http://[\d.:]+)")[1]

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


@contextlib.contextmanager
def routing(*servers, options=()):
    """Yield a router whose backends are all ready, and stop it."""
    router = RouterProcess(*servers, options=options)
    try:
        router.wait_for(lambda: router.num_ready() == len(servers))
        yield router
    finally:
        router.kill()
