"""Targets: how many replicas each role should have, followed from the decisions, and a server that says so to KEDA."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from quire.base.errors import ConfigError
from quire.router.autoscale import ROLES, Drain, Role, Scale, Snapshot, State

PATH = "/replicas"


class Targets:
    """The number of replicas of each role: what is there, or, while an action is under way, what it leads to."""

    def __init__(self) -> None:
        self.by_role: dict[Role, int] = {}
        self._was_flipping = False

    def note(self, snapshot: Snapshot, state: State) -> None:
        """Take in a snapshot, and the state after the decision on it. A role without replicas keeps its number."""
        for role in ROLES:
            names = {one.name for one in snapshot.replicas if one.role == role and one.state != "draining"}
            under_way = state.roles[role].action if role in state.roles else None
            if isinstance(under_way, Scale):
                self.by_role[role] = under_way.num_replicas
            elif isinstance(under_way, Drain):
                self.by_role[role] = len(names.difference(under_way.replicas))
            elif names and self._was_flipping:
                self.by_role[role] = len(names)
            elif names:  # one that does not answer is not one too many
                self.by_role[role] = max(len(names), self.by_role.get(role, 0))
        self._was_flipping = state.flip is not None


class TargetServer:
    """Answers `GET /replicas` with {role: number} for KEDA's trigger `metrics-api`, in a thread of its own.

    503 until there is a first decision, and after a look that failed: KEDA then leaves the number as it is.
    """

    def __init__(self, address: str) -> None:
        """Listen at [HOST:]PORT; without a host at this machine only. Raises ConfigError."""
        host, _, port = address.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"--serve takes [HOST:]PORT, got {address[:200]!r}")
        self._answer: tuple[int, dict[str, Any]] = (503, {"error": "nothing is decided yet"})
        owner = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                status, body = owner._answer if self.path == PATH else (404, {"error": f"there is only {PATH}"})
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: KEDA asks all the time."""

        try:
            self._server = ThreadingHTTPServer((host.strip("[]") or "127.0.0.1", int(port)), Handler)
        except OSError as error:
            raise ConfigError(f"--serve {address}: {error.strerror or error}") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="autoscale-targets")
        self._thread.start()

    def show(self, targets: Targets) -> None:
        """Answer with these numbers from now on."""
        self._answer = (200, {**targets.by_role})

    def show_error(self, error: str) -> None:
        """Answer that nothing is known now."""
        self._answer = (503, {"error": error})

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
