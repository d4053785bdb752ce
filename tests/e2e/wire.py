"""A client that sees what is on the wire, reads as slowly and goes as rudely as a test wants; and what is so after a fault."""

import asyncio
import contextlib
import json
import math
import socket
import struct

from tests.e2e.server_process import NUM_BLOCKS

PROMPT = "It was a cold morning when"
BLOCK_TOKENS = 16
NUM_PROMPT_TOKENS = 10  # at most


def request_bytes(path, body, *headers, method="POST"):
    """Return a request with a JSON body; the connection ends with its answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: localhost",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(data)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def completion(max_tokens, *, prompt=PROMPT, **options):
    """Return the body of a completion of exactly so many tokens."""
    return {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **options}


class Wire:
    """One request on a connection of its own. `events` are the events of the stream that have been read."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.status, self.headers, self.events = 0, {}, []
        self._is_chunked = False

    @classmethod
    async def send(cls, server, path, body, *headers, method="POST"):
        """Send a request with a JSON body."""
        wire = cls(*await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 22))
        wire.writer.write(request_bytes(path, body, *headers, method=method))
        return wire

    @classmethod
    async def stream(cls, server, max_tokens, *headers, **options):
        """Ask for a streamed completion."""
        return await cls.send(server, "/v1/completions", completion(max_tokens, stream=True, **options), *headers)

    @classmethod
    async def ask(cls, server, max_tokens, *headers, **options):
        """Ask for a completion and return (status, headers, body)."""
        return await (await cls.send(server, "/v1/completions", completion(max_tokens, **options), *headers)).answer()

    async def read_head(self):
        """Read the status and the headers."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:] if line)}
        self._is_chunked = self.headers.get("transfer-encoding") == "chunked"
        return self

    async def answer(self):
        """Read a whole answer of known length and return (status, headers, JSON)."""
        await self.read_head()
        body = await self.reader.readexactly(int(self.headers["content-length"]))
        self.close()
        return self.status, self.headers, json.loads(body)

    async def read_chunk(self):
        """Return the next piece of a body; b"" at its proper end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def read_event(self):
        """Read on until there is one more event; False at the proper end of the stream."""
        if not self.status:
            await self.read_head()
        if not self._is_chunked:
            raise AssertionError(f"not a stream: {self.status} {await self.reader.read()}")
        while True:
            found = [part[6:] for part in (await self.read_chunk()).decode().split("\n\n") if part.startswith("data: ")]
            self.events.extend(found)
            if found or self.reader.at_eof():
                return bool(found)

    async def read_rest(self):
        """Read the stream to its proper end."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await self.read_event():
                pass
        self.close()
        return self

    @property
    def text(self):
        """The received text."""
        chunks = [json.loads(event) for event in self.events if event != "[DONE]"]
        return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))

    @property
    def error(self):
        """The error that the stream ended with, if it did, and said that it was over."""
        if len(self.events) < 2 or self.events[-1] != "[DONE]":
            return None
        return json.loads(self.events[-2]).get("error")

    @property
    def is_complete(self):
        """Whether the stream came to its end without an error."""
        return bool(self.events) and self.events[-1] == "[DONE]" and self.error is None

    def close(self):
        """Close as a client that goes."""
        self.writer.close()

    def reset(self):
        """Go without a word: the server gets an RST."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def exchange(server, data, *, timeout_s=60):
    """Send raw bytes and return (status, headers, body) of what comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout_s) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have answered before it has all
            sock.sendall(data)
        return read_answer(sock)


def read_answer(sock):
    """Return (status, headers, body); (0, {}, b"") when the server closed without one."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    if not head:
        return 0, {}, b""
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, body


async def num_blocks_beside(server):
    """Return how many KV blocks are held beyond those of a stream that runs alone: 0, or blocks have leaked."""
    headers = [f"{name}: {value}" for name, value in server.headers.items()]
    before = await asyncio.to_thread(server.metric, "quire:generation_tokens_total")
    wire = await Wire.stream(server, 600, *headers)
    await wire.read_event()
    share, after = await asyncio.to_thread(server.metrics, "quire:kv_cache_usage_perc", "quire:generation_tokens_total")
    wire.close()
    num_own = math.ceil((NUM_PROMPT_TOKENS + after - before) / BLOCK_TOKENS) + 1
    return max(0, round(share * NUM_BLOCKS) - num_own)


def assert_recovered(server, expected=None):
    """The next good request succeeds, then nothing runs or waits, and no block is held."""
    server.wait_ready()
    server.wait_for(server.is_idle)
    answer = server.post("/v1/completions", completion(12))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 12
    if expected is not None:
        assert answer.json()["choices"][0]["text"] == expected
    server.wait_for(server.is_idle)
    num_leaked = asyncio.run(num_blocks_beside(server))
    assert num_leaked == 0, f"{num_leaked} blocks are held by nobody"
    server.wait_for(server.is_idle)
