"""ProcessBarrier: a barrier for ranks that share memory, and the reason why a group has ended."""

from __future__ import annotations

import enum
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from quire.base.errors import UnsupportedError, WorkerError
from quire.base.logging import get_logger
from quire.base.threads import num_usable_cores
from quire.kernels.native import load_native
from quire.parallel.shared_memory import SharedMemoryFile

logger = get_logger(__name__)

NUM_SPINS = 100
NUM_YIELDS = 3000
"""Number of yields in a wait before it sleeps: about a millisecond in total, at most 5 ms where others want the core. It spins
little, as the missing rank may share the core and run only after a yield."""

_FEW_SPINS, _FEW_YIELDS = 50, 200
"""Used if there are more ranks than cores."""

MESSAGE_YIELD_S = 0.002
"""How long the reader of a message ring yields after the last message before it sleeps, if there are enough cores."""

_WARN_S = 5.0
_ACCOUNT_BYTES = 1024
_ACCOUNT_HEAD = struct.Struct("<ii")  # rank + 1 of the subject, bytes of the text
_LEADER_ACCOUNT_S = 0.3
_DONE, _ABORTED, _TIMED_OUT = 0, 1, 2


class AbortReason(enum.IntEnum):
    """Why a group has ended; the numbers are those of process_barrier.h."""

    ENDED = 1
    FAILED = 2
    STALLED = 3
    CLOSED = 4


class GroupClosedError(WorkerError):
    """The leader has closed the group: nothing failed."""


@dataclass(frozen=True, slots=True)
class RankCounts:
    """Statistics of one rank's barriers.

    num_barriers  that it has arrived at, modulo 2**32
    num_waits     at which another rank was missing on arrival; wait_s: the seconds of these
    num_bytes     of rows that it has written for the others in native steps
    """

    num_barriers: int = 0
    num_waits: int = 0
    wait_s: float = 0.0
    num_bytes: int = 0


def native_extension() -> ModuleType:
    """Return the native kernels. Raises UnsupportedError if they were not built or are disabled."""
    native = load_native()
    if native is None:
        raise UnsupportedError("ranks that share memory need the native kernels, which were not built or are off")
    return native


class ProcessBarrier:
    """A barrier of a group's ranks, in an area of shared memory; used by one thread of each rank at a time.

    ranks  ranks in the world of the members, for messages and the abort word
    """

    def __init__(
        self, memory: SharedMemoryFile, rank: int, size: int, name: str = "barrier", ranks: Sequence[int] | None = None
    ) -> None:
        """Attach to the areas of `areas()`; the creator of the memory must have called `initialise`."""
        self._native = native_extension()
        self._memory = memory
        self._name = name
        self.rank = rank
        self.size = size
        self.ranks = tuple(range(size)) if ranks is None else tuple(ranks)
        self.address = memory.address(name)

    @staticmethod
    def areas(size: int, name: str = "barrier") -> dict[str, int]:
        """Return the areas that a barrier of this size needs."""
        return {name: native_extension().BARRIER_STATE_BYTES, f"{name}.accounts": size * _ACCOUNT_BYTES}

    @staticmethod
    def initialise(memory: SharedMemoryFile, size: int, name: str = "barrier", num_cores: int | None = None) -> None:
        """Initialise the state, once, before any rank attaches."""
        cores = num_usable_cores() if num_cores is None else num_cores
        spins, yields = (NUM_SPINS, NUM_YIELDS) if size <= cores else (_FEW_SPINS, _FEW_YIELDS)
        message_yield_s = MESSAGE_YIELD_S if size <= cores else 0.0
        native_extension().initialise_barrier(memory.address(name), size, spins, yields, round(message_yield_s * 1e9))

    # Waits

    def wait(self, timeout_s: float | None = None) -> None:
        """Arrive and wait for all ranks. Raises WorkerError if the group has ended, or after timeout_s.

        The missing rank is logged every 5 s.
        """
        self._native.arrive_at_barrier(self.address, self.rank)
        waited_s = 0.0
        while True:
            piece_s = _WARN_S if timeout_s is None else min(_WARN_S, timeout_s - waited_s)
            result = self._native.wait_for_barrier(self.address, self.rank, self.size, piece_s)
            if result == _DONE:
                return
            if result == _ABORTED:
                raise self.abort_error()
            waited_s += piece_s
            missing = self._native.find_missing_rank(self.address, self.rank, self.size)
            if timeout_s is not None and waited_s >= timeout_s:
                raise WorkerError(
                    f"{self.describe_rank(missing)} has not reached the barrier for {waited_s:g} s", self._global(missing)
                )
            self.warn_slow(missing, waited_s)

    def wait_for_counter(self, address: int, least: int, timeout_s: float | None = None) -> bool:
        """Wait until a shared counter has reached a value; False: not within timeout_s. Raises WorkerError."""
        result = self._native.wait_for_counter(
            self.address, self.rank, address, least & 0xFFFFFFFF, -1.0 if timeout_s is None else timeout_s
        )
        if result == _ABORTED:
            raise self.abort_error()
        return result == _DONE

    def wait_for_message(self, address: int, least: int, timeout_s: float | None = None) -> bool:
        """Like wait_for_counter, but yield for MESSAGE_YIELD_S before sleeping: messages often follow each other closely."""
        result = self._native.wait_for_message(
            self.address, self.rank, address, least & 0xFFFFFFFF, -1.0 if timeout_s is None else timeout_s
        )
        if result == _ABORTED:
            raise self.abort_error()
        return result == _DONE

    def counts(self, member: int) -> RankCounts:
        """Return the statistics of a member's barriers."""
        num_waits, wait_ns, num_bytes = self._native.rank_counts(self.address, member)
        return RankCounts(self.num_arrived(member), num_waits, wait_ns / 1e9, num_bytes)

    def warn_slow(self, missing: int, waited_s: float) -> None:
        """Log which member this rank waits for."""
        logger.warning("rank %d has waited for %s for %.0f s", self._global(self.rank), self.describe_rank(missing), waited_s)

    @property
    def num_passed(self) -> int:
        """The barriers that this rank has arrived at, modulo 2**32."""
        return self._native.num_barriers(self.address, self.rank)

    def num_arrived(self, member: int) -> int:
        """The barriers that a member has arrived at, modulo 2**32."""
        return self._native.num_barriers(self.address, member)

    # Signs of life

    def beat(self) -> None:
        """Signal that this rank is alive; waits do so themselves."""
        self._native.raise_heartbeat(self.address, self.rank)

    def heartbeat(self, member: int) -> int:
        """Return a number that changes as long as a member waits or signals that it is alive."""
        return self._native.heartbeat(self.address, member)

    def process_beat(self, member: int) -> int:
        """Return a number that changes as long as the process of a member runs."""
        return self._native.process_beat(self.address, member)

    def beat_process(self) -> None:
        """Signal that this rank's process runs; called by a thread of it."""
        self._native.raise_process_beat(self.address, self.rank)

    def set_pid(self, pid: int) -> None:
        """Publish the pid of this rank."""
        self._native.set_pid(self.address, self.rank, pid)

    def pid(self, member: int) -> int:
        """Return the pid of a member, 0 until it is published."""
        return self._native.pid(self.address, member)

    def set_location(self, layer: int | None) -> None:
        """Set the layer that this rank computes, for messages; native steps do so themselves."""
        self._native.set_location(self.address, self.rank, 0 if layer is None else layer + 1)

    def describe_rank(self, member: int) -> str:
        """Return "rank 2 (pid 4711, layer 3)", as far as known."""
        pid, location = self.pid(member), self._native.location(self.address, member)
        known = ([f"pid {pid}"] if pid else []) + ([f"layer {location - 1}"] if location else [])
        return f"rank {self._global(member)}" + (f" ({', '.join(known)})" if known else "")

    def _global(self, member: int) -> int:
        return self.ranks[member] if 0 <= member < self.size else -1

    # The end of a group

    def abort(self, rank: int, reason: AbortReason, text: str = "") -> bool:
        """End the group because of a rank (of the world): waits that lack a member raise. Return whether this call was first.

        text  for the error messages of the others; written to shared memory before the abort word is set, and if another rank
              was first with the same reason
        """
        if text and self.abort_cause in (None, (rank, reason)):
            self.write_account(rank, text)
        return self._native.abort_group(self.address, rank, int(reason))

    @property
    def abort_cause(self) -> tuple[int, AbortReason] | None:
        """The rank that ended the group and why; None while it runs."""
        word = self._native.read_abort_word(self.address)
        return None if word == 0 else ((word & 0xFFFF) - 1, AbortReason(word >> 16))

    def check(self) -> None:
        """Raise WorkerError if the group has ended."""
        if self.abort_cause is not None:
            raise self.abort_error()

    def abort_error(self) -> WorkerError:
        """Return the error with the reason why the group has ended."""
        cause = self.abort_cause
        if cause is None:
            return WorkerError("a wait of a group of ranks ended without a reason", self._global(self.rank))
        rank, reason = cause
        if reason is AbortReason.CLOSED:
            return GroupClosedError("the group of ranks has been closed", rank)
        return WorkerError(self._account_of(rank, reason), rank)

    def _account_of(self, rank: int, reason: AbortReason) -> str:
        """Return the best text about a rank: its own if it failed, else the leader's: only the leader knows a child's
        signal."""
        limit_s = time.monotonic() + (_LEADER_ACCOUNT_S if reason is AbortReason.ENDED and rank != self.ranks[0] else 0.0)
        while True:
            accounts = self._read_accounts(rank)
            member = self.ranks.index(rank) if rank in self.ranks else -1
            preferred = member if reason is AbortReason.FAILED else 0
            if preferred in accounts:
                return accounts[preferred]
            if time.monotonic() >= limit_s:
                break
            time.sleep(0.005)
        if accounts:
            return next(iter(accounts.values()))
        name = self.describe_rank(member) if member >= 0 else f"rank {rank}"
        return f"{name} has {'stopped answering' if reason is AbortReason.STALLED else reason.name.lower()}"

    def write_account(self, rank: int, text: str) -> None:
        """Store what this rank knows about the end of a rank (of the world), for all error messages."""
        own = self._memory.area(f"{self._name}.accounts")[self.rank * _ACCOUNT_BYTES :][:_ACCOUNT_BYTES]
        body = text.encode(errors="replace")[: _ACCOUNT_BYTES - _ACCOUNT_HEAD.size]
        _ACCOUNT_HEAD.pack_into(own, 0, 0, len(body))
        own[_ACCOUNT_HEAD.size :][: len(body)] = memoryview(body)
        _ACCOUNT_HEAD.pack_into(own, 0, rank + 1, len(body))

    def _read_accounts(self, rank: int) -> Mapping[int, str]:
        """Return what members have written about a rank, by member."""
        found: dict[int, str] = {}
        area = self._memory.area(f"{self._name}.accounts")
        for member in range(self.size):
            row = area[member * _ACCOUNT_BYTES :][:_ACCOUNT_BYTES]
            about, num_bytes = _ACCOUNT_HEAD.unpack_from(row)
            if about == rank + 1:
                found[member] = bytes(row[_ACCOUNT_HEAD.size :][:num_bytes]).decode(errors="replace")
        return found
