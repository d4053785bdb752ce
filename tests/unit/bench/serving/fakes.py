"""Fakes for tests of the load generator: an event loop without real time, and scripted servers on fake transports."""

import asyncio
import json
import selectors
from dataclasses import dataclass, field

from quire.bench.serving.http_client import Connection, HttpClient, Target


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: the loop's clock jumps to the next timer instead."""

    loop = None

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("the test would wait for ever")
        self.loop.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is a number; sleeping takes none of ours."""

    def __init__(self):
        self.now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self):
        return self.now


def run_virtually(make):
    """Run the coroutine that make(clock) returns on a virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        return runner.run(make(loop.time))


class FakeTransport:
    """Hands what a connection writes to a script, which answers through the connection's callbacks."""

    def __init__(self, connection, server):
        self.connection = connection
        self.server = server
        self.is_closed = False
        self.task = None

    def write(self, data):
        self.server.requests.append(bytes(data))
        script = self.server.scripts.pop(0) if len(self.server.scripts) > 1 else self.server.scripts[0]
        self.task = asyncio.get_running_loop().create_task(self._play(script))

    async def _play(self, script):
        for action in script:
            if self.is_closed:
                return
            if isinstance(action, int | float):
                await asyncio.sleep(action)
            elif isinstance(action, bytes):
                self.connection.data_received(action)
            elif action == "eof":
                self.connection.eof_received()
            elif action == "lost":
                self.is_closed = True
                self.connection.connection_lost(None)
            else:
                self.is_closed = True
                self.connection.connection_lost(action)

    def close(self):
        self.is_closed = True

    abort = close


@dataclass
class FakeServer:
    """scripts: one per request, the last for all that follow; each a list of pauses (seconds), bytes, "eof", "lost", errors."""

    scripts: list
    requests: list = field(default_factory=list)
    transports: list = field(default_factory=list)

    async def connect(self, factory):
        connection = factory()
        assert isinstance(connection, Connection)
        transport = FakeTransport(connection, self)
        self.transports.append(transport)
        connection.connection_made(transport)
        return connection

    def client(self, clock, headers=None):
        return HttpClient(Target("fake", 80), headers or {}, clock, self.connect)


def chunked(*parts, end=True):
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return body + (b"0\r\n\r\n" if end else b"")


def head(status=200, content_type="text/event-stream", framing="Transfer-Encoding: chunked", extra=""):
    return f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\n{framing}\r\n{extra}\r\n".encode()


def refusal(status, body=b"{}", extra=""):
    return head(status, "application/json", f"Content-Length: {len(body)}", extra) + body


def event(text):
    return b"data: " + (text if isinstance(text, bytes) else text.encode()) + b"\n\n"


def text_event(text, reason="null"):
    """An event of /v1/completions; reason is JSON."""
    choice = {"index": 0, "text": text, "finish_reason": json.loads(reason)}
    return event(json.dumps({"choices": [choice], "usage": None}))


def usage_event(prompt, completion):
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event(json.dumps({"choices": [], "usage": usage}))


DONE = event("[DONE]")
