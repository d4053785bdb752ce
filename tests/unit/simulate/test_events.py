"""Prefill and decode apart, KV tiers, failures and the autoscaler on the virtual clock, against times worked out by hand."""

import dataclasses

import pytest

from quire.base.errors import ConfigError
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.metrics import Goals, metric_values
from quire.bench.serving.workload import Dataset
from quire.router.autoscale import Limits, Objectives
from quire.router.config import RouterConfig
from quire.simulate.events import MAX_RESUMES, MAX_RETRIES, RETRY_RATIO, AutoscaleOptions, Failure, HandOverOptions
from quire.simulate.run import simulate
from quire.simulate.tiers import Pipe, TierOptions
from tests.unit.simulate.test_run import PlainTime, make_options

PAGE = 1e6
TIERS = TierOptions(page_bytes=PAGE, num_host_pages=200, host_bytes_per_s=1e9)  # 1 ms a page
CACHING = {"enable_prefix_caching": True, "num_host_pages": 200, "kv_save": "all", "max_num_batched_tokens": 256}
ONE = Dataset(num_prompts=1, input_len=100, output_len=5)
APART = HandOverOptions(num_prefill=1, page_bytes=PAGE, min_tokens=32, bytes_per_s=0.5e9, latency_s=0.003)


def apart(**changes):
    figures = {"scheduler": CACHING, "tiers": TIERS, "hand_over": APART, "dataset": ONE, "arrivals": Arrivals()}
    return make_options(**{**figures, **changes})


def test_prompt_is_computed_elsewhere_handed_over_and_decoded_here():
    outcome = simulate(apart())
    (record,) = outcome.report.result.records
    # 6 of 7 blocks: 96 tokens in a step of 106 ms, 6 MB at 0.5 GB/s and a latency, 6 ms into the pool, and 4 tokens here.
    prefill_s, link_s, load_s = 0.010 + 0.096, 0.012 + 0.003, 0.006
    assert metric_values([record], "ttft") == pytest.approx([prefill_s + link_s + load_s + 0.010 + 0.004])
    assert metric_values([record], "itl") == pytest.approx([0.011] * 4)
    assert record.usage_cached_tokens == 96
    assert (outcome.stats.num_handed_over, outcome.stats.num_handed_pages, outcome.stats.num_peer_pages) == (1, 6, 6)
    assert outcome.num_requests == [1, 0]


def test_hand_overs_of_a_link_come_one_after_the_other():
    link = Pipe(1e9, latency_s=0.5)
    assert [link.send(0.0, 2e9), link.send(1.0, 1e9), link.send(10.0, 1e9)] == [2.5, 3.5, 11.5]
    assert link.duration_s(10.0, 1e9) == 2.5


def test_short_prompts_and_those_without_a_prefill_replica_are_computed_where_they_are_decoded():
    short = simulate(apart(hand_over=dataclasses.replace(APART, min_tokens=97)))
    lost = simulate(apart(failures=(Failure(1, 0.0),)))
    for outcome in (short, lost):
        assert outcome.stats.num_handed_over == 0
        assert metric_values(outcome.report.result.records, "ttft") == pytest.approx([0.110])


def test_prompts_do_not_stretch_the_steps_of_those_that_decode():
    """What the split is for: with prompts computed elsewhere few gaps between tokens have a long prompt in them."""
    load = {"dataset": Dataset(num_prompts=40, input_len=250, output_len=20), "arrivals": Arrivals(4.0, "fixed")}
    split = simulate(apart(**load, hand_over=dataclasses.replace(APART, num_prefill=2))).report.to_dict()
    both = simulate(make_options(**load, num_replicas=1, scheduler=CACHING, tiers=TIERS)).report.to_dict()
    assert split["completed"] == 40
    assert split["p99_itl_ms"] < 60 < 200 < both["p99_itl_ms"]


def test_hand_over_is_left_out_while_it_is_slower_than_computing():
    slow = dataclasses.replace(APART, bytes_per_s=1e6)  # a second a page
    load = {"dataset": Dataset(num_prompts=20, input_len=100, output_len=5), "arrivals": Arrivals(request_rate=0.05)}
    outcome = simulate(apart(**load, hand_over=slow))
    assert outcome.report.to_dict()["completed"] == 20
    assert outcome.stats.num_handed_over == 20  # a decode replica that never computes prompts does not know better
    load = {"dataset": Dataset(num_prompts=40, input_len=100, range_ratio=0.5, output_len=5), "arrivals": Arrivals(2.0)}
    links = [dataclasses.replace(one, min_tokens=96) for one in (APART, slow)]  # shorter ones are computed here
    counts = [simulate(apart(**load, hand_over=one)).stats.num_handed_over for one in links]
    assert counts[1] < 0.6 * counts[0]


def trace_of(tmp_path, *prompts):
    """Write a trace of prompts of 96 tokens and 16 own ones, 10 s apart: each is the number of its first 6 blocks."""
    path = tmp_path / "trace.jsonl"
    rows = [
        f'{{"timestamp": {place * 10_000}, "input_length": 112, "output_length": 2, '
        f'"hash_ids": {[*range(one * 10, one * 10 + 6), 1000 + place]}}}'
        for place, one in enumerate(prompts)
    ]
    path.write_text("\n".join(rows))
    return {"dataset": Dataset(name="trace", path=path), "arrivals": Arrivals()}


def test_prompts_that_left_the_pool_are_loaded_from_the_host_tier(tmp_path):
    load = trace_of(tmp_path, 1, 2, 1)
    small = {**CACHING, "num_kv_blocks": 8}  # holds one prompt
    without = simulate(make_options(**load, scheduler={**small, "num_host_pages": 0}))
    outcome = simulate(make_options(**load, scheduler=small, tiers=TIERS))
    assert metric_values(without.report.result.records, "ttft") == pytest.approx([0.122] * 3)
    first, second, third = metric_values(outcome.report.result.records, "ttft")
    assert first == pytest.approx(0.122)
    assert second >= 0.122 + 0.006  # saves at least 6 pages of a millisecond each
    assert third == pytest.approx(0.010 + 0.016 + 0.006 + (second - 0.122), abs=0.0011)  # loads 6, and saves as many
    assert outcome.stats.num_host_pages == 6


def test_pages_that_left_the_host_are_read_from_disk_if_that_is_faster(tmp_path):
    load = trace_of(tmp_path, 1, 2, 3, 4, 1)
    scheduler = {**CACHING, "num_kv_blocks": 8, "num_host_pages": 16}

    def run(disk_bytes_per_s):
        tiers = TierOptions(PAGE, 16, 1e9, num_disk_pages=100, disk_bytes_per_s=disk_bytes_per_s, disk_latency_s=0.002)
        return simulate(make_options(**load, scheduler=scheduler, tiers=tiers))

    fast, slow = run(0.5e9), run(0.01e9)
    assert (fast.stats.num_disk_pages, fast.stats.num_host_pages) == (4, 2)
    ttft = metric_values(fast.report.result.records, "ttft")
    saves_s = ttft[2] - 0.122
    assert ttft[4] == pytest.approx(0.002 + 0.008 + 0.010 + 0.016 + 0.006 + saves_s, abs=0.0011)
    assert slow.stats.num_disk_pages == 0  # 0.6 s for what is computed in 0.1 s
    last = metric_values(slow.report.result.records, "ttft")[4]
    assert last == pytest.approx(0.010 + 0.112 - 0.032 + 0.002 + saves_s, abs=0.0011)  # 2 pages were still on the host


def test_requests_of_a_failed_replica_go_on_elsewhere_where_they_were():
    options = make_options(
        num_replicas=2, dataset=Dataset(num_prompts=2, input_len=20, output_len=30), arrivals=Arrivals(), routing="round-robin"
    )
    whole = simulate(options).report.result.records
    outcome = simulate(dataclasses.replace(options, failures=(Failure(0, 0.2, 1.0),)))
    lost, other = outcome.report.result.records
    assert (lost.outcome, other.outcome) == ("ok", "ok")
    assert (len(lost.content_s), lost.num_retries, other.num_retries) == (30, 1, 0)
    num_before = sum(at_s <= 0.2 for at_s in whole[0].content_s)
    assert list(lost.content_s[:num_before]) == pytest.approx(list(whole[0].content_s[:num_before]))
    # The other replica computes the prompt and the output so far in one step, next to one token of its own.
    assert lost.content_s[num_before] > 0.2 + 0.010 + 0.001 * (20 + num_before)
    assert (outcome.stats.num_resumes, outcome.stats.num_retries) == (1, 0)
    assert outcome.num_requests == [1, 2]


def test_replica_that_restarts_has_lost_its_cache_and_is_used_again(tmp_path):
    load = trace_of(tmp_path, 1, 1, 1)
    outcome = simulate(make_options(**load, scheduler=CACHING, tiers=TIERS, failures=(Failure(0, 15.0, 2.0),)))
    assert [one.usage_cached_tokens for one in outcome.report.result.records] == [0, 96, 0]


def test_without_a_replica_requests_fail_as_at_the_router():
    load = {"dataset": Dataset(num_prompts=4, input_len=20, output_len=50), "arrivals": Arrivals(1.0, "fixed")}
    outcome = simulate(make_options(**load, failures=(Failure(0, 1.3, 1.0),)))
    first, second, third, last = outcome.report.result.records
    assert (first.outcome, second.error_kind, third.error_kind, last.outcome) == ("ok", "broken_stream", "http_503", "ok")
    assert (second.num_retries, third.status) == (0, 503)


def test_retries_are_those_of_the_router():
    config = RouterConfig(adds_backends=True)
    assert (config.max_retries, config.max_resumes, config.retry_ratio) == (MAX_RETRIES, MAX_RESUMES, RETRY_RATIO)


@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "prefix"])
def test_every_request_ends_whatever_fails(routing):
    failures = tuple(Failure(place % 3, 0.5 + 0.7 * place, 0.9) for place in range(12))
    outcome = simulate(
        apart(
            routing=routing,
            num_replicas=2,
            dataset=Dataset(num_prompts=80, input_len=90, output_len=20, range_ratio=0.8),
            arrivals=Arrivals(request_rate=8.0),
            failures=failures,
        )
    )
    outcomes = {record.outcome for record in outcome.report.result.records}
    assert outcomes <= {"ok", "failed"}
    assert all(len(one.content_s) == one.num_wanted_tokens for one in outcome.report.result.records if one.outcome == "ok")
    assert outcome.stats.num_resumes > 0


def autoscale(least=1, most=4, **changes):
    limits = Limits(min_replicas=least, max_replicas=most, up_delay_s=10.0, down_delay_s=60.0)
    objectives = Objectives(1.0, prompt_tokens_per_s=900.0, output_tokens_per_s=400.0)
    return AutoscaleOptions(objectives, limits, **{"interval_s": 5.0, "start_s": 10.0, **changes})


def test_autoscaler_starts_replicas_for_a_load_and_drains_them_after_it(tmp_path):
    times = [0.3 * place for place in range(300)] + [100.0 + 20.0 * place for place in range(12)]
    rows = [
        f'{{"timestamp": {round(at_s * 1000)}, "input_length": 300, "output_length": 4, "hash_ids": [{place}]}}'
        for place, at_s in enumerate(times)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(rows))
    options = make_options(
        dataset=Dataset(name="trace", path=path), arrivals=Arrivals(), scheduler={"max_num_batched_tokens": 256}
    )
    outcome = simulate(dataclasses.replace(options, autoscale=autoscale()))
    fixed = simulate(options)
    assert outcome.report.to_dict()["completed"] == 312
    assert outcome.report.to_dict()["p99_ttft_ms"] < 0.5 * fixed.report.to_dict()["p99_ttft_ms"]
    texts = [text for _, text in outcome.stats.actions]
    assert any(text.startswith("serve: ") for text in texts)
    assert "drained" in texts[-1]
    used_s = outcome.stats.replica_s
    assert fixed.stats.replica_s == pytest.approx(fixed.report.result.end_s)
    assert 1.2 * fixed.stats.replica_s < used_s < 3 * fixed.stats.replica_s
    assert "replica hours; the autoscaler:" in outcome.describe()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Failure.parse("0"), "--fail takes REPLICA:AT_S"),
        (lambda: Failure.parse("-1:3"), "got '-1:3'"),
        (lambda: Failure.parse("0:1:-2"), "got '0:1:-2'"),
        (lambda: Failure.parse("0:inf"), "got '0:inf'"),
        (lambda: AutoscaleOptions.parse_range("3:2"), "--autoscale takes MIN:MAX"),
        (lambda: AutoscaleOptions.parse_range("4"), "got '4'"),
        (lambda: autoscale(interval_s=0.0), "--autoscale-interval"),
        (lambda: autoscale(start_s=-1.0), "--replica-start"),
        (lambda: dataclasses.replace(APART, num_prefill=-1), "--prefill-replicas"),
        (lambda: dataclasses.replace(APART, min_tokens=0), "--prefill-min-tokens"),
        (lambda: dataclasses.replace(APART, bytes_per_s=0.0), "--link-gb-per-s"),
        (lambda: dataclasses.replace(APART, latency_s=float("nan")), "--link-latency-ms"),
        (lambda: dataclasses.replace(TIERS, num_host_pages=0), "raise --kv-host-gb"),
        (lambda: dataclasses.replace(TIERS, host_bytes_per_s=float("inf")), "--kv-host-gb-per-s"),
        (lambda: dataclasses.replace(TIERS, disk_latency_s=-1.0), "--kv-disk-latency-ms"),
        (lambda: make_options(num_replicas=0), "--replicas must be an integer >= 1"),
        (lambda: make_options(failures=(Failure(1, 0.0),)), "--fail takes a replica below 1"),
        (lambda: make_options(autoscale=autoscale(2, 3)), "--replicas must be from 2 to 3"),
        (lambda: apart(tiers=dataclasses.replace(TIERS, num_disk_pages=9)), "--kv-disk-gb must be left out"),
        (lambda: make_options(tiers=TIERS), "KV tiers need num_host_pages"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_static_batching_is_refused_with_failures():
    from quire.simulate.batching import Batching

    with pytest.raises(ConfigError, match="--batching must be continuous"):
        make_options(failures=(Failure(0, 1.0),), batching=Batching("static", 4))


def test_goals_and_times_are_as_before_with_nothing_of_all_this():
    outcome = simulate(make_options(times=PlainTime(), goals=Goals.parse(["ttft:1000"])))
    assert outcome.stats.replica_s == pytest.approx(outcome.report.result.end_s)
    assert "replica hours" not in outcome.describe()


def changing_load(folder, phase_s):
    """Write a trace of long prompts with short outputs, and then of short prompts with long outputs."""
    rows, now = [], 0.0
    while now < 2 * phase_s:
        is_first = now < phase_s
        num_in, num_out = (400, 20) if is_first else (40, 100)
        lengths = f'"input_length": {num_in}, "output_length": {num_out}, "hash_ids": [{len(rows)}]'
        rows.append(f'{{"timestamp": {round(now * 1000)}, {lengths}}}')
        now += 1 / 6 if is_first else 1 / 8
    path = folder / "changing.jsonl"
    path.write_text("\n".join(rows))
    return {"dataset": Dataset(name="trace", path=path), "arrivals": Arrivals()}


@pytest.mark.slow
def test_autoscaler_attains_more_than_the_best_fixed_split_at_equal_replica_hours(tmp_path):
    load = changing_load(tmp_path, 120.0)
    limits = Limits(max_replicas=3, up_delay_s=15.0, down_delay_s=60.0, queue_delay_s=30.0, flip_delay_s=20.0, window_s=5.0)
    scaling = AutoscaleOptions(Objectives(1.5, 900.0, 650.0), limits, interval_s=5.0, start_s=60.0, tpot_s=0.04)

    def run(num_decode, num_prefill, autoscale=None):
        outcome = simulate(
            apart(
                **load,
                num_replicas=num_decode,
                goals=Goals.parse(["ttft:1500", "tpot:40"]),
                autoscale=autoscale,
                hand_over=HandOverOptions(num_prefill, PAGE, min_tokens=64, bytes_per_s=20e9),
                tiers=TierOptions(PAGE, 2000, 100e9),
                scheduler={**CACHING, "max_num_seqs": 32, "num_host_pages": 2000, "kv_save": "none"},
            )
        )
        return outcome.report.to_dict()["num_good_requests"] / len(outcome.report.result.records), outcome

    attained, scaled = run(1, 3, scaling)
    num_replicas = scaled.stats.replica_s / scaled.report.result.end_s  # on average
    assert num_replicas <= 4
    begun, flips_s = {}, []
    for at_s, text in scaled.stats.actions:
        if "becomes" in text:
            begun[text.replace("becomes", "is")] = at_s
        elif text in begun:
            flips_s.append(at_s - begun[text])
    assert any(text.endswith("is decode") for text in begun)
    assert len(flips_s) >= len(begun)
    assert max(flips_s) < 5.0, flips_s
    assert scaled.report.to_dict()["failed"] == 0
    fixed = [run(num_decode, 4 - num_decode)[0] for num_decode in (1, 2, 3)]
    assert attained > max(fixed)
    assert attained / num_replicas >= 1.3 * max(fixed) / 4, (attained, num_replicas, fixed)
