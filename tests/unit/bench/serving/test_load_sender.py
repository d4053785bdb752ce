"""One request over HTTP: times, counts and ends, against scripted servers and without real time."""

import json

import pytest

from quire.bench.serving.http_client import Target
from quire.bench.serving.http_sender import Api, HttpSender, retry_after_s
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.workload import Request
from tests.unit.bench.serving.fakes import (
    DONE,
    FakeServer,
    chunked,
    event,
    head,
    refusal,
    run_virtually,
    text_event,
    usage_event,
)

REQUEST = Request([5, 6, 7], 3, 4)


def send(scripts, num_requests=1, is_chat=False, headers=None, **options):
    """Send requests one after the other; return their records, the server and the sender."""
    server = FakeServer(scripts)
    kept = {}

    async def go(clock):
        client = server.client(clock, headers)
        api = Api("/v1/x", "m", is_chat, {"temperature": 0.0})
        sender = kept["sender"] = HttpSender(client, api, clock, **options)
        sender.keeps_text = True
        request = Request("hi", 3, 4) if is_chat else REQUEST
        records = [RequestRecord(index, clock(), 3, 4) for index in range(num_requests)]
        for record in records:
            record.outcome = "running"
            await sender.send(request, record)
        return records

    return run_virtually(lambda clock: go(clock)), server, kept["sender"]


def stream(*actions):
    """A script: the head, then pauses and events, each event a chunk of its own."""
    return [head(), *(chunked(item, end=False) if isinstance(item, bytes) else item for item in actions)]


END = b"0\r\n\r\n"
GOOD = [*stream(0.5, text_event("a"), 0.1, text_event("b"), 0.2, text_event("", '"length"'), usage_event(3, 2), DONE), 0.3, END]


def test_times_are_those_of_the_events_when_a_stream_is_good():
    (record,), server, sender = send([[1.0, *GOOD]])
    assert (record.outcome, record.sent_s, record.status) == ("ok", 0.0, 200)
    assert list(record.content_s) == pytest.approx([1.5, 1.6])
    assert (record.first_choice_s, record.last_choice_s) == (pytest.approx(1.5), pytest.approx(1.8))
    assert record.end_s == pytest.approx(2.1)
    assert (record.num_input_tokens, record.num_output_tokens, record.token_source) == (3, 2, "usage")
    assert (record.finish_reason, record.has_done, record.num_events) == ("length", True, 4)
    assert sender.texts == {0: "ab"}
    assert server.requests[0].startswith(b"POST /v1/x HTTP/1.1\r\nHost: fake\r\n")
    body = server.requests[0].partition(b"\r\n\r\n")[2]
    assert body.startswith(b'{"model":"m","prompt":[5,6,7],"max_tokens":4,"stream":true,')


def test_result_is_the_same_when_the_response_is_cut_anywhere():
    data = head() + chunked(
        text_event("a"), event('{"choices":[{"delta":{"content":"ü"}}]}'), text_event("", '"stop"') + usage_event(3, 2), DONE
    )
    for step in (1, 2, 3, 5, 7, 11, 64):
        (record,), _, sender = send([[data[i : i + step] for i in range(0, len(data), step)]])
        assert (record.outcome, record.num_output_tokens, sender.texts[0]) == ("ok", 2, "aü")
    for cut in range(1, len(data)):
        (record,), _, _ = send([[data[:cut], 0.1, data[cut:]]])
        assert (record.outcome, record.finish_reason, record.num_events) == ("ok", "stop", 4)


def test_empty_role_event_is_not_the_first_token():
    role = event('{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}')
    think = event('{"choices":[{"index":0,"delta":{"reasoning_content":"hm"},"finish_reason":null}]}')
    tool = event('{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]},"finish_reason":null}]}')
    stop = event('{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}')
    (record,), server, _ = send([[*stream(0.1, role, 1.0, think, 1.0, tool, stop, DONE), END]], is_chat=True)
    assert record.first_choice_s == pytest.approx(0.1)
    assert list(record.content_s) == pytest.approx([1.1, 2.1])
    assert (record.num_output_tokens, record.token_source) == (2, "chunks")
    assert b'"messages":[{"role":"user","content":"hi"}],"max_completion_tokens":4' in server.requests[0]


def test_tokens_of_each_event_are_known_when_usage_comes_all_along():
    def counted(text, total):
        usage = {"prompt_tokens": 3, "completion_tokens": total}
        return event(json.dumps({"choices": [{"text": text}], "usage": usage}))

    (record,), _, _ = send([[*stream(counted("a", 1), 1, counted("bcd", 4), text_event("", '"stop"'), DONE), END]])
    assert record.tokens_by_event() == [1.0, 3.0]


@pytest.mark.parametrize(
    "script,kind,message",
    [
        ([], "closed", "without a response"),
        ([head()[:30]], "closed", "head"),
        ([head(), chunked(text_event("a"), end=False)], "truncated", "before the end"),
        (stream(text_event("a"), text_event("", '"stop"'), DONE), "truncated", "before the end"),
        ([head(), chunked(text_event("a"))], "incomplete", "finish_reason"),
        ([head(), chunked(DONE)], "empty", "without any choice"),
        ([head(), chunked(event('{"error":{"message":"no\\nmemory"}}'), DONE)], "stream_error", "no memory"),
        ([head(), chunked(event('{"error":"gone"}'), end=False)], "stream_error", "gone"),
        ([head(), chunked(event("{nonsense"), DONE)], "bad_json", "nonsense"),
        ([head(), chunked(event("[1]"), DONE)], "bad_event", "[1]"),
        ([head(), chunked(event('{"choices":7}'), DONE)], "bad_event", "choices"),
        ([head(), chunked(event('{"usage":{"completion_tokens":"7"}}'), DONE)], "bad_event", "completion_tokens"),
        ([head(), chunked(text_event("", '"error"'), DONE)], "stream_error", "finish_reason error"),
        ([refusal(500, b'{"error":{"message":"broke"}}')], "http_500", "broke"),
        ([refusal(400, b'{"error":"bad"}')], "http_400", "bad"),
        ([refusal(404, b"<h1>no</h1>")], "http_404", "<h1>no</h1>"),
        ([head(content_type="application/json", framing="Content-Length: 2"), b"{}"], "no_stream", "application/json"),
        ([b"SMTP\r\n\r\n"], "protocol", "SMTP"),
        ([head(), ConnectionResetError("reset by peer")], "truncated", "reset by peer"),
        ([ConnectionResetError("reset by peer")], "closed", "reset by peer"),
    ],
)
@pytest.mark.parametrize("ending", ["eof", "lost"], ids=["half-closed", "closed"])
def test_failure_has_its_kind_when_a_response_is_bad(script, kind, message, ending):
    (record,), _, _ = send([[*script, 0.25, ending]])
    assert (record.outcome, record.error_kind) == ("failed", kind)
    assert message in record.message
    assert record.end_s is not None


def test_stream_without_done_is_good_when_it_says_how_it_finished():
    (record,), _, _ = send([[*stream(text_event("a"), text_event("", '"stop"')), END]])
    assert (record.outcome, record.has_done) == ("ok", False)


def test_stream_is_good_when_only_the_close_ends_it():
    plain = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    (record, second), server, _ = send(
        [[plain, text_event("a"), text_event("", '"stop"'), DONE.rstrip(), 1, "eof"], GOOD], num_requests=2
    )
    assert (record.outcome, record.has_done, record.end_s) == ("ok", True, 1.0)
    assert second.outcome == "ok"
    assert len(server.transports) == 2


def test_connection_is_used_again_when_it_was_kept():
    records, server, _ = send([GOOD], num_requests=3)
    assert [record.outcome for record in records] == ["ok"] * 3
    assert len(server.transports) == 1


def test_request_goes_over_a_new_connection_when_a_kept_one_turns_out_closed():
    records, server, _ = send([GOOD, ["lost"], GOOD], num_requests=2)
    assert [record.outcome for record in records] == ["ok", "ok"]
    assert (len(server.transports), len(server.requests)) == (2, 3)


def test_request_fails_when_a_new_connection_is_closed_at_once():
    (record,), server, _ = send([["lost"]])
    assert (record.error_kind, len(server.requests)) == ("closed", 1)


def test_request_fails_when_nobody_listens():
    async def refuse(factory):
        raise ConnectionRefusedError(111, "refused")

    async def go(clock):
        from quire.bench.serving.http_client import HttpClient

        sender = HttpSender(HttpClient(Target("fake", 80), {}, clock, refuse), Api("/x", "m", False, {}), clock)
        record = RequestRecord(0, 0.0, 3, 4)
        await sender.send(REQUEST, record)
        return record

    record = run_virtually(lambda clock: go(clock))
    assert (record.outcome, record.error_kind) == ("failed", "connect")


@pytest.mark.parametrize("status", [429, 503])
def test_refusal_is_a_rejection_when_no_retry_is_wanted(status):
    (record,), server, _ = send([[refusal(status, b'{"error":{"message":"full"}}', "Retry-After: 7\r\n")]])
    assert (record.outcome, record.status, record.message, record.end_s) == ("rejected", status, "full", 0.0)
    assert len(server.requests) == 1


def test_retry_waits_as_asked_and_its_wait_counts():
    busy = refusal(429, extra="Retry-After: 7\r\nretry-after-ms: 2500\r\n")
    (record,), _, _ = send([[busy], [refusal(503, extra="Retry-After: 3\r\n")], GOOD], num_retries=2)
    assert (record.outcome, record.num_retries, record.sent_s, record.error_kind) == ("ok", 2, 0.0, "")
    assert record.content_s[0] == pytest.approx(2.5 + 3 + 0.5)


def test_retries_end_when_there_were_enough_and_grow_without_a_header():
    (record,), server, _ = send([[refusal(503)]], num_retries=3, seed=1)
    assert (record.outcome, record.num_retries, len(server.requests)) == ("rejected", 3, 4)
    assert 0.75 * 3.5 <= record.end_s <= 1.25 * 3.5


def test_other_errors_are_not_retried():
    (record,), server, _ = send([[refusal(500)]], num_retries=3)
    assert (record.error_kind, len(server.requests)) == ("http_500", 1)


def test_request_times_out_when_the_server_stalls():
    (record, second), server, _ = send(
        [[head(), chunked(text_event("a"), end=False), 1000], GOOD], num_requests=2, timeout_s=20
    )
    assert (record.error_kind, record.end_s) == ("timeout", 20.0)
    assert second.outcome == "ok"
    assert server.transports[0].is_closed


@pytest.mark.parametrize(
    "headers,wait",
    [
        ({}, None),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after-ms": "150", "retry-after": "2"}, 0.15),
        ({"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after-ms": "x", "retry-after": "4"}, 4.0),
    ],
)
def test_wait_is_read_from_the_headers(headers, wait):
    assert retry_after_s(headers) == wait


def test_headers_are_sent_with_every_request():
    _, server, _ = send([GOOD], headers={"Authorization": "Bearer k"})
    assert b"\r\nAuthorization: Bearer k\r\n" in server.requests[0]
