"""PageServer: lends the KV pages of prompts that a prefill engine computes to decode engines, over sockets.

A connection carries one transfer at a time, so that a peer which is slow, stopped or gone holds up nobody else. Messages of P
say how many pages its jobs have still to compute (num_waiting_pages), by which D chooses among several:

    D -> P  prefill    the tokens, and which of their pages are wanted
    P -> D  accepted, or refusal
    D -> P  load       between transfers: how many pages have P's jobs still to compute? P answers with `load`
    D -> P  pull       how many pages D has taken
    P -> D  pages      those that were computed since, or none after a short while, so that D knows that P is alive; `is_last`
    D -> P  release    after the last page

The pages of a transfer are held for it until D has taken them, closes the connection, or is silent for the time of the lease.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from quire.base.logging import UnexpectedErrors, get_logger
from quire.contracts.shared_slots import SharedSlots
from quire.transfer.address import Address
from quire.transfer.channel import Channel, Fields, TransferError, int_of, text_of
from quire.transfer.handshake import Identity, RefusedError, receive_greeting, refuse
from quire.transfer.nixl_reads import NixlAgent

logger = get_logger(__name__)

LEASE_S = 30.0
HEARTBEAT_S = 0.5
_HANDSHAKE_S = 5.0
_IDLE_S = 300.0
"""A connection without a transfer is closed after so long."""
_MAX_CONNECTIONS = 64
_MAX_PROMPT_TOKENS = 1 << 24
_MAX_STATE_PAGES = 1 << 20
"""Of a recurrent state, which are wanted besides those of tokens."""
MAX_MESSAGE_BYTES = 8 << 20
"""Pages of one message, so that D verifies them and frees ours while the next are sent."""
_CLOSE_S = 2.0
_MAX_TOLD = 100
"""Different refusals that are logged, as their texts come from peers."""


def page_checksum(key: int, data: memoryview) -> int:
    """Return the checksum of a page under its key."""
    return zlib.crc32(data, zlib.crc32(key.to_bytes(16, "big")))


@dataclass(eq=False)
class PrefillJob:
    """One transfer: written by the engine's thread and by that of its connection, under `_changed`.

    token_ids   of whole pages, the last one wanted included
    first_page  the first that is wanted; those before it D has
    num_taken   of the wanted pages, how many D has taken
    is_over     nobody waits for the pages any more
    outcome     then: "complete", "partial", "aborted" (D closed the connection), "expired" (D was silent) or "failed" (an error
                of this engine)
    started_s   of time.monotonic()
    ready       pages that have been lent, (key, slot)
    """

    token_ids: Sequence[int]
    cache_salt: str
    first_page: int
    num_pages: int
    priority: int = 0
    is_background: bool = False
    num_taken: int = 0
    is_over: bool = False
    outcome: str = ""
    started_s: float = field(default_factory=time.monotonic)
    ready: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _is_complete: bool = False
    _reason: str = ""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def add_ready(self, pages: Sequence[tuple[int, int]]) -> None:
        """Lend pages, (key, slot), in order; the engine keeps them in their slots until they are taken or the job is over."""
        with self._changed:
            self.ready += pages
            self._changed.notify_all()

    def complete(self, reason: str = "") -> None:
        """Say that no more pages will come, and why if they are not all."""
        with self._changed:
            self._is_complete, self._reason = True, reason
            self._changed.notify_all()

    def wait_ready(self, first: int, max_pages: int, timeout_s: float) -> tuple[list[tuple[int, int]], bool, str]:
        """Return pages from `first` on, whether they are the last, and the reason; waits for the first of them."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.ready) > first or self._is_complete, timeout_s)
            pages = self.ready[first : first + max_pages]
            is_last = self._is_complete and first + len(pages) == len(self.ready)
            return pages, is_last, self._reason if is_last else ""


class PageSource(Protocol):
    """The engine of a page server; called by the threads of connections.

    shared             its slots, for peers on this machine to map; None: their bytes are sent
    num_waiting_pages  of all jobs, that are not computed yet
    """

    @property
    def shared(self) -> SharedSlots | None: ...

    @property
    def num_waiting_pages(self) -> int: ...

    def begin(self, job: PrefillJob) -> None:
        """Take a job. Raises RefusedError."""
        ...

    def page(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        ...

    def note_change(self) -> None:
        """Take notice that pages were taken, or that a job is over."""
        ...


class PageServer:
    """Listens from its creation to `close`. Raises OSError where it cannot.

    lease_s  how long a peer may be silent while pages are held for it
    nixl     with which the slots are registered; None: pages go over the sockets, or are mapped
    """

    def __init__(
        self,
        address: Address,
        identity: Identity,
        source: PageSource,
        lease_s: float = LEASE_S,
        nixl: NixlAgent | None = None,
    ) -> None:
        self._identity, self._source, self.lease_s, self._nixl = identity, source, lease_s, nixl
        self.incarnation = secrets.token_hex(16)
        self._listener = address.listen()
        name = self._listener.getsockname()
        self.address = address if address.path else Address(host=name[0], port=name[1])
        self._refusals: Counter[str] = Counter()
        self.errors = UnexpectedErrors(logger)
        self._told: set[str] = set()
        self._channels: set[Channel] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closing = False
        self._accepting = threading.Thread(target=self._accept, name="kv-page-server", daemon=True)
        self._accepting.start()

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._channels)

    @property
    def refusals(self) -> Counter[str]:
        """How many handshakes were refused for each reason."""
        with self._lock:
            return self._refusals.copy()

    def close(self) -> None:
        """End all connections and stop listening."""
        with self._lock:
            self._is_closing = True
            channels = list(self._channels)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        for channel in channels:
            channel.shut_down()
        for thread in [self._accepting, *self._threads]:
            thread.join(_CLOSE_S)
        if self.address.path:
            with suppress(OSError):
                os.unlink(self.address.path)

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                sock, _ = self._listener.accept()
                try:
                    self._begin(sock)
                except BaseException:
                    sock.close()
                    raise
            except Exception as error:  # noqa: BLE001 - the next peer may have more luck
                if self._is_closing:
                    return
                if isinstance(error, OSError):
                    logger.warning("the page server cannot accept a connection: %s", error)
                else:
                    self.errors.note("accepting a connection of the page server", error)
                threading.Event().wait(0.1)

    def _begin(self, sock: socket.socket) -> None:
        """Serve a connection in a thread of its own, or close it where there are too many."""
        channel = Channel(sock, _HANDSHAKE_S)
        thread = threading.Thread(target=self._serve, args=(channel, sock), name="kv-page-lender", daemon=True)
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if self._is_closing or len(self._channels) >= _MAX_CONNECTIONS:
                channel.close()
                return
            self._channels.add(channel)
            try:
                thread.start()
            except BaseException:
                self._channels.discard(channel)
                raise
            self._threads.append(thread)

    def _serve(self, channel: Channel, sock: socket.socket) -> None:
        try:
            if not self.address.path:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            shared = self._shared()
            self._greet(channel, shared)
            while not self._is_closing:
                fields, num_bytes = channel.receive("prefill", "load", timeout_s=_IDLE_S)
                if fields["type"] == "load":
                    channel.send({"type": "load", **self._load()})
                    continue
                self._answer(channel, self._read_job(channel, fields, num_bytes), shared is not None)
        except (TransferError, RefusedError, OSError) as error:
            logger.debug("a connection of the page server ends: %s", error)
        except Exception as error:  # noqa: BLE001 - the peer computes the pages
            self.errors.note("a connection of the page server", error)
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def _load(self) -> Fields:
        return {"num_waiting_pages": self._source.num_waiting_pages}

    def _shared(self) -> SharedSlots | Fields | None:
        """Return what a peer needs to read the slots by itself; None: their bytes are sent."""
        if self._nixl is not None:
            return self._nixl.welcome()
        return self._source.shared if self.address.path else None

    def _greet(self, channel: Channel, shared: SharedSlots | Fields | None) -> None:
        """Do the handshake; count the refusals, and tell each of them once."""
        try:
            receive_greeting(channel, self._identity, self.incarnation, shared)
        except RefusedError as error:
            text = str(error)
            with self._lock:
                self._refusals[error.reason] += 1
                is_new = text not in self._told and len(self._told) < _MAX_TOLD
                if is_new:
                    self._told.add(text)
            if is_new:
                logger.warning("a decode engine was refused (%s): %s", error.reason, text)
            raise

    def _read_job(self, channel: Channel, fields: Fields, num_bytes: int) -> PrefillJob:
        num_tokens = int_of(fields, "num_tokens", 1, _MAX_PROMPT_TOKENS)
        if num_bytes != 4 * num_tokens:
            raise TransferError(f"{num_tokens} tokens came in {num_bytes} bytes")
        token_ids = array("I", bytes(num_bytes))
        channel.receive_into(memoryview(token_ids))
        return PrefillJob(
            token_ids=tuple(token_ids),
            cache_salt=text_of(fields, "cache_salt"),
            first_page=int_of(fields, "first_page", 0, num_tokens),
            num_pages=int_of(fields, "num_pages", 1, num_tokens + _MAX_STATE_PAGES),
            priority=int_of(fields, "priority", -(1 << 63), (1 << 63) - 1),
            is_background=bool(fields.get("is_background")),
        )

    def _answer(self, channel: Channel, job: PrefillJob, is_shared: bool) -> None:
        try:
            self._source.begin(job)
        except RefusedError as error:
            with suppress(RefusedError):
                refuse(channel, error.reason, str(error))
            return
        try:
            channel.send({"type": "accepted", **self._load()})
            job.outcome = self._lend(channel, job, is_shared)
        except TransferError as error:
            job.outcome = "expired" if isinstance(error.__cause__, TimeoutError) else "aborted"
            raise
        except Exception:
            job.outcome = "failed"
            raise
        finally:
            job.is_over = True
            self._source.note_change()

    def _lend(self, channel: Channel, job: PrefillJob, is_shared: bool) -> str:
        """Send the pages of a job, and return its outcome. Raises TransferError."""
        num_sent, max_pages = 0, max(1, MAX_MESSAGE_BYTES // self._identity.page_bytes)
        is_last, reason = False, ""
        while True:
            fields, _ = channel.receive("pull", "release", timeout_s=self.lease_s)
            if fields["type"] == "release":
                return "complete" if is_last and not reason else "partial"
            num_taken = int_of(fields, "num_taken", job.num_taken, num_sent)
            if num_taken > job.num_taken:
                job.num_taken = num_taken
                self._source.note_change()
            if is_last:
                raise TransferError("the peer pulls after the last page")
            pages, is_last, reason = job.wait_ready(num_sent, max_pages, HEARTBEAT_S)
            views = [self._source.page(slot) for _, slot in pages]
            message: Fields = {
                "type": "pages",
                "keys": [f"{key:032x}" for key, _ in pages],
                "checksums": [page_checksum(key, view) for (key, _), view in zip(pages, views, strict=True)],
                "is_last": is_last,
                "reason": reason,
                **self._load(),
            }
            if is_shared:
                message["slots"] = [slot for _, slot in pages]
            channel.send(message, () if is_shared else views, timeout_s=self.lease_s)
            num_sent += len(pages)
