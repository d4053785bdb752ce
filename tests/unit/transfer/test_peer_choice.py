"""A transfer goes to the prefill engine from which its pages are expected first; the others are passed over."""

import contextlib
import threading

import pytest

from quire.transfer import page_client
from quire.transfer.address import Address
from quire.transfer.connection import Pull
from quire.transfer.handshake import RefusedError
from quire.transfer.page_client import PageClient
from quire.transfer.page_server import PageServer
from quire.transfer.peer_load import CACHED_PAGE_WORK, MAX_KNOWN_PAGES, PeerLoad
from tests.no_threads import no_threads
from tests.unit.transfer.test_page_transfer import IDENTITY, PAGE_BYTES, Pair, Source, finish, wait_until


@contextlib.contextmanager
def peers(num=2):
    sources = [Source() for _ in range(num)]
    servers = [PageServer(Address("127.0.0.1", 0), IDENTITY, source) for source in sources]
    client = PageClient([server.address for server in servers], IDENTITY, threading.Event().set, silence_s=30.0)
    try:
        yield client, sources, servers
    finally:
        client.close()
        for server in servers:
            server.close()


def start(client, num_pages=4, first_page=0):
    keys = list(range(1, first_page + num_pages + 1))
    buffers = [bytearray(PAGE_BYTES) for _ in range(num_pages)]
    views = [memoryview(one) for one in buffers]
    pull = Pull(range(4 * len(keys)), "", first_page, keys[first_page:], views, prefix_keys=keys[:first_page])
    pull.buffers = buffers
    assert client.begin(pull)
    return pull


def loads(client):
    return [peer.load for peer in client.peers]


def test_work_counts_pages_that_are_computed_and_little_for_cached_ones():
    load = PeerLoad()
    load.remember([1, 2, 3])
    assert load.work([1, 2, 3, 4, 5], 0) == pytest.approx(2 + 3 * CACHED_PAGE_WORK)
    assert load.work([1, 2, 3, 4, 5], 3) == pytest.approx(2)  # the cached pages are not wanted
    assert load.work([9, 2, 3], 1) == pytest.approx(3)  # a page of another prefix does not count, nor do those after it
    load.forget()
    assert load.work([1, 2, 3], 2) == pytest.approx(3)


def test_known_pages_are_bounded():
    load = PeerLoad()
    load.remember(range(MAX_KNOWN_PAGES + 10))
    assert load.work([9], 0) == 1.0
    assert load.work([10], 0) == CACHED_PAGE_WORK


def test_waiting_is_that_of_own_transfers_and_of_others_less_what_was_done_since():
    load = PeerLoad(s_per_page=0.5)
    load.begin("a", 4.0, 8)
    load.report(18, now=10.0)
    assert load.waiting(10.0, None) == pytest.approx(4 + 10)
    assert load.waiting(12.0, None) == pytest.approx(4 + 6)
    load.advance("a", 4)
    assert load.waiting(60.0, None) == pytest.approx(2)
    load.end("a")
    assert load.waiting(60.0, None) == 0.0


@pytest.mark.parametrize("case", ["prefix", "speed", "own-load", "load-of-others"])
def test_peer_with_the_least_predicted_wait_is_asked(case):
    with peers() as (client, sources, _):
        first, second = loads(client)
        first.s_per_page = second.s_per_page = 0.01
        first.report(0, page_client.time.monotonic())
        if case == "prefix":
            second.remember(range(1, 4))
        elif case == "speed":
            second.s_per_page = 0.005
        elif case == "own-load":
            first.begin("another", 3.0, 3)
        else:
            first.report(1000, page_client.time.monotonic())
        assert finish(start(client)) == "complete"
        assert [len(source.jobs) for source in sources] == [0, 1]
        assert list(client.num_transfers.values()) == [0, 1]


def test_speed_and_prefix_are_learned_and_a_peer_that_was_slow_is_tried_again():
    with peers() as (client, sources, _):
        loads(client)[0].s_per_page = 1.0
        loads(client)[1].s_per_page = 0.9
        for _ in range(3):
            assert finish(start(client)) == "complete"
        assert [len(source.jobs) for source in sources] == [0, 3]
        assert loads(client)[0].s_per_page < 1.0
        assert loads(client)[1].s_per_page < 0.8
        assert loads(client)[1].work([1, 2, 3, 4, 5], 0) == pytest.approx(1 + 4 * CACHED_PAGE_WORK)


@pytest.mark.parametrize("reason", ["busy", "refused"])
def test_transfer_that_is_refused_goes_to_the_next_peer(reason):
    with peers() as (client, sources, servers):
        sources[0].refusal = RefusedError(reason, "not now")
        pull = start(client)
        assert finish(pull) == "complete"
        assert pull.address == str(servers[1].address)
        assert client.outcomes == {"complete": 1, "retried": 1}
        sources[1].refusal = sources[0].refusal
        assert finish(start(client)) == reason


def test_peer_that_has_ended_is_passed_over_until_it_is_back():
    with peers() as (client, sources, servers):
        servers[0].close()
        assert [finish(start(client)) for _ in range(2)] == ["complete"] * 2
        assert len(sources[1].jobs) == 2
        assert client.outcomes["retried"] == 1
        assert list(client.waits_s) == [str(servers[1].address)]
        servers[0] = PageServer(servers[0].address, IDENTITY, sources[0])
        client.peers[0].paused_until_s = 0.0
        loads(client)[0].s_per_page, loads(client)[1].s_per_page = 1e-6, 1.0
        assert finish(start(client, num_pages=6)) == "complete"
        assert len(sources[0].jobs) == 1


def test_quiet_peer_gets_no_second_transfer(monkeypatch):
    monkeypatch.setattr(page_client, "_QUIET_S", -1.0)
    with peers() as (client, sources, _):
        sources[0].is_instant = sources[1].is_instant = False
        pulls = [start(client, num_pages=1), start(client, num_pages=9)]
        loads(client)[1].scale(1000.0)
        assert wait_until(lambda: all(source.jobs for source in sources))
        for source, num_pages in zip(sources, (1, 9), strict=True):
            source.compute(num_pages)
            source.jobs[0].complete()
        assert [finish(pull) for pull in pulls] == ["complete"] * 2


def test_idle_peers_are_asked_for_their_load(monkeypatch):
    monkeypatch.setattr(page_client, "_IDLE_CHECK_S", 0.01)
    with peers(1) as (client, sources, servers):
        assert finish(start(client)) == "complete"
        loads(client)[0].s_per_page = 1e6
        sources[0].num_waiting_pages = 7
        assert wait_until(lambda: client.waits_s[str(servers[0].address)] > 6e6)
        assert client.predict_s([1, 2, 3, 4], 0) == pytest.approx(1e6 * (7 + 4 * CACHED_PAGE_WORK), rel=0.01)
        assert servers[0].num_connections == 1  # a transfer that begins while it is asked makes another
        assert finish(start(client)) == "complete"


def test_what_is_expected_of_a_peer_that_rests_stays():
    with peers() as (client, _, _servers):
        resting = client.peers[1]
        resting.paused_until_s, resting.load.s_per_page = float("inf"), 1e-9
        for _ in range(5):
            assert finish(start(client)) == "complete"
        client.expect_faster(2.0)
        assert resting.load.s_per_page == 1e-9
        assert client.predict_s([50, 51], 0) > 1e-6  # nor does it count for the others


def test_what_is_expected_of_other_peers_falls_only_to_that_of_the_chosen_one():
    with peers() as (client, sources, _servers):
        loads(client)[0].s_per_page, loads(client)[1].s_per_page = 1.0, 1.001
        sources[0].refusal = sources[1].refusal = RefusedError("busy", "not now")
        for _ in range(50):
            assert finish(start(client)) == "busy"
        assert all(load.s_per_page > 0.97 for load in loads(client))


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_transfer_waits_as_long_as_is_expected_of_the_peer_that_is_asked(is_measured):
    with peers() as (client, sources, servers):
        if is_measured:
            loads(client)[0].s_per_page, loads(client)[1].s_per_page = 1.0, 100.0
        sources[0].refusal = RefusedError("busy", "not now")
        pull = start(client)
        assert finish(pull) == "complete"
        assert pull.address == str(servers[1].address)
        assert (pull.expected_s is not None and pull.expected_s > 300) is is_measured
        assert pull.asked_s > 0


def test_peers_are_replaced_while_transfers_run_and_those_that_stay_are_known():
    with peers() as (client, sources, servers):
        first, second = (server.address for server in servers)
        client.set_peers([first])
        assert finish(start(client)) == "complete"
        known = loads(client)[0]
        sources[0].is_instant = False
        running = start(client)
        assert wait_until(lambda: len(sources[0].jobs) == 2)
        client.set_peers([second, first, second])
        assert loads(client)[1] is known
        client.set_peers([second])
        assert list(client.num_transfers) == [str(second)]
        sources[0].compute(4)
        sources[0].jobs[-1].complete()
        assert finish(running) == "complete"
        assert finish(start(client)) == "complete"
        assert [len(source.jobs) for source in sources] == [2, 1]
        assert wait_until(lambda: servers[0].num_connections == 0)  # none is kept to a server that is not used
        client.set_peers([])
        assert not client.is_available
        assert wait_until(lambda: servers[1].num_connections == 0)


def test_transfers_go_on_after_there_was_no_thread():
    with Pair(Address("127.0.0.1", 0)) as pair:
        with no_threads("kv-page"), pytest.raises(AssertionError, match="begin"):
            pair.pull()
        peer = pair.client.peers[0]
        assert (pair.client.num_active, peer.num_active, peer.load.waiting(0.0, None)) == (0, 0, 0.0)
        with no_threads("kv-page-idle"):
            assert finish(pair.pull()) == "complete"
        assert not peer.idle
        assert wait_until(lambda: pair.server.num_connections == 0)
        assert pair.client.errors.count == 2
        assert [finish(pair.pull()) for _ in range(2)] == ["complete"] * 2
        assert pair.server.num_connections == len(peer.idle) == 1
