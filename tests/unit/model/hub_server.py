"""A hub on this machine: the routes of the Hugging Face hub that a download needs, whose answers may stop halfway."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


class Hub:
    """files: of every repository. token: that requests must have. stalls_at: bytes after which an answer stops."""

    def __init__(self, files, token=None):
        self.files, self.token, self.stalls_at = files, token, None
        self.ends = threading.Event()
        self.requests = []


def _handler(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            """Say nothing."""

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path, span = unquote(urlsplit(self.path).path), self.headers.get("range")
            hub.requests.append((self.command, path, span))
            if hub.token is not None and self.headers.get("authorization") != f"Bearer {hub.token}":
                self.answer(401, b"{}", {"x-error-code": "GatedRepo", "x-error-message": "a token is needed"})
                return
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self.send_api(parts)
            else:
                self.send_file(parts, span)

        def send_api(self, parts):
            name, kind, revision = "/".join(parts[2:4]), parts[4], parts[5] if len(parts) > 5 else "main"
            commit = COMMITS.get(revision, revision)
            if kind == "tree":
                found = [{"type": "file", "path": file, "size": len(data), "oid": "0"} for file, data in hub.files.items()]
            else:
                found = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in hub.files]}
            self.answer(200, json.dumps(found).encode())

        def send_file(self, parts, span):
            if len(parts) < 5:
                self.answer(404, b"{}")
                return
            commit, file = COMMITS.get(parts[3], parts[3]), "/".join(parts[4:])
            data = hub.files.get(file)
            if data is None:
                self.answer(404, b"", {"x-error-code": "EntryNotFound"})
                return
            headers = {"etag": f'"{hashlib.sha1(data).hexdigest()}"', "x-repo-commit": commit, "accept-ranges": "bytes"}
            begin = int(span.removeprefix("bytes=").split("-")[0]) if span else 0
            if span:
                headers["content-range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            self.answer(206 if span else 200, data[begin:], headers)

        def answer(self, status, body, headers=None):
            self.send_response(status)
            for name, value in {"content-type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.stalls_at is not None and len(body) > hub.stalls_at:
                self.wfile.write(body[: hub.stalls_at])
                hub.ends.wait()
                self.close_connection = True
                return
            self.wfile.write(body)

    return Handler


class _Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Say nothing: clients that are killed end their connections."""


@contextlib.contextmanager
def running_hub(files, token=None):
    """Yield a Hub and its address."""
    hub = Hub(files, token)
    server = _Server(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        hub.ends.set()
        server.shutdown()
        server.server_close()
        thread.join()
