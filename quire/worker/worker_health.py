"""Serves /health for a worker that a launcher has started on another host than rank 0."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from quire.base.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire.parallel.launch import WorkerContext

logger = get_logger(__name__)

_REQUEST_TIMEOUT_S = 5.0


def with_health(main: Callable[[WorkerContext], None], host: str, port: int) -> Callable[[WorkerContext], None]:
    """Return a worker's main function that serves GET /health at `host:port` as long as it runs.

    The answer is 200 while the group is whole and 503 after it has ended. Every other path is answered with 404 and the
    rank that serves requests. A port that is in use, such as rank 0's own on the same host, is left to its owner.
    """

    def serve(context: WorkerContext) -> None:
        with _serving(context, host, port):
            main(context)

    return serve


@contextmanager
def _serving(context: WorkerContext, host: str, port: int) -> Iterator[None]:
    try:
        server = ThreadingHTTPServer((host, port), _handler(context))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        logger.debug("rank %d serves no /health: %s:%d is in use", context.rank, host, port)
        yield
        return
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="quire-worker-health", daemon=True).start()
    logger.info("rank %d serves /health at http://%s:%d; requests go to rank 0", context.rank, host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _handler(context: WorkerContext) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            cause = context.barrier.abort_cause
            if self.path.partition("?")[0] == "/health":
                body = {"status": "ok" if cause is None else "ended", "rank": context.rank, "world_size": context.size}
                self._answer(200 if cause is None else 503, body)
            else:
                self._answer(404, {"error": {"message": f"this process is rank {context.rank}: requests go to rank 0"}})

        def _answer(self, status: int, body: dict[str, object]) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            logger.debug("worker's /health: " + format, *args)

    return Handler
