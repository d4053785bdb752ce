"""Metrics: their definitions on requests with known times, the exposition, and what bounds its size."""

import asyncio
import bisect
import dataclasses
import math
import random
import time
from collections import Counter as Counting

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.base.errors import ConfigError, InvariantError
from quire.contracts.lora import LoRARequest
from quire.contracts.outputs import RequestMetrics
from quire.contracts.pooling_params import PoolingParams
from quire.serving.config import ServerConfig
from quire.serving.engine_client.messages import AttentionKind, ChoiceDelta, RequestDelta, StepOutputs, StepPart, StepReport
from quire.serving.errors import ApiError, engine_unavailable, overloaded, rate_limited, shutting_down
from quire.serving.http.lifecycle import watch_loop
from quire.serving.metrics.definitions import LENGTH_BUCKETS
from quire.serving.metrics.engine_load import EngineLoad, step_work
from quire.serving.metrics.engine_metrics import EngineOccupancy, EngineSource
from quire.serving.metrics.instruments import MAX_LABEL_VALUES, Counter, Histogram
from quire.serving.metrics.server_metrics import ServerMetrics
from tests.unit.serving.request_queue.virtual_engine import VirtualLoop, make_info, make_job


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make_metrics(**config):
    clock = Clock()
    return ServerMetrics(ServerConfig(**config), "demo", clock=clock), clock


def samples(metrics, compat=None):
    """{(sample name, labels without those of all)} -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render(compat)[0].decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[(sample.name, *sorted(labels.items()))] = sample.value
    return found


def report(
    step_id=0, prefill=0, decode=0, totals=(0, 0, 0), seconds=0.1, started_s=99.0, free=75, attended=((0, 0),), parts=()
):
    return StepReport(step_id, started_s, seconds, prefill, decode, list(attended), 3, 2, free, 5, *totals, list(parts))


def run_request(metrics, clock, times=(101.0, 101.5, 102.5), **job):
    """One request of 3 tokens: arrives at 99, opened at 100, dispatched at 100.5, first step at 100.6, tokens at `times`."""
    clock.now = 100.0
    record = metrics.opened(make_job("r", 10, 16, arrival_s=99.0, **job))
    clock.now = 100.5
    metrics.dispatched(record, clock.now)
    engine = RequestMetrics(99.0, 100.6, times[0] - 0.01, None, num_cached_tokens=4, num_preemptions=1)
    for i, clock.now in enumerate(times):
        is_last = i == len(times) - 1
        if is_last:
            engine.finished_time = clock.now - 0.01
        choice = ChoiceDelta(0, "x", [1], finish_reason="stop" if is_last else None)
        metrics.step(StepOutputs([RequestDelta("r", [choice], is_last, engine if i == 0 or is_last else None)]))
    return record


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_to_first_token_seconds", 2.0),
        ("e2e_request_latency_seconds", 3.5),
        ("request_queue_time_seconds", 1.6),
        ("queue_wait_seconds", 0.5),
        ("request_prefill_time_seconds", 0.39),
        ("request_decode_time_seconds", 1.5),
        ("request_inference_time_seconds", 1.89),
        ("request_time_per_output_token_seconds", 0.75),
        ("request_prompt_tokens", 10),
        ("request_generation_tokens", 3),
        ("request_max_num_generation_tokens", 3),
        ("request_params_max_tokens", 16),
        ("request_params_n", 1),
        ("request_num_preemptions", 1),
        ("request_prefill_kv_computed_tokens", 6),
    ],
)
def test_one_sample_is_as_defined_when_a_request_has_known_times(name, value):
    metrics, clock = make_metrics()
    run_request(metrics, clock)
    labels = (("class", "default"),) if name == "queue_wait_seconds" else ()
    found = samples(metrics)
    assert found[(f"quire:{name}_sum", *labels)] == pytest.approx(value)
    assert found[(f"quire:{name}_count", *labels)] == 1


def test_times_count_from_the_head_of_the_request_when_its_body_and_prompt_took_time():
    metrics, clock = make_metrics(slo_ttft_s=2.5)
    record = run_request(metrics, clock, received_s=98.0)
    found = samples(metrics)
    names = ("time_to_first_token", "e2e_request_latency", "request_queue_time")
    assert [found[(f"quire:{name}_seconds_sum",)] for name in names] == pytest.approx([3.0, 4.5, 2.6])
    assert (record.ttft_s, record.e2e_s) == (3.0, 4.5)
    assert (found[("quire:slo_requests_total",)], found[("quire:slo_requests_met_total",)]) == (1, 0)


def test_counters_and_gaps_are_those_of_the_tokens_when_a_request_ends():
    metrics, clock = make_metrics()
    run_request(metrics, clock)
    found = samples(metrics)
    assert found[("quire:inter_token_latency_seconds_count",)] == 2
    assert found[("quire:inter_token_latency_seconds_sum",)] == pytest.approx(1.5)
    assert found[("quire:prompt_tokens_total",)] == 10
    assert found[("quire:prompt_tokens_cached_total",)] == 4
    assert found[("quire:prompt_tokens_by_source_total", ("source", "local_compute"))] == 6
    assert found[("quire:generation_tokens_total",)] == 3
    assert found[("quire:request_success_total", ("finished_reason", "stop"))] == 1
    assert not metrics.records


def test_tokens_of_every_generated_choice_count_when_best_of_returns_one():
    metrics, clock = make_metrics()
    clock.now = 100.0
    record = metrics.opened(make_job("r", 10, 20, best_of=5))
    metrics.dispatched(record, clock.now)
    choice = ChoiceDelta(0, "x" * 20, [1] * 20, finish_reason="length")
    engine = RequestMetrics(99.0, 100.5, 101.0, 103.0, num_unreturned_tokens=80)
    metrics.step(StepOutputs([RequestDelta("r", [choice], True, engine)]))
    found = samples(metrics)
    assert found[("quire:generation_tokens_total",)] == 100
    assert found[("quire:request_generation_tokens_sum",)] == 100
    assert found[("quire:request_max_num_generation_tokens_sum",)] == 20
    assert record.num_output_tokens == 100


@pytest.mark.parametrize(
    ("thresholds", "is_met"),
    [
        ({}, True),
        ({"slo_ttft_s": 2.1, "slo_tpot_s": 0.8, "slo_e2e_s": 3.6}, True),
        ({"slo_ttft_s": 1.9}, False),
        ({"slo_tpot_s": 0.7}, False),
        ({"slo_e2e_s": 3.4}, False),
    ],
)
def test_goodput_counts_requests_within_every_threshold_when_some_are_set(thresholds, is_met):
    metrics, clock = make_metrics(**thresholds)
    run_request(metrics, clock)
    found = samples(metrics)
    assert (found[("quire:slo_requests_total",)], found[("quire:slo_requests_met_total",)]) == (1, is_met)


def test_latencies_and_goodput_are_of_online_requests_when_batches_run():
    metrics, clock = make_metrics(slo_ttft_s=1.0)
    run_request(metrics, clock, priority="batch")
    found = samples(metrics)
    times = ("time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency")
    times += tuple(f"request_{name}_time" for name in ("queue", "prefill", "decode", "inference"))
    assert [found[(f"quire:{name}_seconds_count",)] for name in times] == [0] * len(times)
    assert found[("quire:slo_requests_total",)] == 0
    assert found[("quire:queue_wait_seconds_count", ("class", "batch"))] == 1
    assert (found[("quire:generation_tokens_total",)], found[("quire:prompt_tokens_total",)]) == (3, 10)
    assert found[("quire:request_generation_tokens_count",)] == 1
    assert found[("quire:request_success_total", ("finished_reason", "stop"))] == 1


def test_given_up_requests_do_not_count_for_goodput_when_their_clients_go():
    metrics, _ = make_metrics()
    for reason in ("disconnect", "deadline"):
        record = metrics.opened(make_job(reason))
        metrics.aborted(record, reason)
        metrics.aborted(record, "cancelled")
        metrics.ended(record, "abort")
        metrics.ended(record, "error")
    found = samples(metrics)
    assert (found[("quire:slo_requests_total",)], found[("quire:slo_requests_met_total",)]) == (1, 0)
    assert found[("quire:stream_aborts_total", ("reason", "disconnect"))] == 1
    assert found[("quire:client_disconnects_total", ("phase", "queue"))] == 1
    assert ("quire:stream_aborts_total", ("reason", "cancelled")) not in found
    assert found[("quire:request_success_total", ("finished_reason", "abort"))] == 2


def test_every_choice_counts_once_when_a_request_has_several():
    metrics, _ = make_metrics()
    metrics.opened(make_job("r", n=3))
    choices = [ChoiceDelta(0, "a", [1, 2], finish_reason="stop"), ChoiceDelta(1, "b", [1])]
    metrics.step(StepOutputs([RequestDelta("r", choices, False)]))
    metrics.step(StepOutputs([RequestDelta("r", [ChoiceDelta(1, "", [], finish_reason="length")], True, error="broken")]))
    found = samples(metrics)
    reasons = {key[1][1]: value for key, value in found.items() if key[0] == "quire:request_success_total"}
    assert reasons == {"stop": 1, "length": 1, "error": 1}
    assert found[("quire:request_max_num_generation_tokens_sum",)] == 2


def test_embedding_counts_its_prompt_and_no_output_when_it_ends():
    metrics, clock = make_metrics(slo_e2e_s=9.0)
    metrics.opened(make_job("r", 10, arrival_s=99.0, pooling=PoolingParams()))
    engine = RequestMetrics(99.0, 100.5, None, 101.0)
    clock.now = 102.0
    metrics.step(StepOutputs([RequestDelta("r", [], True, engine, embedding=[0.5])]))
    found = samples(metrics)
    assert found[("quire:prompt_tokens_total",)] == 10
    assert found[("quire:e2e_request_latency_seconds_sum",)] == 3
    assert found[("quire:time_to_first_token_seconds_count",)] == 0
    assert found[("quire:request_generation_tokens_count",)] == 0
    assert found[("quire:slo_requests_met_total",)] == 1
    assert found[("quire:request_success_total", ("finished_reason", "stop"))] == 1


def test_rejections_are_counted_by_reason_when_refused():
    metrics, _ = make_metrics()
    by_status = [(400, "x" * 99, "invalid"), (401, None, "unauthorized"), (404, "model_not_found", "not_found"),
                 (413, "request_too_large", "too_large"), (431, "y", "too_large"), (500, "internal_error", "failed"),
                 (503, "too_many_body_bytes", "body_bytes"), (503, "too_many_connections", "connections"),
                 (503, "storage_full", "storage"), (503, "engine_error", "failed"), (503, "z", "unavailable"),
                 (504, "deadline_exceeded", "deadline"), (529, "overloaded", "overloaded"), (429, "z", "rate_limited"),
                 (408, "slow_reader", "slow_reader"), (408, "request_timeout", "deadline")]  # fmt: skip
    expected = Counting(reason for _, _, reason in by_status)
    for error in (overloaded("", 1), rate_limited("", 1), engine_unavailable(""), shutting_down()):
        metrics.rejected(error)
    expected.update(["overloaded", "rate_limited", "engine_unavailable", "draining"])
    for status, code, _ in by_status:
        metrics.rejected(ApiError(status, "", code=code))
    found = {key[1][1]: value for key, value in samples(metrics).items() if key[0] == "quire:admission_rejections_total"}
    assert found == expected
    assert all(reason in metrics.defined.rejections.text for reason in found)


@pytest.mark.parametrize("is_refused", [True, False])
def test_error_is_a_rejection_and_not_the_servers_when_the_request_is_at_fault(is_refused):
    metrics, clock = make_metrics(slo_ttft_s=1.0)
    ended = []
    metrics.on_end.append(ended.append)
    record = metrics.opened(make_job("r", 10, 16))
    metrics.dispatched(record, clock.now)
    clock.now += 0.1
    metrics.step(StepOutputs([RequestDelta("r", [], True, error="no regex", error_param="regex", is_refused=is_refused)]))
    found = samples(metrics)
    assert ("quire:admission_rejections_total", ("reason", "invalid")) not in found  # its answer is what counts
    assert found.get(("quire:request_success_total", ("finished_reason", "error")), 0) == (not is_refused)
    assert found[("quire:slo_requests_total",)] == (not is_refused)
    assert found[("quire:slo_requests_met_total",)] == 0
    assert ended == [record]
    assert (record.error, record.finish_reasons) == ("no regex", ["error"])
    assert not metrics.records


def test_engine_gauges_show_the_last_step_when_it_reports():
    metrics, _ = make_metrics()
    metrics.engine_state("ready")
    metrics.engine_ready(make_info(num_kv_blocks=100))
    metrics.step(StepOutputs([], report(prefill=30, decode=4, totals=(1, 50, 20))))
    metrics.step(StepOutputs([], report(1, prefill=0, decode=5, totals=(3, 60, 20))))
    found = samples(metrics)
    assert found[("quire:num_requests_running",)] == 3
    assert found[("quire:kv_cache_usage_perc",)] == pytest.approx(0.25)
    assert (found[("quire:batch_prefill_tokens",)], found[("quire:batch_decode_tokens",)]) == (0, 5)
    assert found[("quire:num_preemptions_total",)] == 3
    assert (found[("quire:prefix_cache_queries_total",)], found[("quire:prefix_cache_hits_total",)]) == (60, 20)
    assert found[("quire:iteration_tokens_total_sum",)] == 39
    assert found[("quire:engine_state", ("state", "ready"))] == 1


def test_totals_go_on_growing_when_the_engine_starts_again():
    metrics, _ = make_metrics()
    metrics.step(StepOutputs([], report(totals=(5, 100, 50))))
    for state in ("restarting", "restarting", "ready"):
        metrics.engine_state(state)
    metrics.step(StepOutputs([], report(totals=(2, 10, 5))))
    found = samples(metrics)
    assert found[("quire:num_preemptions_total",)] == 7
    assert {key[1][1]: value for key, value in found.items() if key[0] == "quire:engine_state"} == {"restarting": 0, "ready": 1}


def test_restarts_are_those_of_the_engines_client_when_it_never_gets_ready():
    num_restarts = 0
    metrics = ServerMetrics(ServerConfig(), "demo", engines=[EngineSource(num_restarts=lambda: num_restarts)])
    metrics.engine_state("restarting")  # it died; whether it is started again is not decided
    assert samples(metrics)[("quire:engine_restarts_total",)] == 0
    num_restarts = 4
    assert samples(metrics)[("quire:engine_restarts_total",)] == 4


@pytest.mark.parametrize(("age_s", "shown"), [(math.inf, None), (None, None), (0.5, 0.5)])
def test_heartbeat_has_an_age_only_when_there_is_an_engine(age_s, shown):
    metrics = ServerMetrics(ServerConfig(), "demo", engines=[EngineSource(heartbeat_age_s=lambda: age_s)])
    assert samples(metrics).get(("quire:engine_heartbeat_age_seconds",)) == shown


def test_drafts_are_counted_by_position_when_steps_report_them():
    metrics, _ = make_metrics()
    drafted = [(4, 16, [3, 2]), (6, 24, [5, 2, 1])]
    for total_drafts, total_tokens, accepted in drafted:
        metrics.step(StepOutputs([], msgspec.structs.replace(report(), total_drafts=total_drafts,
                                                             total_draft_tokens=total_tokens,
                                                             total_accepted_per_pos=accepted)))  # fmt: skip
    found = samples(metrics)
    name = "quire:spec_decode_num"
    assert [found[(f"{name}_{one}_total",)] for one in ("drafts", "draft_tokens", "accepted_tokens")] == [6, 24, 8]
    by_position = [found[(f"{name}_accepted_tokens_per_pos_total", ("position", str(position)))] for position in range(3)]
    assert by_position == [5, 2, 1]
    for state in ("restarting", "ready"):
        metrics.engine_state(state)
    metrics.step(
        StepOutputs([], msgspec.structs.replace(report(), total_drafts=1, total_draft_tokens=4, total_accepted_per_pos=[1]))
    )
    assert samples(metrics)[(f"{name}_drafts_total",)] == 7
    assert samples(metrics)[(f"{name}_accepted_tokens_per_pos_total", ("position", "0"))] == 6


def test_the_times_of_pipeline_stages_are_counted_when_steps_report_them():
    metrics, _ = make_metrics()
    for busy_s, active_s in ([1.0, 2.0], 3.0), ([2.5, 2.0], 4.0):
        metrics.step(StepOutputs([], msgspec.structs.replace(report(), total_stage_busy_s=busy_s, total_active_s=active_s)))
    for state in ("restarting", "ready"):
        metrics.engine_state(state)
    metrics.step(StepOutputs([], msgspec.structs.replace(report(), total_stage_busy_s=[0.5, 0.25], total_active_s=1.0)))
    found = samples(metrics)
    busy = [found[("quire:pipeline_stage_busy_seconds_total", ("stage", stage))] for stage in "01"]
    assert (busy, found[("quire:pipeline_active_seconds_total",)]) == ([3.0, 2.25], 5.0)


# Work and load.


def test_step_work_is_the_sum_by_hand_when_layers_have_windows():
    kinds = [AttentionKind(None, 40, 32), AttentionKind(16, 24, 16)]
    info = make_info(num_active_parameters=1000, weight_bytes=2000, kv_bytes_per_token=64, attention=kinds)
    # Ten tokens of a new prompt, and one behind 29.
    work = step_work(info, report(prefill=10, decode=1, attended=[(10 + 30, 55 + 30), (10 + 16, 55 + 16)]))
    assert work.flops == 2 * 1000 * 11 + 4 * 32 * 85 + 4 * 16 * 71
    assert work.read_bytes == 2000 + 40 * 40 + 24 * 26
    assert work.written_bytes == 64 * 11
    assert step_work(info, report()).read_bytes == 0


def test_cache_shows_its_own_dtype_when_it_is_not_the_models():
    metrics, _ = make_metrics()
    metrics.engine_ready(make_info(dtype="bfloat16", kv_cache_dtype="int8"))
    shapes = [dict(key[1:]) for key in samples(metrics) if key[0] == "quire:cache_config_info"]
    assert [shape["cache_dtype"] for shape in shapes] == ["int8"]


def test_shares_are_of_step_time_and_end_when_the_engine_idles():
    clock = Clock()
    load = EngineLoad(clock, peak_flops_per_s=1e6)
    info = make_info(num_active_parameters=1000, attention=[AttentionKind(None, 0, 0)])
    for i in range(50):
        one = report(i, decode=5, started_s=50 + i, seconds=0.1)
        load.observe(step_work(info, one), one)
    clock.now = 101.0
    assert load.flops_per_s() == pytest.approx(2 * 1000 * 5 / 0.1)
    assert load.mfu() == pytest.approx(0.1)
    assert load.mbu() is None
    clock.now = 200.0
    assert load.flops_per_s() == 0


def test_shares_are_exported_only_when_peaks_are_known():
    metrics, _ = make_metrics()
    assert ("quire:mfu",) not in samples(metrics)
    assert ("quire:achieved_flops_per_second",) in samples(metrics)
    metrics.engines[0].load.peak_flops_per_s = 1e9
    assert ("quire:mfu",) in samples(metrics)


# The exposition.


def test_every_metric_has_help_and_the_labels_of_all_when_rendered():
    metrics, clock = make_metrics(metric_labels={"zone": "a"})
    run_request(metrics, clock)
    text = metrics.render()[0].decode()
    for instrument in metrics.defined.all:
        assert len(instrument.text) > 10
        assert f"# HELP {instrument.name}" in text
        assert instrument.label_names[:3] == ("model_name", "engine", "zone")
    for line in text.splitlines():
        if not line.startswith("#"):
            assert line.startswith("quire:")
            assert 'model_name="demo"' in line
    assert len({instrument.name for instrument in metrics.defined.all}) == len(metrics.defined.all)


def test_prefix_alone_changes_when_rendered_for_other_dashboards():
    metrics, clock = make_metrics(metric_labels={"note": "quire:x"})
    run_request(metrics, clock)
    own, other = metrics.render()[0].decode(), metrics.render("vllm")[0].decode()
    assert other.replace("vllm:", "quire:") == own
    assert 'note="quire:x"' in other
    with pytest.raises(ApiError, match="compat"):
        metrics.render("x")


def test_metrics_names_choose_the_prefix_and_the_labels_of_the_cache():
    texts = {}
    for names in ("quire", "vllm", "both"):
        metrics, _ = make_metrics(metrics_names=names)
        metrics.engine_ready(make_info(num_kv_blocks=100))
        metrics.step(StepOutputs([], report(free=25)))
        texts[names] = metrics.render()[0].decode()
    assert "vllm:" not in texts["quire"]
    assert "quire:" not in texts["vllm"]
    assert texts["both"] == texts["quire"] + texts["vllm"]
    assert len(list(text_string_to_metric_families(texts["both"]))) == 2 * len(
        list(text_string_to_metric_families(texts["quire"]))
    )
    values = samples(metrics, "vllm")
    assert values[("vllm:num_requests_running",)] == 3
    assert values[("vllm:kv_cache_usage_perc",)] == 0.75
    assert ("vllm:num_requests_waiting",) in values
    (shape,) = [dict(key[1:]) for key in values if key[0] == "vllm:cache_config_info"]
    assert (shape["block_size"], shape["num_gpu_blocks"]) == ("16", "100")
    with pytest.raises(ConfigError, match="metrics_names must be 'quire', 'vllm' or 'both', got 'x'"):
        make_metrics(metrics_names="x")


def test_adapters_of_requests_are_labels_of_one_sample_of_now():
    metrics, clock = make_metrics(metrics_names="vllm")

    def adapters():
        found = [(dict(key[1:]), value) for key, value in samples(metrics, "vllm").items() if "lora_requests" in key[0]]
        assert all(time.time() - 5 < value <= time.time() for _, value in found)
        return [(one["max_lora"], one["running_lora_adapters"], one["waiting_lora_adapters"]) for one, _ in found]

    metrics.engine_ready(make_info())
    assert adapters() == []
    metrics.engine_ready(make_info(enable_lora=True, max_loras=4))
    assert adapters() == [("4", "", "")]
    records = {}
    for name, adapter in (("a", "cats"), ("b", "dogs"), ("c", "cats"), ("d", None)):
        job = make_job(name)
        lora = None if adapter is None else LoRARequest(adapter, 1, "/nowhere")
        records[name] = metrics.opened(dataclasses.replace(job, request=dataclasses.replace(job.request, lora=lora)))
    assert adapters() == [("4", "", "cats,dogs")]
    for record in records.values():
        metrics.dispatched(record, clock.now)
    assert adapters() == [("4", "", "cats,dogs")]  # the engine has not begun them
    metrics.step(StepOutputs([], report(parts=[StepPart(name, 0, 10, True) for name in ("b", "a", "d")])))
    assert adapters() == [("4", "cats,dogs", "cats")]
    for record in records.values():
        metrics.ended(record, "stop")
    assert adapters() == [("4", "", "")]


def test_occupancy_is_that_of_the_gauges():
    metrics, _ = make_metrics()
    assert metrics.occupancy() == ([EngineOccupancy()], 0)
    metrics.engine_ready(make_info(num_kv_blocks=100))
    metrics.step(StepOutputs([], report(free=25)))
    (found,), _ = metrics.occupancy()
    assert (found.num_running, found.num_waiting, found.num_free_blocks, found.num_blocks) == (3, 2, 25, 100)


def test_registries_are_apart_when_there_are_two_servers():
    first, clock = make_metrics()
    second, _ = make_metrics()
    run_request(first, clock)
    assert samples(second)[("quire:generation_tokens_total",)] == 0


def test_exposition_stays_small_when_clients_invent_names():
    metrics, _ = make_metrics()
    for i in range(3000):
        metrics.ignored_param(f"invented{i}")
        metrics.http_request(f"/route/{i}", 200)
        metrics.tool_parser(f"format{i}", "parsed")
    metrics.ignored_param("user")
    found = samples(metrics)
    assert found[("quire:ignored_params_total", ("param", "other"))] == 3000
    assert found[("quire:ignored_params_total", ("param", "user"))] == 1
    routes = [value for key, value in found.items() if key[0] == "quire:http_requests_total"]
    assert len(routes) <= MAX_LABEL_VALUES + 1
    assert sum(routes) == 3000


@pytest.mark.parametrize("seed", range(3))
def test_histogram_counts_like_a_plain_loop_when_values_are_random(seed):
    rng, bounds = random.Random(seed), (0.1, 0.5, 1.0, 10.0)
    histogram = Histogram("quire:h", "text", {}, bounds)
    values = [rng.choice([rng.expovariate(1), 0.1, 1.0, 10.0, 99.0]) for _ in range(500)]
    for value in values:
        histogram.labels().observe(value)
    rows = histogram.labels().cumulative()
    assert [count for _, count in rows] == [sum(value <= bound for value in values) for bound in (*bounds, float("inf"))]
    assert histogram.labels().sum == pytest.approx(sum(values))
    assert bisect.bisect_left([float(bound) for bound, _ in rows], 10.0) == 3


def test_wrong_number_of_labels_is_an_error_when_used():
    with pytest.raises(InvariantError):
        Counter("quire:c", "text", {}, ("a",)).labels()


def test_length_buckets_are_those_of_every_model_when_servers_are_added_up():
    assert LENGTH_BUCKETS[:6] == (1, 2, 5, 10, 20, 50)
    assert LENGTH_BUCKETS[-1] == 1_000_000
    assert list(LENGTH_BUCKETS) == sorted(set(LENGTH_BUCKETS))


def test_loop_lag_is_what_a_blocking_call_took_when_it_blocks():
    loop, found = VirtualLoop(), []
    task = loop.create_task(watch_loop(found.append))
    loop.call_at(0.6, lambda: setattr(loop._jumping, "now", loop.time() + 1.0))
    loop.run_until_complete(_sleep(3))
    task.cancel()
    loop.run_until_complete(_sleep(0))
    loop.close()
    assert max(found) == pytest.approx(0.85)
    assert sorted(found)[-2] == pytest.approx(0)


async def _sleep(seconds):
    await asyncio.sleep(seconds)


def test_engine_metrics_have_a_label_for_each_replica_where_there_are_several():
    sources = [EngineSource(heartbeat_age_s=lambda age_s=age_s: age_s, num_restarts=lambda: 1) for age_s in (0.5, math.inf)]
    metrics = ServerMetrics(ServerConfig(), "demo", engines=sources)
    for index in (0, 1):
        metrics.engine_state("ready", index)
        metrics.engine_ready(make_info(num_kv_blocks=100 + index), index)
    metrics.step(StepOutputs([], report(totals=(2, 10, 5))))
    metrics.step(StepOutputs([], report(totals=(1, 4, 4)), replica=1))
    metrics.step(StepOutputs([], report(totals=(1, 8, 6)), replica=1))
    metrics.engine_state("restarting", 1)
    text = metrics.render()[0].decode()

    def value(name, **labels):
        lines = [line for line in text.splitlines() if line.startswith(f"quire:{name}{{")]
        found = [line for line in lines if all(f'{key}="{label}"' in line for key, label in labels.items())]
        return [float(line.rpartition(" ")[2]) for line in found]

    assert [value("prefix_cache_hits_total", replica=index) for index in (0, 1)] == [[5], [6]]
    assert [value("num_preemptions_total", replica=index) for index in (0, 1)] == [[2], [1]]
    assert [value("engine_step_seconds_count", replica=index) for index in (0, 1)] == [[1], [2]]
    assert [value("engine_state", replica=index, state="ready") for index in (0, 1)] == [[1], [0]]
    assert [value("engine_heartbeat_age_seconds", replica=index) for index in (0, 1)] == [[0.5], []]
    assert value("engine_restarts_total") == [1, 1]
    assert value("cache_config_info", replica=1, num_kv_blocks=101) == [1]
    assert value("num_requests_waiting", replica=0) == []
    assert len(value("num_requests_waiting")) == 1


def test_a_label_of_the_user_cannot_be_that_of_replicas():
    with pytest.raises(ConfigError, match="replica"):
        ServerConfig(metric_labels={"replica": "x"})
