"""What one transfer of KV pages uses: the pages that are wanted, the connection to a peer, and the peer's slots."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.contracts.shared_slots import SharedSlots
from quire.transfer.channel import Channel, TransferError
from quire.transfer.nixl_reads import NixlSlots

_LEAST_BYTES_PER_S = 1e6
"""A read of a peer's slots that is slower, after the time of silence, is given up."""


@dataclass(eq=False)
class Pull:
    """One transfer: what is wanted, and how far it is.

    token_ids   of whole pages, the last one wanted included
    keys        of the wanted pages, from page first_page on
    prefix_keys of the pages before them, by which a peer that has computed this prefix is preferred
    slots       where their bytes go
    num_done    pages that are verified, from the first on
    is_over     the thread uses the slots no more
    outcome     then: "complete", "partial", "busy", "refused", "mismatch", "auth", "version", "lost", "damaged" or "aborted"
    address     of the peer that is asked, or was asked last
    expected_work  of it at that peer, with what was before it there, in the pages of PeerLoad
    expected_s, asked_s  the seconds that it is expected to take there (None: nothing was measured), and since when
    """

    token_ids: Sequence[int]
    cache_salt: str
    first_page: int
    keys: Sequence[int]
    slots: Sequence[memoryview]
    priority: int = 0
    is_background: bool = False
    prefix_keys: Sequence[int] = ()
    expected_work: float = 0.0
    expected_s: float | None = None
    asked_s: float = 0.0
    num_done: int = 0
    num_bytes: int = 0
    duration_s: float = 0.0
    is_over: bool = False
    is_cancelled: bool = False
    outcome: str = ""
    address: str = ""
    _channel: Channel | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def use(self, channel: Channel | None) -> None:
        """Set the connection that `cancel` is to end. Raises TransferError if that was called already."""
        with self._lock:
            self._channel = channel
            if self.is_cancelled and channel is not None:
                raise TransferError("the transfer was given up")

    def cancel(self) -> None:
        """Give the transfer up; its thread is done with the slots when `is_over` is set, which is soon."""
        with self._lock:
            self.is_cancelled = True
            if self._channel is not None:
                self._channel.shut_down()


class MappedSlots:
    """The slots of a peer of this machine, mapped."""

    def __init__(self, shared: SharedSlots, page_bytes: int) -> None:
        """Take over the file descriptor of the slots. Raises TransferError if they cannot be mapped safely."""
        self._num_slots, self._stride, self._page_bytes = shared.num_slots, shared.stride, page_bytes
        try:
            num_bytes = shared.num_slots * shared.stride
            # A file that shrinks would end this process.
            is_sealed = fcntl.fcntl(shared.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not is_sealed or os.fstat(shared.fd).st_size < num_bytes:
                raise TransferError("the peer's shared slots are smaller than it says, or may shrink")
            self._slots = mmap.mmap(shared.fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise TransferError(f"the peer's shared slots cannot be mapped: {error}") from error
        finally:
            os.close(shared.fd)

    def read(self, slots: Sequence[int], targets: Sequence[memoryview], _is_given_up: Callable[[], bool]) -> None:
        """Copy the pages in slots of the peer to the targets. Raises TransferError."""
        with memoryview(self._slots) as memory:
            for slot, target in zip(slots, targets, strict=True):
                if not 0 <= slot < self._num_slots:
                    raise TransferError(f"the peer names slot {slot}, which it does not share")
                target.cast("B")[:] = memory[slot * self._stride : slot * self._stride + self._page_bytes]

    def close(self) -> None:
        """Unmap the slots."""
        self._slots.close()


class Connection:
    """A connection after its handshake, and the peer's slots if pages are read from there."""

    def __init__(self, channel: Channel, slots: MappedSlots | NixlSlots | None) -> None:
        self.channel, self._slots = channel, slots

    @property
    def is_shared(self) -> bool:
        """Whether pages are read from the peer's slots."""
        return self._slots is not None

    def read(self, slots: Sequence[object], pull: Pull, silence_s: float) -> None:
        """Read the pages in slots of the peer, the next ones of a transfer. Raises TransferError."""
        assert self._slots is not None
        targets = pull.slots[pull.num_done : pull.num_done + len(slots)]
        numbers = [slot for slot in slots if isinstance(slot, int)]
        if len(numbers) != len(slots):
            raise TransferError(f"the peer names slots that are no numbers: {slots!r:.100}")
        deadline_s = time.monotonic() + silence_s + sum(target.nbytes for target in targets) / _LEAST_BYTES_PER_S

        def is_given_up() -> bool:
            return pull.is_cancelled or time.monotonic() > deadline_s or self.channel.is_readable

        self._slots.read(numbers, targets, is_given_up)

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()
        if self._slots is not None:
            self._slots.close()
