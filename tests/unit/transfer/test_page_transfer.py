"""Pages go from a page server to a client whole and verified, or the transfer ends with a reason, whatever fails."""

import contextlib
import fcntl
import os
import socket
import threading
import time

import pytest

from quire.base.errors import ConfigError
from quire.contracts.shared_slots import SharedSlots
from quire.transfer import page_client, page_server
from quire.transfer.address import Address, parse_address
from quire.transfer.channel import PROTOCOL_VERSION, Channel, TransferError
from quire.transfer.connection import Pull
from quire.transfer.handshake import Identity, RefusedError, raise_refusal
from quire.transfer.page_client import PageClient
from quire.transfer.page_server import PageServer
from quire.transfer.peer_load import PeerLoad
from tests.ranks import open_descriptors, wait_until

PAGE_BYTES = 1000
FINGERPRINT = {"weights": "abc", "kv": "bf16"}
IDENTITY = Identity(FINGERPRINT, PAGE_BYTES, b"secret")


def page_of(key):
    return bytes([key % 251]) * PAGE_BYTES


class Source:
    """An engine whose pages have key 1, 2, ... and that computes one whenever `compute` is called, or all at once."""

    def __init__(self, is_instant=True):
        self.jobs, self.refusal = [], None
        self.slots = {}
        self.is_instant = is_instant
        self.num_changes = 0

    def begin(self, job):
        if self.refusal is not None:
            raise self.refusal
        self.jobs.append(job)
        if self.is_instant:
            self.compute(job.num_pages, job)
            job.complete()

    def compute(self, num_pages, job=None):
        job = job or self.jobs[-1]
        keys = [job.first_page + len(job.ready) + number + 1 for number in range(num_pages)]
        self.slots.update({key: bytearray(page_of(key)) for key in keys})
        job.add_ready([(key, key) for key in keys])

    shared = None

    def page(self, slot):
        return memoryview(self.slots[slot])

    num_waiting_pages = 0

    def note_change(self):
        self.num_changes += 1


@pytest.fixture(params=["tcp", "unix"])
def address(request, tmp_path):
    return Address("127.0.0.1", 0) if request.param == "tcp" else Address(path=str(tmp_path / "pages"))


@pytest.fixture
def tcp():
    return Address("127.0.0.1", 0)


class Pair:
    """A server and a client of it."""

    def __init__(
        self, address, source=None, identity=IDENTITY, server_identity=IDENTITY, silence_s=30.0, lease_s=30.0, peer=None
    ):
        self.source = source or Source()
        self.server = PageServer(address, server_identity, self.source, lease_s)
        self.news = threading.Event()
        self.client = PageClient([peer or self.server.address], identity, self.news.set, silence_s)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()
        self.server.close()
        assert wait_until(lambda: self.server.num_connections == 0)

    def pull(self, num_pages=5, first_page=2):
        keys = list(range(first_page + 1, first_page + num_pages + 1))
        buffers = [bytearray(PAGE_BYTES) for _ in keys]
        pull = Pull(range(4 * (first_page + num_pages)), "salt\udfff", first_page, keys, [memoryview(one) for one in buffers])
        pull.buffers = buffers
        assert self.client.begin(pull)
        return pull


def finish(pull):
    assert wait_until(lambda: pull.is_over), "the transfer hangs"
    for key, buffer in list(zip(pull.keys, pull.buffers, strict=True))[: pull.num_done]:
        assert bytes(buffer) == page_of(key)
    return pull.outcome


def test_pages_arrive_whole(address):
    with Pair(address) as pair:
        assert finish(pair.pull()) == "complete"
        assert wait_until(lambda: pair.source.jobs[0].is_over)
        job = pair.source.jobs[0]
        assert (list(job.token_ids), job.cache_salt, job.first_page) == (list(range(28)), "salt\udfff", 2)
        for _ in range(3):  # on the same connection
            assert finish(pair.pull(num_pages=3)) == "complete"
        assert pair.server.num_connections == 1


def test_both_sides_go_on_after_unexpected_errors(tcp, monkeypatch):
    with Pair(tcp) as pair:
        for target, name in ((page_server, "Channel"), (pair.source, "begin"), (PeerLoad, "learn")):
            with monkeypatch.context() as patch:
                patch.setattr(target, name, lambda *_: 1 // 0)
                assert finish(pair.pull()) == "lost"
            pair.client.peers[0].paused_until_s = 0.0
        assert finish(pair.pull()) == "complete"
        assert (pair.server.errors.count, pair.client.errors.count) == (2, 1)
        assert pair.client.num_active == pair.client.peers[0].num_active == 0


class SharingSource(Source):
    """The same with slots that the client maps; page n is in slot n."""

    STRIDE = 1024

    def __init__(self, is_instant=True, num_bytes=64 * 1024, seals=fcntl.F_SEAL_SHRINK):
        super().__init__(is_instant)
        self.fd = os.memfd_create("slots", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_bytes)
        if seals:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.shared = SharedSlots(self.fd, 64, self.STRIDE)

    def compute(self, num_pages, job=None):
        job = job or self.jobs[-1]
        first = job.first_page + len(job.ready) + 1
        for key in range(first, first + num_pages):
            os.pwrite(self.fd, page_of(key), key * self.STRIDE)
        super().compute(num_pages, job)


def test_pages_are_copied_from_shared_slots_on_one_machine(tmp_path):
    before = open_descriptors()
    source = SharingSource()
    with Pair(Address(path=str(tmp_path / "pages")), source) as pair:
        for number in range(1, 9):
            assert finish(pair.pull(num_pages=number)) == "complete"
        assert pair.client.peers[0].idle[0].is_shared
        source.is_instant = False
        pull = pair.pull()
        assert wait_until(lambda: len(source.jobs) == 9)
        source.compute(2)
        assert wait_until(lambda: pull.num_done == 2)
        real = source.page
        source.page = lambda slot: memoryview(b"x" * PAGE_BYTES) if slot == 5 else real(slot)  # the slot was given away
        source.compute(1)
        assert finish(pull) == "damaged"
        assert pull.num_done == 2
    os.close(source.fd)
    assert wait_until(lambda: open_descriptors() <= before)


def test_slots_of_an_ended_server_are_let_go_without_another_transfer(tmp_path, monkeypatch):
    """A mapping would keep the memory of a prefill engine that was killed."""
    monkeypatch.setattr(page_client, "_IDLE_CHECK_S", 0.01)
    source = SharingSource()
    with Pair(Address(path=str(tmp_path / "pages")), source) as pair:
        pulls = [pair.pull() for _ in range(3)]
        assert [finish(pull) for pull in pulls] == ["complete"] * 3
        assert num_mapped() > 0
        pair.server.close()
        assert wait_until(lambda: num_mapped() == 0)
        assert not pair.client.peers[0].idle
    os.close(source.fd)


def num_mapped():
    """Return how many mappings of shared slots this process has."""
    with open("/proc/self/maps") as file:
        return sum("memfd:" in line and "r--s" in line for line in file)


def test_shared_slots_are_not_offered_over_tcp(tcp):
    source = SharingSource()
    with Pair(tcp, source) as pair:
        assert finish(pair.pull()) == "complete"
        assert not pair.client.peers[0].idle[0].is_shared
    os.close(source.fd)


@pytest.mark.parametrize("options", [{"num_bytes": 1000}, {"seals": 0}], ids=["too-small", "may-shrink"])
def test_shared_slots_that_could_end_this_process_are_not_mapped(tmp_path, options):
    source = SharingSource(**options)
    with Pair(Address(path=str(tmp_path / "pages")), source) as pair:
        assert finish(pair.pull()) == "lost"
    os.close(source.fd)


def test_pages_arrive_while_the_others_are_computed_and_are_freed_when_they_were_taken(tcp):
    with Pair(tcp, Source(is_instant=False)) as pair:
        pull = pair.pull(5)
        assert wait_until(lambda: bool(pair.source.jobs))
        for number in range(1, 6):
            pair.source.compute(1)
            assert wait_until(lambda number=number: pull.num_done == number)
            assert wait_until(lambda number=number: pair.source.jobs[0].num_taken == number)
        assert not pull.is_over
        pair.source.jobs[0].complete()
        assert finish(pull) == "complete"


@pytest.mark.slow
def test_peer_that_computes_for_long_is_not_lost(tcp, monkeypatch):
    monkeypatch.setattr(page_server, "HEARTBEAT_S", 0.05)
    with Pair(tcp, Source(is_instant=False), silence_s=2.0) as pair:
        pull = pair.pull()
        time.sleep(3)
        assert not pull.is_over
        pair.source.compute(2)
        pair.source.jobs[0].complete("the step failed")
        assert finish(pull) == "partial"
        assert pull.num_done == 2


def test_many_transfers_at_once(address):
    with Pair(address) as pair:
        pulls = [pair.pull(num_pages=1 + number % 7) for number in range(20)]
        assert [finish(pull) for pull in pulls] == ["complete"] * 20


@pytest.mark.parametrize("reason", ["busy", "refused"])
def test_refused_transfer_is_not_the_end_of_the_connection(tcp, reason):
    with Pair(tcp) as pair:
        pair.source.refusal = RefusedError(reason, "not now")
        assert finish(pair.pull()) == reason
        pair.source.refusal = None
        assert pair.client.is_available
        assert finish(pair.pull()) == "complete"
        assert pair.server.num_connections == 1


def differing(name, decode, prefill):
    return f"{name}: {decode} on the decode engine, {prefill} on the prefill engine"


@pytest.mark.parametrize(
    ("identity", "outcome", "text"),
    [
        (
            Identity({**FINGERPRINT, "kv": "int8"}, PAGE_BYTES, b"secret"),
            "mismatch",
            differing("kv", "int8", "bf16"),
        ),
        (
            Identity({**FINGERPRINT, "rope": "long"}, PAGE_BYTES, b"secret"),
            "mismatch",
            differing("rope", "long", "nothing"),
        ),
        (Identity(FINGERPRINT, 999, b"secret"), "mismatch", differing("page_bytes", 999, 1000)),
        (Identity(FINGERPRINT, PAGE_BYTES, b"another"), "auth", "does not know the secret"),
        (Identity(FINGERPRINT, PAGE_BYTES), "auth", "does not know the secret"),
    ],
    ids=["field", "missing-field", "page-size", "secret", "no-secret"],
)
def test_wrong_peer_is_refused_told_once_and_left_alone(tcp, monkeypatch, identity, outcome, text):
    warnings = []
    monkeypatch.setattr(page_client.logger, "warning", lambda message, *values: warnings.append(message % values))
    with Pair(tcp, identity=identity) as pair:
        pull = pair.pull()
        assert finish(pull) == outcome
        assert pull.num_done == 0
        assert not pair.source.jobs
        assert not pair.client.is_available
        pair.client.peers[0].paused_until_s = 0.0
        assert finish(pair.pull()) == outcome
    assert len(warnings) == 1
    assert text in warnings[0]


def test_server_does_not_take_a_client_without_the_secret(tcp):
    """Also where the client does not ask for the server's proof."""
    with Pair(tcp) as pair, socket.create_connection((pair.server.address.host, pair.server.address.port)) as sock:
        channel = Channel(sock, 30.0)
        channel.send({"type": "hello", "version": PROTOCOL_VERSION, "nonce": "00"})
        channel.receive("challenge")
        channel.send({"type": "identify", "proof": "00", "fingerprint": FINGERPRINT, "page_bytes": PAGE_BYTES})
        fields, _ = channel.receive("refusal")
        assert fields["reason"] == "auth"


def test_refusal_for_an_unknown_reason_is_no_refusal():
    with pytest.raises(TransferError, match="'whim', which is none of"):
        raise_refusal({"type": "refusal", "reason": "whim", "text": ""})


def test_another_version_is_refused(tcp, monkeypatch):
    with Pair(tcp) as pair:
        monkeypatch.setattr("quire.transfer.handshake.PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
        fields = []
        with socket.create_connection((pair.server.address.host, pair.server.address.port)) as sock:
            channel = Channel(sock, 30.0)
            channel.send({"type": "hello", "version": PROTOCOL_VERSION, "nonce": "00"})
            fields.append(channel.receive("refusal")[0])
    assert fields[0]["reason"] == "version"


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"QKVT" + b"\xff" * 12, b"QKVT\x02\0\0\0" + b"\0" * 8 + b"[]"])
def test_other_protocols_are_cut_off(tcp, data):
    with Pair(tcp) as pair, socket.create_connection((pair.server.address.host, pair.server.address.port)) as sock:
        sock.sendall(data)
        sock.settimeout(30)
        with contextlib.suppress(ConnectionResetError):  # it had not read all
            assert sock.recv(100) == b""
        assert finish(pair.pull()) == "complete"


def test_damaged_page_does_not_count(tcp, monkeypatch):
    with Pair(tcp) as pair:
        real = page_server.page_checksum
        monkeypatch.setattr(page_server, "page_checksum", lambda key, data: real(key, data) ^ (key == 5))
        pull = pair.pull()
        assert finish(pull) == "damaged"
        assert pull.num_done == 2


def test_page_of_another_key_does_not_count(tcp):
    with Pair(tcp, Source(is_instant=False)) as pair:
        pull = pair.pull()
        assert wait_until(lambda: bool(pair.source.jobs))
        pair.source.slots[9] = bytearray(page_of(9))
        pair.source.jobs[0].add_ready([(9, 9)])
        assert finish(pull) == "lost"
        assert pull.num_done == 0


def test_given_up_transfer_ends_at_once_and_the_server_notices(tcp):
    with Pair(tcp, Source(is_instant=False)) as pair:
        pull = pair.pull()
        assert wait_until(lambda: bool(pair.source.jobs))
        pair.source.compute(1)
        assert wait_until(lambda: pull.num_done == 1)
        pull.cancel()
        assert finish(pull) == "aborted"
        assert wait_until(lambda: pair.source.jobs[0].is_over)
        assert pair.client.is_available


def test_peer_that_is_away_is_left_alone_for_longer_and_longer(tcp):
    with Pair(tcp, peer=Address("127.0.0.1", 1)) as pair:
        pauses = []
        for _ in range(3):
            pair.client.peers[0].paused_until_s = 0.0
            assert finish(pair.pull()) == "lost"
            assert not pair.client.is_available
            pauses.append(pair.client.peers[0].pause_s)
    assert pauses == [10.0, 20.0, 40.0]


def test_other_peers_are_asked_while_one_is_away(tcp):
    with Pair(tcp) as pair:
        client = PageClient([Address("127.0.0.1", 1), pair.server.address], IDENTITY, pair.news.set)
        pair.client.close()
        pair.client = client
        assert [finish(pair.pull()) for _ in range(3)] == ["complete"] * 3
        assert client.outcomes == {"complete": 3, "retried": 1}


def test_restarted_peer_is_found_by_the_kept_connection(tmp_path):
    address = Address(path=str(tmp_path / "pages"))
    with Pair(address) as pair:
        assert finish(pair.pull()) == "complete"
        before = pair.client.peers[0].incarnation
        pair.server.close()
        pair.server = PageServer(address, IDENTITY, pair.source)
        assert finish(pair.pull()) == "complete"
        assert pair.client.peers[0].incarnation != before


def test_lease_of_a_client_that_says_nothing_ends(tcp):
    with Pair(tcp, lease_s=0.5) as pair, socket.create_connection((pair.server.address.host, pair.server.address.port)) as sock:
        channel = Channel(sock, 30.0)
        page_client.greet(channel, IDENTITY)
        channel.send(
            {"type": "prefill", "num_tokens": 4, "cache_salt": "", "first_page": 0, "num_pages": 1, "priority": 0},
            [memoryview(bytes(16))],
        )
        channel.receive("accepted")
        assert wait_until(lambda: pair.source.jobs[0].is_over)
        assert pair.source.jobs[0].outcome == "expired"


class Link:
    """A proxy between client and server, which may pass bytes slowly, cut, or say nothing more, as a server that is stopped."""

    def __init__(self, target, bytes_per_s=None, cut_after=None, is_silent=False):
        self._target, self._bytes_per_s, self._cut_after = target, bytes_per_s, cut_after
        self._is_silent, self._is_closed = is_silent, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._listener.getsockname())
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((self._target.host, self._target.port))
            self._sockets += [near, far]
            threading.Thread(target=self._pass, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, self._cut_after), daemon=True).start()

    def _pass(self, source, target, cut_after):
        try:
            while data := source.recv(1024):
                if cut_after is not None:
                    data, cut_after = data[:cut_after], cut_after - len(data)
                target.sendall(data)
                if cut_after is not None and cut_after <= 0:
                    if self._is_silent:
                        self._is_closed.wait(60)
                    break
                if self._bytes_per_s is not None:
                    time.sleep(len(data) / self._bytes_per_s)
        except OSError:
            return
        finally:
            self._shut_down(source, target)

    def _shut_down(self, *sockets):
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._is_closed.set()
        self._shut_down(*self._sockets)  # close alone does not end a connection that a thread reads
        for sock in self._sockets:
            sock.close()


@pytest.mark.parametrize(
    ("cut_after", "is_silent"),
    [*((number, False) for number in (0, 10, 100, 300, 500, 700, 2000, 4000, 6000)), (0, True), (3000, True)],
)
def test_cut_or_silent_link_keeps_the_whole_pages_of_before(tcp, cut_after, is_silent):
    source = Source()
    server = PageServer(tcp, IDENTITY, source)
    link = Link(server.address, cut_after=cut_after, is_silent=is_silent)
    with Pair(tcp, peer=link.address, silence_s=0.3 if is_silent else 30.0) as pair:
        pull = pair.pull()
        outcome = finish(pull)
        assert outcome in ("lost", "complete")
        assert (pull.num_done == 5) or outcome == "lost"
        assert not is_silent or pull.num_done < 5
    link.close()
    assert wait_until(lambda: server.num_connections == 0)
    assert all(job.is_over for job in source.jobs)
    server.close()


def test_server_that_says_nothing_more_on_a_kept_connection_is_given_up(tcp):
    server = PageServer(tcp, IDENTITY, Source())
    link = Link(server.address, cut_after=20_000, is_silent=True)
    with Pair(tcp, peer=link.address, silence_s=1.0) as pair:
        outcomes = [finish(pair.pull())]
        while outcomes[-1] == "complete":
            outcomes.append(finish(pair.pull()))
        assert (outcomes[0], outcomes[-1], pair.client.is_available) == ("complete", "lost", False)
    link.close()
    server.close()


def test_slow_link_is_no_lost_link_and_may_be_given_up(tcp):
    server = PageServer(tcp, IDENTITY, Source())
    link = Link(server.address, bytes_per_s=2000)
    with Pair(tcp, peer=link.address) as pair:
        pull = pair.pull(40)
        assert wait_until(lambda: pull.num_done >= 2)
        started_s = time.monotonic()
        pull.cancel()
        assert finish(pull) == "aborted"
        assert time.monotonic() - started_s < 15
        assert 2 <= pull.num_done < 40
    link.close()
    server.close()


def test_full_server_takes_no_more_connections(tcp, monkeypatch):
    monkeypatch.setattr(page_server, "_MAX_CONNECTIONS", 2)
    with Pair(tcp, Source(is_instant=False)) as pair:
        pulls = [pair.pull() for _ in range(2)]
        assert wait_until(lambda: len(pair.source.jobs) == 2)
        assert finish(pair.pull()) == "lost"
        assert not any(pull.is_over for pull in pulls)


def test_end_of_the_server_ends_all_transfers(tcp):
    with Pair(tcp, Source(is_instant=False)) as pair:
        pulls = [pair.pull() for _ in range(3)]
        assert wait_until(lambda: len(pair.source.jobs) == 3)
        pair.server.close()
        assert [finish(pull) for pull in pulls] == ["lost"] * 3
        assert all(job.is_over for job in pair.source.jobs)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tcp://127.0.0.1:7000", Address("127.0.0.1", 7000)),
        ("tcp://[::1]:7000", Address("::1", 7000)),
        ("tcp://prefill.example:7000", Address("prefill.example", 7000)),
        ("unix:/run/quire/pages", Address(path="/run/quire/pages")),
        ("unix:///run/quire/pages", Address(path="/run/quire/pages")),
    ],
)
def test_addresses_are_read(text, found):
    assert parse_address(text, "prefill_urls") == found
    assert parse_address(str(found), "prefill_urls") == found


@pytest.mark.parametrize(
    "text", ["http://host:1", "host:1", "tcp://host", "tcp://host:99999", "tcp://:1", "unix:", "unix:" + "x" * 200]
)
def test_bad_addresses_are_refused(text):
    with pytest.raises(ConfigError, match=r"prefill_urls must be tcp://HOST:PORT or unix:PATH.*got"):
        parse_address(text, "prefill_urls")


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        (Address("127.0.0.1", 1), True),
        (Address("127.9.9.9", 1), True),
        (Address("::1", 1), True),
        (Address("localhost", 1), True),
        (Address(path="/x"), True),
        (Address("0.0.0.0", 1), False),
        (Address("::", 1), False),
        (Address("10.0.0.1", 1), False),
        (Address("host", 1), False),
    ],
)
def test_local_addresses_are_known(address, is_local):
    assert address.is_local is is_local
