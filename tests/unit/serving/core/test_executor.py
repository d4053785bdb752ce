"""TokenizerPool: whose call is next, what is refused and until when, and what is counted down."""

from __future__ import annotations

import asyncio
import threading
import time

import msgspec
import pytest

from quire.serving.core import executor
from quire.serving.core.executor import BRIEF_CHARACTERS, LARGE_CHARACTERS, TokenizerPool, is_large
from quire.serving.errors import ApiError
from tests.no_threads import no_threads

LARGE = "x" * (LARGE_CHARACTERS + 1)


def test_threads_run_before_the_first_call():
    """A call whose thread could not be started would stay counted."""
    with no_threads("quire-prepare_1"), pytest.raises(RuntimeError, match="can't start new thread"):
        TokenizerPool()
    pool = TokenizerPool()
    with no_threads("quire-prepare"):
        assert asyncio.run(pool.run("owner", LARGE, lambda: 3)) == 3


class Bench:
    """A TokenizerPool whose calls note their names in the order in which they run; "gate" calls wait for the gate."""

    def __init__(self, **options):
        self.preparation = TokenizerPool(**{"num_threads": 1, "random": lambda: 0.0, **options})
        self.gate = threading.Event()
        self.order = []
        self.tasks = []

    async def ask(self, owner, name, texts="", **options):
        def work():
            if name == "gate":
                self.gate.wait(60)
            self.order.append(name)
            return name

        self.tasks.append(asyncio.create_task(self.preparation.run(owner, texts, work, **options)))
        await asyncio.sleep(0)
        return self.tasks[-1]

    async def finish(self):
        self.gate.set()
        return await asyncio.gather(*self.tasks, return_exceptions=True)


def with_bench(test, **options):
    async def run():
        bench = Bench(**options)
        try:
            await test(bench)
        finally:
            await bench.finish()
            bench.preparation.close()

    asyncio.run(run())


def refusal(task):
    error = task.exception()
    assert isinstance(error, ApiError)
    return error


def test_owners_take_turns_when_one_has_asked_for_much():
    async def test(bench):
        await bench.ask("ann", "gate")
        for i in range(6):
            await bench.ask("ann", f"a{i}")
        await bench.ask("bob", "b0")
        await bench.ask("cid", "c0")
        await bench.finish()
        assert bench.order[0] == "gate"
        assert set(bench.order[1:3]) == {"b0", "c0"}
        assert bench.order[3:] == [f"a{i}" for i in range(6)]

    with_bench(test)


def test_small_text_overtakes_when_all_that_runs_and_waits_is_large():
    async def test(bench):
        await bench.ask("ann", "gate", LARGE)
        for i in range(4):
            await bench.ask("ann", f"large{i}", [LARGE])
        assert await (await bench.ask("bob", "b")) == "b"
        assert await (await bench.ask("ann", "a")) == "a"
        assert bench.order == ["b", "a"]
        await bench.finish()
        assert bench.order[2:] == ["gate", "large0", "large1", "large2", "large3"]

    with_bench(test, num_threads=2)


def test_batches_come_last_when_anything_else_waits():
    async def test(bench):
        await bench.ask("ann", "gate")
        await bench.ask("bob", "line", is_batch=True)
        await bench.ask("ann", "chat")
        await bench.finish()
        assert bench.order == ["gate", "chat", "line"]

    with_bench(test)


def test_owner_who_had_more_time_comes_later_when_both_wait():
    async def test(bench):
        def spin():
            end_s = time.thread_time() + 0.02
            while time.thread_time() < end_s:
                pass

        await bench.preparation.run("bob", "", spin)
        await bench.ask("cid", "gate")
        await bench.ask("ann", "a0")
        await bench.ask("bob", "b0")
        await bench.ask("ann", "a1")
        bench.preparation.lines["bob", False].share.received += 1.0
        await bench.finish()
        assert bench.order == ["gate", "a0", "a1", "b0"]
        assert bench.preparation.lines["bob", False].share.received >= 1.02

    with_bench(test)


def test_owner_of_more_weight_has_as_much_more_time_and_room_when_both_wait():
    async def test(bench):
        await bench.ask("cid", "gate")
        lines = bench.preparation.lines
        for i in range(9):
            await bench.ask("ann", f"a{i}")
            await bench.ask("bob", f"b{i}")
        assert (lines["ann", False].share.weight, lines["bob", False].share.weight) == (1.0, 2.0)
        for _ in range(40):
            await bench.ask("ann", "more")
            await bench.ask("bob", "more")
        refused = [task for task in bench.tasks if task.done()]
        assert refused
        held = {name: lines[name, False].num_held for name in ("ann", "bob")}
        assert held["ann"] < held["bob"]

    with_bench(test, max_waiting=80, weight_of=lambda owner: 2.0 if owner == "bob" else 1.0)


def test_time_and_running_calls_count_half_when_the_weight_is_two(monkeypatch):
    monkeypatch.setattr(executor, "_timed", lambda function: executor._Outcome(function(), None, 1.0, 1.0))

    async def test(bench):
        await bench.preparation.run("bob", "", lambda: None)
        await bench.ask("bob", "gate")
        line = bench.preparation.lines["bob", False]
        assert (line.share.received, line.load) == (0.5, 0.5)

    with_bench(test, weight_of=lambda _: 2.0)


def test_owner_is_refused_when_it_has_taken_the_room_and_a_newcomer_is_not():
    async def test(bench):
        await bench.ask("bob", "gate")
        for _ in range(80):
            await bench.ask("ann", "a")
        refused = [task for task in bench.tasks if task.done()]
        assert 0 < len(refused) < 20
        assert {refusal(task).status for task in refused} == {429}
        assert not (await bench.ask("cid", "c")).done()

    with_bench(test, max_waiting=80)


def test_call_is_refused_with_503_when_the_queue_is_full_of_all():
    async def test(bench):
        await bench.ask("ann", "gate")
        await bench.ask("bob", "b")
        assert refusal(await bench.ask("cid", "c")).status == 503

    with_bench(test, max_waiting=2)


@pytest.mark.parametrize(("jitter", "seconds"), [(0.0, 20.0), (1.0, 25.0)])
def test_retry_after_is_of_the_measured_rate_and_spread_when_refused(jitter, seconds):
    async def test(bench):
        await bench.ask("o0", "gate")
        for i in range(1, 8):
            await bench.ask(f"o{i}", "x")
        bench.preparation.mean_s = 10.0  # a quarter of 8 calls has to end
        assert refusal(await bench.ask("new", "y")).retry_after_s == seconds

    with_bench(test, max_waiting=8, random=lambda: jitter)


def test_mean_is_that_of_the_calls_when_some_have_run():
    async def test(bench):
        await bench.preparation.run("ann", "", lambda: time.sleep(0.02))
        assert bench.preparation.mean_s >= 0.02

    with_bench(test)


def test_room_is_given_back_when_the_thread_is_done_or_a_waiter_goes():
    async def test(bench):
        running = await bench.ask("ann", "gate")
        waiting = await bench.ask("bob", "b")
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert not (await bench.ask("cid", "c")).done()
        assert refusal(await bench.ask("dan", "d")).status == 503  # the thread is not done with ann's
        await bench.finish()
        assert bench.order == ["gate", "c"]
        assert await bench.preparation.run("dan", "", lambda: 7) == 7

    with_bench(test, max_waiting=2)


def test_error_is_the_callers_when_the_function_raises():
    async def test(bench):
        with pytest.raises(ZeroDivisionError):
            await bench.preparation.run("ann", "", lambda: 1 // 0)
        assert await bench.preparation.run("ann", "", lambda: 7) == 7

    with_bench(test)


def test_brief_call_runs_at_once_when_nobody_waits():
    async def test(bench):
        thread = await bench.preparation.run("ann", "x" * BRIEF_CHARACTERS, threading.get_ident, may_run_here=True)
        assert thread == threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await bench.preparation.run("ann", "", lambda: 1 // 0, may_run_here=True)

    with_bench(test)


@pytest.mark.parametrize(
    "texts, options",
    [("x" * (BRIEF_CHARACTERS + 1), {"may_run_here": True}), ([1] * BRIEF_CHARACTERS, {"may_run_here": True}), ("", {})],
    ids=["longer", "many numbers", "may wait"],
)
def test_call_goes_to_a_thread_when_it_is_not_brief(texts, options):
    async def test(bench):
        assert await bench.preparation.run("ann", texts, threading.get_ident, **options) != threading.get_ident()

    with_bench(test)


def test_brief_call_waits_its_turn_when_others_run():
    async def test(bench):
        await bench.ask("ann", "gate")
        later = await bench.ask("bob", "b", may_run_here=True)
        assert not later.done()
        await bench.finish()
        assert bench.order == ["gate", "b"]

    with_bench(test)


def test_brief_calls_go_to_threads_when_they_take_long_and_come_back_when_they_do_not():
    def spin():
        end_s = time.thread_time() + 40 * executor.BRIEF_S
        while time.thread_time() < end_s:
            pass

    async def test(bench):
        async def thread():
            return await bench.preparation.run("ann", "", threading.get_ident, may_run_here=True)

        await bench.preparation.run("ann", "", spin, may_run_here=True)
        threads = [await thread() for _ in range(200)]
        assert threads[0] != threading.get_ident()
        assert threads[-1] == threading.get_ident()

    with_bench(test)


class Part(msgspec.Struct):
    text: str


@pytest.mark.parametrize(
    "texts",
    [
        LARGE,
        LARGE.encode(),
        [LARGE],
        {"a": [LARGE]},
        {LARGE: 0},
        [Part(LARGE)],
        (Part("x" * 20_000), "x" * 20_000),
        [1] * 40_000,
    ],
)
def test_texts_are_large_when_they_are_so_together(texts):
    assert is_large(texts)
    assert not is_large([Part("x" * 1000), {"a": None}, 3])
