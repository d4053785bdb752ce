"""Pages are read by NIXL as over sockets, and a read that is given up leaves its buffer alone until it is over."""

import ctypes
import mmap
import sys
import threading
import types

import pytest

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.transfer import nixl_reads
from quire.transfer.address import Address
from quire.transfer.channel import TransferError
from quire.transfer.connection import Pull
from quire.transfer.handshake import Identity
from quire.transfer.nixl_reads import NixlAgent, Region
from quire.transfer.page_client import PageClient
from quire.transfer.page_server import PageServer

PAGE_BYTES, STRIDE, NUM_SLOTS = 1000, 1024, 8


class FakeAgent:
    """NIXL within this process: a read copies memory when `is_open`, and goes on until then."""

    is_open = True
    registered: list

    def __init__(self, name, _config):
        self.name, self.registered, self.released, self.peers = name, [], [], []
        type(self).last = self

    def register_memory(self, regions, kind):
        assert kind == "DRAM"
        self.registered += regions
        return regions

    def deregister_memory(self, regions):
        for region in regions:
            self.registered.remove(region)

    def get_agent_metadata(self):
        return self.name.encode()

    def add_remote_agent(self, metadata):
        self.peers.append(metadata)
        return metadata

    def remove_remote_agent(self, peer):
        self.peers.remove(peer.encode())

    def get_xfer_descs(self, pieces, _kind):
        return pieces

    def initialize_xfer(self, operation, here, there, _peer):
        assert operation == "READ"
        return here, there

    def transfer(self, _handle):
        return "PROC"

    def check_xfer_state(self, handle):
        if not self.is_open:
            return "PROC"
        for (to, size, _), (start, _, _) in zip(*handle, strict=True):
            ctypes.memmove(to, start, size)
        return "DONE"

    def release_xfer_handle(self, handle):
        self.released.append(handle)


@pytest.fixture
def nixl(monkeypatch):
    api = types.ModuleType("nixl._api")
    api.nixl_agent, api.nixl_agent_config = FakeAgent, lambda **_: None
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setattr(nixl_reads, "check_nixl", lambda: None)
    return FakeAgent


@pytest.fixture
def memory():
    found = mmap.mmap(-1, NUM_SLOTS * STRIDE)
    for slot in range(NUM_SLOTS):
        found[slot * STRIDE : slot * STRIDE + PAGE_BYTES] = bytes([slot + 1]) * PAGE_BYTES
    return found


def region_of(memory):
    return Region(ctypes.addressof(ctypes.c_char.from_buffer(memory)), NUM_SLOTS, STRIDE)


def open_slots(memory, num_pages=2, **changes):
    welcome = {"type": "welcome", **NixlAgent(region_of(memory)).welcome(), **changes}
    return NixlAgent().open(welcome, PAGE_BYTES, num_pages * PAGE_BYTES)


def test_reads_copy_pages_a_few_at_once(nixl, memory):
    slots = open_slots(memory)
    targets = [memoryview(bytearray(PAGE_BYTES)) for _ in range(5)]
    slots.read([4, 0, 7, 2, 2], targets, lambda: False)
    assert [bytes(target) for target in targets] == [bytes([slot + 1]) * PAGE_BYTES for slot in (4, 0, 7, 2, 2)]
    assert len(nixl.last.released) == 3
    slots.close()
    assert not nixl.last.registered
    assert not nixl.last.peers


def test_buffer_of_a_read_that_was_given_up_is_kept_until_it_is_over(nixl, memory, monkeypatch):
    slots = open_slots(memory)
    monkeypatch.setattr(nixl, "is_open", False)
    target = memoryview(bytearray(PAGE_BYTES))
    with pytest.raises(TransferError, match="given up"):
        slots.read([1], [target], lambda: True)
    with pytest.raises(TransferError, match="given up"):
        slots.read([1], [target], lambda: False)
    slots.close()
    agent = nixl.last
    assert len(agent.registered) == 1
    assert not agent.released
    welcome = {"type": "welcome", **NixlAgent(region_of(memory)).welcome()}
    monkeypatch.setattr(nixl_reads, "_MAX_UNFINISHED", 1)
    with pytest.raises(TransferError, match="1 reads that were given up"):
        slots.agent.open(welcome, PAGE_BYTES, PAGE_BYTES)
    monkeypatch.setattr(nixl, "is_open", True)
    slots.agent.open(welcome, PAGE_BYTES, PAGE_BYTES).close()
    assert not agent.registered
    assert len(agent.released) == 1
    assert bytes(target) == bytes(PAGE_BYTES)


def test_read_that_cannot_start_is_released(nixl, memory, monkeypatch):
    def transfer(_self, _handle):
        raise RuntimeError("no route")

    monkeypatch.setattr(nixl, "transfer", transfer)
    with pytest.raises(TransferError, match="cannot read from the peer: no route"):
        open_slots(memory).read([1], [memoryview(bytearray(PAGE_BYTES))], lambda: False)
    assert len(nixl.last.released) == 1


def test_read_that_ends_is_over_when_it_cannot_be_released(nixl, memory, monkeypatch):
    def release_xfer_handle(_self, _handle):
        raise RuntimeError("busy")

    slots = open_slots(memory)
    monkeypatch.setattr(nixl, "release_xfer_handle", release_xfer_handle)
    target = memoryview(bytearray(PAGE_BYTES))
    slots.read([1], [target], lambda: False)
    assert bytes(target) == bytes([2]) * PAGE_BYTES


def test_peer_is_forgotten_when_no_buffer_can_be_registered(nixl, memory, monkeypatch):
    welcome = {"type": "welcome", **NixlAgent(region_of(memory)).welcome()}
    agent = NixlAgent()

    def register_memory(_self, _regions, _kind):
        raise RuntimeError("no memory")

    monkeypatch.setattr(nixl, "register_memory", register_memory)
    with pytest.raises(TransferError, match="cannot reach the peer: no memory"):
        agent.open(welcome, PAGE_BYTES, PAGE_BYTES)
    assert not nixl.last.peers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nixl": "%"}, "not base64"),
        ({"nixl": 5}, "field nixl of welcome must be a string"),
        ({"stride": PAGE_BYTES - 1}, "field stride"),
        ({"num_slots": 1 << 62}, "field num_slots"),
        ({"address": 0}, "field address"),
    ],
)
def test_wrong_fields_of_a_peer_are_refused(nixl, memory, changes, message):
    with pytest.raises(TransferError, match=message):
        open_slots(memory, **changes)


def test_slot_that_the_peer_does_not_have_is_refused(nixl, memory):
    with pytest.raises(TransferError, match="does not share"):
        open_slots(memory).read([NUM_SLOTS], [memoryview(bytearray(PAGE_BYTES))], lambda: False)


class Source:
    """Lends slots 0, 1, ... of a memory as pages with keys 1, 2, ..."""

    shared = None

    def __init__(self, memory):
        self.memory = memory

    def begin(self, job):
        job.add_ready([(slot + 1, slot) for slot in range(job.num_pages)])
        job.complete()

    def page(self, slot):
        return memoryview(self.memory)[slot * STRIDE : slot * STRIDE + PAGE_BYTES]

    num_waiting_pages = 0

    def note_change(self):
        pass


def pull_pages(memory, server_backend, client_backend):
    agents = {"nixl": NixlAgent(region_of(memory)), "sockets": None}
    address = Address(host="127.0.0.1", port=0)
    server = PageServer(address, Identity({}, PAGE_BYTES, backend=server_backend), Source(memory), nixl=agents[server_backend])
    news = threading.Event()
    reader = NixlAgent() if client_backend == "nixl" else None
    client = PageClient([server.address], Identity({}, PAGE_BYTES, backend=client_backend), news.set, nixl=reader)
    pages = [memoryview(bytearray(PAGE_BYTES)) for _ in range(NUM_SLOTS)]
    pull = Pull([0] * NUM_SLOTS, "", 0, range(1, NUM_SLOTS + 1), pages)
    try:
        assert client.begin(pull)
        while not pull.is_over:
            news.wait(1)
            news.clear()
        return pull, client.problems
    finally:
        client.close()
        server.close()


def test_transfer_by_nixl_is_complete(nixl, memory):
    pull, _ = pull_pages(memory, "nixl", "nixl")
    assert pull.outcome == "complete"
    assert [bytes(page) for page in pull.slots] == [bytes([slot + 1]) * PAGE_BYTES for slot in range(NUM_SLOTS)]


@pytest.mark.parametrize("backends", [("nixl", "sockets"), ("sockets", "nixl")])
def test_engines_with_different_backends_refuse_each_other(nixl, memory, backends):
    pull, problems = pull_pages(memory, *backends)
    assert pull.outcome == "mismatch"
    prefill, decode = backends
    assert f"kv_transfer_backend: {decode} on the decode engine, {prefill} on the prefill engine" in str(problems)


def test_options_are_checked(monkeypatch):
    with pytest.raises(ConfigError, match="kv_transfer_backend"):
        EngineConfig(model="demo", kv_transfer_backend="rdma")
    with pytest.raises(ConfigError, match="role is 'both', and kv_transfer_backend is 'nixl'"):
        EngineConfig(model="demo", kv_transfer_backend="nixl")
    monkeypatch.setattr(nixl_reads, "MODULE", "nixl_that_is_not_installed")
    with pytest.raises(ConfigError, match=r"pip install 'quire\[nixl\]'"):
        NixlAgent()
