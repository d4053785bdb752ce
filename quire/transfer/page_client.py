"""PageClient: pulls the KV pages of prompts from prefill engines, each transfer in a thread of its own.

Each transfer goes to the peer from which its pages are expected first: by the work that waits there, the prefixes that it has
computed, and its measured speed. If that peer refuses, or is not there, the next one is asked.

A page is verified in its slot before it counts. A transfer that fails, is late or is given up keeps the pages that it has; the
rest is computed. A peer that failed is left alone for a time that grows with each failure.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from quire.base.logging import UnexpectedErrors, get_logger
from quire.contracts.shared_slots import SharedSlots
from quire.transfer.address import Address
from quire.transfer.channel import Channel, Fields, TransferError, int_of, list_of, text_of
from quire.transfer.connection import Connection, MappedSlots, Pull
from quire.transfer.handshake import Identity, RefusedError, greet, raise_refusal
from quire.transfer.nixl_reads import NixlAgent, NixlSlots
from quire.transfer.page_server import MAX_MESSAGE_BYTES, page_checksum
from quire.transfer.peer_load import PeerLoad

logger = get_logger(__name__)

SILENCE_S = 2.0
"""A peer that sends nothing for so long counts as lost; it sends a heartbeat each half second."""
MAX_TRANSFERS = 32
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_MAX_IDLE_CHANNELS = 8
_IDLE_CHECK_S = 1.0
"""A connection that is kept is closed so soon after its peer has ended, so that the memory of the peer's slots is freed. So
often a peer without a transfer is asked for its load, over such a connection."""
_QUIET_S = 1.5
"""A peer with a transfer that has said nothing for so long, three heartbeats, gets no other one while others are there."""
_RETRY_WITHIN_S = 0.5
"""A transfer that failed so early, and has no page yet, goes to another peer."""
_RETRIED = ("busy", "refused", "mismatch", "auth", "version", "lost")
_RETRY = 1.01
"""Each transfer lets the expected speed of the other peers rise by this much, so that one that was slow is tried again."""
_MAX_REPORTED_PAGES = 1 << 40


@dataclass(eq=False)
class _Peer:
    address: Address
    num_active: int = 0
    pause_s: float = 0.0
    paused_until_s: float = 0.0
    problem: str = ""
    outcome: str = ""
    idle: list[Connection] = field(default_factory=list[Connection])
    incarnation: str = ""
    load: PeerLoad = field(default_factory=PeerLoad)
    heard_s: float = 0.0

    def is_quiet(self, now: float) -> bool:
        """Whether it has a transfer but has said nothing for a while: it may be stopped."""
        return self.num_active > 0 and now - self.heard_s > _QUIET_S


class PageClient:
    """Pulls pages for one decode engine. `begin` and `close` are called by the engine's thread.

    on_news  called by threads after pages have come, and when a transfer is over
    nixl     reads the pages, where the backend of the identity is "nixl"
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        identity: Identity,
        on_news: Callable[[], None],
        silence_s: float = SILENCE_S,
        nixl: NixlAgent | None = None,
    ) -> None:
        self._identity, self._on_news, self._silence_s, self._nixl = identity, on_news, silence_s, nixl
        self._peers = [_Peer(address) for address in addresses]
        self._pulls: set[Pull] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watching: threading.Thread | None = None
        self._outcomes: Counter[str] = Counter()
        self.errors = UnexpectedErrors(logger)
        self.pull_s = 0.0

    def set_peers(self, addresses: Sequence[Address]) -> None:
        """Ask these peers from now on; transfers from others go on, and what is known of those that stay is kept."""
        with self._lock:
            known = {peer.address: peer for peer in self._peers}
            self._peers = [known.pop(address, None) or _Peer(address) for address in dict.fromkeys(addresses)]
            for peer in known.values():
                _drop(peer.idle, list(peer.idle))

    @property
    def peers(self) -> tuple[_Peer, ...]:
        """What is known of each peer, in the order of the addresses."""
        return tuple(self._peers)

    @property
    def outcomes(self) -> Counter[str]:
        """How many transfers have ended with each outcome, see Pull."""
        with self._lock:
            return self._outcomes.copy()

    @property
    def problems(self) -> dict[str, str]:
        """Why the last transfer from a peer failed, by its address; without those whose last transfer did not."""
        with self._lock:
            return {str(peer.address): f"{peer.outcome}: {peer.problem}" for peer in self._peers if peer.problem}

    @property
    def is_available(self) -> bool:
        """Whether a transfer may be begun now: a peer is there that has not just failed."""
        now = time.monotonic()
        return len(self._pulls) < MAX_TRANSFERS and any(peer.paused_until_s <= now for peer in self._peers)

    @property
    def num_active(self) -> int:
        """Transfers whose threads run."""
        return len(self._pulls)

    @property
    def num_transfers(self) -> dict[str, int]:
        """Transfers that gave pages, by the peer's address."""
        with self._lock:
            return {str(peer.address): peer.load.num_transfers for peer in self._peers}

    @property
    def waits_s(self) -> dict[str, float]:
        """The seconds that the work which waits at a peer is expected to take, by its address; without those that rest."""
        with self._lock:
            now, default = time.monotonic(), self._default_s_per_page()
            return {
                str(peer.address): peer.load.waiting(now, default) * (peer.load.s_per_page or default or 0.0)
                for peer in self._peers
                if peer.paused_until_s <= now
            }

    def predict_s(self, keys: Sequence[int], first_page: int) -> float | None:
        """Return the seconds that the pages of a prompt from first_page on are expected to take; None: nothing was measured, or
        no peer can be asked.

        keys  of all pages up to the last one wanted
        """
        with self._lock:
            peer = self._choose(keys, first_page, ())
            return None if peer is None or self._default_s_per_page() is None else self._predict(peer, keys, first_page)

    def expect_faster(self, factor: float) -> None:
        """Expect all peers to take less by a factor, so that one that was slow once is tried again."""
        with self._lock:
            now = time.monotonic()
            for peer in self._peers:
                if peer.paused_until_s <= now:
                    peer.load.scale(1 / factor)

    def note_late(self, pull: Pull, factor: float) -> None:
        """Expect the peer of a transfer that was too late to take longer by a factor."""
        with self._lock:
            for peer in self._peers:
                if str(peer.address) == pull.address:
                    peer.load.scale(factor)

    def begin(self, pull: Pull) -> bool:
        """Start a transfer from the peer from which it is expected first; False: there is no peer to ask, or no thread."""
        with self._lock:
            if len(self._pulls) >= MAX_TRANSFERS:
                return False
            peer = self._assign(pull, [])
            if peer is None:
                return False
            self._pulls.add(pull)
        try:
            threading.Thread(target=self._run, args=(pull, peer), name="kv-page-pull", daemon=True).start()
        except RuntimeError as error:  # the system has no thread for it
            with self._lock:
                self._pulls.discard(pull)
                peer.num_active -= 1
                peer.load.end(pull)
            self.errors.note("starting a KV transfer", error)
            return False
        return True

    def _assign(self, pull: Pull, excluded: Sequence[_Peer]) -> _Peer | None:
        """Choose a peer and count the transfer there; the caller has the lock."""
        keys, now = [*pull.prefix_keys, *pull.keys], time.monotonic()
        first_page = len(pull.prefix_keys)
        peer = self._choose(keys, first_page, excluded)
        if peer is not None:
            if not peer.num_active:
                peer.heard_s = now
            peer.num_active += 1
            pull.address = str(peer.address)
            predicted_s = self._predict(peer, keys, first_page)
            pull.expected_s, pull.asked_s = None if self._default_s_per_page() is None else predicted_s, now
            work = peer.load.work(keys, first_page)
            pull.expected_work = work + peer.load.waiting(now, self._default_s_per_page())
            peer.load.begin(pull, work, len(pull.keys))
        return peer

    def _let_others_retry(self, pull: Pull, peer: _Peer) -> None:
        """Expect the other peers to be a little faster than before, but not faster than the one that has given pages."""
        keys, first_page, now = [*pull.prefix_keys, *pull.keys], len(pull.prefix_keys), time.monotonic()
        least_s = self._predict(peer, keys, first_page)
        for other in self._peers:
            if other is not peer and other.paused_until_s <= now and self._predict(other, keys, first_page) > least_s:
                other.load.scale(1 / _RETRY)

    def _choose(self, keys: Sequence[int], first_page: int, excluded: Sequence[_Peer]) -> _Peer | None:
        """Return the peer with the least predicted time; equal ones by their transfers now, then by those that they had."""
        now = time.monotonic()
        peers = [peer for peer in self._peers if peer.paused_until_s <= now and peer not in excluded]
        peers = [peer for peer in peers if not peer.is_quiet(now)] or peers
        order = {id(peer): (self._predict(peer, keys, first_page), peer.num_active, peer.load.num_transfers) for peer in peers}
        return min(peers, key=lambda peer: order[id(peer)], default=None)

    def _predict(self, peer: _Peer, keys: Sequence[int], first_page: int) -> float:
        """Return the seconds until a peer is expected to have given pages; in pages of work where nothing was measured."""
        default = self._default_s_per_page()
        s_per_page = peer.load.s_per_page or default or 1.0
        return s_per_page * (peer.load.work(keys, first_page) + peer.load.waiting(time.monotonic(), default))

    def _default_s_per_page(self) -> float | None:
        """Return the speed of the fastest peer that was measured and does not rest, for those that were not."""
        now = time.monotonic()
        measured = [peer.load.s_per_page for peer in self._peers if peer.paused_until_s <= now]
        return min((s_per_page for s_per_page in measured if s_per_page is not None), default=None)

    def close(self, timeout_s: float = 2.0) -> None:
        """Give up all transfers and close the connections."""
        self._closing.set()
        for pull in list(self._pulls):
            pull.cancel()
        deadline_s = time.monotonic() + timeout_s
        while self._pulls and time.monotonic() < deadline_s:
            time.sleep(0.005)
        with self._lock:
            for peer in self._peers:
                _drop(peer.idle, list(peer.idle))
        if self._watching is not None:
            self._watching.join(timeout_s)

    def _run(self, pull: Pull, peer: _Peer) -> None:
        started_s, outcome = time.monotonic(), "lost"
        try:
            outcome = self._try_peers(pull, [peer], started_s)
        except Exception as error:  # noqa: BLE001 - the pages are computed here
            self.errors.note("the choice of a prefill engine", error)
        finally:
            pull.duration_s = time.monotonic() - started_s
            with self._lock:
                self._pulls.discard(pull)
                self._outcomes[outcome] += 1
                self.pull_s += pull.duration_s
            pull.outcome, pull.is_over = outcome, True
            self._on_news()

    def _try_peers(self, pull: Pull, tried: list[_Peer], started_s: float) -> str:
        """Ask the one peer of a list, and others where it fails, which are added to it; return the outcome."""
        outcome = self._attempt(pull, tried[0])
        while outcome in _RETRIED and not pull.num_done and time.monotonic() - started_s < _RETRY_WITHIN_S:
            with self._lock:
                following = None if pull.is_cancelled or self._closing.is_set() else self._assign(pull, tried)
                if following is None:
                    break
                self._outcomes["retried"] += 1
            tried.append(following)
            outcome = self._attempt(pull, following)
        return outcome

    def _attempt(self, pull: Pull, peer: _Peer) -> str:
        """Ask one peer, and return the outcome."""
        started_s, problem = time.monotonic(), ""
        try:
            outcome = self._pull(pull, peer)
        except RefusedError as error:
            outcome, problem = error.reason, str(error)
        except (TransferError, OSError) as error:
            outcome, problem = ("aborted" if pull.is_cancelled else "lost"), str(error)
        except Exception as error:  # noqa: BLE001 - the pages are computed here
            self.errors.note("a KV transfer", error, f"from {peer.address}")
            outcome, problem = "lost", "an error of this engine"
        with self._lock:
            peer.num_active -= 1
            peer.load.end(pull)
            if outcome in ("complete", "partial") and pull.num_done:
                peer.load.learn(pull.expected_work * pull.num_done / len(pull.keys), time.monotonic() - started_s)
                self._let_others_retry(pull, peer)
                peer.load.remember([*pull.prefix_keys, *pull.keys[: pull.num_done]])
            self._judge(peer, outcome, problem)
        return outcome

    def _judge(self, peer: _Peer, outcome: str, problem: str) -> None:
        """Leave a peer that failed alone for a while; tell each problem once."""
        if outcome in ("complete", "partial"):
            peer.pause_s = peer.paused_until_s = 0.0
            peer.outcome = peer.problem = ""
            return
        if outcome in ("mismatch", "auth", "version"):
            peer.pause_s = _MAX_PAUSE_S
        elif outcome in ("lost", "damaged"):
            peer.pause_s = min(_MAX_PAUSE_S, max(_FIRST_PAUSE_S, 2 * peer.pause_s))
            _drop(peer.idle, list(peer.idle))
            peer.load.forget()
        else:
            return  # busy, refused, aborted: it is alive
        peer.paused_until_s = time.monotonic() + peer.pause_s
        peer.problem = problem or "a page has other bytes than its checksum says"
        if outcome != peer.outcome:
            peer.outcome = outcome
            logger.warning(
                "prompts are computed here, as the prefill engine %s fails (%s): %s", peer.address, outcome, peer.problem
            )

    def _keep(self, peer: _Peer, connection: Connection) -> None:
        """Keep a connection for the next transfer, if a thread can watch it; the caller has the lock."""
        if self._watching is None:
            watching = threading.Thread(target=self._watch, name="kv-page-idle", daemon=True)
            try:
                watching.start()
            except RuntimeError as error:  # the system has no thread for it
                self.errors.note("watching the connections to prefill engines", error)
                connection.close()
                return
            self._watching = watching
        peer.idle.append(connection)

    def _watch(self) -> None:
        """Close kept connections whose peer has ended, and ask peers without a transfer for their load."""
        while not self._closing.wait(_IDLE_CHECK_S):
            with self._lock:
                for peer in self._peers:
                    _drop(peer.idle, [one for one in peer.idle if one.channel.is_readable])
            for peer in self._peers:
                self._ask_load(peer)

    def _ask_load(self, peer: _Peer) -> None:
        with self._lock:
            if peer.num_active or not peer.idle or self._closing.is_set():
                return
            connection = peer.idle.pop()
        try:
            connection.channel.send({"type": "load"})
            fields, _ = connection.channel.receive("load")
            self._note_report(peer, fields)
        except Exception as error:  # noqa: BLE001 - the load of the peer is not known
            connection.close()
            if not isinstance(error, TransferError | OSError):
                self.errors.note("asking for the load of a prefill engine", error, str(peer.address))
            if isinstance(error.__cause__, TimeoutError):  # a peer that has ended is noticed at the next transfer
                with self._lock:
                    self._judge(peer, "lost", str(error))
            return
        with self._lock:
            if self._closing.is_set() or peer not in self._peers:
                connection.close()
            else:
                peer.idle.append(connection)

    def _note_report(self, peer: _Peer, fields: Fields) -> None:
        """Take in what a message of a peer says of its load. Raises TransferError."""
        num_waiting = int_of(fields, "num_waiting_pages", 0, _MAX_REPORTED_PAGES)
        with self._lock:
            peer.heard_s = time.monotonic()
            peer.load.report(num_waiting, peer.heard_s)

    def _pull(self, pull: Pull, peer: _Peer) -> str:
        with self._lock:
            connection = peer.idle.pop() if peer.idle else None
        if connection is not None:
            try:
                return self._transfer(pull, peer, connection)
            except _StaleError:
                pass  # the peer has closed it meanwhile, or was started again
        return self._transfer(pull, peer, self._connect(pull, peer))

    def _connect(self, pull: Pull, peer: _Peer) -> Connection:
        channel = Channel(peer.address.connect(self._silence_s), self._silence_s)
        try:
            pull.use(channel)
            incarnation, shared = greet(channel, self._identity)
            with self._lock:
                if incarnation != peer.incarnation:
                    peer.load.forget()
                peer.incarnation = incarnation
            return Connection(channel, self._open(shared))
        except BaseException:
            pull.use(None)
            channel.close()
            raise

    def _open(self, shared: SharedSlots | Fields | None) -> MappedSlots | NixlSlots | None:
        if isinstance(shared, SharedSlots):
            return MappedSlots(shared, self._identity.page_bytes)
        if shared is None or self._nixl is None:
            return None
        return self._nixl.open(shared, self._identity.page_bytes, MAX_MESSAGE_BYTES)

    def _transfer(self, pull: Pull, peer: _Peer, connection: Connection) -> str:
        is_clean = False
        try:
            pull.use(connection.channel)
            self._ask(pull, peer, connection.channel)
            outcome = self._receive(pull, peer, connection)
            is_clean = outcome in ("complete", "partial")
            return outcome
        except RefusedError:
            is_clean = True
            raise
        finally:
            pull.use(None)
            with self._lock:
                is_kept = is_clean and not pull.is_cancelled and not self._closing.is_set()
                if is_kept and peer in self._peers and len(peer.idle) < _MAX_IDLE_CHANNELS:
                    self._keep(peer, connection)
                else:
                    connection.close()

    def _ask(self, pull: Pull, peer: _Peer, channel: Channel) -> None:
        tokens = array("I", pull.token_ids)
        message: Fields = {
            "type": "prefill",
            "num_tokens": len(tokens),
            "cache_salt": pull.cache_salt,
            "first_page": pull.first_page,
            "num_pages": len(pull.keys),
            "priority": pull.priority,
            "is_background": pull.is_background,
        }
        before = channel.num_received_bytes
        try:
            channel.send(message, [memoryview(tokens)])
            fields, _ = channel.receive("accepted", "refusal")
        except TransferError as error:
            if channel.num_received_bytes == before and not pull.is_cancelled:
                raise _StaleError(str(error)) from error
            raise
        raise_refusal(fields)
        self._note_report(peer, fields)

    def _receive(self, pull: Pull, peer: _Peer, connection: Connection) -> str:
        channel = connection.channel
        while True:
            channel.send({"type": "pull", "num_taken": pull.num_done})
            fields, _ = channel.receive("pages")
            self._note_report(peer, fields)
            keys, checksums, slots = _lists_of(fields, connection.is_shared)
            expected = [f"{key:032x}" for key in pull.keys[pull.num_done : pull.num_done + len(keys)]]
            if keys != expected:
                raise TransferError(f"the peer sent pages {keys!r:.100}, which were not asked for")
            if connection.is_shared and slots:
                connection.read(slots, pull, self._silence_s)
            for checksum in checksums:
                view = pull.slots[pull.num_done]
                if not connection.is_shared:
                    channel.receive_into(view)
                if page_checksum(pull.keys[pull.num_done], view) != checksum:
                    return "damaged"
                pull.num_done += 1
                pull.num_bytes += view.nbytes
            if keys:
                with self._lock:
                    peer.load.advance(pull, len(pull.keys) - pull.num_done)
                self._on_news()
            if fields.get("is_last") is True:
                with suppress(TransferError):
                    channel.send({"type": "release"})
                return "complete" if pull.num_done == len(pull.keys) else "partial"


def _drop(idle: list[Connection], dropped: list[Connection]) -> None:
    for connection in dropped:
        idle.remove(connection)
        connection.close()


class _StaleError(TransferError):
    """A connection that was kept was closed by the peer before the transfer began."""


def _lists_of(fields: Fields, is_shared: bool) -> tuple[list[object], list[object], list[object]]:
    keys, checksums = list_of(fields, "keys"), list_of(fields, "checksums")
    slots = list_of(fields, "slots") if is_shared else keys
    if not len(keys) == len(checksums) == len(slots):
        raise TransferError(f"the peer sent {len(keys)} keys, {len(checksums)} checksums and {len(slots)} slots")
    text_of(fields, "reason")
    return keys, checksums, slots
