"""The arithmetic of figures, against numpy and plain loops over random records."""

import math
from array import array

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.bench.serving.metrics import (
    DEFINITIONS,
    Goals,
    distribution,
    metric_of,
    metric_values,
    peak_concurrency,
    peak_throughput,
    timeline,
    title_of,
)
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.runner import LoadResult


def random_record(draw, index):
    sent = float(draw.uniform(0, 20))
    gaps = draw.uniform(0.001, 0.3, draw.integers(1, 30))
    times = sent + np.cumsum(gaps)
    record = RequestRecord(index, sent - float(draw.uniform(0, 1)), int(draw.integers(1, 900)), len(times), sent_s=sent)
    record.first_choice_s = sent + float(gaps[0]) / 2
    record.content_s = array("d", times.tolist())
    record.last_choice_s = float(times[-1]) + 0.01
    record.end_s = float(times[-1]) + 0.02
    record.usage_output_tokens = len(times) + int(draw.integers(0, 3)) if index % 3 else None
    record.outcome = "ok" if index % 7 else "failed"
    return record


@pytest.fixture(scope="module")
def result():
    draw = np.random.default_rng(11)
    records = tuple(random_record(draw, index) for index in range(200))
    return LoadResult(records, 0.0, max(record.end_s for record in records), False)


def test_distribution_is_that_of_numpy():
    values = np.random.default_rng(5).lognormal(size=1001)
    found = distribution(values.tolist(), [0, 12.5, 50, 90, 99, 99.9, 100])
    assert (found.mean, found.std) == (pytest.approx(values.mean()), pytest.approx(values.std()))
    assert (found.count, found.min, found.max) == (1001, values.min(), values.max())
    assert found.percentiles == {q: pytest.approx(np.percentile(values, q)) for q in (0, 12.5, 50, 90, 99, 99.9, 100)}
    assert found.median == pytest.approx(np.median(values))


def test_percentile_lies_between_ranks_by_hand():
    ordered = sorted([4.0, 1.0, 9.0, 2.0])
    found = distribution([4.0, 1.0, 9.0, 2.0], [25, 90]).percentiles
    for percent, value in found.items():
        place = percent / 100 * 3
        low = math.floor(place)
        assert value == pytest.approx(ordered[low] + (place - low) * (ordered[min(low + 1, 3)] - ordered[low]))


def test_there_is_no_distribution_without_values():
    assert distribution([], [50]) is None


def test_metrics_are_their_definitions(result):
    ok = [record for record in result.records if record.outcome == "ok"]
    assert 100 < len(ok) < 200
    for record in ok:
        first, last, number = record.content_s[0], record.content_s[-1], record.num_output_tokens
        expected = {
            "ttft": first - record.sent_s,
            "ttft_first_event": record.first_choice_s - record.sent_s,
            "ttft_visible": None if record.first_visible_s is None else record.first_visible_s - record.sent_s,
            "tpot": (last - first) / (number - 1) if number > 1 else None,
            "tpot_events": (record.last_choice_s - record.first_choice_s) / (number - 1) if number > 1 else None,
            "tpot_with_ttft": (last - record.sent_s) / number,
            "e2el": record.last_choice_s - record.sent_s,
            "e2el_body": record.end_s - record.sent_s,
            "client_queue_time": record.sent_s - record.scheduled_s,
            "e2el_including_client_queue": record.last_choice_s - record.scheduled_s,
        }
        assert {name: metric_of(record, name) for name in expected} == pytest.approx(expected)
    assert set(expected) | {"itl"} == set(DEFINITIONS)
    gaps = [after - before for record in ok for before, after in zip(record.content_s, record.content_s[1:], strict=False)]
    assert metric_values(result.records, "itl") == pytest.approx(gaps)
    assert len(metric_values(result.records, "ttft")) == len(ok)
    assert all(title_of(name) for name in DEFINITIONS)


def test_goodput_counts_what_keeps_every_limit(result):
    goals = Goals.parse(["ttft:150", "tpot:160", "e2el:3000"])
    expected = 0
    for record in result.records:
        if record.outcome != "ok":
            continue
        number = record.num_output_tokens
        tpot = (record.content_s[-1] - record.content_s[0]) / (number - 1) if number > 1 else 0.0
        is_fast = record.content_s[0] - record.sent_s <= 0.15 and tpot <= 0.16
        expected += is_fast and record.last_choice_s - record.sent_s <= 3.0
    assert 5 < expected < 150
    assert sum(goals.is_met_by(record) for record in result.records) == expected


@pytest.mark.parametrize("item", ["ttft", "ttft:", "ttft:x", "itl:3", "ttft:-1", "ttft:nan", ":3"])
def test_goal_is_refused_when_it_is_none(item):
    with pytest.raises(ConfigError, match="--goodput"):
        Goals.parse([item])


def test_goal_is_refused_when_it_is_named_twice():
    with pytest.raises(ConfigError, match="twice"):
        Goals.parse(["ttft:1", "ttft:2"])


def test_timeline_keeps_all_tokens_and_finds_the_most_requests(result):
    course = timeline(result, 0.5)
    total = sum(record.num_output_tokens for record in result.records)
    assert sum(course.tokens_per_s) * 0.5 == pytest.approx(total)
    moments = sorted({time for record in result.records for time in (record.sent_s, record.end_s)})
    under_way = [sum(record.sent_s <= at < record.end_s for record in result.records) for at in moments]
    assert peak_concurrency(result) == max(under_way) == max(course.concurrency)
    for index, most in enumerate(course.concurrency):
        low, high = index * 0.5, (index + 1) * 0.5
        inside = [count for at, count in zip(moments, under_way, strict=True) if low <= at < high]
        at_start = sum(record.sent_s < low < record.end_s for record in result.records)
        assert most == max([at_start, *inside])


def test_peak_throughput_is_that_of_the_fullest_second(result):
    events = [item for record in result.records for item in zip(record.content_s, record.tokens_by_event(), strict=True)]
    expected = max(sum(tokens for time, tokens in events if end - 1.0 < time <= end) for end, _ in events)
    assert peak_throughput(result) == pytest.approx(expected)
    assert peak_throughput(result) >= sum(tokens for _, tokens in events) / result.duration_s
    short = LoadResult(result.records[:1], 0.0, 0.5, False)
    assert peak_throughput(short) >= 2 * max(tokens for _, tokens in events[:1])
    assert peak_throughput(LoadResult((), 0.0, 1.0, False)) == 0.0


def test_token_counts_say_where_they_come_from():
    record = RequestRecord(0, 0.0, 10, 4)
    record.content_s = array("d", [1.0, 2.0])
    assert (record.num_output_tokens, record.token_source) == (2, "chunks")
    record.num_text_tokens = 5
    assert (record.num_output_tokens, record.token_source, record.tokens_by_event()) == (5, "tokenizer", [2.5, 2.5])
    record.usage_output_tokens = 4
    assert (record.num_output_tokens, record.token_source) == (4, "usage")
    record.content_tokens = array("q", [1, 4])
    assert record.tokens_by_event() == [1.0, 3.0]
    record.usage_prompt_tokens = 12
    assert record.num_input_tokens == 12
