"""A server in the test's own event loop, made of the real shell and handlers of the test."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import msgspec
import uvicorn

from quire.serving.answers import Ready
from quire.serving.auth import Authenticator
from quire.serving.body_room import BodyRoom
from quire.serving.config import ServerConfig
from quire.serving.context import ServerContext
from quire.serving.endpoint import Endpoint, bind
from quire.serving.http.app import ShellParts, make_app
from quire.serving.http.lifecycle import SignalFreeServer, listen
from quire.serving.http.protocol import guarded_protocol


class Counts:
    def __init__(self):
        self.requests = []
        self.ignored = []
        self.errors = []

    def http_request(self, route, status, seconds):
        self.requests.append((route, status))

    def rejected(self, error):
        self.errors.append((error.status, error.code))

    def ignored_param(self, name):
        self.ignored.append(name)


class EveryPart(ServerContext):
    """What the handlers of any package work with, so that a test need not say which its own work with."""

    def __init__(self, config):
        super().__init__(config=config, gateway=SimpleNamespace())
        self.server = self
        self.client = SimpleNamespace()
        self.metrics = Counts()
        self.authenticator = Authenticator(config)
        self.bodies = BodyRoom(config.max_held_body_bytes)
        self.service = None

    def app(self, endpoints):
        """Return the application with these endpoints."""
        parts = ShellParts(self.config, self.gateway, self.authenticator, self.metrics, self.bodies)
        return make_app(parts, bind(endpoints, self))


def endpoint(path, handler, method="POST", **options):
    return Endpoint(method=method, path=path, handler=handler, summary="s", tag="t", **options)


@contextlib.asynccontextmanager
async def running(endpoints, **options):
    """Yield (port, context) of a running server."""
    config = ServerConfig(port=0, **options)
    context = EveryPart(config)
    sock = listen(config)
    server = SignalFreeServer(
        uvicorn.Config(
            context.app(endpoints),
            http=guarded_protocol(config, context.metrics.rejected),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[sock]))
    await until(lambda: server.started)
    try:
        yield sock.getsockname()[1], context
    finally:
        await end(server)
        task.cancel()
        await asyncio.wait([task])


async def end(server):
    """Close what is open, and wait for what ran; the server's own end would look every tenth of a second whether it is over."""
    for listener in server.servers:
        listener.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    if tasks := list(server.server_state.tasks):
        _, pending = await asyncio.wait(tasks, timeout=60)
        assert not pending


async def until(condition):
    async with asyncio.timeout(200):  # a busy machine may take a minute to start an engine
        while not condition():
            await asyncio.sleep(0.005)


async def exchange(port, request, until_close=False):
    """Send raw bytes and return everything that comes back (up to the end of one answer with a length)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if until_close:
            return await reader.read()
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length")), 0)
        return head + await reader.readexactly(length)
    finally:
        writer.close()


def post(path, body=b"{}", *headers):
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers]).encode() + b"\r\n\r\n" + body


class Body(msgspec.Struct):
    text: str = ""


async def echo(context, call):
    body = await call.body(Body)
    return Ready(msgspec.json.encode({"text": body.text, "owner": call.owner.name}))


def parse(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


def ask(request, endpoints=None, is_text=False, **options):
    async def go():
        async with running(endpoints or [endpoint("/echo", echo)], **options) as (port, context):
            return parse(await exchange(port, request)), context

    (status, headers, body), context = asyncio.run(go())
    return status, headers, json.loads(body) if body and not is_text else body or None, context
