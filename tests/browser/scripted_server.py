"""ScriptedServer: the real page over real sockets, with answers that a test writes: faults, reasoning, tool calls."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from quire.serving.page.static_files import read_static_files

MODEL = {
    "name": "scripted",
    "max_model_len": 1024,
    "max_logprobs": 20,
    "defaults": {"temperature": 0.7, "top_k": 40},
    "has_chat": True,
    "has_tools": True,
    "has_reasoning": True,
}
CUT = "cut"
HOLD = "hold"


def text_chunks(*texts: str) -> list[dict[str, Any] | str]:
    """Return the chunks of a chat that says this and stops, with its usage."""
    usage = {"prompt_tokens": 12, "completion_tokens": len(texts), "prompt_tokens_details": {"cached_tokens": 8}}
    return [*(chunk({"content": text}) for text in texts), chunk({}, "stop"), {"choices": [], "usage": usage}]


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}


class ScriptedServer:
    """script: for each POST in turn a list of chunks, or (status, headers, body).

    CUT among the chunks closes the connection there, once may_cut is set.
    HOLD waits until the client closes it, and then sets was_left.
    prefix  what is before every path, as a proxy has it
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.script: list[Any] = []
        self.was_left = threading.Event()
        self.may_cut = threading.Event()
        self.bodies: list[dict[str, Any]] = []
        self.files = {file.path: file for file in read_static_files()}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                if not self.path.startswith(f"{outer.prefix}/"):
                    self.reply(404, {"content-type": "text/plain"}, b"outside of the prefix")
                    return
                file = outer.files.get(self.path.removeprefix(outer.prefix))
                if file is not None:
                    answer = file.answer("")
                    self.reply(200, {**answer.headers, "content-type": answer.media_type}, answer.body or b"")
                else:
                    self.reply(200, {"content-type": "application/json"}, json.dumps(MODEL).encode())

            def do_POST(self) -> None:
                if not self.path.startswith(f"{outer.prefix}/v1/"):
                    self.reply(404, {"content-type": "text/plain"}, b"outside of the prefix")
                    return
                length = int(self.headers["content-length"])
                outer.bodies.append(json.loads(self.rfile.read(length)))
                answer = outer.script.pop(0)
                if isinstance(answer, tuple):
                    status, headers, body = answer
                    self.reply(status, {"content-type": "application/json", **headers}, json.dumps(body).encode())
                    return
                self.stream(answer)

            def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def stream(self, chunks: list[dict[str, Any] | str]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for item in [*chunks, "[DONE]"]:
                    if item in (CUT, HOLD):
                        if item == CUT:
                            outer.may_cut.wait(60)
                        elif self.connection.recv(1) == b"":
                            outer.was_left.set()
                        self.close_connection = True  # in the middle of the body
                        return
                    text = item if isinstance(item, str) else json.dumps(item)
                    piece = f"data: {text}\n\n".encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}{self.prefix}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
