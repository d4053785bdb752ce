"""The feed of the live view: nothing without viewers, one frame for all, resumption, slow viewers, the limit."""

import json

import pytest

from quire.serving.errors import ApiError
from quire.serving.page.feed import MAX_VIEWERS, EngineFeed
from quire.serving.page.view import RING_STEPS
from tests.unit.serving.page.setting import parse, run, take


def test_nothing_is_watched_or_computed_while_nobody_looks():
    async def scenario(s):
        assert (s.engine.watched, s.num_snapshots, s.engine.on_step, s.engine.on_kv, s.metrics.on_end) == ([], 0, [], [], [])
        frames = s.feed.frames(10, False)
        await take(frames)
        assert s.engine.watched[-1] == 10
        assert len(s.engine.on_step) == len(s.engine.on_kv) == len(s.metrics.on_end) == 1
        await frames.aclose()
        assert s.engine.watched[-1] == 0
        assert s.engine.on_step == s.engine.on_kv == s.engine.on_state == s.metrics.on_end == []
        assert s.feed.timer is None
        assert s.feed.num_viewers == 0

    run(scenario)


def test_unread_stream_counts_as_no_viewer():
    async def scenario(s):
        frames = s.feed.frames(10, False)
        await frames.aclose()
        assert s.engine.watched == []

    run(scenario)


def test_snapshot_comes_first_and_steps_between_ticks_come_as_one_frame():
    async def scenario(s):
        s.add_request("req-1")
        frames = s.feed.frames(10, False)
        kind, _, data = await take(frames)
        assert kind == "snapshot"
        assert data["shape"]["num_kv_blocks"] == 256
        assert [row[3:5] for row in data["requests"]] == [["queue", 5]]
        for step_id in range(3):
            s.step(step_id, ("req-1", 4 if step_id == 0 else 1, step_id == 0))
        s.feed.tick()
        kind, event_id, data = await take(frames)
        number = data["requests"][0][0]
        assert (kind, event_id) == ("delta", 2)
        assert [row[0] for row in data["steps"]] == [0, 1, 2]
        assert [row[3:5] for row in data["steps"]] == [[4, 0], [0, 1], [0, 1]]
        assert data["steps"][0][12] == [[number, 4, 1]]
        assert data["requests"][0][3] == "prefill"
        s.feed.tick()  # nothing is new
        s.step(3)
        s.feed.tick()
        _, event_id, data = await take(frames)
        assert (event_id, [row[0] for row in data["steps"]], data.get("requests")) == (3, [3], None)
        await frames.aclose()

    run(scenario)


def test_frame_is_encoded_once_when_many_look(monkeypatch):
    async def scenario(s):
        viewers = [s.feed.frames(10, False) for _ in range(5)]
        for frames in viewers:
            await take(frames)
        num_made = 0
        make = s.view.frame

        def count(*args):
            nonlocal num_made
            num_made += 1
            return make(*args)

        monkeypatch.setattr(s.view, "frame", count)
        s.step(0)
        s.feed.tick()
        assert num_made == 1
        assert len({json.dumps(await take(frames)) for frames in viewers}) == 1
        for frames in viewers:
            await frames.aclose()

    run(scenario)


def test_only_missing_steps_are_sent_when_a_viewer_resumes():
    async def scenario(s):
        first = s.feed.frames(10, False)
        await take(first)
        for step_id in range(10):
            s.step(step_id)
        second = s.feed.frames(10, False, after_step=6)
        _, event_id, data = await take(second)
        assert ([row[0] for row in data["steps"]], event_id) == ([7, 8, 9], 9)
        of_another_engine = s.feed.frames(10, False, after_step=5000)
        _, _, data = await take(of_another_engine)
        assert [row[0] for row in data["steps"]] == list(range(10))
        for frames in (first, second, of_another_engine):
            await frames.aclose()

    run(scenario)


def test_ring_keeps_the_latest_steps():
    async def scenario(s):
        frames = s.feed.frames(10, False)
        await take(frames)
        for step_id in range(RING_STEPS + 100):
            s.step(step_id)
        late = s.feed.frames(10, False)
        _, _, data = await take(late)
        assert [data["steps"][0][0], len(data["steps"])] == [100, RING_STEPS]
        await frames.aclose()
        await late.aclose()

    run(scenario)


def test_slow_viewer_gets_a_snapshot_with_what_it_lacks_instead_of_queued_frames():
    async def scenario(s):
        slow, quick = s.feed.frames(10, False), s.feed.frames(10, False)
        await take(slow)
        await take(quick)
        s.step(0)
        s.feed.tick()
        assert (await take(slow))[1] == 0
        for step_id in range(1, 50):
            s.step(step_id)
            s.feed.tick()
            assert (await take(quick))[1] == step_id
        viewer = s.feed.viewers[0]
        assert viewer.num_dropped == 48  # one frame waits, all others are gone
        kind, event_id, data = await take(slow)
        assert (kind, event_id, [row[0] for row in data["steps"]]) == ("snapshot", 49, list(range(1, 50)))
        s.step(50)
        s.feed.tick()
        assert (await take(slow))[:2] == ("delta", 50)
        await slow.aclose()
        await quick.aclose()

    run(scenario)


def test_one_viewer_too_many_is_refused_with_503():
    async def scenario(s):
        viewers = [s.feed.frames(10, False) for _ in range(MAX_VIEWERS)]
        for frames in viewers:
            await take(frames)
        with pytest.raises(ApiError) as caught:
            await anext(s.feed.frames(10, False))
        assert (caught.value.status, caught.value.code) == (503, "too_many_viewers")
        await viewers.pop().aclose()
        viewers.append(s.feed.frames(10, False))
        await take(viewers[-1])
        for frames in viewers:
            await frames.aclose()

    run(scenario)


def test_slow_rate_gets_every_tenth_tick_and_sets_the_engines_rate():
    async def scenario(s):
        slow = s.feed.frames(1, False)
        await take(slow)
        assert s.engine.watched[-1] == 1
        fast = s.feed.frames(10, False)
        await take(fast)
        assert s.engine.watched[-1] == 10
        for step_id in range(10):
            s.step(step_id)
            s.feed.tick()
            await take(fast)
        _, _, data = await take(slow)
        assert [row[0] for row in data["steps"]] == list(range(10))
        await fast.aclose()
        assert s.engine.watched[-1] == 1
        s.step(10)
        s.feed.tick()  # alone, it is told at every tick, of which there is one a second
        assert (await take(slow))[1] == 10
        await slow.aclose()

    run(scenario)


def test_streams_end_when_the_server_has_drained():
    async def scenario(s):
        record = s.add_request("r")
        frames = s.feed.frames(10, False)
        await take(frames)
        s.phase = "draining"
        s.feed.tick()
        assert (await take(frames))[2]["phase"] == "draining"
        s.end(record)
        s.feed.tick()
        assert [parse(event)[0] async for event in frames] == ["delta"]
        assert s.feed.num_viewers == 0

    run(scenario)


def test_timer_ticks_by_itself_while_somebody_looks():
    async def scenario(s):
        feed = EngineFeed(s.engine, s.view, tick_s=0.001)
        frames = feed.frames(10, False)
        await take(frames)
        s.step(0)
        assert (await take(frames))[1] == 0
        await frames.aclose()

    run(scenario)
