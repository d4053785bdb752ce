"""The manifest of a router and its servers: its objects fit together, and its commands are those of quire."""

from pathlib import Path

import pytest

from quire.cli.main import make_parser
from quire.cli.router import router_config

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

PATH = Path(__file__).resolve().parents[2] / "deploy" / "router.yaml"
API_VERSIONS = {
    "StatefulSet": "apps/v1",
    "Deployment": "apps/v1",
    "Service": "v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}


@pytest.fixture
def documents():
    found = list(yaml.safe_load_all(PATH.read_text()))
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


@pytest.fixture
def servers(documents):
    return documents["StatefulSet", "quire"]["spec"]


@pytest.fixture
def routers(documents):
    return documents["Deployment", "quire-router"]["spec"]


def container_of(spec):
    (container,) = spec["template"]["spec"]["containers"]
    return container


def arguments_of(spec):
    program, *words = container_of(spec)["command"]
    assert program == "quire"
    return make_parser().parse_args(words)


def ports_of(spec):
    return {port["name"]: port["containerPort"] for port in container_of(spec)["ports"]}


def test_each_object_has_the_version_of_its_kind_and_a_name_of_its_own(documents):
    assert {kind: one["apiVersion"] for (kind, _), one in documents.items()} == API_VERSIONS
    assert len(documents) == len(list(yaml.safe_load_all(PATH.read_text())))


def test_selectors_name_the_pods_they_are_meant_for(documents, servers, routers):
    for spec in (servers, routers):
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    server, router = servers["template"]["metadata"]["labels"], routers["template"]["metadata"]["labels"]
    assert documents["Service", "quire"]["spec"]["selector"] == server
    assert documents["Service", "quire-router"]["spec"]["selector"] == router
    assert documents["PodDisruptionBudget", "quire"]["spec"]["selector"]["matchLabels"] == server
    policy = documents["NetworkPolicy", "quire"]["spec"]
    assert policy["podSelector"]["matchLabels"] == server
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": router}}]
    assert {port["port"] for port in rule["ports"]} == set(ports_of(servers).values())


def test_ports_of_services_probes_and_commands_are_the_same(documents, servers, routers):
    for name, spec in (("quire", servers), ("quire-router", routers)):
        ports = ports_of(spec)
        assert {port["targetPort"] for port in documents["Service", name]["spec"]["ports"]} == set(ports)
        probes = [probe for key, probe in container_of(spec).items() if key.endswith("Probe")]
        assert probes
        assert {probe["httpGet"]["port"] for probe in probes} == {"http"}
        assert arguments_of(spec).port == ports["http"]
    served = arguments_of(servers)
    assert served.kv_events_endpoint == f"tcp://*:{ports_of(servers)['kv-events']}"
    assert served.kv_events_replay_endpoint == f"tcp://*:{ports_of(servers)['kv-replay']}"


def test_router_has_each_server_with_its_kv_events(servers, routers, monkeypatch):
    for entry in container_of(routers)["env"]:
        monkeypatch.setenv(entry["name"], "key")
    config = router_config(arguments_of(routers))
    assert (config.admin_key, config.backend_key) == ("key", "key")
    hosts = [f"quire-{number}.{servers['serviceName']}" for number in range(servers["replicas"])]
    assert [backend.url for backend in config.backends] == [f"http://{host}:8000" for host in hosts]
    sources = {name: [(one.endpoint, one.replay_endpoint) for one in found] for name, found in config.kv_events.items()}
    assert sources == {f"{host}:8000": [(f"tcp://{host}:5557", f"tcp://{host}:5558")] for host in hosts}


def test_pods_get_the_time_that_their_drain_takes(servers, routers):
    server, router = arguments_of(servers), arguments_of(routers)
    for spec, drain_s in ((servers, server.drain_grace + server.drain_timeout), (routers, router.drain_timeout)):
        assert drain_s > 0
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= drain_s + 5
