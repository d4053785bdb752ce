"""KV events as subscribers see them: vLLM's frames, sequence numbers, replays; and that they tell the truth of a real cache."""

import random

import msgspec
import pytest
import zmq

from quire.base.errors import ConfigError
from quire.contracts.block_keys import block_keys
from quire.engine.scheduling.prefix_index import BlockContent, PrefixIndex
from quire.serving.config import ServerConfig
from quire.serving.engine_client import kv_events
from quire.serving.engine_client.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    KvEventOptions,
    KvEventPublisher,
    events_of,
)
from quire.serving.engine_client.supervisor import LinkOptions

SIZE = 4


class Cache:
    """A prefix index that records its changes, filled with whole prompts."""

    def __init__(self):
        self.index = PrefixIndex()
        self.index.changes = []
        self.num_blocks = 0

    def add(self, tokens, root=""):
        parent = None
        for number, key in enumerate(block_keys(root, tokens, SIZE)):
            content = BlockContent(key, root, tuple(tokens[number * SIZE : (number + 1) * SIZE]))
            parent = self.index.publish(parent, content, self.num_blocks)
            self.num_blocks += 1

    def take(self):
        changes, self.index.changes = self.index.changes, []
        return changes


def hashes(tokens, root=""):
    return [key.to_bytes(16) for key in block_keys(root, tokens, SIZE)]


def test_blocks_of_a_prompt_are_one_event_and_a_branch_another():
    cache = Cache()
    cache.add(list(range(12)))
    cache.add([0, 1, 2, 3, 9, 9, 9, 9])
    cache.index.drop(1)
    cache.index.drop(0)
    first, branch = hashes(list(range(12))), hashes([0, 1, 2, 3, 9, 9, 9, 9])
    assert events_of(cache.take(), SIZE) == [
        BlockStored(first, None, list(range(12)), SIZE, None, "GPU", None),
        BlockStored(branch[1:], first[0], [9, 9, 9, 9], SIZE, None, "GPU", None),
        BlockRemoved([first[1], first[0]], "GPU"),
    ]


def test_salted_blocks_have_extra_keys_that_do_not_tell_the_salt():
    cache = Cache()
    cache.add(list(range(8)), root="secret")
    (event,) = events_of(cache.take(), SIZE)
    assert event.block_hashes == hashes(list(range(8)), "secret")
    (one,), (two,) = event.extra_keys
    assert one == two
    assert "secret" not in one
    assert len(one) == 32


def test_wire_form_is_that_of_vllm():
    """Arrays in the order of vLLM's fields, the name of the class first."""
    cache = Cache()
    cache.add(list(range(4)))
    batch = KvEventBatch(1.5, [AllBlocksCleared(), *events_of(cache.take(), SIZE), BlockRemoved([b"x"], "GPU")], 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            ["AllBlocksCleared"],
            ["BlockStored", hashes(list(range(4))), None, [0, 1, 2, 3], SIZE, None, "GPU", None, None],
            ["BlockRemoved", [b"x"], "GPU"],
        ],
        2,
    ]


def test_events_followed_in_order_equal_the_index():
    cache, picks, held = Cache(), random.Random(3), {}
    for _ in range(300):
        if picks.random() < 0.6:
            cache.add([picks.randrange(3) for _ in range(picks.randrange(20))], root=picks.choice(["", "a"]))
        else:
            cache.index.drop(picks.randrange(cache.num_blocks + 1))
        for event in events_of(cache.take(), SIZE):
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == SIZE * len(event.block_hashes)
                held.update(dict.fromkeys(event.block_hashes))
            else:
                for one in event.block_hashes:
                    del held[one]
        assert set(held) == {key.to_bytes(16) for key, _, _ in cache.index.iter_entries()}


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def receive(socket, timeout_ms=30_000):
    assert socket.poll(timeout_ms), "nothing came"
    return socket.recv_multipart()


def dealer_replay(context, endpoint, start, timeout_ms=30_000):
    """Return the (number, batch) that a replay has; the frames are those of a REQ socket."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    found = []
    while True:
        _, number, payload = receive(socket, timeout_ms)
        if number == END_OF_REPLAY:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=KvEventBatch)))


def test_published_batches_are_numbered_and_replayed(context, tmp_path, monkeypatch):
    options = KvEventOptions(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r", 1)
    publisher = KvEventPublisher(options, SIZE)
    try:
        socket = context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(options.endpoint)
        cache, num_sent = Cache(), 0
        while not socket.poll(50):  # until the subscription has come through
            cache.add([num_sent] * SIZE)
            publisher.publish(cache.take())
            num_sent += 1
        topic, first, payload = socket.recv_multipart()
        assert topic == b""
        batch = msgspec.msgpack.decode(payload, type=KvEventBatch)
        assert batch.data_parallel_rank == 1
        assert isinstance(batch.events[0], BlockStored)
        publisher.publish([])
        cache.add([777] * SIZE)
        publisher.publish(cache.take())
        numbers = [int.from_bytes(first, "big")]
        while numbers[-1] < num_sent + 1:
            numbers.append(int.from_bytes(receive(socket)[1], "big"))
        assert numbers == list(range(numbers[0], num_sent + 2))
        replayed = dealer_replay(context, options.replay_endpoint, 0)
        assert [number for number, _ in replayed] == list(range(num_sent + 2))
        assert replayed[0][1].events == [AllBlocksCleared()]
        assert replayed[-1][1].events[0].token_ids == [777] * SIZE
        assert [number for number, _ in dealer_replay(context, options.replay_endpoint, num_sent + 1)] == [num_sent + 1]
        assert dealer_replay(context, options.replay_endpoint, num_sent + 2) == []
        with monkeypatch.context() as patch:
            patch.setattr(kv_events, "END_OF_REPLAY", None)  # no frame
            with pytest.raises(AssertionError, match="nothing came"):
                dealer_replay(context, options.replay_endpoint, num_sent + 2, timeout_ms=200)
        assert dealer_replay(context, options.replay_endpoint, num_sent + 2) == []
    finally:
        publisher.close()


def test_address_that_is_taken_is_a_config_error(tmp_path):
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(ConfigError, match="KV events cannot be published"):
        KvEventPublisher(KvEventOptions(f"ipc://{tmp_path}/e", f"tcp://127.0.0.1:{port}"), SIZE)
    context.destroy(linger=0)


def test_log_says_whether_an_endpoint_is_listened_at(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(kv_events.logger, "info", lambda text, *values: lines.append(text % values))
    for endpoint in (f"ipc://{tmp_path}/e", "tcp://127.0.0.1:5557"):
        KvEventPublisher(KvEventOptions(endpoint), SIZE).close()
    assert lines[0] == f"KV events are published at ipc://{tmp_path}/e"
    assert lines[1].startswith("KV events are sent to tcp://127.0.0.1:5557, which a subscriber must listen at")


@pytest.mark.parametrize("endpoint", ["", "tcp://", "tcp://*", "tcp://a:x", "tcp://a:0", "tcp://:5", "udp://a:1", "ipc://"])
def test_wrong_endpoint_is_refused(endpoint):
    with pytest.raises(ConfigError, match="kv_events_endpoint must be like"):
        LinkOptions.of(ServerConfig(kv_events_endpoint=endpoint))
    with pytest.raises(ConfigError, match="kv_events_replay_endpoint must be like"):
        LinkOptions.of(ServerConfig(kv_events_endpoint="tcp://*:5557", kv_events_replay_endpoint=endpoint))


def test_replicas_have_ports_of_their_own():
    options = LinkOptions.of(
        ServerConfig(kv_events_endpoint="tcp://*:5557", kv_events_replay_endpoint="tcp://*:6000")
    ).kv_events
    assert options.of_replica(2) == KvEventOptions("tcp://*:5559", "tcp://*:6002", 2)
    assert KvEventOptions("ipc:///x").of_replica(1).endpoint == "ipc:///x_dp1"
    with pytest.raises(ConfigError, match="needs kv_events_endpoint"):
        ServerConfig(kv_events_replay_endpoint="tcp://*:1")
