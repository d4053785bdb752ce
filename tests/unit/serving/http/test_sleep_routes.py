"""The order of what POST /sleep does to the requests and to the engine."""

import asyncio
from contextlib import contextmanager

import pytest

from quire.serving.errors import ApiError
from quire.serving.http.sleep import SleepParts


class Steps:
    """A client and a gateway that note what is done. refusal: of the engine; None: it can sleep."""

    def __init__(self, refusal=None):
        self.refusal, self.done = refusal, []

    async def check_sleep(self, level):
        if self.refusal is not None:
            raise self.refusal

    async def sleep(self, level):
        self.done.append(f"sleep {level}")

    @contextmanager
    def refusing(self, error):
        self.done.append(f"refuse {error.status}")
        yield
        self.done.append("accept")

    def fail_all(self, reason, error):
        self.done.append(f"fail {reason}")

    async def drained(self, timeout_s):
        return True

    async def emptied(self):
        self.done.append("wait")


@pytest.mark.parametrize(("mode", "end"), [("abort", "fail sleep"), ("wait", "wait")])
def test_requests_end_before_the_engine_sleeps(mode, end):
    steps = Steps()
    asyncio.run(SleepParts(steps, steps).sleep(2, mode))
    assert steps.done == ["refuse 503", end, "sleep 2", "accept"]


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_go_on_when_the_engine_cannot_sleep(mode):
    steps = Steps(ApiError(400, "not with role 'decode'", code="unsupported_value"))
    with pytest.raises(ApiError, match="role"):
        asyncio.run(SleepParts(steps, steps).sleep(1, mode))
    assert steps.done == []


def test_mode_abort_ends_requests_for_which_mode_wait_still_waits():
    steps, ended = Steps(), asyncio.Event()
    steps.emptied = ended.wait

    def fail_all(*args):
        Steps.fail_all(steps, *args)
        ended.set()

    steps.fail_all = fail_all
    parts = SleepParts(steps, steps)

    async def go():
        waiting = asyncio.create_task(parts.sleep(2, "wait"))
        await asyncio.sleep(0)
        async with asyncio.timeout(50):
            await parts.sleep(2, "abort")
            await waiting

    asyncio.run(go())
    assert steps.done[:3] == ["refuse 503", "fail sleep", "sleep 2"]
