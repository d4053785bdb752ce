"""What the live view is told: requests under random labels, KV cells, steps, over a restart of the engine."""

import json
import secrets

import msgspec

from quire.contracts.expert_stats import ExpertStats
from quire.contracts.rank_stats import RankStats
from quire.contracts.tier_stats import TierStats
from quire.serving.page.static_files import FOLDER
from quire.serving.page.view import EngineView
from quire.serving.page.wire import ExpertRow, RankRow, RequestRow, StepRow, TierRow
from tests.unit.serving.page.setting import Setting, run, take


def test_ids_are_random_and_prompts_absent_unless_the_viewer_is_admin():
    async def scenario(s):
        s.add_request("req-visible")
        plain, admin = s.feed.frames(10, False), s.feed.frames(10, True)
        of_plain, of_admin = (await take(plain))[2], (await take(admin))[2]
        assert of_admin["requests"][0][1] == "req-visible"
        assert of_plain["requests"][0][1] != "req-visible"
        assert of_plain["requests"][0][2:-1] == of_admin["requests"][0][2:-1]
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
        s.clock_s += 0.99
        s.step(0, ("r", 5, True))
        s.feed.tick()
        assert (await take(frames))[2]["requests"][0][3:] == ["prefill", 5, 0, 0, 0.0, 1000.0, None, None, None, None]
        s.clock_s += 0.5
        record.first_output_s, record.num_output_tokens = s.clock_s, 1
        s.feed.tick()
        row = (await take(frames))[2]["requests"][0]
        assert row[3:] == ["decode", 5, 1, 0, 0.0, 1000.0, 1500.0, None, None, None]
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


def test_only_an_admin_is_told_whose_a_request_is():
    async def scenario(s):
        s.add_request("a")
        shown = []
        for is_admin in (False, True):
            frames = s.feed.frames(10, is_admin)
            row = (await take(frames))[2]["requests"][0]
            shown.append((row[1] == "a", row[-1]))
            await frames.aclose()
        assert shown == [(False, None), (True, "ann")]

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


def test_blocks_are_shared_when_several_choices_of_one_request_hold_them():
    async def scenario(s):
        s.add_request("a")
        frames = s.feed.frames(10, True)
        await take(frames)
        s.kv({"a": [0, 1, 2, 0, 1, 3, 0, 4]})
        s.feed.tick()
        kv = (await take(frames))[2]["kv"]
        number = kv["holders"][0][0]
        assert (kv["used"], kv["shared"], kv["holders"]) == (5, 2, [[number, 5, 2]])
        assert kv["runs"] == [[0, 1, number, 3], [1, 1, number, 2], [2, 3, number, 1]]
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


def test_page_reads_as_many_columns_as_rows_have():
    text = (FOLDER / "engine_model.mjs").read_text()

    def num_columns(name):
        return len(json.loads(text.split(f"const {name} = ", 1)[1].split(";", 1)[0]))

    assert num_columns("STEP") == len(StepRow.__struct_fields__)
    assert num_columns("REQUEST") == len(RequestRow.__struct_fields__)


def test_states_of_all_replicas_are_told_at_first_and_when_one_changes():
    states = ["ready", "ready"]
    s = Setting()
    view = EngineView(s.engine, s, s.metrics, lambda: "serving", clock=lambda: s.clock_s, replicas=lambda: list(states))
    view.start()
    assert view.snapshot(-1, False).replicas == ["ready", "ready"]
    mark = view.mark()
    view.update()
    assert view.frame(mark, False) is None
    states[1] = "restarting"
    view.update()
    assert view.frame(mark, False).replicas == ["ready", "restarting"]


def test_ranks_are_told_when_they_change():
    async def scenario(s):
        s.engine.ranks = [
            RankStats(rank=0, pid=7, memory_bytes=1024, share=2 / 3, wait_s=0.25),
            RankStats(rank=1, state="failed", part="stage 0 (layers 0 to 3)"),
        ]
        frames = s.feed.frames(10, False)
        told = (await take(frames))[2]["ranks"]
        assert told == [[0, 7, "ready", 1024, 0.6667, 250.0, ""], [1, 0, "failed", 0, 0.0, 0.0, "stage 0 (layers 0 to 3)"]]
        s.add_request("another")
        s.feed.tick()
        assert "ranks" not in (await take(frames))[2]
        s.engine.ranks = []
        s.feed.tick()
        assert (await take(frames))[2]["ranks"] == []
        await frames.aclose()

    run(scenario)


def test_experts_are_told_when_their_load_changes():
    async def scenario(s):
        moved = {"imbalance": 1.25, "imbalance_before": 1.5, "imbalance_after": 1.04, "num_moved": 3, "num_failed_moves": 1}
        s.engine.experts = [ExpertStats(layer=2, tokens=[5, 30, *[1] * 8], rank_tokens=[27.4, 15.6], **moved)]
        frames = s.feed.frames(10, False)
        told = (await take(frames))[2]["experts"]
        busiest = [[1, 30], [0, 5], *([expert, 1] for expert in range(2, 8))]
        assert told == [[2, 10, 43, busiest, [27, 16], 1.25, 1.5, 1.04, 3, 1]]
        s.add_request("another")
        s.feed.tick()
        assert "experts" not in (await take(frames))[2]
        s.engine.experts = []
        s.feed.tick()
        assert (await take(frames))[2]["experts"] == []
        await frames.aclose()

    run(scenario)


def test_the_page_knows_the_columns_of_the_experts():
    columns = ("layer", "count", "tokens", "busiest", "ranks", "imbalance", "before", "after", "moved", "failed")
    assert f"const EXPERTS = {json.dumps(list(columns))};" in (FOLDER / "engine_model.mjs").read_text()
    assert len(columns) == len(ExpertRow.__struct_fields__)


def test_the_page_knows_the_columns_of_a_rank():
    columns = [f'"{name}"' for name in ("rank", "pid", "state", "memory", "share", "wait", "part")]
    assert f"const RANK = [{', '.join(columns)}];" in (FOLDER / "engine_model.mjs").read_text()
    assert len(columns) == len(RankRow.__struct_fields__)


def test_tiers_are_told_when_they_change():
    async def scenario(s):
        counts = {"num_hits": 5, "num_saved": 7, "num_loaded": 6, "num_dropped": 1, "save_s": 0.25, "load_s": 0.5}
        s.engine.tiers = [TierStats(tier="host", num_pages=3, num_bytes=300, max_bytes=1200, **counts)]
        frames = s.feed.frames(10, False)
        assert (await take(frames))[2]["tiers"] == [["host", 3, 300, 1200, 5, 7, 6, 1, 250.0, 500.0, {}, {}]]
        s.add_request("another")
        s.feed.tick()
        assert "tiers" not in (await take(frames))[2]
        s.engine.tiers = []
        s.feed.tick()
        assert (await take(frames))[2]["tiers"] == []
        await frames.aclose()

    run(scenario)


def test_transfers_and_the_role_are_told():
    async def scenario(s):
        s.engine.info = msgspec.structs.replace(s.engine.info, role="decode")
        outcomes, problems = {"complete": 4, "short": 2}, {"tcp://10.0.0.2:7000": "the engines differ in dtype"}
        s.engine.tiers = [TierStats(tier="peer", num_pages=1, num_bytes=8, max_bytes=8, outcomes=outcomes, problems=problems)]
        frames = s.feed.frames(10, False)
        _, _, data = await take(frames)
        assert data["shape"]["role"] == "decode"
        assert data["tiers"][0][-2:] == [outcomes, problems]
        await frames.aclose()

    run(scenario)


def test_the_page_knows_the_columns_of_a_tier():
    columns = ["tier", "pages", "bytes", "limit", "hits", "saved", "loaded", "dropped", "saving", "loading"]
    columns += ["outcomes", "problems"]
    shown = ", ".join(f'"{name}"' for name in columns)
    assert f"const TIER = [{shown}];" in (FOLDER / "engine_model.mjs").read_text()
    assert len(columns) == len(TierRow.__struct_fields__)
