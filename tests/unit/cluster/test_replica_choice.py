"""ReplicaChooser: prefixes, load and reports decide; AutoscalePolicy: Ray's context becomes a snapshot of `decide`."""

from types import SimpleNamespace

import pytest

from quire.cluster.autoscale_policy import AutoscalePolicy
from quire.cluster.engine_server import TokenRates, read_totals
from quire.cluster.replica_choice import ReplicaChooser
from quire.router.prompt import parse_body

REPORT = {
    "load": {"running": 0, "waiting": 0, "kv_blocks_free": 90, "kv_blocks_total": 100, "block_size": 16},
    "cost": {"s_per_prompt": 0.0, "s_per_token": 0.001},
}


def prompt(text):
    return parse_body(b'{"prompt":"%b"}' % text.encode()).prompt(16, b"")


def chooser(*names, policy="prefix", **reports):
    found = ReplicaChooser(policy, 16, 1000, clock=lambda: NOW[0])
    found.set_replicas({name: reports.get(name, REPORT) for name in names})
    return found


NOW = [0.0]


def test_prompt_goes_where_its_prefix_was_sent_and_another_elsewhere():
    found = chooser("a", "b")
    first = prompt("x" * 400)
    home = found.order(["a", "b"], first)[0][0]
    found.begin("r1", home, first)
    found.end("r1")
    assert found.order(["a", "b"], prompt("x" * 400 + "y"))[0] == [home]
    found.begin("r2", home, first)
    assert found.order(["a", "b"], prompt("z" * 400))[0] != [home]


def test_prompt_counts_until_the_time_that_it_was_predicted_to_take():
    NOW[0] = 0.0
    found = chooser("a", "b")
    found.begin("r1", "a", prompt("x" * 4000))
    assert found.replicas["a"].num_queued_tokens > 900
    assert found.order(["a", "b"], prompt("y" * 400))[0] == ["b"]
    NOW[0] = 1.5
    found.order(["a", "b"], None)
    assert found.replicas["a"].num_queued_tokens == 0
    assert found.replicas["a"].num_in_flight == 1


def test_replica_with_full_kv_cache_or_many_requests_of_others_comes_last():
    full = {**REPORT, "load": {**REPORT["load"], "kv_blocks_free": 1}}
    busy = {**REPORT, "load": {**REPORT["load"], "running": 500}}
    found = chooser("full", "busy", "free", "none", full=full, busy=busy, none={})
    assert found.order(["full", "busy", "free"], prompt("x" * 40)) == [["free"], ["busy"], ["full"]]
    assert found.order(["full", "new"], prompt("x" * 40)) == [["full"], ["new"]]


def test_replicas_that_are_gone_are_forgotten_and_reports_that_are_not_understood_change_nothing():
    found = chooser("a", "b")
    found.begin("r1", "a", prompt("x" * 40))
    found.set_replicas({"b": {"load": "much"}})
    assert list(found.replicas) == ["b"]
    assert found.replicas["b"].load.kv_blocks_total == 100
    found.end("r1")
    found.begin("r2", "a", None)
    found.end("r2")


def context(now_s, num_running, target, queued_in_ray=0.0, **metrics):
    values = {name: {"r": value} for name, value in metrics.items()}
    return SimpleNamespace(
        current_time=now_s,
        current_num_replicas=num_running,
        target_num_replicas=target,
        aggregated_metrics=values,
        total_queued_requests=queued_in_ray,
    )


def test_load_adds_replicas_and_quiet_takes_one_after_its_delay():
    policy = AutoscalePolicy(max_replicas=3, prompt_tokens_per_s=1000.0, up_delay_s=1.0, down_delay_s=20.0)
    assert policy(context(0.0, 1, 1, prompt_tokens_per_s=100.0)) == (1, {})
    assert policy(context(1.0, 1, 1, prompt_tokens_per_s=1500.0))[0] == 2
    assert policy(context(2.0, 1, 2, prompt_tokens_per_s=9000.0))[0] == 2  # one action at a time
    assert policy(context(5.0, 2, 2, prompt_tokens_per_s=9000.0))[0] == 3
    assert policy(context(6.0, 3, 3))[0] == 3
    assert policy(context(25.0, 3, 3))[0] == 3
    assert policy(context(50.0, 3, 3))[0] == 2
    assert policy(context(51.0, 2, 2))[0] == 2  # the action is over, the delay begins again


def test_requests_that_wait_in_ray_add_a_replica():
    policy = AutoscalePolicy(max_replicas=2, queue_delay_s=2.0, up_delay_s=0.0)
    assert policy(context(0.0, 1, 1, queued_in_ray=5.0))[0] == 1
    assert policy(context(3.0, 1, 1, queued_in_ray=5.0))[0] == 2


def test_figures_are_rates_with_what_was_refused():
    text = """# HELP quire:prompt_tokens_total x
quire:prompt_tokens_total{model="a b"} %d
quire:generation_tokens_total{model="a"} 10
quire:queue_prompt_tokens{class="1"} 40
quire:queue_prompt_tokens{class="2"} 2.5
quire:request_success_total{finished_reason="stop"} %d
quire:admission_rejections_total{reason="x"} %d
"""
    names = ("quire:prompt_tokens_total", "quire:queue_prompt_tokens", "quire:request_success_total")
    assert read_totals(text % (7, 1, 0), names) == dict(zip(names, (7.0, 42.5, 1.0), strict=True))
    rates, all_names = TokenRates(), (*names, "quire:admission_rejections_total")
    rates.add(100.0, read_totals(text % (0, 0, 0), all_names))
    assert rates.figures()["prompt_tokens_per_s"] == 0.0
    rates.add(110.0, read_totals(text % (500, 10, 10), all_names))
    assert rates.figures() == {
        "prompt_tokens_per_s": pytest.approx(100.0),  # 50 served, as many refused
        "output_tokens_per_s": 0.0,
        "queued_tokens": 42.5,
        "recent_share": pytest.approx(1.0),
    }
