"""What the autoscaler reads from Prometheus, and `quire autoscale` from the command line."""

import json
import urllib.parse
from contextlib import contextmanager

import pytest

from quire.base.errors import ConfigError
from quire.cli.main import main
from quire.router.autoscale import Demand, Replica
from quire.router.autoscale_source import PrometheusSource, SourceError
from tests.http_server import QuietHandler, http_server

SERIES = {
    'engine_state{state="ready"}': [({"instance": "a:1"}, "1"), ({"instance": "b:1", "role": "prefill"}, "0")],
    "num_requests_running": [({"instance": "a:1"}, "7")],
    "prompt_tokens_total": [({}, "900"), ({"role": "prefill"}, "50")],
    "generation_tokens_total": [({}, "80")],
    "(quire:queue_prompt_tokens)": [({}, "1200")],
    "deriv": [({}, "100")],
    "request_success_total": [({}, "4")],
    "admission_rejections_total": [({}, "1")],
    "slo_requests_total": [({}, "4")],
    "slo_requests_met_total": [({}, "3")],
}


@contextmanager
def prometheus(series=SERIES, status=200, body=None):
    class Handler(QuietHandler):
        def do_GET(self):
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)["query"][0]
            found = next((series[name] for name in series if name in query), [])
            result = [{"metric": labels, "value": [1.0, value]} for labels, value in found]
            answer = {"status": "success", "data": {"resultType": "vector", "result": result}}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode() if body is None else body)

    with http_server(Handler) as url:
        yield url


def test_snapshot_has_replicas_and_the_demand_of_each_role():
    with prometheus() as url:
        found = PrometheusSource(url).read(5.0)
    assert found.replicas == (Replica("a:1", "serve", "ready", 7), Replica("b:1", "prefill", "starting", 0))
    assert found.now_s == 5.0
    assert found.demand == {
        # What was served and what more waits, and the quarter that was refused.
        "serve": Demand((900 + 100) * 1.25, 80 * 1.25, queued_tokens=1200, attainment=0.75),
        "prefill": Demand(prompt_tokens_per_s=50.0),
    }


def test_no_traffic_is_zero_and_no_replica_is_no_demand():
    with prometheus({'engine_state{state="ready"}': [({"instance": "a:1"}, "1")], "generation": [({}, "NaN")]}) as url:
        assert PrometheusSource(url).read(0.0).demand == {"serve": Demand()}
    with prometheus({}) as url:
        assert PrometheusSource(url).read(0.0).demand == {}


@pytest.mark.parametrize("options", [{"body": b"<html>"}, {"body": b'{"status": "error"}'}, {"status": 400}])
def test_what_is_no_prometheus_is_an_error(options):
    with prometheus(**options) as url, pytest.raises(SourceError):
        PrometheusSource(url).read(0.0)


def test_unknown_role_and_address_are_errors():
    with (
        prometheus({"engine_state": [({"instance": "a", "role": "both"}, "1")]}) as url,
        pytest.raises(SourceError, match="both"),
    ):
        PrometheusSource(url).read(0.0)
    with pytest.raises(SourceError, match="does not answer"):
        PrometheusSource("http://127.0.0.1:9", timeout_s=2).read(0.0)
    with pytest.raises(ConfigError, match="http://host:9090"):
        PrometheusSource("localhost:9090")


def test_command_prints_what_it_would_do(capsys):
    with prometheus() as url:
        words = ["autoscale", "--prometheus", url, "--once", "--prompt-tokens-per-s", "500"]
        assert main([*words, "--dry-run"]) == 0
        line = json.loads(capsys.readouterr().out)
        assert line["actions"] == [{"action": "scale", "role": "serve", "num_replicas": 4}]
        assert line["replicas"] == {"ready": 1, "starting": 1}
        assert line["demand"]["serve"]["queued_tokens"] == 1200
        assert main(words) != 0
        assert "--dry-run" in capsys.readouterr().err
