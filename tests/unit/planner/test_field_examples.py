"""Worked examples from the texts of the field: the planner's figures are theirs."""

import pytest

from quire.bench.serving.client_cost import CpuTimes
from quire.bench.serving.metrics import Goals
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.report import Report
from quire.bench.serving.runner import LoadResult
from quire.bench.serving.setup import Cost, Setup
from quire.planner.model_shape import AttentionGroup, blocks_of, usual_weight_bytes
from tests.unit.planner.shapes import make_shape


def test_7b_at_100_tokens_per_s_in_fp16_uses_70_percent_of_2_tb_per_s():
    shape = make_shape(dtype="float16", num_parameters=7 * 10**9, weight_bytes=usual_weight_bytes(7 * 10**9, "float16"))
    used = shape.read_bytes("float16", 1) * 100
    assert used == 1_400e9
    assert used / 2e12 == pytest.approx(0.70)


def test_gpt3_has_an_embedding_of_614_million_and_4_72_mb_of_kv_per_token():
    layers, heads, dim = 96, 96, 128
    group = AttentionGroup(None, layers, layers * heads, layers * heads * dim * 2, layers * heads * dim)
    shape = make_shape(dtype="float16", num_layers=layers, hidden_size=12_288, num_head=50_000 * 12_288, attention=(group,))
    assert shape.num_head == 614_400_000
    assert shape.kv_bytes_per_token("float16") == 4_718_592
    assert shape.kv_bytes_of(2048, "float16") == 2048 * 4_718_592


def test_700_tokens_in_blocks_of_256_leave_68_slots_unused():
    assert blocks_of([700], 256) == (3, 68)


def record(index, ttft_s, tpot_s):
    one = RequestRecord(index, scheduled_s=0.0, num_prompt_tokens=10, num_wanted_tokens=11, sent_s=0.0)
    for place in range(11):
        one.content_s.append(ttft_s + place * tpot_s)
    one.usage_output_tokens, one.has_done, one.outcome = 11, True, "ok"
    one.first_choice_s, one.last_choice_s = one.content_s[0], one.content_s[-1]
    one.end_s = one.content_s[-1]
    return one


def test_30_of_100_requests_a_minute_within_200_ms_and_100_ms_are_a_goodput_of_30_a_minute():
    inside = [record(index, 0.199, 0.099) for index in range(30)]
    late_first = [record(30 + index, 0.210, 0.050) for index in range(40)]
    slow_rest = [record(70 + index, 0.100, 0.110) for index in range(30)]
    setup = Setup(*[""] * 6, "all", 100, 100 / 60, 1.0, None, True, 0, *[""] * 7)
    result = LoadResult((*inside, *late_first, *slow_rest), 0.0, 60.0, False)
    report = Report(setup, result, Cost(CpuTimes(0.0), ()), Goals.parse(["ttft:200", "tpot:100"]))
    figures = report.to_dict()
    assert figures["request_throughput"] * 60 == pytest.approx(100)
    assert figures["request_goodput"] * 60 == pytest.approx(30)
