"""The dashboard and the alert rules use metrics and labels that the server exports."""

import json
import re
from pathlib import Path

import pytest

from quire.serving.config import ServerConfig
from quire.serving.metrics.instruments import Counter, Histogram
from quire.serving.metrics.server_metrics import ServerMetrics

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).resolve().parents[4] / "deploy"
METRIC = re.compile(r"(quire:\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"by \(([^)]*)\) \((?:\w+\()?(quire:\w+)")


def exported():
    """Sample name -> its labels."""
    found = {}
    for one in ServerMetrics(ServerConfig(), "demo").defined.all:
        labels = set(one.label_names)
        if isinstance(one, Counter):
            found[f"{one.name}_total"] = labels
        elif isinstance(one, Histogram):
            found |= {f"{one.name}_sum": labels, f"{one.name}_count": labels, f"{one.name}_bucket": labels | {"le"}}
        else:
            found[one.name] = labels
    return found


def dashboard_expressions():
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    queries = [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())] + queries


def alert_expressions():
    groups = yaml.safe_load((DEPLOY / "prometheus-alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert all({"alert", "expr", "labels", "annotations"} <= rule.keys() for rule in rules)
    assert len({rule["alert"] for rule in rules}) == len(rules)
    return [rule["expr"] for rule in rules]


@pytest.mark.parametrize("expressions", [dashboard_expressions, alert_expressions], ids=["dashboard", "alerts"])
def test_every_metric_and_label_exists_when_an_expression_uses_it(expressions):
    known, used = exported(), set()
    for expression in expressions():
        assert expression.count("(") == expression.count(")")
        for name, matchers in METRIC.findall(expression):
            assert name in known, f"{name} in {expression}"
            used.add(name)
            for label in re.findall(r"(\w+)\s*[=!]~?", matchers):
                assert label in known[name], f"{label} of {name} in {expression}"
        for labels, name in GROUPED.findall(expression):
            assert {label.strip() for label in labels.split(",")} <= known[name], expression
    assert len(used) >= 15


def test_dashboard_shows_every_metric_when_it_is_not_a_shape():
    text = " ".join(dashboard_expressions() + alert_expressions())
    left_out = {"cache_config_info", "http_request_duration_seconds", "prompt_tokens_by_source", "request_params_n",
                "request_num_preemptions", "request_max_num_generation_tokens"}  # fmt: skip
    missing = [one.name for one in ServerMetrics(ServerConfig(), "demo").defined.all if one.name not in text]
    assert {name.removeprefix("quire:") for name in missing} == left_out
