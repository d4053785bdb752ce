"""The lag of a server's event loop out of its /metrics."""

import asyncio

import pytest

from quire.bench.serving.server_lag import LagCounts, read_server_lag, read_server_steps
from tests.unit.bench.serving.fakes import FakeServer, refusal

TEXT = b"""# TYPE quire:event_loop_lag_seconds histogram
quire:event_loop_lag_seconds_bucket{engine="0",le="0.001",model_name="m"} %d.0
quire:event_loop_lag_seconds_bucket{engine="0",le="0.02",model_name="m"} %d.0
quire:event_loop_lag_seconds_bucket{engine="0",le="+Inf",model_name="m"} %d.0
quire:event_loop_lag_seconds_count{engine="0",model_name="m"} 9.0
"""


def read(*scripts):
    async def go():
        return await read_server_lag(FakeServer(list(scripts)).client(lambda: 0.0))

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((50, 99, 100), {"p50_at_most": 1.0, "p99_at_most": 20.0, "max_at_most": None, "count": 100}),
        ((49, 98, 100), {"p50_at_most": 20.0, "p99_at_most": None, "max_at_most": None, "count": 100}),
        ((4, 4, 4), {"p50_at_most": 1.0, "p99_at_most": 1.0, "max_at_most": 1.0, "count": 4}),
        ((0, 0, 0), {"p50_at_most": None, "p99_at_most": None, "max_at_most": None, "count": 0}),
    ],
)
def test_figures_are_the_bounds_that_the_server_knows(counts, expected):
    found = read([refusal(200, TEXT % counts)])
    assert found is not None
    assert found.figures() == expected


def test_only_what_came_after_counts_when_the_server_ran_before():
    before, after = LagCounts.parse(TEXT % (10, 10, 90)), LagCounts.parse(TEXT % (20, 20, 100))
    assert before is not None
    assert after is not None
    assert after.since(before).figures() == {"p50_at_most": 1.0, "p99_at_most": 1.0, "max_at_most": 1.0, "count": 10}


@pytest.mark.parametrize("answer", [refusal(404), refusal(200, b"other:metric 1.0\n"), "lost"], ids=["404", "other", "gone"])
def test_nothing_is_told_when_the_server_does_not_tell(answer):
    assert read([answer]) is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (refusal(200, b'quire:iteration_tokens_total_count{engine="0",model_name="m"} 41.0\n'), 41),
        (refusal(200, TEXT % (1, 1, 1)), None),
        (refusal(404), None),
        ("lost", None),
    ],
)
def test_steps_are_counted_when_the_server_tells_them(answer, expected):
    async def go():
        return await read_server_steps(FakeServer([[answer]]).client(lambda: 0.0))

    assert asyncio.run(go()) == expected
