"""KV events in the router: both encodings, the index of blocks, replays, losses, restarts, silence, and the choice."""

import asyncio
import random
import time

import msgspec
import pytest
import zmq
import zmq.asyncio

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.base.errors import ConfigError
from quire.contracts.block_keys import block_keys
from quire.router import kv_subscriber
from quire.router.block_index import BlockIndex, chain_keys
from quire.router.config import KvEventSource, RouterConfig, parse_backend, parse_kv_events
from quire.router.kv_events import Cleared, KvEventError, Removed, Stored, decode_batch
from quire.router.kv_subscriber import KvSubscriber
from quire.serving.engine_client.kv_events import KvEventOptions, KvEventPublisher
from tests.unit.router.fake_backend import FakeBackend, backends, respond, routing

SIZE = 4
GPU = ("GPU", 0)


def encode(*events):
    return msgspec.msgpack.encode([time.time(), list(events), 0])


def stored(token_ids, parent=None, hashes=None, **more):
    """Return a map like those of vLLM; hashes default to those of quire."""
    hashes = [key.to_bytes(16) for key in block_keys("", token_ids, SIZE)] if hashes is None else hashes
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": token_ids, "block_size": SIZE}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", "lora_name": None, **more}


def removed(*hashes):
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def num_cached(index, token_ids, is_separate=False):
    return index.num_cached(chain_keys(token_ids, SIZE, is_separate=is_separate))


def test_arrays_and_maps_are_read_alike():
    tokens = list(range(8))
    as_map = decode_batch(msgspec.msgpack.encode([1, [stored(tokens, 7, [1, 2]), removed(1), {"type": "AllBlocksCleared"}]]))
    array = ["BlockStored", [1, 2], 7, tokens, SIZE, None, "GPU"]
    as_array = decode_batch(msgspec.msgpack.encode([1, [array, ["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]], None]))
    expected = (Stored((1, 2), 7, tuple(tokens), SIZE, GPU, False), Removed((1,), GPU), Cleared())
    assert as_map.events == as_array.events == expected
    assert (as_map.time_s, as_array.time_s) == (1.0, 1.0)


def test_what_separates_equal_tokens_is_seen():
    for more in ({"extra_keys": [["salt"]]}, {"lora_name": "a"}, {"lora_id": 1}):
        (event,) = decode_batch(encode(stored([1, 2, 3, 4], **more))).events
        assert event.has_extra
    (event,) = decode_batch(encode(stored([1, 2, 3, 4], extra_keys=[None]))).events
    assert not event.has_extra


def test_unknown_kinds_are_left_out_and_later_fields_too():
    batch = decode_batch(encode({"type": "BlockMoved", "x": 1}, ["BlockMoved", 1], stored([1, 2, 3, 4], group_idx=2, new=5)))
    assert [event.medium for event in batch.events] == [("GPU", 2)]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode([1, [[]]]),
        msgspec.msgpack.encode(["x", []]),
        encode(stored([1, 2, 3])),
        encode(stored([1, 2, 3, -4], hashes=[1])),
        encode(stored([1, 2, 3, 1 << 40], hashes=[1])),
        encode({"type": "BlockStored", "block_hashes": [1]}),
        encode(["BlockRemoved", 5]),
    ],
    ids=range(11),  # the payloads have the time in them
)
def test_what_is_no_batch_is_refused(payload):
    with pytest.raises(KvEventError):
        decode_batch(payload)


def test_index_follows_any_order_of_events():
    """Random chains are stored and removed from their ends; hashes are random integers, as engines make them."""
    picks, index = random.Random(5), BlockIndex()
    held, hashes = {}, {}  # tokens of a chain -> hash of its last block
    for _ in range(400):
        if picks.random() < 0.7:
            parent = picks.choice([(), *held])
            tokens = parent + tuple(picks.randrange(2) for _ in range(SIZE))
            if tokens in held:
                continue
            held[tokens] = hashes.setdefault(tokens, picks.randrange(1 << 60))
            (event,) = decode_batch(encode(stored(list(tokens[-SIZE:]), held.get(parent), [held[tokens]]))).events
        else:
            parents = {one[:-SIZE] for one in held}
            ends = [one for one in held if one not in parents]
            if not ends:
                continue
            (event,) = decode_batch(encode(removed(held.pop(picks.choice(ends))))).events
        index.apply(event)
        assert len(index) == len(held)
        for tokens in picks.sample(sorted(hashes), min(5, len(hashes))):
            true = max((n for n in range(len(tokens) // SIZE + 1) if n == 0 or tokens[: n * SIZE] in held), default=0)
            assert num_cached(index, tokens) == true
    assert index.num_unknown_parents == 0


def test_block_in_two_media_is_held_until_both_have_removed_it():
    index = BlockIndex()
    for event in decode_batch(encode(stored([1, 2, 3, 4]), stored([1, 2, 3, 4], medium="CPU"))).events:
        index.apply(event)
    (key,) = [key.to_bytes(16) for key in block_keys("", [1, 2, 3, 4], SIZE)]
    index.apply(Removed((key,), GPU))
    assert num_cached(index, [1, 2, 3, 4]) == 1
    index.apply(Removed((key,), ("CPU", 0)))
    assert (num_cached(index, [1, 2, 3, 4]), len(index)) == (0, 0)


def test_block_without_its_parent_is_counted_and_left_out():
    index = BlockIndex()
    index.apply(decode_batch(encode(stored([1, 2, 3, 4], parent=b"never seen"))).events[0])
    assert (len(index), index.num_unknown_parents) == (0, 1)


def test_separate_blocks_do_not_count_for_prompts_without_a_salt():
    index = BlockIndex()
    index.apply(decode_batch(encode(stored([1, 2, 3, 4], extra_keys=[["salt"]]))).events[0])
    index.apply(decode_batch(encode(stored([5, 6, 7, 8], block_keys("", [1, 2, 3, 4], SIZE)[0].to_bytes(16), [9]))).events[0])
    assert num_cached(index, list(range(1, 9))) == 0
    assert num_cached(index, list(range(1, 9)), is_separate=True) == 2


class Publisher:
    """The sockets of an engine, whose batches a test may hold back or forget."""

    def __init__(self, path, has_replay=True):
        self.context = zmq.asyncio.Context()
        self.source = KvEventSource(f"ipc://{path}/e", f"ipc://{path}/r" if has_replay else None)
        self.kept, self.next, self.answers = [], 0, True
        self.num_replays = 0
        self.open()

    def open(self):
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.bind(self.source.endpoint)
        self.replaying = None
        if self.source.replay_endpoint is not None:
            self.router = self.context.socket(zmq.ROUTER)
            self.router.bind(self.source.replay_endpoint)
            self.replaying = asyncio.create_task(self.replay())

    async def wait_for_subscriber(self):
        """Wait until a SUB socket has connected, which misses what is sent before."""
        await self.socket.recv()

    async def send(self, *events, drops=False, keeps=True):
        number, payload = self.next, encode(*events)
        self.next += 1
        if keeps:
            self.kept.append((number, payload))
        if not drops:
            await self.socket.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def restart(self):
        self.kept, self.next = [], 0

    async def replay(self):
        while True:
            client, _, start = await self.router.recv_multipart()
            self.num_replays += 1
            if not self.answers:
                continue
            for number, payload in list(self.kept):
                if number >= int.from_bytes(start, "big"):
                    await self.router.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self):
        if self.replaying is not None:
            self.replaying.cancel()
        self.context.destroy(linger=0)


def follow(path, work, has_replay=True, silence_s=0.2):
    """Run `work(publisher, subscriber, until)` with both."""

    async def run():
        publisher = Publisher(path, has_replay)
        answers = [0]
        subscriber = KvSubscriber("b", publisher.source, lambda: answers[0], silence_s)

        async def until(condition):
            async with asyncio.timeout(30):
                while not condition():
                    await asyncio.sleep(0.01)

        try:
            await publisher.send({"type": "AllBlocksCleared"})
            subscriber.start()
            await publisher.wait_for_subscriber()
            await work(publisher, subscriber, until, answers)
        finally:
            await subscriber.close()
            publisher.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_was_published_before_is_replayed(tmp_path):
    async def work(publisher, subscriber, until, answers):
        await publisher.send(stored([1, 2, 3, 4]))
        await until(lambda: num_cached(subscriber.index, [1, 2, 3, 4]) == 1)
        assert (subscriber.state, subscriber.is_complete) == ("live", True)
        assert subscriber.counts.num_lost == subscriber.counts.num_restarts == 0

    follow(tmp_path, work)


def test_events_are_followed_again_after_an_unexpected_error(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_subscriber, "_RETRY_S", 0.01)

    async def work(publisher, subscriber, until, answers):
        await until(lambda: subscriber.is_live)
        with monkeypatch.context() as patch:
            patch.setattr(BlockIndex, "apply", lambda *_: 1 // 0)
            await publisher.send(stored([1, 2, 3, 4]))
            await until(lambda: subscriber.state == "silent")
        await until(lambda: num_cached(subscriber.index, [1, 2, 3, 4]) == 1)
        assert (subscriber.state, subscriber.is_complete) == ("live", True)

    follow(tmp_path, work)


def test_gap_is_filled_by_a_replay(tmp_path):
    async def work(publisher, subscriber, until, answers):
        await until(lambda: subscriber.is_live)
        for number in range(50):
            await publisher.send(stored([number] * SIZE), drops=number % 7 == 3)
        await publisher.send(stored([99] * SIZE))
        await until(lambda: num_cached(subscriber.index, [99] * SIZE) == 1)
        assert all(num_cached(subscriber.index, [number] * SIZE) == 1 for number in range(50))
        assert subscriber.counts.num_gaps >= 1
        assert subscriber.counts.num_lost == 0
        assert subscriber.counts.num_batches == 52
        assert subscriber.is_complete

    follow(tmp_path, work)


def test_events_that_cannot_be_had_again_begin_the_index_anew(tmp_path):
    async def work(publisher, subscriber, until, answers):
        await until(lambda: subscriber.is_live)
        await publisher.send(stored([1] * SIZE))
        await until(lambda: num_cached(subscriber.index, [1] * SIZE) == 1)
        publisher.kept.clear()
        await publisher.send(stored([2] * SIZE), drops=True, keeps=False)
        await publisher.send(stored([3] * SIZE))
        await until(lambda: num_cached(subscriber.index, [3] * SIZE) == 1)
        assert num_cached(subscriber.index, [1] * SIZE) == 0  # it may have been removed by what is lost
        assert subscriber.counts.num_lost == 1
        assert not subscriber.is_complete

    follow(tmp_path, work)


def test_gap_without_replay_begins_the_index_anew(tmp_path):
    async def work(publisher, subscriber, until, answers):
        async def probe():
            while not subscriber.is_live:  # a SUB socket misses what is sent before it has connected
                await publisher.send(stored([1] * SIZE))
                await asyncio.sleep(0.02)

        await probe()
        await publisher.send(stored([2] * SIZE), drops=True)
        await publisher.send(stored([3] * SIZE))
        await until(lambda: num_cached(subscriber.index, [3] * SIZE) == 1)
        assert num_cached(subscriber.index, [1] * SIZE) == 0
        assert not subscriber.is_complete

    follow(tmp_path, work, has_replay=False)


@pytest.mark.parametrize("num_new", [1, 5, 40])
def test_engine_that_starts_again_begins_the_index_anew(tmp_path, num_new):
    """Also where it has published more batches since than before, and the first of them was not seen."""

    async def work(publisher, subscriber, until, answers):
        await until(lambda: subscriber.is_live)
        for number in range(10):
            await publisher.send(stored([number] * SIZE))
        await until(lambda: num_cached(subscriber.index, [9] * SIZE) == 1)
        publisher.restart()
        await publisher.send({"type": "AllBlocksCleared"}, drops=True)
        for number in range(num_new):
            await publisher.send(stored([100 + number] * SIZE), drops=number < num_new - 1)
        await until(lambda: num_cached(subscriber.index, [100 + num_new - 1] * SIZE) == 1)
        assert all(num_cached(subscriber.index, [number] * SIZE) == 0 for number in range(10))
        assert all(num_cached(subscriber.index, [100 + number] * SIZE) == 1 for number in range(num_new))
        assert (subscriber.counts.num_restarts, subscriber.is_complete) == (1, True)

    follow(tmp_path, work)


def test_lost_last_event_is_found_when_requests_are_answered_without_one(tmp_path):
    async def work(publisher, subscriber, until, answers):
        await until(lambda: subscriber.is_live)
        await publisher.send(stored([1] * SIZE), drops=True)
        answers[0] += 5
        await until(lambda: num_cached(subscriber.index, [1] * SIZE) == 1)
        assert subscriber.state == "live"

    follow(tmp_path, work)


def test_silent_engine_is_noted_and_comes_back(tmp_path, caplog):
    async def work(publisher, subscriber, until, answers):
        await asyncio.sleep(0.5)
        assert subscriber.state == "waiting"  # idle, for all that is known
        answers[0] += 5
        await until(lambda: subscriber.state == "silent")
        assert not subscriber.is_live
        while not subscriber.is_live:
            await publisher.send(stored([1] * SIZE))
            await asyncio.sleep(0.02)
        assert num_cached(subscriber.index, [1] * SIZE) == 1

    follow(tmp_path, work, has_replay=False)
    assert [record.levelname for record in caplog.records if "do not come" in record.message] == ["ERROR"]


def test_index_that_fails_is_not_taken_for_a_live_one(tmp_path, monkeypatch, caplog):
    async def work(publisher, subscriber, until, answers):
        await until(lambda: subscriber.is_live)

        def fail(event):
            raise KeyError("bug")

        monkeypatch.setattr(subscriber.index, "apply", fail)
        await publisher.send(stored([1] * SIZE))
        await until(lambda: subscriber.state == "silent")

    follow(tmp_path, work)
    assert "KeyError" in caplog.text


def test_idle_engine_is_not_silent(tmp_path):
    async def work(publisher, subscriber, until, answers):
        await until(lambda: subscriber.is_live)
        answers[0] += 1
        await asyncio.sleep(0.7)
        assert subscriber.state == "live"

    follow(tmp_path, work)


def test_messages_that_are_not_understood_are_counted_and_passed_over(tmp_path):
    async def work(publisher, subscriber, until, answers):
        await until(lambda: subscriber.is_live)
        await publisher.socket.send_multipart([b"x"])
        await publisher.socket.send_multipart([b"", b"1234", b""])
        await publisher.socket.send_multipart([b"", (1).to_bytes(8, "big"), b"\xff"])
        await publisher.send(stored([1] * SIZE))
        await until(lambda: num_cached(subscriber.index, [1] * SIZE) == 1)
        assert subscriber.counts.num_invalid == 3

    follow(tmp_path, work)


@pytest.mark.parametrize("encoding", ["array", "map"])
def test_publisher_of_quire_is_followed_in_both_encodings(tmp_path, encoding):
    from tests.unit.serving.engine_client.test_kv_events import Cache

    async def work():
        options = KvEventOptions(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r", encoding=encoding)
        publisher = KvEventPublisher(options, SIZE)
        subscriber = KvSubscriber("b", KvEventSource(options.endpoint, options.replay_endpoint), lambda: 0)
        try:
            cache, tokens = Cache(), list(range(20))
            cache.add(tokens)
            publisher.publish(cache.take())
            subscriber.start()
            async with asyncio.timeout(30):
                while num_cached(subscriber.index, tokens) < 5:
                    await asyncio.sleep(0.01)
                while subscriber.counts.num_batches < 3:  # a SUB socket misses what is sent before it has connected
                    cache.add([100 + cache.num_blocks] * SIZE)
                    publisher.publish(cache.take())
                    await asyncio.sleep(0.01)
            for block in range(cache.num_blocks + 1):
                cache.index.drop(block)
            publisher.publish(cache.take())
            async with asyncio.timeout(30):
                while len(subscriber.index):
                    await asyncio.sleep(0.01)
        finally:
            await subscriber.close()
            await asyncio.to_thread(publisher.close)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_map_encoding_names_the_fields_of_vllm(tmp_path):
    publisher = KvEventPublisher(KvEventOptions(f"ipc://{tmp_path}/e", encoding="map"), SIZE)
    try:
        (_, payload) = publisher.kept[0]
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert (events, rank) == ([{"type": "AllBlocksCleared"}], 0)
        assert abs(ts - time.time()) < 60
    finally:
        publisher.close()
    with pytest.raises(ConfigError, match="kv_events_encoding must be one of array, map, got 'json'"):
        KvEventOptions("tcp://*:5557", encoding="json")


def test_prompt_goes_to_the_backend_that_holds_its_blocks(tmp_path):
    """The backends' own events decide, not what this router has sent."""

    async def tokenizing(request, writer):
        if request["path"] == "/tokenize":
            assert request["json"]["messages"] == [{"role": "user", "content": "hello"}]
            assert "max_tokens" not in request["json"]
            assert request["json"]["model"] == "m"  # which the body called by an alias
            await respond(writer, {"tokens": list(range(40, 80)), "count": 40})
        else:
            await respond(writer, {"port": int(request["headers"]["host"].split(":")[1])})

    async def work():
        fakes = [FakeBackend(answer=tokenizing) for _ in range(3)]
        async with backends(*fakes):
            publishers = []
            for number, _ in enumerate(fakes):
                (tmp_path / str(number)).mkdir()
                publishers.append(Publisher(tmp_path / str(number)))
                await publishers[-1].send({"type": "AllBlocksCleared"})
            events = {fake.name: (publisher.source,) for fake, publisher in zip(fakes, publishers, strict=True)}
            try:
                async with routing(*fakes, kv_events=events, tokenize_timeout_s=5.0, aliases={"a": "m"}) as router:
                    await router.until(lambda: all(router.backend(fake).has_live_events for fake in fakes))
                    await asyncio.gather(*(publisher.wait_for_subscriber() for publisher in publishers))
                    for number, fake in enumerate(fakes):
                        tokens = [number + 1] * 400
                        await publishers[number].send(stored(tokens))
                        await router.until(lambda fake=fake: len(router.backend(fake).kv_subscribers[0].index) >= 100)
                        got = await router.post({"model": "m", "prompt": [*tokens, 7, 8]})
                        assert got.json()["port"] == fake.port
                    await publishers[2].send(stored(list(range(40, 80))))
                    await router.until(lambda: len(router.backend(fakes[2]).kv_subscribers[0].index) == 110)
                    body = {"model": "a", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
                    for path in ("/v1/chat/completions", "/v1/chat/completions", "/openai/deployments/a/chat/completions"):
                        assert (await router.post(body, path)).json()["port"] == fakes[2].port
                    assert await router.metric("tokenized_prompts_total", result="done") == 3
                    assert await router.metric("kv_event_sources", state="live") == 3
                    listed = await router.client.get("/router/backends", headers={"authorization": "Bearer admin"})
                    assert [one["kv_events"][0]["num_blocks"] for one in listed.json()["backends"]] == [100, 100, 110]
            finally:
                for publisher in publishers:
                    publisher.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_prompt_that_is_not_tokenised_in_time_is_sent_all_the_same(tmp_path):
    async def slow(request, writer):
        if request["path"] == "/tokenize":
            await asyncio.sleep(60)
        await respond(writer, {"ok": True})

    async def work():
        fakes = [FakeBackend(answer=slow), FakeBackend(answer=slow)]
        async with backends(*fakes):
            publisher = Publisher(tmp_path)
            await publisher.send({"type": "AllBlocksCleared"})
            try:
                async with routing(*fakes, kv_events={fakes[0].name: (publisher.source,)}) as router:
                    await router.until(lambda: router.backend(fakes[0]).has_live_events)
                    assert (await router.post({"model": "m", "prompt": "text"})).json() == {"ok": True}
                    assert await router.metric("tokenized_prompts_total", result="timeout") == 1
            finally:
                publisher.close()

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.slow
def test_silent_events_are_told_by_health_and_the_estimate_goes_on(tmp_path):
    async def work():
        fakes = [FakeBackend(), FakeBackend()]
        async with backends(*fakes):
            events = {fakes[0].name: (KvEventSource(f"ipc://{tmp_path}/nobody"),)}
            async with routing(*fakes, kv_events=events, kv_events_silence_s=0.1) as router:
                prompt = "x" * 5000
                first = (await router.post({"model": "m", "prompt": prompt})).json()["backend"]
                for number in range(40):
                    await router.post({"model": "m", "prompt": f"{number}" * 100})
                await router.until(lambda: router.backend(fakes[0]).kv_subscribers[0].state == "silent")
                assert (await router.client.get("/health")).json()["kv_events_silent"] == [fakes[0].name]
                assert await router.metric("kv_event_sources", state="silent") == 1
                assert (await router.post({"model": "m", "prompt": prompt + "more"})).json()["backend"] == first

    asyncio.run(asyncio.wait_for(work(), 60))


def test_backend_added_by_the_admin_api_may_have_events(tmp_path):
    async def work():
        fakes = [FakeBackend(), FakeBackend()]
        async with backends(*fakes):
            publisher = Publisher(tmp_path)
            await publisher.send({"type": "AllBlocksCleared"})
            try:
                async with routing(fakes[0]) as router:
                    admin = {"authorization": "Bearer admin"}
                    source = publisher.source
                    body = {"url": fakes[1].url, "kv_events_endpoint": source.endpoint}
                    body["kv_events_replay_endpoint"] = source.replay_endpoint
                    assert (await router.post(body, "/router/backends", headers=admin)).status_code == 201
                    await router.until(lambda: router.backend(fakes[1]).has_live_events)
                    removed = await router.client.delete(f"/router/backends/{fakes[1].name}", headers=admin)
                    assert removed.status_code == 200
                    bad = await router.post({**body, "kv_events_endpoint": "udp://x"}, "/router/backends", headers=admin)
                    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "kv_events_endpoint")
            finally:
                publisher.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_option_names_backends_and_endpoints():
    found = parse_kv_events(["http://a:8000=tcp://a:5557,tcp://a:5558", "http://a:8000=tcp://a:5559", "http://b:1=ipc:///x"])
    assert found == {
        "a:8000": (KvEventSource("tcp://a:5557", "tcp://a:5558"), KvEventSource("tcp://a:5559")),
        "b:1": (KvEventSource("ipc:///x"),),
    }
    for text in ("http://a:8000", "=tcp://a:1", "http://a:8000=", "http://a:8000=udp://a:1", "http://a:8000=tcp://a:1,"):
        with pytest.raises(ConfigError):
            parse_kv_events([text])
    events = {"a:8000": (KvEventSource("tcp://a:5557"),)}
    with pytest.raises(ConfigError, match="a:8000 is none of the backends"):
        RouterConfig(backends=(parse_backend("http://b:8000"),), kv_events=events)
    with pytest.raises(ConfigError, match="policy prefix"):
        RouterConfig(backends=(parse_backend("http://a:8000"),), kv_events=events, policy="round-robin")
