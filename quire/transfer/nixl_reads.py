"""Reads of KV pages by NIXL (https://github.com/ai-dynamo/nixl): one-sided reads over RDMA, TCP or shared memory, as UCX finds.

A prefill engine registers its slots, and says in the handshake where they are. A decode engine reads pages into a buffer of
the connection and copies them from there. Thus a read that is given up may still end later without harm: its buffer is used
for nothing else until NIXL says that it is over.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import importlib.util
import mmap
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.transfer.channel import Fields, TransferError, int_of, text_of

logger = get_logger(__name__)

MODULE = "nixl"
_MEMORY = "DRAM"
RUNNING = "PROC"
_MAX_UNFINISHED = 16
"""Reads that were given up and are not over; with so many, no connection is made any more."""
_POLL_S = 50e-6
_MAX_ADDRESS = (1 << 63) - 1


def check_nixl() -> None:
    """Raise ConfigError where the package is not installed."""
    if importlib.util.find_spec(MODULE) is None:
        raise ConfigError("kv_transfer_backend is 'nixl', which needs the package nixl: pip install 'quire[nixl]'")


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process: slots of `stride` bytes, one after the other from `address` on."""

    address: int
    num_slots: int
    stride: int


class NixlAgent:
    """The NIXL agent of an engine. The threads of transfers use it in turn.

    region  memory that peers may read; None: they read nothing here
    """

    def __init__(self, region: Region | None = None) -> None:
        """Start the agent. Raises ConfigError where that is not possible."""
        check_nixl()
        self._region = region
        self._lock = threading.Lock()
        self._peers: Counter[str] = Counter()
        self._unfinished: list[tuple[object, _Buffer]] = []
        try:
            api = importlib.import_module("nixl._api")
            self._agent: Any = api.nixl_agent(f"quire-{secrets.token_hex(8)}", api.nixl_agent_config(backends=["UCX"]))
            if region is not None:
                self._register(region.address, region.num_slots * region.stride)
        except Exception as error:
            raise ConfigError(f"kv_transfer_backend is 'nixl', which cannot start: {error}") from error

    def welcome(self) -> Fields:
        """Return what a peer needs to read this engine's region, as fields of the handshake."""
        assert self._region is not None
        with self._lock:
            metadata: bytes = self._agent.get_agent_metadata()
        return {
            "nixl": base64.b64encode(metadata).decode(),
            "address": self._region.address,
            "num_slots": self._region.num_slots,
            "stride": self._region.stride,
        }

    def open(self, fields: Fields, page_bytes: int, buffer_bytes: int) -> NixlSlots:
        """Return the slots of the peer that sent these fields. Raises TransferError.

        buffer_bytes  that are read at once, at most
        """
        stride = int_of(fields, "stride", page_bytes, _MAX_ADDRESS)
        num_slots = int_of(fields, "num_slots", 1, _MAX_ADDRESS // stride)
        address = int_of(fields, "address", 1, _MAX_ADDRESS - num_slots * stride)
        try:
            metadata = base64.b64decode(text_of(fields, "nixl"), validate=True)
        except ValueError:
            raise TransferError("the peer's NIXL metadata is not base64") from None
        with self._lock:
            self._reap()
            if len(self._unfinished) >= _MAX_UNFINISHED:
                raise TransferError(f"{_MAX_UNFINISHED} reads that were given up are not over yet")
            peer = None
            try:
                name = self._agent.add_remote_agent(metadata)
                peer = name.decode() if isinstance(name, bytes) else str(name)
                self._peers[peer] += 1
                memory = mmap.mmap(-1, max(buffer_bytes, page_bytes))
                first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                buffer = _Buffer(memory, first, self._register(first, len(memory)))
            except Exception as error:
                if peer is not None:
                    self._leave(peer)
                raise TransferError(f"NIXL cannot reach the peer: {error}") from error
        return NixlSlots(self, peer, Region(address, num_slots, stride), page_bytes, buffer)

    def start(self, peer: str, pairs: Sequence[tuple[int, int]], num_bytes: int) -> tuple[object, str]:
        """Start to read pieces of num_bytes, (address of the peer, address here); return the read and its state.

        Raises TransferError.
        """
        with self._lock:
            try:
                here = self._agent.get_xfer_descs([(to, num_bytes, 0) for _, to in pairs], _MEMORY)
                there = self._agent.get_xfer_descs([(start, num_bytes, 0) for start, _ in pairs], _MEMORY)
                handle = self._agent.initialize_xfer("READ", here, there, peer)
            except Exception as error:
                raise TransferError(f"NIXL cannot read from the peer: {error}") from error
            try:
                state: str = self._agent.transfer(handle)
            except Exception as error:
                self._release(handle)
                raise TransferError(f"NIXL cannot read from the peer: {error}") from error
            return handle, state if state == RUNNING else self._state_of(handle)

    def state_of(self, handle: object) -> str:
        """Return RUNNING, DONE or an error; the read is released if it is not running."""
        with self._lock:
            return self._state_of(handle)

    def abandon(self, handle: object, buffer: _Buffer) -> None:
        """Keep the buffer of a read until it is over."""
        with self._lock:
            self._unfinished.append((handle, buffer))

    def close(self, peer: str, buffer: _Buffer | None) -> None:
        """Free a connection's buffer, and forget a peer to which no connection is left."""
        with self._lock:
            if buffer is not None:
                self._free(buffer)
            self._leave(peer)

    def _leave(self, peer: str) -> None:
        """Count a connection to a peer as closed."""
        self._peers[peer] -= 1
        if self._peers[peer] == 0:
            del self._peers[peer]
            try:
                self._agent.remove_remote_agent(peer)
            except Exception as error:  # noqa: BLE001 - NIXL's errors have no base of their own
                logger.debug("NIXL cannot forget a peer: %s", error)

    def _register(self, address: int, num_bytes: int) -> object:
        return self._agent.register_memory([(address, num_bytes, 0, "")], _MEMORY)

    def _free(self, buffer: _Buffer) -> None:
        try:
            self._agent.deregister_memory(buffer.registered)
        except Exception as error:  # noqa: BLE001
            logger.debug("NIXL cannot free a buffer: %s", error)

    def _state_of(self, handle: object) -> str:
        try:
            state: str = self._agent.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001
            state = f"{type(error).__name__}: {error}"
        if state != RUNNING:
            self._release(handle)
        return state

    def _release(self, handle: object) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001
            logger.warning("NIXL cannot release a read: %s", error)

    def _reap(self) -> None:
        """Free the buffers of reads that are over by now."""
        still: list[tuple[object, _Buffer]] = []
        for handle, buffer in self._unfinished:
            if self._state_of(handle) == RUNNING:
                still.append((handle, buffer))
            else:
                self._free(buffer)
        self._unfinished = still


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    memory: mmap.mmap
    address: int
    registered: object


class NixlSlots:
    """The slots of a peer, read over one connection; see MappedSlots for those of the same machine."""

    def __init__(self, agent: NixlAgent, peer: str, region: Region, page_bytes: int, buffer: _Buffer) -> None:
        self.agent, self._peer, self._region, self._page_bytes = agent, peer, region, page_bytes
        self._buffer: _Buffer | None = buffer

    def read(self, slots: Sequence[int], targets: Sequence[memoryview], is_given_up: Callable[[], bool]) -> None:
        """Copy the pages in slots of the peer to the targets. Raises TransferError."""
        buffer = self._buffer
        if buffer is None:
            raise TransferError("an earlier read over this connection was given up")
        at_once = len(buffer.memory) // self._page_bytes
        for begin in range(0, len(slots), at_once):
            part = slots[begin : begin + at_once]
            if not all(0 <= slot < self._region.num_slots for slot in part):
                raise TransferError("the peer names slots that it does not share")
            pairs = [
                (self._region.address + slot * self._region.stride, buffer.address + index * self._page_bytes)
                for index, slot in enumerate(part)
            ]
            self._wait(*self.agent.start(self._peer, pairs, self._page_bytes), buffer, is_given_up)
            with memoryview(buffer.memory) as pages:
                for index, target in enumerate(targets[begin : begin + at_once]):
                    target.cast("B")[:] = pages[index * self._page_bytes : (index + 1) * self._page_bytes]

    def close(self) -> None:
        """Close the connection."""
        self.agent.close(self._peer, self._buffer)

    def _wait(self, handle: object, state: str, buffer: _Buffer, is_given_up: Callable[[], bool]) -> None:
        while state == RUNNING:
            if is_given_up():
                self._buffer = None
                self.agent.abandon(handle, buffer)
                raise TransferError("a read of NIXL was given up, as the peer is silent or gone")
            time.sleep(_POLL_S)
            state = self.agent.state_of(handle)
        if state != "DONE":
            raise TransferError(f"a read of NIXL failed: {state}")
