"""MBU, MFU and users of a run, worked out by hand."""

import json

import pytest

from quire.bench.serving.html_report import render_sweep
from quire.bench.serving.openai_stream import StreamRecorder
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.runner import LoadResult
from quire.bench.serving.sweep import Sweep, run_sweep
from quire.bench.serving.utilization import Peaks, find_utilization
from quire.planner.model_shape import AttentionGroup, usual_weight_bytes
from quire.simulate.run import simulate
from tests.unit.planner.shapes import make_shape
from tests.unit.simulate.test_run import make_options

NO_KV = (AttentionGroup(None, 1, 1, 0, 0),)
SEVEN_B = make_shape(
    dtype="float16",
    num_parameters=7 * 10**9,
    num_head=10**9,
    weight_bytes=usual_weight_bytes(7 * 10**9, "float16"),
    attention=NO_KV,
)
PEAKS = Peaks(SEVEN_B, "float16", "float16", 2e12, 140e12, "a device of 2 TB/s")


def record(index, start_s, num_tokens=101, tpot_s=0.01, num_prompt=10):
    one = RequestRecord(index, start_s, num_prompt, num_tokens, sent_s=start_s)
    one.content_s.extend(start_s + place * tpot_s for place in range(num_tokens))
    one.usage_output_tokens, one.outcome, one.end_s = num_tokens, "ok", one.content_s[-1]
    return one


def test_one_user_of_a_7b_model_at_100_tokens_per_s_uses_70_percent_of_2_tb_per_s():
    used = find_utilization(LoadResult((record(0, 0.0),), 0.0, 1.0, False), PEAKS)
    assert used.num_users == pytest.approx(1.0)
    assert used.mbu == pytest.approx(0.70)
    # 10 prompt tokens and 100 outputs go through 6 billion weights, 101 through the head: two operations each.
    assert used.mfu == pytest.approx(2 * (110 * 6e9 + 101 * 1e9) / 140e12)


def test_users_who_decode_together_share_the_reading_of_weights():
    together = LoadResult(tuple(record(index, 0.0) for index in range(4)), 0.0, 1.0, False)
    in_turn = LoadResult(tuple(record(index, float(index)) for index in range(4)), 0.0, 4.0, False)
    assert (find_utilization(together, PEAKS).num_users, find_utilization(in_turn, PEAKS).num_users) == pytest.approx(
        (4.0, 1.0)
    )
    assert find_utilization(together, PEAKS).mbu == pytest.approx(0.70)
    assert find_utilization(in_turn, PEAKS).mbu == pytest.approx(0.70)
    assert find_utilization(together, PEAKS).mfu == pytest.approx(4 * find_utilization(in_turn, PEAKS).mfu)


def test_nothing_is_claimed_without_peaks_or_outputs():
    result = LoadResult((record(0, 0.0),), 0.0, 1.0, False)
    assert (find_utilization(result, None).mbu, find_utilization(result, None).mfu) == (None, None)
    assert find_utilization(LoadResult((), 0.0, 0.0, False), PEAKS).mbu is None
    assert find_utilization(LoadResult((record(0, 0.0, num_tokens=1),), 0.0, 1.0, False), PEAKS).mbu is None


def test_sweep_has_columns_and_a_plot_of_utilization_by_users():
    def run(arrivals, number):
        return simulate(make_options(arrivals=arrivals, peaks=PEAKS)).report

    result = run_sweep(Sweep.parse("concurrency:1,4"), make_options().arrivals.__class__(), run)
    first, last = result.points()
    assert first.mean_users == pytest.approx(1.0, rel=0.01)
    assert last.mean_users > 2
    assert 0 < first.mfu_percent < last.mfu_percent
    assert first.median_ttft_visible_ms == first.median_ttft_ms
    text = result.describe()
    assert all(
        name in text for name in ("users", "in tok/s", "out tok/s", "req/min", "good/min", "TTFT visible", "MBU %", "MFU %")
    )
    assert "Utilization of bandwidth and arithmetic by users" in render_sweep(result)


@pytest.mark.parametrize(
    ("deltas", "visible"),
    [
        ([{"reasoning_content": "Hm"}, {"tool_calls": [{"index": 0}]}, {"content": "Yes"}, {"content": "."}], 3.0),
        ([{"content": ""}, {"refusal": "No"}], 2.0),
        ([{"reasoning": "Hm"}], None),
    ],
)
def test_first_visible_token_comes_after_reasoning_and_tool_calls(deltas, visible):
    one = RequestRecord(0, 0.0, 1, 1, sent_s=0.0)
    recorder = StreamRecorder(one)
    for place, delta in enumerate(deltas, start=1):
        recorder.on_body(f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n".encode(), float(place))
    assert one.first_visible_s == visible
    assert one.content_s[0] == (2.0 if deltas[0] == {"content": ""} else 1.0)


def test_text_of_completions_is_visible():
    one = RequestRecord(0, 0.0, 1, 1, sent_s=0.0)
    StreamRecorder(one).on_body(b'data: {"choices": [{"index": 0, "text": "Yes"}]}\n\n', 4.0)
    assert one.first_visible_s == 4.0
