"""FleetManager with fake processes: admission, the least recently used, queues, failures, the memory that is never exceeded."""

import asyncio
import random

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.base.errors import ConfigError
from quire.serving.errors import ApiError
from tests.unit.fleet.fake_process import running


def run(work):
    asyncio.run(asyncio.wait_for(work, 60))


def test_concurrent_first_requests_start_one_process():
    async def work():
        async with running({"a": 10}, 10) as fleet:
            fleet.is_ready_at_once = False
            requests = [await fleet.begin("a") for _ in range(5)]
            assert fleet.names() == ["a"]
            assert fleet.manager.num_waiting == 5
            fleet.launched[0].become_ready()
            await fleet.settle()
            assert (fleet.manager.num_waiting, fleet.slot("a").num_held) == (0, 5)
            for task, may_end in requests:
                may_end.set()
                await task
            assert fleet.slot("a").num_held == 0
            assert 'quire_fleet:loads_total{model="a",result="loaded"} 1.0' in fleet.text()

    run(work())


def test_least_recently_used_makes_room():
    async def work():
        async with running({"a": 4, "b": 4, "c": 4}, 8) as fleet:
            for name in ("a", "b", "a", "c"):
                await fleet.use(name)
            assert [fleet.state(name) for name in "abc"] == ["loaded", "unloaded", "loaded"]
            assert fleet.backends.names == ["a", "c"]
            assert 'quire_fleet:unloads_total{model="b",reason="memory"} 1.0' in fleet.text()

    run(work())


def test_no_model_is_unloaded_that_need_not_be():
    async def work():
        async with running({"small": 1, "big": 6, "new": 7}, 8) as fleet:
            await fleet.use("small")
            await fleet.use("big")
            await fleet.use("new")
            assert [fleet.state(name) for name in ("small", "big", "new")] == ["loaded", "unloaded", "loaded"]

    run(work())


def test_nothing_is_unloaded_for_a_model_that_would_still_not_fit():
    async def work():
        async with running({"a": 4, "b": 4, "c": 8}, 8) as fleet:
            task, may_end = await fleet.begin("a")
            await fleet.use("b")
            waiting = await fleet.later("c")
            await fleet.pass_time(1)
            assert (fleet.state("b"), fleet.state("c")) == ("loaded", "unloaded")
            may_end.set()
            await task
            await waiting
            assert (fleet.state("a"), fleet.state("b")) == ("unloaded", "unloaded")

    run(work())


def test_memory_of_a_process_counts_until_it_has_ended():
    async def work():
        async with running({"a": 8, "b": 8}, 8) as fleet:
            await fleet.use("a")
            fleet.launched[0].may_stop.clear()
            waiting = await fleet.later("b")
            await fleet.settle()
            assert (fleet.state("a"), fleet.names()) == ("unloading", ["a"])
            fleet.launched[0].may_stop.set()
            await waiting
            assert fleet.names() == ["a", "b"]

    run(work())


@pytest.mark.parametrize("reason", ["request", "background"])
def test_model_in_use_is_never_unloaded(reason):
    async def work():
        async with running({"a": 8, "b": 8}, 8, swap_after_s=5) as fleet:
            task, may_end = await fleet.begin("a")
            if reason == "background":
                may_end.set()
                await task
                fleet.backends.busy.add("a")
            waiting = await fleet.later("b")
            await fleet.pass_time(100)
            assert (fleet.state("a"), fleet.launched[0].num_stops) == ("loaded", 0)
            may_end.set()
            fleet.backends.busy.clear()
            await fleet.pass_time(0)
            await waiting
            assert fleet.state("a") == "unloaded"

    run(work())


def test_pinned_model_stays_and_is_loaded_at_the_start():
    async def work():
        async with running({"a": 4, "b": 4, "c": 4}, 8, fields={"a": {"pinned": True}}) as fleet:
            assert fleet.state("a") == "loaded"
            await fleet.use("b")
            await fleet.use("c")
            assert [fleet.state(name) for name in "abc"] == ["loaded", "unloaded", "loaded"]

    run(work())


def test_busy_model_makes_room_after_a_while_for_one_that_waits():
    """Requests for `a` overlap for ever, so that it is never idle: after swap_after_s those that are new wait behind `b`."""

    async def work():
        async with running({"a": 8, "b": 8}, 8, swap_after_s=5) as fleet:
            first, end_first = await fleet.begin("a")
            waiting = await fleet.later("b")
            await fleet.pass_time(4)
            second, end_second = await fleet.begin("a")  # is served at once still
            assert fleet.slot("a").num_held == 2
            await fleet.pass_time(2)
            third = asyncio.create_task(fleet.use("a"))
            await fleet.settle()
            assert (fleet.slot("a").num_held, len(fleet.slot("a").waiters)) == (2, 1)
            end_first.set()
            end_second.set()
            await asyncio.gather(first, second, waiting, third)
            assert fleet.names() == ["a", "b", "a"]

    run(work())


def test_requests_go_on_when_the_one_that_wanted_the_memory_gives_up():
    async def work():
        async with running({"a": 8, "b": 8}, 8, swap_after_s=0) as fleet:
            first, end_first = await fleet.begin("a")
            waiting = await fleet.later("b")
            await fleet.pass_time(1)
            second, end_second = await fleet.begin("a")
            assert len(fleet.slot("a").waiters) == 1
            waiting.cancel()
            await fleet.settle()
            assert fleet.slot("a").num_held == 2
            for task, may_end in ((first, end_first), (second, end_second)):
                may_end.set()
                await task
            assert fleet.names() == ["a"]

    run(work())


def test_queue_is_bounded():
    async def work():
        async with running({"a": 8}, 8, max_waiting_requests=2) as fleet:
            fleet.is_ready_at_once = False
            tasks = [(await fleet.begin("a"))[0] for _ in range(2)]
            with pytest.raises(ApiError) as refused:
                await fleet.use("a")
            assert (refused.value.status, refused.value.code) == (503, "model_queue_full")
            assert refused.value.headers()["retry-after"]
            for task in tasks:
                task.cancel()

    run(work())


def test_wait_is_bounded_and_the_load_goes_on():
    async def work():
        async with running({"a": 8}, 8, max_wait_s=0.05) as fleet:
            fleet.is_ready_at_once = False
            with pytest.raises(ApiError) as refused:
                await fleet.use("a")
            assert (refused.value.status, refused.value.code) == (503, "model_load_timeout")
            assert (fleet.manager.num_waiting, fleet.state("a")) == (0, "loading")
            fleet.launched[0].become_ready()
            await fleet.settle()
            await fleet.use("a")
            assert fleet.names() == ["a"]

    run(work())


def test_unexpected_error_of_a_start_is_told_and_the_model_is_loaded_later():
    async def work():
        async with running({"a": 8}, 8) as fleet:
            fleet.launch_error = KeyError("unforeseen")
            with pytest.raises(ApiError, match="unforeseen"):
                await fleet.use("a")
            fleet.launch_error = None
            await fleet.pass_time(2)
            await fleet.use("a")

    run(work())


def test_failed_start_is_told_and_tried_again_after_a_growing_pause():
    async def work():
        async with running({"a": 8}, 8) as fleet:
            fleet.is_ready_at_once = False
            for pause_s in (1, 2, 4):
                task, _ = await fleet.begin("a")
                fleet.launched[-1].fail("no weights")
                with pytest.raises(ApiError, match="no weights") as told:
                    await task
                assert told.value.status == 503
                num_started = len(fleet.launched)
                await fleet.pass_time(pause_s * 0.9)
                with pytest.raises(ApiError, match="no weights") as refused:
                    await fleet.use("a")
                assert refused.value.retry_after_s == pytest.approx(pause_s * 0.1)
                assert len(fleet.launched) == num_started
                await fleet.pass_time(pause_s * 0.2)
            fleet.is_ready_at_once = True
            await fleet.use("a")
            assert (fleet.state("a"), fleet.slot("a").error) == ("loaded", None)

    run(work())


def test_crashed_process_is_started_again_by_the_next_request():
    async def work():
        async with running({"a": 8}, 8) as fleet:
            await fleet.use("a")
            fleet.launched[0].crash()
            await fleet.settle()
            assert (fleet.state("a"), fleet.backends.names, fleet.manager.used_bytes) == ("unloaded", [], 0)
            with pytest.raises(ApiError, match="signal 9") as refused:
                await fleet.use("a")
            assert refused.value.status == 503
            assert fleet.names() == ["a"]
            await fleet.pass_time(1.5)
            await fleet.use("a")
            assert fleet.names() == ["a", "a"]
            assert 'quire_fleet:unloads_total{model="a",reason="crashed"} 1.0' in fleet.text()

    run(work())


def test_crash_of_one_model_leaves_the_others():
    async def work():
        async with running({"a": 4, "b": 4}, 8) as fleet:
            await fleet.use("a")
            task, may_end = await fleet.begin("b")
            fleet.launched[0].crash()
            await fleet.settle()
            assert (fleet.state("b"), task.done()) == ("loaded", False)
            may_end.set()
            await task

    run(work())


def test_process_that_cannot_be_launched_leaves_the_model_unloaded():
    async def work():
        async with running({"a": 8}, 8) as fleet:
            fleet.launch_error = ConfigError("/tmp/x/0.json cannot be written: No space left on device")
            with pytest.raises(ApiError, match="No space left"):
                await fleet.use("a")
            assert (fleet.state("a"), fleet.manager.used_bytes) == ("unloaded", 0)
            fleet.launch_error = None
            await fleet.pass_time(2)
            await fleet.use("a")

    run(work())


def test_model_that_has_failed_very_often_can_still_be_started():
    async def work():
        async with running({"a": 8}, 8) as fleet:
            fleet.slot("a").num_failures = 2000
            fleet.launch_error = OSError("no memory")
            with pytest.raises(ApiError, match="no memory"):
                await fleet.use("a")
            fleet.launch_error = None
            await fleet.pass_time(61)
            await fleet.use("a")

    run(work())


def test_start_that_takes_too_long_is_ended():
    async def work():
        async with running({"a": 8}, 8, fields={"a": {"start_timeout_s": 0.05}}) as fleet:
            fleet.is_ready_at_once = False
            with pytest.raises(ApiError, match=r"not ready within 0\.05 s"):
                await fleet.use("a")
            assert fleet.launched[0].num_stops == 1

    run(work())


def test_model_is_unloaded_after_its_keep_alive():
    async def work():
        async with running({"a": 4, "b": 4}, 8, fields={"a": {"keep_alive_s": 30}}) as fleet:
            await fleet.use("a")
            await fleet.use("b")
            await fleet.pass_time(25)
            assert fleet.state("a") == "loaded"
            task, may_end = await fleet.begin("a")
            await fleet.pass_time(100)
            assert fleet.state("a") == "loaded"  # a request uses it
            may_end.set()
            await task
            await fleet.pass_time(31)
            assert [fleet.state(name) for name in "ab"] == ["unloaded", "loaded"]
            assert 'quire_fleet:unloads_total{model="a",reason="idle"} 1.0' in fleet.text()

    run(work())


def test_preload_is_loaded_at_the_start_and_may_be_unloaded():
    async def work():
        async with running({"a": 8, "b": 8}, 8, fields={"b": {"preload": True}}) as fleet:
            assert (fleet.names(), fleet.manager.has_preloaded) == (["b"], True)
            await fleet.use("a")
            assert fleet.state("b") == "unloaded"

    run(work())


def test_close_refuses_who_waits_and_ends_all_processes():
    async def work():
        async with running({"a": 4, "b": 4}, 8) as fleet:
            await fleet.use("a")
            fleet.is_ready_at_once = False
            task, _ = await fleet.begin("b")
            await fleet.manager.close()
            with pytest.raises(ApiError) as refused:
                await task
            assert refused.value.status == 503
            assert [process.num_stops for process in fleet.launched] == [1, 1]
            with pytest.raises(ApiError, match="shutting down"):
                await fleet.use("b")

    run(work())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(20))
def test_random_requests_all_end_within_the_budget(seed):
    """Requests, crashes, failed starts and clients that go: every request ends, and the budget holds at each start."""

    async def work():
        rng = random.Random(seed)
        sizes = {name: rng.randint(1, 6) for name in "abcd"}
        async with running(sizes, 8, swap_after_s=1, max_waiting_requests=6) as fleet:
            tasks = []
            for _ in range(120):
                action = rng.random()
                if action < 0.6:
                    tasks.append(await fleet.begin(rng.choice("abcd")))
                elif action < 0.7:
                    rng.choice(tasks)[0].cancel() if tasks else None
                elif action < 0.75 and fleet.launched:
                    process = rng.choice(fleet.launched)
                    if not process.ended.done():
                        process.crash()
                elif tasks:
                    rng.choice(tasks)[1].set()
                await fleet.pass_time(rng.random())
            for _, may_end in tasks:
                may_end.set()
            for _ in range(200):
                await fleet.pass_time(1)
            ends = await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
            assert all(end is None or isinstance(end, ApiError | asyncio.CancelledError) for end in ends)
            assert sum(end is None for end in ends) > 10
            assert all(slot.num_held == 0 and not slot.waiters for slot in fleet.manager.slots)

    run(work())
