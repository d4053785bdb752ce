"""ProcessMonitor: detects when another rank's process ends, stops or hangs, and ends the group with the reason."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.base.errors import UnsupportedError
from quire.base.logging import get_logger
from quire.parallel.barrier import AbortReason, ProcessBarrier

logger = get_logger(__name__)

WATCHDOG_TIMEOUT_S = 60.0
STOPPED_TIMEOUT_S = 0.5
_TICK_S = 0.2


class _Sign:
    """A value that should change, and the time since its last change."""

    def __init__(self, now_s: float) -> None:
        self._value: object = None
        self._since_s = now_s

    def age_s(self, value: object, now_s: float) -> float:
        """Record the current value; return for how long it has not changed."""
        if value != self._value:
            self._value, self._since_s = value, now_s
        return now_s - self._since_s

    def restart(self, now_s: float) -> None:
        """Restart the time."""
        self._since_s = now_s


class ProcessMonitor:
    """A thread in each rank's process that watches the processes of all others. The first to detect a failure ends the group.

    - A process that ends: its pidfd signals it at once. Its parent also knows the signal or the status.
    - A process that is stopped (SIGSTOP) for STOPPED_TIMEOUT_S: its monitor no longer beats, and /proc shows it as stopped.
    - A process that does not run at all for watchdog_timeout_s, for another reason.
    - With `watch_barriers`: a rank that others have waited for in a barrier for watchdog_timeout_s, without a sign of work.

    A group that was closed (AbortReason.CLOSED) is ignored. Linux only.
    """

    def __init__(
        self,
        barrier: ProcessBarrier,
        others: Sequence[ProcessBarrier] = (),
        watchdog_timeout_s: float = WATCHDOG_TIMEOUT_S,
        on_abort: Callable[[], None] | None = None,
    ) -> None:
        """barrier: of all ranks; others: of groups of this rank, which are ended too; on_abort: called once in the thread."""
        if not hasattr(os, "pidfd_open"):
            raise UnsupportedError("ranks as processes need Linux 5.3 or later (pidfd_open)")
        self._barrier = barrier
        self._barriers = (barrier, *others)
        self._watchdog_timeout_s = watchdog_timeout_s
        self._on_abort = on_abort
        self._watches_barriers = False
        self._descriptors: dict[int, int] = {}  # by member
        self._has_ended: set[int] = set()
        self._poll = select.poll()
        self._wake_read, self._wake_write = os.pipe()
        self._poll.register(self._wake_read, select.POLLIN)
        self._is_closed = False
        self._process_signs = [_Sign(time.monotonic()) for _ in range(barrier.size)]
        self._work_signs = [[_Sign(time.monotonic()) for _ in range(each.size)] for each in self._barriers]
        self._thread = threading.Thread(target=self._run, name="quire-process-monitor", daemon=True)

    def start(self) -> None:
        """Publish this rank's pid, and watch the other processes as soon as theirs are published."""
        self._barrier.set_pid(os.getpid())
        self._barrier.beat_process()
        self._thread.start()

    def watch(self, member: int, pid: int) -> None:
        """Watch a child from its start, before it publishes its pid. Call before `start`."""
        if member not in self._descriptors:
            self._open(member, pid)

    def watch_barriers(self) -> None:
        """From now on treat a rank that others wait for, and that shows no sign of work, as hanging."""
        self._watches_barriers = True

    def close(self) -> None:
        """Stop the thread."""
        if self._is_closed:
            return
        self._is_closed = True
        os.write(self._wake_write, b"x")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for descriptor in (*self._descriptors.values(), self._wake_read, self._wake_write):
            os.close(descriptor)
        self._descriptors.clear()

    def _open(self, member: int, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._report_end(member, f"{self._barrier.describe_rank(member)} has ended")
            return
        self._descriptors[member] = descriptor
        self._poll.register(descriptor, select.POLLIN)

    def _run(self) -> None:
        last_s = time.monotonic()
        has_told = False
        unknown = {member for member in range(self._barrier.size) if member not in self._descriptors} - {self._barrier.rank}
        while not self._is_closed:
            self._barrier.beat_process()
            for member in [member for member in unknown if self._barrier.pid(member)]:
                self._open(member, self._barrier.pid(member))
                unknown.remove(member)
            ready = {descriptor for descriptor, _ in self._poll.poll(_TICK_S * 1000)}
            for member, descriptor in list(self._descriptors.items()):
                if descriptor in ready:
                    self._poll.unregister(descriptor)
                    self._report_end(member, self._describe_end(member, descriptor))
            now_s = time.monotonic()
            if now_s - last_s > 3 * _TICK_S:
                self._restart_signs(now_s)  # this process did not run itself, so missing signs mean nothing
            last_s = now_s
            if self._barrier.abort_cause is None:
                self._look_for_stalled(now_s)
            elif not has_told and not self._is_ending():
                has_told = True
                self._spread()

    # Ends

    def _describe_end(self, member: int, descriptor: int) -> str:
        """Return how a process has ended, as far as this process can know."""
        name = self._barrier.describe_rank(member)
        try:
            status = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another's child, or one that was waited for
            return f"{name} has ended"
        if status is None:
            return f"{name} has ended"
        if status.si_code == os.CLD_EXITED:
            return f"{name}: exited with status {status.si_status}"
        return f"{name}: killed by {signal.Signals(status.si_status).name}"

    def _report_end(self, member: int, text: str) -> None:
        self._has_ended.add(member)
        cause = self._barrier.abort_cause
        if cause is not None and cause[1] is AbortReason.CLOSED:
            return
        self._end_group(self._barrier.ranks[member], AbortReason.ENDED, text)

    def _is_ending(self) -> bool:
        """Return whether another rank has seen the end of a process before this one, which may know the signal."""
        cause = self._barrier.abort_cause
        if cause is None or cause[1] is not AbortReason.ENDED or cause[0] not in self._barrier.ranks:
            return False
        member = self._barrier.ranks.index(cause[0])
        return member in self._descriptors and member not in self._has_ended

    def _end_group(self, rank: int, reason: AbortReason, text: str) -> None:
        if self._barrier.abort(rank, reason, text):
            logger.error("rank %d ends the group: %s", self._barrier.ranks[self._barrier.rank], text)

    def _spread(self) -> None:
        """End waits of this rank's other groups, too."""
        cause = self._barrier.abort_cause
        if cause is not None:
            for other in self._barriers[1:]:
                text = "" if cause[1] is AbortReason.CLOSED else str(self._barrier.abort_error())
                other.abort(*cause, text)
            if self._on_abort is not None:
                self._on_abort()

    # Hangs

    def _restart_signs(self, now_s: float) -> None:
        for sign in (*self._process_signs, *(sign for signs in self._work_signs for sign in signs)):
            sign.restart(now_s)

    def _look_for_stalled(self, now_s: float) -> None:
        for member in range(self._barrier.size):
            beat = self._barrier.process_beat(member)
            if member == self._barrier.rank or beat == 0:
                continue
            age_s = self._process_signs[member].age_s(beat, now_s)
            if age_s >= STOPPED_TIMEOUT_S and _is_stopped(self._barrier.pid(member)):
                self._report_stall(self._barrier, member, "is stopped (SIGSTOP)")
            elif age_s >= self._watchdog_timeout_s:
                self._report_stall(self._barrier, member, f"has not run for {age_s:.1f} s")
        if self._watches_barriers:
            for barrier, signs in zip(self._barriers, self._work_signs, strict=True):
                self._look_at_barrier(barrier, signs, now_s)

    def _look_at_barrier(self, barrier: ProcessBarrier, signs: list[_Sign], now_s: float) -> None:
        """Find a member that has arrived at fewer barriers than another, and neither arrives nor shows a heartbeat."""
        arrived = [barrier.num_arrived(member) for member in range(barrier.size)]
        for member, sign in enumerate(signs):
            is_waited_for = any(0 < (other - arrived[member]) % 2**32 < 2**31 for other in arrived)
            age_s = sign.age_s((is_waited_for, arrived[member], barrier.heartbeat(member)), now_s)
            if is_waited_for and age_s >= self._watchdog_timeout_s:
                self._report_stall(barrier, member, f"has kept the others waiting for {age_s:.1f} s without a sign of work")

    def _report_stall(self, barrier: ProcessBarrier, member: int, what: str) -> None:
        self._end_group(barrier.ranks[member], AbortReason.STALLED, f"{barrier.describe_rank(member)} {what}")


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; a debugger's stop does not count."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended, which its pidfd signals
        return False
    return text.rpartition(")")[2].split()[0] == "T"
