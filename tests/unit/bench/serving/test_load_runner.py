"""When requests are sent, on a clock without real time, and the figures that follow."""

import asyncio

import pytest

from quire.bench.serving.http_sender import Api, HttpSender
from quire.bench.serving.metrics import metric_of, peak_concurrency
from quire.bench.serving.runner import run_load
from quire.bench.serving.workload import Request
from tests.unit.bench.serving.fakes import DONE, FakeServer, chunked, head, run_virtually, text_event, usage_event


class Echo:
    """Ends every request after as many seconds as it has prompt tokens."""

    def __init__(self, clock):
        self.clock = clock

    async def send(self, request, record):
        record.sent_s = self.clock()
        await asyncio.sleep(request.num_prompt_tokens)
        if request.num_output_tokens == 0:
            raise ValueError("a bug")
        record.outcome = "ok"
        record.end_s = self.clock()


def requests_of(*lengths, num_output=1):
    return [Request([1], length, num_output) for length in lengths]


def drive(requests, times, **options):
    return run_virtually(lambda clock: run_load(requests, times, Echo(clock), clock, **options))


def test_requests_are_sent_when_they_are_due():
    result = drive(requests_of(5, 5, 5), [0.0, 1.5, 4.0])
    assert [record.sent_s for record in result.records] == [0.0, 1.5, 4.0]
    assert (result.duration_s, result.is_interrupted, peak_concurrency(result)) == (9.0, False, 3)


def test_closed_loop_keeps_its_number_of_requests_under_way():
    result = drive(requests_of(4, 1, 1, 2, 3), [0.0] * 5, max_concurrency=2)
    assert [record.sent_s for record in result.records] == [0, 0, 1, 2, 4]
    assert (result.duration_s, peak_concurrency(result)) == (7.0, 2)


def test_wait_in_the_client_is_known_when_an_open_loop_is_limited():
    result = drive(requests_of(3, 1), [0.0, 1.0], max_concurrency=1)
    assert [metric_of(record, "client_queue_time") for record in result.records] == [0.0, 2.0]


def test_records_are_handed_out_as_they_end():
    seen = []
    drive(requests_of(3, 1, 2), [0.0] * 3, on_end=lambda record: seen.append(record.index))
    assert seen == [1, 2, 0]


def test_what_was_done_is_kept_when_the_run_is_cancelled():
    async def interrupted(clock):
        task = asyncio.get_running_loop().create_task(run_load(requests_of(1, 9, 9, 9), [0, 0, 0, 8], Echo(clock), clock))
        await asyncio.sleep(2)
        task.cancel()
        return await task

    result = run_virtually(lambda clock: interrupted(clock))
    assert result.is_interrupted
    assert [record.outcome for record in result.records] == ["ok", "aborted", "aborted", "waiting"]
    assert (result.duration_s, result.records[1].end_s) == (2.0, 2.0)


def test_bug_of_a_sender_is_not_hidden():
    with pytest.raises(ValueError, match="a bug"):
        drive([*requests_of(1, 2), *requests_of(1, num_output=0)], [0.0] * 3)


def test_whole_run_over_scripted_streams_has_the_expected_times():
    script = [0.5, head(), chunked(text_event("a"), end=False), 0.25, chunked(text_event("b"), end=False), 0.25]
    script.append(chunked(text_event("c", '"length"'), usage_event(9, 3), DONE))
    server = FakeServer([script])

    async def go(clock):
        requests = [Request([1], 9, 3) for _ in range(6)]
        sender = HttpSender(server.client(clock), Api("/v1/completions", "m", False, {}), clock)
        sender.prepare(requests)
        return await run_load(requests, [0.0] * 6, sender, clock, max_concurrency=3)

    result = run_virtually(lambda clock: go(clock))
    assert [record.outcome for record in result.records] == ["ok"] * 6
    assert [record.sent_s for record in result.records] == [0.0] * 3 + [1.0] * 3
    for record in result.records:
        values = [metric_of(record, name) for name in ("ttft", "tpot", "tpot_with_ttft", "e2el")]
        assert values == pytest.approx([0.5, 0.25, 1 / 3, 1.0])
    assert (result.duration_s, len(server.transports)) == (2.0, 3)
