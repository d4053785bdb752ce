"""Subscription: nothing is lost, added or out of order, however the reader keeps up."""

import asyncio
import random

import pytest

from quire.base.errors import InvariantError
from quire.contracts.outputs import RequestMetrics
from quire.serving.engine_client.messages import ChoiceDelta, RequestDelta, TokenLogprob
from quire.serving.engine_client.subscription import Subscription, coalesce
from quire.serving.errors import ApiError


def subscription(max_bytes=1000, max_age_s=10.0):
    return Subscription("a", 0, max_bytes, max_age_s)


def delta(text="x", finished=False, index=0, **fields):
    return RequestDelta("a", [ChoiceDelta(index, text, [1], finish_reason="stop" if finished else None)], finished, **fields)


def whole(deltas, index):
    """What all deltas together say of one choice."""
    parts = [choice for delta in deltas for choice in delta.choices if choice.index == index]
    return (
        "".join(part.text for part in parts),
        [token_id for part in parts for token_id in part.token_ids],
        [entries for part in parts for entries in part.logprobs or ()],
        [part.finish_reason for part in parts if part.finish_reason is not None],
        [part.stop_reason for part in parts if part.stop_reason is not None],
        parts[-1].cumulative_logprob,
    )


def random_deltas(rng):
    """The deltas of a request with three choices that end at different times."""
    deltas, running = [], {0: 0, 1: 0, 2: 0}
    while running:
        choices = []
        for index in sorted(rng.sample(sorted(running), rng.randint(1, len(running)))):
            running[index] += 1
            token_id = 100 * index + running[index]
            is_last = rng.random() < 0.05
            choices.append(
                ChoiceDelta(
                    index,
                    f"{token_id} ",
                    [token_id],
                    [[TokenLogprob(token_id, -1.0, 1)]],
                    "stop" if is_last else None,
                    "end" if is_last else None,
                    -float(running[index]),
                )
            )
            if is_last:
                del running[index]
        deltas.append(RequestDelta("a", choices, not running, RequestMetrics(float(len(deltas))) if not deltas else None))
    deltas[-1].metrics = RequestMetrics(9.0, finished_time=10.0)
    return deltas


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_out_of_order_at_any_reading_speed(seed):
    rng = random.Random(seed)
    sent = random_deltas(rng)

    async def main():
        target, got = subscription(10**9), []

        async def reader():
            while not got or not got[-1].finished:
                got.append(await target.next())
                for _ in range(rng.randint(0, 60)):
                    await asyncio.sleep(0)

        task = asyncio.create_task(reader())
        for one in sent:
            target.deliver(one, 0.0)
            for _ in range(rng.randint(0, 2)):
                await asyncio.sleep(0)
        await task
        return got

    got = asyncio.run(main())
    assert [whole(got, index) for index in range(3)] == [whole(sent, index) for index in range(3)]
    assert got[-1].metrics == sent[-1].metrics
    assert len(got) < len(sent)


@pytest.mark.parametrize("seed", range(20))
def test_order_is_kept_when_some_deltas_are_taken_on_their_way(seed):
    rng = random.Random(seed)
    sent = random_deltas(rng)

    async def main():
        target, got, num_taken = subscription(10**9), [], 0

        def take(one):
            nonlocal num_taken
            assert not one.finished
            if is_taking := rng.random() < 0.7:
                got.append(one)
                num_taken += 1
            return is_taking

        async def reader():
            while not got or not got[-1].finished:
                got.append(await target.next())
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)

        target.attach_sink(take)
        task = asyncio.create_task(reader())
        for one in sent:
            target.deliver(one, 0.0)
            for _ in range(rng.randint(0, 4)):
                await asyncio.sleep(0)
        await task
        return got, num_taken

    got, num_taken = asyncio.run(main())
    assert num_taken > 0
    assert [whole(got, index) for index in range(3)] == [whole(sent, index) for index in range(3)]


def test_nothing_is_taken_when_nobody_waits():
    async def main():
        target = subscription()
        target.attach_sink(lambda one: pytest.fail("the reader has not come back for it"))
        target.deliver(delta("x"), 0.0)
        target.deliver(delta("y"), 0.0)
        return await target.next()

    assert asyncio.run(main()).choices[0].text == "xy"


def test_coalescing_keeps_what_only_one_delta_has():
    prompt_logprobs = [None, [TokenLogprob(1, -1.0, 1)]]
    merged = coalesce([delta(prompt_logprobs=prompt_logprobs), delta("y"), delta("", True, error="broken")])
    assert merged.prompt_logprobs == prompt_logprobs
    assert (merged.error, merged.finished) == ("broken", True)
    assert merged.choices[0].text == "xy"
    assert merged.choices[0].logprobs is None


def test_slow_reader_is_found_by_bytes_and_by_age():
    target = subscription(max_bytes=1000, max_age_s=10.0)
    assert not target.is_slow(1e9)
    target.deliver(delta("x" * 2000), now=5.0)
    assert not target.is_slow(5.1)  # much at once is no fault of the reader's
    assert target.is_slow(6.0)
    target = subscription()
    target.deliver(delta(), now=5.0)
    target.deliver(delta(), now=14.0)
    assert not target.is_slow(14.9)
    assert target.is_slow(15.1)  # from the oldest on
    target.deliver(delta(finished=True), now=15.0)
    assert not target.is_slow(1e9)  # the engine has done with it


def test_reading_starts_the_bounds_anew():
    async def main():
        target = subscription(max_bytes=1000)
        for now in range(100):
            target.deliver(delta("x" * 900), now)
            assert not target.is_slow(now + 0.9)
            await target.next()

    asyncio.run(main())


def test_error_comes_at_once_unless_the_answer_is_complete():
    async def main():
        waiting, behind, complete = subscription(), subscription(), subscription()
        task = asyncio.create_task(waiting.next())
        await asyncio.sleep(0)
        behind.deliver(delta(), 0.0)
        complete.deliver(delta(finished=True), 0.0)
        for target in (waiting, behind, complete):
            target.fail(ApiError(503, "dead"))
            target.fail(ApiError(503, "dead again"))
        for awaitable in (task, waiting.next(), behind.next()):
            with pytest.raises(ApiError, match="dead$"):
                await awaitable
        assert (await complete.next()).finished
        with pytest.raises(InvariantError):
            await complete.next()

    asyncio.run(main())


def test_cancelled_reader_loses_nothing():
    async def main():
        target = subscription()
        task = asyncio.create_task(target.next())
        await asyncio.sleep(0)
        target.deliver(delta("a"), 0.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        target.deliver(delta("b", True), 0.0)
        assert (await target.next()).choices[0].text == "ab"

    asyncio.run(main())


def test_second_reader_is_refused():
    async def main():
        target = subscription()
        task = asyncio.create_task(target.next())
        await asyncio.sleep(0)
        with pytest.raises(InvariantError):
            await target.next()
        target.deliver(delta(finished=True), 0.0)
        assert (await task).finished

    asyncio.run(main())
