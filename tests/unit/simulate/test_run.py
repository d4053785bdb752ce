"""The simulation against times that can be worked out by hand, and what has to hold for any load."""

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.metrics import Goals, metric_values
from quire.bench.serving.workload import Dataset
from quire.contracts.scheduler_config import SchedulerConfig
from quire.engine.scheduling import Scheduler
from quire.planner.delivery import Delivery
from quire.planner.step_time import StepWork
from quire.simulate.batching import Batching
from quire.simulate.run import SimulateOptions, simulate


@dataclass(frozen=True)
class PlainTime:
    """10 ms a step and 1 ms a token, with a delay of each request."""

    request_s: float = 0.0
    step_s: float = 0.010
    token_s: float = 0.001

    def mean_s(self, work: StepWork) -> float:
        return self.step_s + self.token_s * work.num_tokens

    def draw_ratio(self, work: StepWork, rng: random.Random) -> float:
        return 1.0


def make_options(**changes) -> SimulateOptions:
    scheduler = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 4096,
        "block_size": 16,
        "num_kv_blocks": 1000,
        "enable_prefix_caching": False,
        **changes.pop("scheduler", {}),
    }
    figures = {
        "model": "plain",
        "machine": "by hand",
        "scheduler": SchedulerConfig(**scheduler),
        "times": PlainTime(),
        "windows": (None,),
        "dataset": Dataset(num_prompts=4, input_len=20, output_len=5),
        "arrivals": Arrivals(request_rate=1.0, process="fixed"),
    }
    return SimulateOptions(**{**figures, **changes})


def test_lonely_requests_take_the_times_of_their_steps():
    outcome = simulate(make_options(times=PlainTime(request_s=0.005)))
    records = outcome.report.result.records
    assert [record.sent_s for record in records] == [0.0, 1.0, 2.0, 3.0]
    assert all(record.outcome == "ok" for record in records)
    assert metric_values(records, "ttft") == pytest.approx([0.005 + 0.010 + 0.020] * 4)
    assert metric_values(records, "itl") == pytest.approx([0.011] * 16)
    assert metric_values(records, "e2el") == pytest.approx([0.035 + 4 * 0.011] * 4)
    assert outcome.num_steps == 20
    assert outcome.busy_shares == [pytest.approx(4 * (0.030 + 0.044) / (3 + 0.079))]


def test_delivery_delays_requests_by_their_pause_and_tokens_by_stalls():
    delivery = Delivery(((0.0, 0.002), (0.8, 0.007)), ((0.0, (0.0,)), (0.8, (0.004,))))
    records = simulate(make_options(times=PlainTime(request_s=0.5), delivery=delivery)).report.result.records
    assert all(0.002 <= value - 0.030 <= 0.007 + 0.004 for value in metric_values(records, "ttft"))
    assert metric_values(records, "itl") == pytest.approx([0.011] * 16)  # every token of a request is as late
    stalls = replace(delivery, stalls=((0.0, (0.0, 0.0, 0.0, 0.050)),))
    records = simulate(make_options(delivery=stalls)).report.result.records
    times = [value for record in records for value in record.content_s]
    assert times == sorted(times)
    assert max(metric_values(records, "itl")) > 0.030
    assert sum(len(record.content_s) for record in records) == 20


def test_requests_that_come_together_share_steps_under_the_token_budget():
    outcome = simulate(make_options(arrivals=Arrivals()))  # 80 prompt tokens at once, 64 in a step
    first, *_, last = outcome.report.result.records
    # step 1: 20 + 20 + 20 + 4 tokens; step 2: 3 decode, and 16 of the last prompt
    assert first.content_s[0] == pytest.approx(0.074)
    assert last.content_s[0] == pytest.approx(0.074 + 0.010 + 0.019)
    assert first.content_s[1] == pytest.approx(0.074 + 0.029)


def test_report_is_that_of_bench_serve():
    outcome = simulate(make_options(goals=Goals.parse(["ttft:1000"])))
    figures = outcome.report.to_dict()
    assert figures["completed"] == 4
    assert figures["total_output_tokens"] == 20
    assert figures["num_good_requests"] == 4
    assert figures["backend"] == "simulated"
    assert figures["warnings"] == []
    text = outcome.describe()
    assert "Serving Benchmark Result" in text
    assert "Simulated, not measured" in text


def test_same_seed_gives_the_same_outcome():
    options = make_options(dataset=Dataset(num_prompts=50, range_ratio=0.5, input_len=100, output_len=20, seed=7),
                           arrivals=Arrivals(request_rate=20.0))  # fmt: skip
    first, second = simulate(options), simulate(options)
    assert [one.content_s for one in first.report.result.records] == [one.content_s for one in second.report.result.records]


def test_prompts_that_can_never_fit_fail_and_others_go_on():
    dataset = Dataset(num_prompts=20, input_len=100, output_len=5, range_ratio=0.9)
    outcome = simulate(make_options(dataset=dataset, scheduler={"max_model_len": 110}))
    failed = [record for record in outcome.report.result.records if record.outcome == "failed"]
    assert failed
    assert all(record.num_prompt_tokens >= 110 for record in failed)
    assert all(record.error_kind == "http_400" and "max_model_len" in record.message for record in failed)
    assert len(failed) < 20


def test_full_replica_rejects_when_it_may():
    outcome = simulate(make_options(arrivals=Arrivals(), scheduler={"max_num_seqs": 1}, max_waiting=1))
    outcomes = [record.outcome for record in outcome.report.result.records]
    assert outcomes.count("rejected") == 2
    assert outcomes.count("ok") == 2
    assert outcome.report.to_dict()["rejections"] == {"503": 2}


def test_closed_loop_keeps_the_concurrency():
    arrivals = Arrivals(max_concurrency=2)
    outcome = simulate(make_options(arrivals=arrivals, dataset=Dataset(num_prompts=9, input_len=20, output_len=5)))
    figures = outcome.report.to_dict()
    assert figures["completed"] == 9
    assert figures["max_concurrent_requests"] == 2


def test_small_pool_preempts_and_all_end():
    scheduler = {"num_kv_blocks": 8}
    outcome = simulate(
        make_options(arrivals=Arrivals(), scheduler=scheduler, dataset=Dataset(num_prompts=6, input_len=30, output_len=60))
    )
    assert outcome.num_preemptions > 0
    assert outcome.report.to_dict()["completed"] == 6


@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "prefix"])
def test_replicas_share_the_load(routing):
    outcome = simulate(
        make_options(
            routing=routing,
            num_replicas=4,
            dataset=Dataset(num_prompts=200, input_len=50, output_len=20, range_ratio=0.8),
            arrivals=Arrivals(request_rate=50.0),
        )
    )
    assert sum(outcome.num_requests) == 200
    assert max(outcome.num_requests) <= 1.5 * 50
    assert outcome.report.to_dict()["completed"] == 200


def test_prefix_routing_finds_more_than_round_robin(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rng = random.Random(1)
    rows = []
    for number in range(300):
        user = rng.randrange(12)
        ids = [user * 100 + place for place in range(8)] + [10_000 + number]
        rows.append(f'{{"timestamp": {number * 40}, "input_length": 144, "output_length": 8, "hash_ids": {ids}}}')
    trace.write_text("\n".join(rows))
    shares = {}
    for routing in ("round-robin", "prefix"):
        outcome = simulate(
            make_options(
                routing=routing,
                num_replicas=4,
                dataset=Dataset(name="trace", path=trace),
                arrivals=Arrivals(),
                scheduler={"enable_prefix_caching": True, "num_kv_blocks": 100, "max_num_batched_tokens": 256},
            )
        )
        shares[routing] = outcome.prefix_hit_share
    assert shares["prefix"] > shares["round-robin"] + 0.05


def test_shared_prefix_is_found_in_the_cache():
    dataset = Dataset(num_prompts=10, input_len=16, output_len=2, prefix_len=160)
    outcome = simulate(make_options(dataset=dataset, scheduler={"enable_prefix_caching": True}))
    cached = [record.usage_cached_tokens for record in outcome.report.result.records]
    assert cached == [0] + [160] * 9


def test_continuous_batching_beats_static_and_dynamic():
    dataset = Dataset(num_prompts=60, input_len=20, output_len=40, range_ratio=0.9)
    figures = {}
    for policy in ("continuous", "dynamic", "static"):
        outcome = simulate(
            make_options(batching=Batching(policy, 8, 0.2), dataset=dataset, arrivals=Arrivals(request_rate=6.0))
        )
        assert outcome.report.to_dict()["completed"] == 60
        figures[policy] = outcome.report.to_dict()
    assert figures["continuous"]["mean_ttft_ms"] < figures["dynamic"]["mean_ttft_ms"] < figures["static"]["mean_ttft_ms"]


def test_static_batch_waits_until_it_is_full_and_runs_to_its_end():
    outcome = simulate(make_options(batching=Batching("static", 2)))
    records = outcome.report.result.records
    assert records[0].content_s[0] == pytest.approx(1.0 + 0.050)  # with the second
    assert records[0].content_s[0] == records[1].content_s[0]
    assert records[2].content_s[0] == pytest.approx(3.0 + 0.050)


def test_dynamic_batch_starts_after_its_delay():
    outcome = simulate(make_options(batching=Batching("dynamic", 2, 0.3)))
    assert metric_values(outcome.report.result.records, "ttft")[:3] == pytest.approx([0.3 + 0.030] * 3)


def test_static_batches_end_with_a_closed_loop_smaller_than_a_batch():
    outcome = simulate(make_options(batching=Batching("static", 4), arrivals=Arrivals(max_concurrency=3)))
    assert outcome.report.to_dict()["completed"] == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"routing": "random"}, "--routing must be one of round-robin, least-loaded, prefix, got 'random'"),
        ({"num_replicas": 0}, "--replicas must be an integer >= 1, got 0"),
        ({"max_waiting": -1}, "--max-waiting must be an integer >= 0, got -1"),
        ({"dataset": Dataset(name="custom", path=Path("x"))}, "--dataset-name must be random or trace, got 'custom'"),
    ],
)
def test_wrong_options_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        simulate(make_options(**changes))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("steady",), "--batching must be one of continuous, dynamic, static, got 'steady'"),
        (("static", 0), "--batch-size must be an integer >= 1, got 0"),
        (("dynamic", 4, -1.0), "--batch-delay-ms must be a number of at least 0, got -1000"),
    ],
)
def test_wrong_batching_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Batching(*arguments)


def test_batch_larger_than_the_scheduler_allows_is_refused():
    with pytest.raises(ConfigError, match=r"--batch-size must be at most max_num_seqs \(8\), got 9"):
        make_options(batching=Batching("static", 9))


@pytest.mark.covering
@pytest.mark.parametrize("concurrency", [None, 12])
@pytest.mark.parametrize("batching", ["continuous", "dynamic"])
@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "prefix"])
def test_runs_of_decode_steps_change_nothing(monkeypatch, routing, batching, concurrency):
    rate = math.inf if concurrency else 12.0
    options = make_options(
        num_replicas=2,
        routing=routing,
        batching=Batching(batching, 4, 0.05),
        times=PlainTime(request_s=0.003),
        dataset=Dataset(num_prompts=80, input_len=40, output_len=60, range_ratio=0.9, prefix_len=32),
        arrivals=Arrivals(request_rate=rate, max_concurrency=concurrency),
        scheduler={"enable_prefix_caching": True, "num_kv_blocks": 400, "max_num_batched_tokens": 256},
    )
    at_once = simulate(options)
    num_commits = []
    commit = Scheduler.commit
    monkeypatch.setattr(Scheduler, "commit", lambda *args: (num_commits.append(1), commit(*args))[1])
    again = simulate(options)
    assert len(num_commits) < (1.0 if concurrency else 0.8) * again.num_steps  # there are runs at all
    monkeypatch.setattr("quire.simulate.replica._MAX_DECODE_RUN", 1)
    one_by_one = simulate(options)
    assert one_by_one.num_steps == at_once.num_steps
    assert one_by_one.num_requests == at_once.num_requests
    for left, right in zip(at_once.report.result.records, one_by_one.report.result.records, strict=True):
        assert list(left.content_s) == pytest.approx(list(right.content_s))
        assert left.end_s == pytest.approx(right.end_s)
        assert left.usage_cached_tokens == right.usage_cached_tokens
