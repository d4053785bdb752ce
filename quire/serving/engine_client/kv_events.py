"""KvEventPublisher: which KV blocks the prefix cache holds, told to routers over ZeroMQ in vLLM's format.

A PUB socket sends frames (topic, sequence number in 8 bytes big-endian, msgpack of a KvEventBatch). A ROUTER socket answers a
sequence number with the batches from it on that are still kept, as frames (number, batch), and the number -1 at the end.

A batch is the array [time, events, rank]. An event is an array with its name first, as in older versions of vLLM, or a map with
its name under "type", as in later ones and in SGLang.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import msgspec
import zmq

from quire.base.errors import ConfigError
from quire.base.logging import UnexpectedErrors, get_logger
from quire.contracts.block_keys import root_key

logger = get_logger(__name__)

MAX_KEPT_BATCHES = 10_000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MEDIUM = "GPU"
"""vLLM's word for the pool that is computed with, on a CPU too."""
_KEY_BYTES = 16
_POLL_MS = 200

KvEventEncoding = Literal["array", "map"]
KV_EVENT_ENCODINGS: tuple[KvEventEncoding, ...] = ("array", "map")


class KvEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """One event; the name of its class stands first."""


class BlockStored(KvEvent, tag=True):
    """Blocks that can be found from now on, each after the one before it.

    parent_block_hash  of the block before the first; None at the start of a prompt
    token_ids          of all the blocks
    extra_keys         for each block what separates equal tokens: a hash of the cache salt; None without a salt
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(KvEvent, tag=True):
    """Blocks that cannot be found any more."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(KvEvent, tag=True):
    """Nothing can be found: the engine has started."""


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step changed. ts: seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KvEventOptions(msgspec.Struct, frozen=True):
    """Where and how events are published: tcp://*:5557 binds, tcp://host:5557 connects. Each replica adds its number to the
    ports.
    """

    endpoint: str
    replay_endpoint: str | None = None
    replica: int = 0
    encoding: KvEventEncoding = "array"

    def __post_init__(self) -> None:
        if self.encoding not in KV_EVENT_ENCODINGS:
            raise ConfigError(f"kv_events_encoding must be one of {', '.join(KV_EVENT_ENCODINGS)}, got {self.encoding!r}")
        check_endpoint("kv_events_endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            check_endpoint("kv_events_replay_endpoint", self.replay_endpoint)

    @classmethod
    def of(
        cls, endpoint: str | None, replay_endpoint: str | None, encoding: KvEventEncoding = "array"
    ) -> KvEventOptions | None:
        """Return the options of a server; None where it publishes nothing. Raises ConfigError."""
        return None if endpoint is None else cls(endpoint, replay_endpoint, encoding=encoding)

    def of_replica(self, replica: int) -> KvEventOptions:
        """Return those of one of several replicas."""
        replay = None if self.replay_endpoint is None else offset_port(self.replay_endpoint, replica)
        return KvEventOptions(offset_port(self.endpoint, replica), replay, replica, self.encoding)


def offset_port(endpoint: str, replica: int) -> str:
    """Return the endpoint of a replica: a later port, or a path with its number."""
    if replica == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{replica}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + replica}"


def check_endpoint(name: str, endpoint: str) -> None:
    """Raise ConfigError where an endpoint is neither tcp://host:port nor ipc://path."""
    scheme, _, rest = endpoint.partition("://")
    port = rest.rpartition(":")[2]
    is_tcp = scheme == "tcp" and rest.rpartition(":")[0] != "" and port.isdigit() and 0 < int(port) < 65536
    if not is_tcp and not (scheme == "ipc" and rest):
        raise ConfigError(f"{name} must be like tcp://*:5557, tcp://host:5557 or ipc:///path, got {endpoint[:200]!r}")


class BlockContent(Protocol):
    """What a block holds: the chained hash, the salt, the tokens."""

    @property
    def key(self) -> int: ...
    @property
    def root(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...


class Entry(Protocol):
    """A block of the prefix index, and the one before it."""

    @property
    def content(self) -> BlockContent: ...
    @property
    def parent(self) -> Entry | None: ...


def events_of(changes: Iterable[tuple[Entry, bool]], block_size: int) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Return the events of changes, (entry, whether it was published) in order. Neighbours become one event."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    last: Entry | None = None
    for entry, is_published in changes:
        content = entry.content
        block_hash = content.key.to_bytes(_KEY_BYTES)
        event = events[-1] if events else None
        if not is_published:
            if isinstance(event, BlockRemoved):
                event.block_hashes.append(block_hash)
            else:
                events.append(BlockRemoved([block_hash], MEDIUM))
            continue
        extra = (f"{root_key(content.root):032x}",) if content.root else None
        if isinstance(event, BlockStored) and entry.parent is last and last is not None:
            event.block_hashes.append(block_hash)
            event.token_ids.extend(content.token_ids)
            if event.extra_keys is not None:
                event.extra_keys.append(extra)
        else:
            parent = None if entry.parent is None else entry.parent.content.key.to_bytes(_KEY_BYTES)
            keys = None if extra is None else [extra]
            events.append(BlockStored([block_hash], parent, list(content.token_ids), block_size, None, MEDIUM, None, keys))
        last = entry
    return events


def as_map(event: msgspec.Struct) -> dict[str, Any]:
    """Return an event with its name under "type"; extra_keys are left out where there are none."""
    fields = msgspec.structs.asdict(event)
    if fields.get("extra_keys", ()) is None:
        del fields["extra_keys"]
    return {"type": event.__struct_config__.tag, **fields}


class KvEventPublisher:
    """Publishes from the engine's thread, which never waits; replays are answered by a thread of its own.

    Raises ConfigError when an address cannot be had.
    """

    def __init__(self, options: KvEventOptions, block_size: int) -> None:
        self._options = options
        self._block_size = block_size
        self._encoder = msgspec.msgpack.Encoder()
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT_BATCHES)
        self._lock = threading.Lock()
        self._next = 0
        self._context = zmq.Context()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._socket = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        for socket in (self._socket, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
        try:
            self._open()
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"KV events cannot be published at {options.endpoint} ({options.replay_endpoint}): {error}"
            ) from None
        self._send([AllBlocksCleared()])

    def _open(self) -> None:
        options = self._options
        if "*" in options.endpoint or "::" in options.endpoint or options.endpoint.startswith("ipc://"):
            self._socket.bind(options.endpoint)
            logger.info("KV events are published at %s", options.endpoint)
        else:
            self._socket.connect(options.endpoint)
            logger.info(
                "KV events are sent to %s, which a subscriber must listen at; tcp://*:PORT listens here", options.endpoint
            )
        if options.replay_endpoint is not None:
            self._replay.bind(options.replay_endpoint)
            self._thread = threading.Thread(target=self._serve_replays, name="quire-kv-replay", daemon=True)
            self._thread.start()

    def publish(self, changes: Iterable[tuple[Entry, bool]]) -> None:
        """Publish the changes of one step; nothing where there are none."""
        events = events_of(changes, self._block_size)
        if events:
            self._send(events)

    def _send(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        batch: object = KvEventBatch(time.time(), events, self._options.replica)
        if self._options.encoding == "map":
            batch = [time.time(), [as_map(event) for event in events], self._options.replica]
        payload = self._encoder.encode(batch)
        with self._lock:
            number, self._next = self._next, self._next + 1
            self.kept.append((number, payload))
        # A PUB socket drops what a slow subscriber does not take; its numbers then have a gap, and it asks for a replay.
        self._socket.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def _serve_replays(self) -> None:
        errors = UnexpectedErrors(logger)
        while not self._stopping.is_set():
            try:
                if self._replay.poll(_POLL_MS):
                    self._answer(self._replay.recv_multipart())
            except zmq.ZMQError as error:
                logger.warning("a replay of KV events failed: %s", error)
                self._stopping.wait(_POLL_MS / 1000)
            except Exception as error:  # noqa: BLE001 - whoever asked for it asks again
                errors.note("a replay of KV events", error)

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a request for KV events is not understood: it must be a sequence number of 8 bytes")
            return
        client, _, start = frames
        with self._lock:
            kept = [one for one in self.kept if one[0] >= int.from_bytes(start, "big")]
        for number, payload in kept:
            self._replay.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
        self._replay.send_multipart([client, b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        """Stop the thread and close the sockets."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.close()
        self._replay.close()
        self._context.term()
