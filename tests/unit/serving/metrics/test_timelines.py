"""Timelines in the server: what is kept, where the time went, and the answers and traces made of it."""

import dataclasses
import json

import pytest

from quire.contracts.outputs import RequestMetrics
from quire.contracts.timeline import RequestTimeline, TimelineEvent
from quire.serving.engine_client.messages import StepOutputs, StepReport
from quire.serving.metrics.chrome_trace import chrome_trace
from quire.serving.metrics.phases import LABELS, format_s, seconds_by_phase, summary_of
from quire.serving.metrics.request_record import RequestRecord
from quire.serving.metrics.timeline_answers import steps_of, timeline_of
from quire.serving.metrics.timelines import MAX_STEPS, KeptTimeline, TimelineStore, is_request_named
from tests.unit.serving.request_queue.virtual_engine import make_job


def event(kind, start_s, end_s, **fields):
    return TimelineEvent(kind, fields.pop("choice", 0), start_s, end_s, **fields)


PLAIN = [
    event("queue", 101.0, 101.5),
    event("admit", 101.5, 101.5, num_tokens=6, num_cached_tokens=4),
    event("prefill", 101.5, 102.0, step_id=7, num_tokens=6, num_steps=1, num_step_tokens=6),
    event("decode", 102.0, 106.0, step_id=8, num_tokens=4, num_steps=4, longest_step_s=1.5, longest_step_id=9),
    event("finish", 106.0, 106.0, num_tokens=5, reason="length"),
]
PREEMPTED = [
    event("queue", 101.0, 101.0),
    event("admit", 101.0, 101.0, num_tokens=10),
    event("prefill", 101.0, 101.5, num_tokens=10, num_steps=1, num_step_tokens=10),
    event("decode", 101.5, 102.0, num_tokens=1, num_steps=1),
    event("preempt", 102.0, 105.0, reason="kv_blocks"),
    event("admit", 105.0, 105.0, num_tokens=12),
    event("prefill", 105.0, 105.75, num_tokens=12, num_steps=1, num_step_tokens=12),
    event("decode", 105.75, 106.0, num_tokens=1, num_steps=1),
    event("finish", 106.0, 106.0, num_tokens=4, reason="stop"),
]


def make_record(name="req_1", events=PLAIN, **fields):
    """Return a record of [99.0, 106.25]: tokenised at 99.5, dispatched at 100.75."""
    job = make_job(name, 10, 20, owner=fields.pop("owner", "team"), **fields.pop("job", {}))
    record = RequestRecord(job, arrival_s=99.0, opened_s=99.5, dispatched_s=100.75)
    record.first_output_s, record.last_output_s, record.ended_s = 102.1, 106.1, 106.25
    record.engine = RequestMetrics(99.5, 101.5, 102.0, 106.0, num_cached_tokens=4, timeline=RequestTimeline(list(events)))
    record.num_output_tokens, record.finish_reasons = 5, ["length"]
    for field, value in fields.items():
        setattr(record, field, value)
    return record


def kept_of(*args, **fields):
    return KeptTimeline.of(make_record(*args, **fields), 106.25)


def test_phases_add_up_to_the_whole_time():
    assert seconds_by_phase(kept_of()) == pytest.approx(
        {"prepare": 0.5, "server_queue": 1.25, "engine_queue": 0.5, "prefill": 0.5, "decode": 4.0, "other": 0.5}
    )


def test_preemption_and_what_it_costs_are_phases():
    kept = kept_of(events=PREEMPTED)
    seconds = seconds_by_phase(kept)
    assert (seconds["preempted"], seconds["recompute"], seconds["decode"]) == (3.0, 0.75, 0.75)
    assert sum(seconds.values()) == pytest.approx(7.25)
    assert summary_of(kept, seconds) == (
        "41% of the time (3.00 s) was spent waiting after a preemption: it lost its KV blocks once because the KV cache was "
        "full."
    )


def test_a_request_counts_as_decoding_while_one_of_its_choices_does():
    second = [
        event("queue", 101.0, 103.0, choice=1),
        event("admit", 103.0, 103.0, choice=1),
        event("decode", 103.5, 106.1, choice=1, num_steps=3, num_tokens=3),
        event("finish", 106.1, 106.1, choice=1, reason="length"),
    ]
    seconds = seconds_by_phase(kept_of(events=[*PLAIN, *second]))
    assert (seconds["prefill"], seconds["engine_queue"]) == (0.5, 0.5)
    assert seconds["decode"] == pytest.approx(4.1)


def test_request_that_never_left_the_queue_waited_all_the_time():
    record = make_record(events=(), dispatched_s=None, first_output_s=None, engine=None, abort_reason="deadline")
    kept = KeptTimeline.of(record, 0.0)
    assert seconds_by_phase(kept) == {"prepare": 0.5, "server_queue": 6.75}
    assert "waiting in the server's queue" in summary_of(kept, seconds_by_phase(kept))


def test_unfinished_request_is_described_up_to_now():
    record = make_record(ended_s=None, engine=None, first_output_s=None, last_output_s=None, finish_reasons=[])
    kept = KeptTimeline.of(record, 104.0, RequestTimeline(PLAIN[:3]))
    assert (kept.phase, kept.ended_s) == ("prefill", 104.0)
    assert seconds_by_phase(kept)["prefill"] == 2.5
    answer = timeline_of(kept, 0.0)
    assert (answer.state, answer.total_s, answer.time_to_first_token_s) == ("prefill", 5.0, None)
    assert [entry.kind for entry in answer.events if entry.kind == "ended"] == []


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (PLAIN, ["55% of the time (4.00 s)", "generating tokens", "4 tokens in 4 steps of 1.00 s"]),
        (
            [*PLAIN[:3], PLAIN[3]._replace(num_drafts=8, num_accepted=2, prefill_step_s=2.0)],
            ["2 of 8 draft tokens accepted", "50% of it in steps that also computed prompts of other requests"],
        ),
        (
            [PLAIN[0], PLAIN[1], PLAIN[2]._replace(end_s=102.5, num_step_tokens=50), event("finish", 106.0, 106.0)],
            ["computing the prompt", "6 tokens in 1 step", "4 of 10 prompt tokens came from the cache",
             "44 tokens of other sequences", "3.50 s of it passed in steps that had no room"],
        ),
        ([event("queue", 101.0, 106.0)], ["waiting in the engine's queue", "max_num_seqs"]),
        ([event("compile", 100.8, 106.0)], ["compiling the constraint"]),
    ],
)  # fmt: skip
def test_summary_says_what_took_longest_and_why(events, words):
    kept = kept_of(events=events)
    text = summary_of(kept, seconds_by_phase(kept))
    assert all(word in text for word in words), text


def test_every_phase_has_a_label_and_durations_are_for_people():
    assert set(seconds_by_phase(kept_of())) <= set(LABELS)
    assert [format_s(seconds) for seconds in (0.00123, 1.5, 250.0)] == ["1.2 ms", "1.50 s", "250 s"]


def test_the_last_requests_are_kept_and_found_by_each_of_their_ids():
    store = TimelineStore(2)
    for number in range(3):
        store.keep(make_record(f"cmpl-{number}", owner=f"team{number % 2}", job={"call_id": f"req_{number}"}))
    assert [kept.request_id for kept in store.ended(None)] == ["cmpl-1", "cmpl-2"]
    assert [kept.request_id for kept in store.ended("team0")] == ["cmpl-2"]
    (kept,) = store.ended("team1")
    assert kept.has_id("cmpl-1")
    assert kept.has_id("req_1")
    assert not kept.has_id("req_2")


@pytest.mark.parametrize(
    ("wanted", "is_named"),
    [("cmpl-7-1", True), ("cmpl-7", True), ("cmpl-7-0", False), ("cmpl", False), ("req_1", True), ("mine", True), ("", False)],
)
def test_a_request_is_named_by_the_id_of_its_answer(wanted, is_named):
    assert is_request_named(wanted, "cmpl-7-1", "req_1", "mine") is is_named
    assert not is_request_named("chatcmpl", "chatcmpl-a", "req_1", None)


def test_neither_prompt_nor_output_is_kept():
    record = make_record()
    store = TimelineStore(1)
    store.keep(record)
    (kept,) = store.ended(None)
    values = [getattr(kept, field.name) for field in dataclasses.fields(kept)]
    assert record.job.request.prompt_token_ids not in values
    assert not {type(value) for value in values} - {str, int, float, tuple, type(None)}


def make_report(step_id):
    return StepReport(step_id, 100.0 + step_id, 0.5, 6, 2, [], 3, 1, 40, 0, 0, 0, 0, [])


def test_steps_are_kept_up_to_a_limit():
    store = TimelineStore(1)
    store.note_step(StepOutputs([]))
    for step_id in range(MAX_STEPS + 3):
        store.note_step(StepOutputs([], make_report(step_id), replica=1))
    assert len(store.steps) == MAX_STEPS
    (first, *_) = steps_of(store.steps, 1000.0)
    assert (first.step, first.replica, first.started_at, first.duration_s) == (3, 1, 1103.0, 0.5)
    assert (first.prefill_tokens, first.decode_tokens, first.running, first.waiting, first.free_blocks) == (6, 2, 3, 1, 40)


def test_answer_has_times_since_the_arrival():
    answer = timeline_of(kept_of(job={"call_id": "req_9", "client_id": "mine"}), offset_s=1000.0)
    assert (answer.id, answer.http_request_id, answer.client_request_id) == ("req_1", "req_9", "mine")
    assert (answer.received_at, answer.total_s, answer.time_to_first_token_s) == (1099.0, 7.25, 3.1)
    assert [(entry.kind, entry.start_s) for entry in answer.events] == [
        ("received", 0.0), ("queued", 0.5), ("dispatched", 1.75), ("queue", 2.0), ("admit", 2.5), ("prefill", 2.5),
        ("decode", 3.0), ("first_token", 3.1), ("finish", 7.0), ("last_token", 7.1), ("ended", 7.25),
    ]  # fmt: skip
    decode = answer.events[6]
    assert (decode.duration_s, decode.step, decode.tokens, decode.steps, decode.longest_step) == (4.0, 8, 4, 4, 9)
    assert sum(phase.share for phase in answer.phases) == pytest.approx(1.0, abs=1e-3)


def test_error_is_shown_without_values_of_others():
    answer = timeline_of(kept_of(error="RuntimeError: no block for 'a secret prompt'"), 0.0)
    assert answer.error == "RuntimeError: no block for '...'"


def spans_of_trace(trace, name):
    return [(entry["ts"], entry["dur"]) for entry in trace["traceEvents"] if entry["ph"] == "X" and entry["name"] == name]


def test_trace_has_requests_and_steps_in_microseconds_from_the_first_event():
    store = TimelineStore(1)
    store.note_step(StepOutputs([], make_report(2), replica=1))
    trace = chrome_trace([timeline_of(kept_of(), 0.0)], steps_of(store.steps, 0.0))
    assert json.loads(json.dumps(trace)) == trace
    assert trace["otherData"]["started_at"] == 99.0
    assert spans_of_trace(trace, "req_1") == [(0.0, 7_250_000.0)]
    assert spans_of_trace(trace, "prepare") == [(0.0, 500_000.0)]
    assert spans_of_trace(trace, "server queue") == [(500_000.0, 1_250_000.0)]
    assert spans_of_trace(trace, "decode") == [(3_000_000.0, 4_000_000.0)]
    assert spans_of_trace(trace, "prefill and decode") == [(3_000_000.0, 500_000.0)]
    names = {(entry["pid"], entry["args"]["name"]) for entry in trace["traceEvents"] if entry["ph"] == "M"}
    assert names == {(1, "requests"), (1, "req_1"), (11, "engine 1"), (11, "steps")}
    counters = {entry["name"]: entry["args"] for entry in trace["traceEvents"] if entry["ph"] == "C"}
    assert counters["sequences"] == {"running": 3, "waiting": 1}


def test_spans_of_a_row_of_a_trace_are_nested_or_apart():
    second = [event._replace(choice=1, start_s=event.start_s + 0.1, end_s=event.end_s + 0.1) for event in PLAIN]
    trace = chrome_trace([timeline_of(kept_of(events=[*PLAIN, *second]), 0.0), timeline_of(kept_of(events=PREEMPTED), 0.0)])
    rows = {}
    for entry in trace["traceEvents"]:
        if entry["ph"] == "X":
            rows.setdefault((entry["pid"], entry["tid"]), []).append((entry["ts"], entry["ts"] + entry["dur"]))
    assert len(rows) == 3
    for spans in rows.values():
        for start, end in spans:
            for other_start, other_end in spans:
                assert not start < other_start < end < other_end
