"""The routes of timelines: who sees which requests, and what is said of unknown ones."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from quire.contracts.timeline import RequestTimeline
from quire.serving.auth import hash_key
from quire.serving.config import ApiKey
from quire.serving.http import timelines
from quire.serving.http.timelines import get_timeline, list_timelines
from quire.serving.metrics.timeline_answers import timeline_of
from quire.serving.metrics.timelines import TimelineStore
from tests.unit.serving.http.shell import endpoint, exchange, parse, running
from tests.unit.serving.metrics.test_timelines import PLAIN, make_record

KEYS = tuple(ApiKey(name, hash_key(name), is_admin=name == "admin") for name in ("admin", "team", "other"))
ROUTES = [
    endpoint("/v1/requests/timelines", list_timelines, method="GET"),
    endpoint("/v1/requests/{request_id}/timeline", get_timeline, method="GET"),
]


class Replica:
    """An engine that knows how far the requests are that run."""

    def __init__(self, known):
        self.known, self.asked = known, []

    async def timelines_of(self, request_ids):
        self.asked.append(request_ids)
        return {name: RequestTimeline(PLAIN[:3]) for name in request_ids if name in self.known}


def ask(path, key="admin", keys=KEYS, ended=(), running_now=(), max_kept=4):
    store = TimelineStore(max_kept) if max_kept else None
    for record in ended:
        store.keep(record)
    replicas = [Replica(()), Replica({record.job.request.request_id for record in running_now})]

    async def go():
        async with running(ROUTES, api_keys=keys) as (port, context):
            context.store, context.replicas, context.clock = store, replicas, lambda: 104.0
            context.records = {record.job.request.request_id: record for record in running_now}
            head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\r\n"
            return parse(await exchange(port, head.encode()))

    status, _, body = asyncio.run(go())
    return SimpleNamespace(status=status, body=json.loads(body), replicas=replicas)


def ids_of(answer):
    return [timeline["id"] for timeline in answer.body["timelines"]]


def test_request_is_found_by_each_id_and_a_shared_id_finds_all():
    records = [make_record(f"cmpl-{n}", job={"call_id": "req_1", "client_id": "mine"}) for n in range(2)]
    for wanted, found in (("cmpl-1", ["cmpl-1"]), ("req_1", ["cmpl-0", "cmpl-1"]), ("mine", ["cmpl-0", "cmpl-1"])):
        answer = ask(f"/v1/requests/{wanted}/timeline", ended=records)
        assert (answer.status, ids_of(answer)) == (200, found)


@pytest.mark.parametrize(("key", "found"), [("admin", ["a", "b"]), ("team", ["a"]), ("other", ["b"])])
def test_key_sees_its_own_requests_and_an_admin_all(key, found):
    records = [make_record("a", owner="team"), make_record("b", owner="other")]
    answer = ask("/v1/requests/timelines", key, ended=records)
    assert (answer.status, ids_of(answer), answer.body["max_timelines"]) == (200, found, 4)
    statuses = {name: ask(f"/v1/requests/{name}/timeline", key, ended=records).status for name in "ab"}
    assert statuses == {name: 200 if name in found else 404 for name in "ab"}


@pytest.mark.parametrize("path", ["/v1/requests/timelines", "/v1/requests/a/timeline"])
def test_answer_is_made_outside_the_event_loop(path, monkeypatch):
    threads = []

    def noted(kept, offset_s):
        threads.append(threading.current_thread())
        return timeline_of(kept, offset_s)

    monkeypatch.setattr(timelines, "timeline_of", noted)
    assert ask(path, ended=[make_record("a")]).status == 200
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_no_key_sees_nothing():
    assert ask("/v1/requests/timelines", "wrong", ended=[make_record("a")]).status == 401
    assert ask("/v1/requests/a/timeline", "wrong", ended=[make_record("a")]).status == 401


def test_unknown_id_is_answered_with_how_many_are_kept():
    answer = ask("/v1/requests/nope/timeline", ended=[make_record("a"), make_record("b", owner="other")])
    assert (answer.status, answer.body["error"]["param"]) == (404, "request_id")
    message = answer.body["error"]["message"]
    assert all(text in message for text in ("'nope'", "the last 4 ended requests", "2 now"))
    others = ask("/v1/requests/nope/timeline", "team", ended=[make_record("a"), make_record("b", owner="other")])
    assert "1 now" in others.body["error"]["message"]


def test_server_that_keeps_none_says_so():
    for path in ("/v1/requests/a/timeline", "/v1/requests/timelines"):
        answer = ask(path, max_kept=0)
        assert answer.status == 404
        assert "--max-timelines 0" in answer.body["error"]["message"]


def test_engine_is_asked_for_the_timeline_of_a_running_request():
    record = make_record("runs", ended_s=None, engine=None, first_output_s=None, last_output_s=None, finish_reasons=[])
    answer = ask("/v1/requests/runs/timeline", running_now=[record])
    (timeline,) = answer.body["timelines"]
    assert (timeline["state"], timeline["total_s"]) == ("prefill", 5.0)
    assert "prefill" in [event["kind"] for event in timeline["events"]]
    assert [replica.asked for replica in answer.replicas] == [[["runs"]], [["runs"]]]


def test_engine_is_not_asked_for_a_request_that_is_still_queued():
    record = make_record("waits", ended_s=None, engine=None, dispatched_s=None, first_output_s=None, finish_reasons=[])
    answer = ask("/v1/requests/timelines", running_now=[record])
    (timeline,) = answer.body["timelines"]
    assert timeline["state"] == "queue"
    assert [phase["phase"] for phase in timeline["phases"]] == ["prepare", "server_queue"]
    assert answer.replicas[0].asked == [[]]


def test_requests_of_others_are_not_shown_while_they_run():
    records = [make_record(name, owner=name, ended_s=None) for name in ("team", "other")]
    assert ids_of(ask("/v1/requests/timelines", "team", running_now=records)) == ["team"]
