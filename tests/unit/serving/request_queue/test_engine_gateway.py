"""The gateway over an engine that computes nothing: streams, ends and fairness."""

import asyncio
import random

import pytest

from quire.base.errors import InvariantError
from quire.serving.admission import AdmissionControl
from quire.serving.config import ApiKey, ServerConfig
from quire.serving.engine_client.messages import RequestDelta, StepOutputs
from quire.serving.errors import ApiError
from quire.serving.interfaces import NOT_BY_CLIENT
from tests.unit.serving.request_queue.virtual_bench import read, with_bench
from tests.unit.serving.request_queue.virtual_engine import make_job


async def fill(bench, count=12, **job):
    """Open jobs that keep the engine full, read by tasks."""
    streams = [bench.gateway.open(make_job(f"fill{i}", **job)) for i in range(count)]
    return streams, [bench.loop.create_task(read(stream)) for stream in streams]


def test_stream_gives_all_tokens_and_ends_when_nothing_happens():
    async def test(bench):
        assert await read(bench.gateway.open(make_job("a", n=2, max_tokens=5))) == (10, ["length", "length"])
        assert bench.engine.aborts == []

    with_bench(test)


def test_request_is_dispatched_when_sending_begins():
    async def test(bench):
        submit = bench.engine.submit

        def submit_slowly(request):
            bench.loop.advance(1.0)
            return submit(request)

        bench.engine.submit = submit_slowly
        stream = bench.gateway.open(make_job("a"))
        record = bench.metrics.records["a"]
        await read(stream)
        assert record.dispatched_s == record.opened_s

    with_bench(test)


def test_every_generated_token_is_charged_and_learnt_from_when_best_of_returns_one_choice():
    key = ApiKey("a", b"", tokens_per_minute=1000)

    async def test(bench):
        before = bench.gateway.ratelimit_headers("a")["x-ratelimit-remaining-tokens"]
        assert await read(bench.gateway.open(make_job("r", 10, 20, owner="a", best_of=5))) == (20, ["length"])
        left = int(bench.gateway.ratelimit_headers("a")["x-ratelimit-remaining-tokens"])
        refilled = 1000 / 60 * bench.loop.time()
        assert int(before) - 110 <= left <= int(before) - 110 + refilled
        assert bench.metrics.defined.generation_tokens.labels().value == 100
        assert bench.admission.limits_of("a").expected_output_tokens(None) == 20

    with_bench(test, config=ServerConfig(api_keys=(key,)))


def test_what_a_taker_takes_is_not_read_when_a_stream_is_diverted():
    async def test(bench):
        stream, taken = bench.gateway.open(make_job("a", max_tokens=6)), []

        def take(delta):
            taken.append(delta)
            return True

        stream.attach_sink(take)  # while it waits in the queue, or just after
        assert await read(stream) == (1, ["length"])
        assert len(taken) == 5
        assert not any(delta.finished for delta in taken)

    with_bench(test)


def test_stream_alone_fails_when_its_taker_raises():
    async def test(bench):
        stream, other = bench.gateway.open(make_job("a", max_tokens=50)), bench.gateway.open(make_job("b", max_tokens=50))

        def take(delta):
            raise ValueError("broken")

        stream.attach_sink(take)
        beside = bench.loop.create_task(read(other))
        with pytest.raises(ValueError, match="broken"):
            await read(stream)
        assert bench.engine.aborts == ["a"]
        assert await beside == (50, ["length"])

    with_bench(test)


def test_abort_reaches_the_engine_once_when_the_block_is_left_early():
    async def test(bench):
        stream = bench.gateway.open(make_job("a", max_tokens=50))
        async with stream:
            await anext(stream)
        stream.abort("cancelled")
        assert bench.engine.aborts == ["a"]

    with_bench(test)


def test_no_abort_is_sent_when_the_last_delta_is_not_yet_read():
    async def test(bench):
        stream = bench.gateway.open(make_job("a", max_tokens=2))
        async with stream:
            await anext(stream)
            await asyncio.sleep(1)
        assert bench.engine.aborts == []

    with_bench(test)


@pytest.mark.parametrize(
    ("call_id", "message", "reason"),
    [
        ("req_1", None, "disconnect"),
        ("req_1", NOT_BY_CLIENT, "cancelled"),  # another part of its request has failed
        (None, None, "cancelled"),  # of a batch: nobody was there to go
    ],
)
def test_abort_is_sent_once_when_the_reading_task_is_cancelled(call_id, message, reason):
    async def test(bench):
        task = bench.loop.create_task(read(bench.gateway.open(make_job("a", max_tokens=500, call_id=call_id))))
        await asyncio.sleep(0.2)
        task.cancel(message)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.engine.aborts == ["a"]
        defined = bench.metrics.defined
        assert defined.aborts.labels(reason).value == 1
        assert defined.disconnects.labels("decode").value == (reason == "disconnect")

    with_bench(test)


def test_iteration_ends_with_an_abort_delta_when_a_running_request_is_aborted():
    async def test(bench):
        stream = bench.gateway.open(make_job("a", max_tokens=500))
        async with stream:
            await anext(stream)
            stream.abort("tool_cut")
            last = [delta async for delta in stream][-1]
        assert last.finished
        assert last.choices[0].finish_reason == "abort"
        assert bench.engine.aborts == ["a"]

    with_bench(test)


def test_engine_never_hears_of_a_request_when_it_is_aborted_in_the_queue():
    async def test(bench):
        _, tasks = await fill(bench)
        stream = bench.gateway.open(make_job("late", n=2))
        stream.abort("cancelled")
        assert await read(stream) == (0, ["abort", "abort"])
        await asyncio.gather(*tasks)
        assert "late" not in bench.engine.submitted
        assert bench.engine.aborts == []

    with_bench(test)


def test_queued_request_fails_with_408_when_its_deadline_passes():
    async def test(bench):
        _, tasks = await fill(bench, max_tokens=200)
        stream = bench.gateway.open(make_job("late", deadline_s=bench.loop.time() + 0.5))
        with pytest.raises(ApiError) as caught:
            await read(stream)
        assert (caught.value.status, bench.loop.time()) == (408, 0.5)
        await asyncio.gather(*tasks)
        assert "late" not in bench.engine.submitted

    with_bench(test)


def test_running_request_is_aborted_with_504_when_its_deadline_passes():
    async def test(bench):
        stream = bench.gateway.open(make_job("a", max_tokens=500, deadline_s=0.503))
        with pytest.raises(ApiError) as caught:
            await read(stream)
        assert (caught.value.status, caught.value.should_retry) == (504, False)
        assert bench.loop.time() == pytest.approx(0.503)
        assert bench.engine.aborts == ["a"]

    with_bench(test)


def test_deadline_error_waits_for_the_reader_when_nobody_reads():
    async def test(bench):
        stream = bench.gateway.open(make_job("a", max_tokens=500, deadline_s=0.5))
        await asyncio.sleep(1)
        with pytest.raises(ApiError, match="deadline"):
            await read(stream)

    with_bench(test)


def test_outer_cancellation_wins_when_it_comes_together_with_a_deadline():
    async def test(bench):
        stream = bench.gateway.open(make_job("a", max_tokens=500, deadline_s=0.5))
        task = bench.loop.create_task(read(stream))
        await asyncio.sleep(0.4)
        bench.loop.call_at(0.5, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    with_bench(test)


def test_reader_task_can_be_used_further_when_a_deadline_interrupted_it():
    async def test(bench):
        stream = bench.gateway.open(make_job("a", max_tokens=500, deadline_s=0.5))
        with pytest.raises(ApiError):
            await read(stream)
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0.1)

    with_bench(test)


def test_all_fail_at_once_and_later_ones_succeed_when_the_engine_dies():
    async def test(bench):
        _, tasks = await fill(bench, 40, max_tokens=100)
        await asyncio.sleep(0.3)
        bench.engine.set_state("restarting")
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert {(error.status, error.code) for error in found} == {(503, "engine_error"), (503, "engine_unavailable")}
        assert bench.loop.time() == pytest.approx(0.3)
        with pytest.raises(ApiError) as caught:
            bench.gateway.open(make_job("b"))
        assert caught.value.code == "engine_unavailable"
        bench.engine.set_state("ready")
        assert await read(bench.gateway.open(make_job("c", max_tokens=3))) == (3, ["length"])
        assert bench.engine.aborts == []

    with_bench(test)


def test_new_jobs_are_refused_and_old_ones_end_when_draining():
    async def test(bench):
        _, tasks = await fill(bench, 20)
        bench.gateway.start_drain()
        with pytest.raises(ApiError) as caught:
            bench.gateway.open(make_job("b"))
        assert (caught.value.status, caught.value.code) == (503, "draining")
        assert 1 <= caught.value.retry_after_s <= 1.25
        assert not await bench.gateway.drained(0.01)
        assert await bench.gateway.drained(60)
        assert [reasons for _, reasons in await asyncio.gather(*tasks)] == [["length"]] * 20

    with_bench(test)


@pytest.mark.parametrize(("longest_s", "left_s"), [(30, 20), (5, 5)])
def test_refusals_say_how_long_the_drain_takes_and_are_spread_when_draining(monkeypatch, longest_s, left_s):
    async def test(bench):
        monkeypatch.setattr(AdmissionControl, "work_left_s", 20.0)
        bench.gateway.start_drain(longest_s)
        found = []
        for number in range(20):
            with pytest.raises(ApiError) as caught:
                bench.gateway.open(make_job(str(number)))
            found.append(caught.value.retry_after_s)
        assert all(left_s <= seconds <= 1.25 * left_s for seconds in found)
        assert len(set(found)) > 10
        await asyncio.sleep(longest_s + 1)
        assert bench.gateway.drain_left_s == 0

    with_bench(test)


def test_work_left_is_that_of_the_queue_and_of_the_engine_when_rates_are_known():
    async def test(bench):
        _, tasks = await fill(bench, 20)
        assert bench.admission.work_left_s == 0  # no step yet
        await asyncio.sleep(0.1)
        half_s = bench.admission.work_left_s
        assert half_s > 0
        await asyncio.gather(*tasks)
        assert bench.admission.work_left_s == 0

    with_bench(test)


def test_every_stream_gets_an_error_when_all_are_failed():
    async def test(bench):
        _, tasks = await fill(bench, 20, max_tokens=1000)
        await asyncio.sleep(0.1)
        bench.gateway.start_drain()
        bench.gateway.fail_all()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert {error.code for error in found} == {"server_shutdown"}
        assert sorted(bench.engine.aborts) == sorted(bench.engine.submitted)
        assert await bench.gateway.drained(1)

    with_bench(test)


@pytest.mark.parametrize(("is_refused", "status"), [(True, 400), (False, 500)])
def test_engine_error_becomes_an_api_error_when_a_delta_has_one(is_refused, status):
    async def test(bench):
        stream = bench.gateway.open(make_job("a"))
        one = bench.engine.waiting[0]
        delta = RequestDelta("a", [], True, error="prompt too long", error_param="prompt", is_refused=is_refused)
        bench.engine.end(one)
        one.subscription.deliver(delta, 0.0)
        for listener in bench.engine.on_step:
            listener(StepOutputs([delta]))
        with pytest.raises(ApiError) as caught:
            await read(stream)
        assert caught.value.status == status

    with_bench(test)


@pytest.mark.parametrize("status", [400, 503])
def test_refusal_while_submitting_is_counted_by_whose_fault_it_is(status):
    async def test(bench):
        def refuse(request):
            raise ApiError(status, "cannot be sent")

        bench.engine.submit = refuse
        stream = bench.gateway.open(make_job("a"))
        with pytest.raises(ApiError):
            await read(stream)
        defined = bench.metrics.defined
        assert defined.slo_counted.labels().value == (status == 503)
        assert defined.success.labels("error").value == (status == 503)
        assert bench.admission.is_empty

    with_bench(test)


def test_books_are_closed_when_the_client_gives_up_a_request_that_nobody_reads():
    async def test(bench):
        bench.gateway.open(make_job("a"))
        one = bench.engine.waiting[0]
        bench.engine.end(one)
        one.subscription.fail(ApiError(503, "the request was lost", code="engine_error"))
        await asyncio.sleep(2)
        assert bench.admission.is_empty

    with_bench(test)


def test_second_request_of_the_same_id_is_an_error_when_the_first_is_open():
    async def test(bench):
        stream = bench.gateway.open(make_job("a"))
        with pytest.raises(InvariantError):
            bench.gateway.open(make_job("a"))
        await read(stream)

    with_bench(test)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lengths", [(64, 64), (20, 100)], ids=["equal", "mixed"])
def test_engine_does_not_starve_when_many_wait(lengths):
    async def run(bench, hold_back):
        rng = random.Random(3)
        jobs = [make_job(f"r{i}", 20, rng.randint(*lengths)) for i in range(200)]
        if hold_back:
            await asyncio.gather(*(read(bench.gateway.open(job)) for job in jobs))
            assert bench.engine.most_sequences <= bench.gateway.capacity
        else:  # all at once, as a program without a server would
            subscriptions = [bench.engine.submit(job.request) for job in jobs]
            while not all(subscription.is_finished for subscription in subscriptions):
                await asyncio.sleep(0.001)
        return bench.loop.time()

    served = with_bench(lambda bench: run(bench, True), max_num_seqs=16)
    offline = with_bench(lambda bench: run(bench, False), max_num_seqs=16)
    assert served <= 1.05 * offline


def test_batch_runs_only_in_room_left_when_others_wait():
    async def test(bench):
        batch = [bench.gateway.open(make_job(f"b{i}", priority="batch")) for i in range(16)]
        online = [bench.gateway.open(make_job(f"o{i}")) for i in range(30)]
        tasks = [bench.loop.create_task(read(stream)) for stream in batch + online]
        await asyncio.gather(*tasks)
        order = bench.engine.submitted
        first_batch = [name for name in order[: order.index("o0")] if name.startswith("b")]
        assert len(first_batch) == bench.gateway.capacity  # the engine was idle when they came
        assert all(name.startswith("o") for name in order[len(first_batch) : len(first_batch) + 30])
        with pytest.raises(ApiError, match="window"):
            [bench.gateway.open(make_job(f"c{i}", priority="batch")) for i in range(17)]
        bench.gateway.fail_all()

    with_bench(test)


def test_requests_do_not_wait_for_batches_when_these_fill_the_engine():
    async def test(bench):
        lines = [bench.gateway.open(make_job(f"b{i}", max_tokens=900, priority="batch")) for i in range(16)]
        tasks = [bench.loop.create_task(read(stream)) for stream in lines]
        await asyncio.sleep(0.5)
        bench.metrics.render()
        waiting = bench.metrics.defined.waiting_by_reason
        assert (waiting.labels("deferred").value, waiting.labels("capacity").value) == (8, 0)
        began = bench.loop.time()
        answers = [read(bench.gateway.open(make_job(f"o{i}", max_tokens=5))) for i in range(8)]
        assert await asyncio.gather(*answers) == [(5, ["length"])] * 8
        assert bench.loop.time() - began < 10 * (0.01 + 8 * 0.001)
        assert not any(task.done() for task in tasks)
        assert await asyncio.gather(*tasks) == [(900, ["length"])] * 16

    with_bench(test)


def test_flooding_owner_does_not_slow_another_when_both_have_keys():
    keys = (ApiKey("flood", b""), ApiKey("polite", b""))

    async def polite(bench):
        waits = []
        for i in range(20):
            await asyncio.sleep(1)
            stream, began = bench.gateway.open(make_job(f"p{i}", 20, 20, owner="polite")), bench.loop.time()
            async with stream:
                async for _ in stream:
                    waits.append(bench.loop.time() - began)
                    break
        return sorted(waits)[18]

    async def flooded(bench):
        streams, refusals = [], set()
        for i in range(1000):
            try:
                streams.append(bench.gateway.open(make_job(f"f{i}", 20, 20, owner="flood")))
            except ApiError as error:
                refusals.add(error.status)
        assert refusals <= {429, 503}
        tasks = [bench.loop.create_task(read(stream)) for stream in streams]
        p95 = await polite(bench)
        assert bench.gateway.snapshot().classes[1].num_requests > 100  # the flood still waits
        bench.gateway.fail_all()
        await asyncio.gather(*tasks, return_exceptions=True)
        return p95

    config = ServerConfig(api_keys=keys, max_queue_wait_s=600)
    alone = with_bench(polite, config=config, max_num_seqs=8)
    beside = with_bench(flooded, config=config, max_num_seqs=8)
    request_s = 20 * (0.01 + 8 * 0.001)
    assert beside <= 2 * alone + request_s  # nobody is preempted: a slot has to come free


def test_snapshot_tells_what_waits_when_the_engine_is_full():
    async def test(bench):
        _, tasks = await fill(bench, 30, num_prompt_tokens=7)
        await asyncio.sleep(0.25)
        snapshot = bench.gateway.snapshot()
        waiting = {one.priority: one for one in snapshot.classes}["default"]
        assert waiting.num_requests == 30 - snapshot.num_in_engine - sum(task.done() for task in tasks)
        assert waiting.num_prompt_tokens == 7 * waiting.num_requests
        assert waiting.oldest_wait_s == pytest.approx(0.25)
        assert waiting.estimated_wait_s > 0
        bench.metrics.render()
        assert bench.metrics.defined.queued.labels("default").value == waiting.num_requests
        await asyncio.gather(*tasks)

    with_bench(test)


@pytest.mark.parametrize("state", ["restarting", "failed"])
def test_refusal_says_why_the_engine_is_not_there(state):
    async def test(bench):
        bench.engine.last_error = "RuntimeError: no block for 'a secret prompt'"
        bench.engine.set_state(state)
        with pytest.raises(ApiError) as caught:
            bench.gateway.open(make_job("a"))
        assert caught.value.status == 503
        assert "RuntimeError: no block for '...'" in caught.value.message
        assert "secret" not in caught.value.message

    with_bench(test)
