"""The dashboard and the alert rules use metrics and labels that the server exports."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from quire.router.backend import BackendTable
from quire.router.config import RouterConfig
from quire.router.metrics import RouterMetrics
from quire.serving.config import ServerConfig
from quire.serving.errors import ApiError
from quire.serving.metrics.instruments import Counter, Gauge, Histogram
from quire.serving.metrics.server_metrics import ServerMetrics
from tests.unit.serving.metrics.promql import Parser, takes

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).resolve().parents[4] / "deploy"
INTERVAL = {"$__rate_interval": "5m", "$__range": "1h", "$__interval": "1m"}


@cache
def exported():
    """Sample name -> (its labels, whether it is a counter)."""
    found = {}
    of_a_router = [
        one
        for one in vars(RouterMetrics(BackendTable(RouterConfig(adds_backends=True)))).values()
        if isinstance(one, Counter | Gauge | Histogram)
    ]
    for one in [*ServerMetrics(ServerConfig(), "demo").defined.all, *of_a_router]:
        labels = frozenset(one.label_names)
        if isinstance(one, Counter):
            found[f"{one.name}_total"] = (labels, True)
        elif isinstance(one, Histogram):
            found |= {f"{one.name}_sum": (labels, True), f"{one.name}_count": (labels, True)}
            found[f"{one.name}_bucket"] = (labels | {"le"}, True)
        else:
            found[one.name] = (labels, False)
    return found


def board():
    return json.loads((DEPLOY / "helm/quire/files/grafana-dashboard.json").read_text())


def dashboard_expressions():
    """Return (expression, labels that what is shown of it names)."""
    found = []
    for panel in board()["panels"]:
        for target in panel.get("targets", ()):
            legend = target.get("legendFormat", "")
            found.append((target["expr"], set(re.findall(r"{{\s*(\w+)\s*}}", legend))))
    return found


def alert_rules():
    groups = yaml.safe_load((DEPLOY / "helm/quire/files/prometheus-alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alert_expressions():
    return [(rule["expr"], set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))) for rule in alert_rules()]


def parsed(expression):
    for variable, value in INTERVAL.items():
        expression = expression.replace(variable, value)
    return Parser(expression, exported()).parse()


def selectors_of(alert):
    """Return the matchers of every selector of an alert, in order."""
    parser = Parser(next(rule["expr"] for rule in alert_rules() if rule["alert"] == alert), exported())
    parser.parse()
    return [matchers for _, matchers in parser.selectors]


def names_in(expressions):
    return {name for expression, _ in expressions for name in re.findall(r"quire(?:_router)?:\w+", expression)}


@pytest.mark.parametrize("expressions", [dashboard_expressions, alert_expressions], ids=["dashboard", "alerts"])
def test_every_expression_parses_and_has_the_labels_that_are_shown(expressions):
    for expression, shown in expressions():
        value = parsed(expression)
        assert shown <= value.labels, f"{shown - value.labels} is shown of {expression}"
    assert len(names_in(expressions())) >= 15


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("quire:no_such_metric", "no metric"),
        ('quire:num_requests_running{zone="a"}', "no label zone"),
        ("sum by (zone) (quire:num_requests_running)", "which there is not"),
        ("rate(quire:num_requests_running[5m])", "of counters"),
        ("rate(quire:generation_tokens_total)", "does not take"),
        ("quire:generation_tokens_total[5m]", "no result"),
        ("sum(rate(quire:generation_tokens_total[5m])", "too early"),
        ("sum(quire:num_requests_running))", "too much"),
        ("histogram_quantile(0.9, sum by (model_name) (rate(quire:time_to_first_token_seconds_bucket[5m])))", "does not take"),
        ("sum by (model_name) (quire:num_requests_running) / sum(quire:num_requests_running)", "never match"),
        ("quire:num_requests_running and 1", "needs vectors"),
        ("sum by (model_name) quire:num_requests_running", "is expected"),
        ('quire:http_requests_total{code=~"5.("}', "unterminated|missing"),
    ],
)
def test_expression_is_refused_when_it_is_wrong(expression, reason):
    with pytest.raises((ValueError, re.error), match=reason):
        parsed(expression)


def test_dashboard_has_panels_of_its_own_and_variables_that_exist():
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for variable in board()["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((quire:\w+), (\w+)\)", variable["query"]).groups()
            assert label in exported()[name][0]


def test_every_alert_says_what_it_is_about():
    rules = alert_rules()
    assert all({"alert", "expr", "labels", "annotations"} <= rule.keys() for rule in rules)
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert re.fullmatch(r"\d+[smhd]", rule.get("for", "1m")), rule
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_dashboard_shows_every_metric_when_it_is_not_a_shape():
    text = " ".join(names_in(dashboard_expressions()) | names_in(alert_expressions()))
    left_out = {"cache_config_info", "lora_requests_info", "http_request_duration_seconds", "prompt_tokens_by_source",
                "request_params_n", "request_num_preemptions", "request_max_num_generation_tokens"}  # fmt: skip
    missing = [one.name for one in ServerMetrics(ServerConfig(), "demo").defined.all if one.name not in text]
    assert {name.removeprefix("quire:") for name in missing} == left_out
    of_a_router = {re.sub("_(total|bucket|sum|count)$", "", name) for name in exported() if name.startswith("quire_router:")}
    assert len(of_a_router) > 20
    assert [name for name in sorted(of_a_router) if name not in text] == []


@pytest.mark.covering
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/ready", "/health", "/metrics"])
@pytest.mark.parametrize("code", ["200", "400", "429", "499", "500", "502", "503", "504", "529"])
def test_server_errors_are_neither_shed_load_nor_probes(route, code):
    failed, every = selectors_of("QuireServerErrors")
    is_probe = route in ("/ready", "/health", "/metrics")
    assert takes(failed, {"route": route, "code": code}) == (code in ("500", "502", "504") and not is_probe)
    assert takes(every, {"route": route, "code": code}) == (not is_probe)


def test_refusals_are_what_the_server_turned_away_for_want_of_room():
    refused, every, _ = selectors_of("QuireRefusals")
    metrics = ServerMetrics(ServerConfig(), "demo")
    errors = [ApiError(503, "", code=code) for code in ("overloaded", "engine_unavailable", "too_many_body_bytes", "draining")]
    for error in [
        *errors,
        ApiError(503, "", code="too_many_connections"),
        ApiError(429, ""),
        ApiError(400, ""),
        ApiError(401, ""),
    ]:
        metrics.rejected(error)
    reasons = [key[-1] for key in metrics.defined.rejections.cells]
    expected = {"overloaded", "engine_unavailable", "body_bytes", "connections"}
    assert {reason for reason in reasons if takes(refused, {"reason": reason})} == expected
    assert {reason for reason in reasons if takes(every, {"reason": reason})} == set(reasons) - {"unauthorized"}


@pytest.mark.parametrize(("value", "is_taken"), [("a", True), ("ab", False), ("c", False)])
def test_matcher_is_of_the_whole_value_when_it_is_an_expression(value, is_taken):
    assert takes([("x", "=~", "a|b"), ("x", "!=", "c"), ("x", "!~", "c.*")], {"x": value}) == is_taken
