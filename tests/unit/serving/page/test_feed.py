"""The feed of the live view: nothing without viewers, one frame for all, resumption, slow viewers, the limit."""

import asyncio
import json
import secrets
from types import SimpleNamespace

import pytest

from quire.serving.errors import ApiError
from quire.serving.gateway.engine_gateway import QueueSnapshot
from quire.serving.link.messages import KvReport, StepOutputs, StepPart, StepReport
from quire.serving.metrics.request_record import RequestRecord
from quire.serving.page.feed import MAX_VIEWERS, EngineFeed
from quire.serving.page.static_files import FOLDER
from quire.serving.page.view import RING_STEPS, EngineView
from quire.serving.page.wire import RequestRow, StepRow
from tests.unit.serving.fakes import engine_info

NEVER_S = 1e6  # the tests tick by hand


class Engine:
    def __init__(self):
        self.on_step, self.on_kv, self.on_state = [], [], []
        self.state = "ready"
        self.info = engine_info()
        self.watched = []

    def watch(self, hz):
        self.watched.append(hz)

    def become(self, state):
        self.state = state
        for listener in self.on_state:
            listener(state)


class Setting:
    """A feed over fakes; `clock_s` moves only by hand."""

    def __init__(self):
        self.clock_s = 100.0
        self.phase = "serving"
        self.num_snapshots = 0
        self.engine = Engine()
        self.metrics = SimpleNamespace(records={}, on_end=[])
        self.view = EngineView(self.engine, self, self.metrics, lambda: self.phase, clock=lambda: self.clock_s)
        self.feed = EngineFeed(self.engine, self.view, tick_s=NEVER_S)

    def snapshot(self):
        self.num_snapshots += 1
        return QueueSnapshot(
            classes=[],
            num_in_engine=len(self.metrics.records),
            num_sequences_in_engine=0,
            capacity=20,
            prefill_tokens_per_s=None,
            decode_tokens_per_s=None,
            is_draining=False,
        )

    def add_request(self, request_id, num_prompt=5):
        request = SimpleNamespace(request_id=request_id, prompt_token_ids=(1,) * num_prompt, prompt="a secret")
        record = RequestRecord(SimpleNamespace(request=request, priority="default"), self.clock_s, self.clock_s)
        self.metrics.records[request_id] = record
        return record

    def end(self, record, reason="stop"):
        record.ended_s = self.clock_s
        record.finish_reasons.append(reason)
        del self.metrics.records[record.job.request.request_id]
        for listener in self.metrics.on_end:
            listener(record)

    def step(self, step_id, *parts, preemptions=0):
        self.clock_s += 0.01
        for listener in self.engine.on_step:
            listener(StepOutputs([], report(step_id, self.clock_s, parts, preemptions)))

    def kv(self, blocks, cached=(), num_blocks=256):
        for listener in self.engine.on_kv:
            listener(KvReport(self.clock_s, num_blocks, blocks, list(cached)))


def report(step_id, now_s, parts=(), preemptions=0):
    prefill = sum(tokens for _, tokens, is_prefill in parts if is_prefill)
    return StepReport(
        step_id=step_id,
        started_s=now_s,
        duration_s=0.004,
        num_prefill_tokens=prefill,
        num_decode_tokens=sum(tokens for _, tokens, _ in parts) - prefill,
        num_context_tokens=0,
        num_running=len(parts),
        num_waiting=0,
        num_free_blocks=250,
        num_cached_blocks=3,
        total_preemptions=preemptions,
        total_prefix_queries=0,
        total_prefix_hits=0,
        parts=[StepPart(name, 0, tokens, is_prefill) for name, tokens, is_prefill in parts],
    )


def parse(event):
    lines = dict(line.split(": ", 1) for line in event.decode().strip().split("\n"))
    return lines["event"], int(lines["id"]), json.loads(lines["data"])


async def take(frames):
    """Return the next event, which must be there already."""
    return parse(await asyncio.wait_for(anext(frames), 5))


def run(scenario):
    asyncio.run(scenario(Setting()))


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
        assert s.feed._timer is None
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
        record = s.add_request("req-1")
        frames = s.feed.frames(10, False)
        kind, _, data = await take(frames)
        assert kind == "snapshot"
        assert data["shape"]["num_kv_blocks"] == 256
        assert [row[3:5] for row in data["requests"]] == [["queue", 5]]
        record.dispatched_s = s.clock_s
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
        viewer = s.feed._viewers[0]
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


def test_ids_are_random_and_prompts_absent_unless_the_viewer_is_admin():
    async def scenario(s):
        s.add_request("req-visible")
        plain, admin = s.feed.frames(10, False), s.feed.frames(10, True)
        of_plain, of_admin = (await take(plain))[2], (await take(admin))[2]
        assert of_admin["requests"][0][1] == "req-visible"
        assert of_plain["requests"][0][1] != "req-visible"
        assert of_plain["requests"][0][2:] == of_admin["requests"][0][2:]
        assert "req-visible" not in json.dumps(of_plain)
        assert "secret" not in json.dumps([of_plain, of_admin])
        s.add_request("req-next")
        s.feed.tick()
        assert "req-next" not in json.dumps(await take(plain))
        assert (await take(admin))[2]["requests"][0][1] == "req-next"
        await plain.aclose()
        await admin.aclose()

    run(scenario)


def test_label_does_not_follow_from_the_id_when_the_view_begins_anew(monkeypatch):
    async def scenario(s):
        labels = []
        for _ in range(2):
            record = s.add_request("same")
            frames = s.feed.frames(10, False)
            labels.append((await take(frames))[2]["requests"][0][1])
            await frames.aclose()
            s.end(record)
            frames = s.feed.frames(10, False)
            assert "requests" not in (await take(frames))[2]
            await frames.aclose()
        assert labels == ["aaaa", "bbbb"]

    found = iter(["aaaa", "bbbb"])
    monkeypatch.setattr(secrets, "token_hex", lambda size: next(found))
    run(scenario)


def test_request_is_shown_with_its_times_and_its_end():
    async def scenario(s):
        record = s.add_request("r")
        frames = s.feed.frames(10, False)
        await take(frames)
        s.clock_s += 1
        record.dispatched_s = s.clock_s
        s.clock_s += 0.5
        record.first_output_s, record.num_output_tokens = s.clock_s, 1
        s.feed.tick()
        row = (await take(frames))[2]["requests"][0]
        assert row[3:] == ["decode", 5, 1, 0, 0.0, 1000.0, 1500.0, None, None]
        s.clock_s += 0.25
        s.end(record, "length")
        s.feed.tick()
        row = (await take(frames))[2]["requests"][0]
        assert (row[3], row[10], row[11]) == ("ended", 1750.0, "length")
        late = s.feed.frames(10, False)
        assert (await take(late))[2]["requests"] == [row]
        await frames.aclose()
        await late.aclose()

    run(scenario)


def test_kv_cells_show_owners_shared_and_cached_blocks():
    async def scenario(s):
        s.add_request("a")
        s.add_request("b")
        frames = s.feed.frames(10, True)
        numbers = {row[1]: row[0] for row in (await take(frames))[2]["requests"]}
        s.kv({"a": [0, 1, 2, 3], "b": [0, 1, 7]}, cached=[9, 10])
        s.feed.tick()
        kv = (await take(frames))[2]["kv"]
        a, b = numbers["a"], numbers["b"]
        assert kv == {
            "num_blocks": 256,
            "blocks_per_cell": 1,
            "used": 5,
            "shared": 2,
            "cached": 2,
            "runs": [[0, 2, a, 2], [2, 2, a, 1], [7, 1, b, 1], [9, 2, -1, 0]],
            "holders": [[a, 4, 2], [b, 3, 2]],
        }
        s.kv({"a": [0, 1, 2, 3], "b": [0, 1, 7]}, cached=[9, 10])  # the same again is no news
        s.step(0)
        s.feed.tick()
        assert "kv" not in (await take(frames))[2]
        await frames.aclose()

    run(scenario)


def test_blocks_are_binned_when_they_are_very_many():
    async def scenario(s):
        s.add_request("a")
        frames = s.feed.frames(10, False)
        number = (await take(frames))[2]["requests"][0][0]
        s.kv({"a": list(range(0, 40))}, cached=range(40, 50), num_blocks=8192 * 10)
        s.feed.tick()
        kv = (await take(frames))[2]["kv"]
        assert (kv["blocks_per_cell"], kv["runs"]) == (10, [[0, 4, number, 1], [4, 1, -1, 0]])
        await frames.aclose()

    run(scenario)


def test_steps_begin_anew_when_the_engine_restarts():
    async def scenario(s):
        frames = s.feed.frames(10, False)
        await take(frames)
        s.step(70, preemptions=4)
        s.step(71, preemptions=6)
        s.feed.tick()
        assert [row[9] for row in (await take(frames))[2]["steps"]] == [0, 2]
        s.engine.become("restarting")
        s.feed.tick()
        data = (await take(frames))[2]
        assert (data["engine"], data.get("steps")) == ("restarting", None)
        s.engine.become("ready")
        s.step(0, preemptions=0)
        s.feed.tick()
        _, event_id, data = await take(frames)
        assert (event_id, data["engine"], [row[0] for row in data["steps"]]) == (0, "ready", [0])
        await frames.aclose()

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
        assert (await take(frames))[1] == 0  # within five seconds
        await frames.aclose()

    run(scenario)


def test_page_reads_as_many_columns_as_rows_have():
    text = (FOLDER / "engine_model.mjs").read_text()

    def num_columns(name):
        return len(json.loads(text.split(f"const {name} = ", 1)[1].split(";", 1)[0]))

    assert num_columns("STEP") == len(StepRow.__struct_fields__)
    assert num_columns("REQUEST") == len(RequestRow.__struct_fields__)
