"""A small OpenAI-like server on a real socket, whose answers a test decides, and a router in front of some."""

import asyncio
import contextlib
import json

import httpx

from quire.router.config import RouterConfig, parse_backend
from quire.router.main import Router
from quire.serving.config import ServerConfig
from quire.serving.http.lifecycle import listen

CHUNKED = "transfer-encoding: chunked"


def run(work):
    """Return what a coroutine returns, within a minute."""
    return asyncio.run(asyncio.wait_for(work, 60))


class FakeBackend:
    """Answers /ready, /v1/models and /load by its attributes, and everything else by `answer(request, writer)`."""

    def __init__(self, *models, answer=None, load=None):
        self.models = models or ("m",)
        self.answer = answer or self.say_name
        self.load = load
        self.is_ready = True
        self.requests = []
        self.num_cancelled = 0
        self.num_connections = 0
        self._writers = set()
        self.server = None
        self.port = 0

    async def start(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def stop(self):
        self.server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    @property
    def name(self):
        return f"127.0.0.1:{self.port}"

    @property
    def url(self):
        return f"http://{self.name}"

    async def say_name(self, request, writer):
        await respond(writer, {"backend": self.name, "model": request["json"].get("model")})

    async def _serve(self, reader, writer):
        self._writers.add(writer)
        self.num_connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                request = await read_request(reader)
                await self._dispatch(request, reader, writer)
        self._writers.discard(writer)
        writer.close()

    async def _dispatch(self, request, reader, writer):
        path = request["path"]
        if path == "/ready":
            await respond(writer, {}, 200 if self.is_ready else 503)
        elif path == "/v1/models":
            await respond(writer, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})
        elif path == "/load":
            await (respond(writer, self.load) if self.load is not None else respond(writer, {}, 404))
        else:
            self.requests.append(request)
            answering = asyncio.ensure_future(self.answer(request, writer))
            closing = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({answering, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():  # the router has closed
                self.num_cancelled += 1
                answering.cancel()
                raise ConnectionResetError
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await answering


async def read_request(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    try:
        found = json.loads(body)
    except ValueError:
        found = {}
    return {"method": method, "path": path, "headers": headers, "body": body, "json": found}


async def respond(writer, body, status=200, *headers):
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(data)}", *headers]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    await writer.drain()


async def begin_stream(writer, media_type="text/event-stream"):
    writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {media_type}\r\n{CHUNKED}\r\n\r\n".encode())
    await writer.drain()


async def send_chunk(writer, piece):
    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    await writer.drain()


async def end_stream(writer):
    writer.write(b"0\r\n\r\n")
    await writer.drain()


class RunningRouter:
    """A router on a free port and a client of it."""

    def __init__(self, router, port):
        self.router = router
        self.port = port
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)

    def backend(self, fake):
        return self.router.table.get(fake.name)

    async def post(self, body, path="/v1/completions", **options):
        return await self.client.post(path, json=body, **options)

    async def until(self, condition, timeout_s=50):
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def all_ready(self):
        await self.until(lambda: all(backend.state == "ready" for backend in self.router.table))

    async def metric(self, name, **labels):
        found = 0.0
        for line in (await self.client.get("/metrics")).text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == f"quire_router:{name}" and all(f'{k}="{v}"' in series for k, v in labels.items()):
                found += float(value)
        return found


@contextlib.asynccontextmanager
async def routing(*fakes, waits=True, **options):
    """Yield a router in front of backends that are started, or not, by the caller; all are ready where `waits`."""
    defaults = {"health_interval_s": 0.05, "port": 0, "drain_timeout_s": 0.2, "admin_key": "admin"}
    config = RouterConfig(**{**defaults, "backends": tuple(parse_backend(fake.url) for fake in fakes), **options})
    sock = listen(ServerConfig(port=0))
    router = Router(config, sock)
    running = asyncio.create_task(router.run())
    found = RunningRouter(router, sock.getsockname()[1])
    try:
        if waits:
            await found.all_ready()
        yield found
    finally:
        await found.client.aclose()
        router.stop()
        await running
        sock.close()


@contextlib.asynccontextmanager
async def backends(*fakes):
    """Yield started backends and stop them."""
    for fake in fakes:
        await fake.start()
    try:
        yield fakes
    finally:
        for fake in fakes:
            await fake.stop()
