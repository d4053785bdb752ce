"""The LeaderWorkerSet manifest: its required fields, and that all pods run the same command."""

from pathlib import Path

import pytest

from quire.parallel.rendezvous import DEFAULT_PORT

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

PATH = Path(__file__).resolve().parents[2] / "deploy" / "leaderworkerset.yaml"


@pytest.fixture
def documents():
    return list(yaml.safe_load_all(PATH.read_text()))


def _container(template):
    (container,) = template["spec"]["containers"]
    return container


def test_required_fields_of_a_leader_worker_set(documents):
    group = documents[0]
    assert (group["apiVersion"], group["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    assert group["metadata"]["name"]
    assert group["spec"]["replicas"] >= 1
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    for name in ("leaderTemplate", "workerTemplate"):
        container = _container(template[name])
        assert container["image"]
        assert container["resources"]["requests"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template[name]["spec"]["volumes"]}


def test_pods_are_as_many_as_ranks_and_run_one_command(documents):
    template = documents[0]["spec"]["leaderWorkerTemplate"]
    leader, worker = _container(template["leaderTemplate"]), _container(template["workerTemplate"])
    assert leader["command"] == worker["command"]
    assert leader["env"] == worker["env"]
    command = leader["command"]
    assert command[command.index("--tensor-parallel-size") + 1] == str(template["size"])
    assert {"name": "MASTER_PORT", "value": str(DEFAULT_PORT)} in leader["env"]


def test_options_of_the_command_are_those_of_quire_serve(documents):
    from quire.cli.main import make_parser

    args = make_parser().parse_args(_container(documents[0]["spec"]["leaderWorkerTemplate"]["leaderTemplate"])["command"][1:])
    assert args.tensor_parallel_size == 2


def test_all_pods_are_probed_and_only_the_leader_gets_requests(documents):
    group, service = documents
    template = group["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        assert _container(template[name])["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
        assert {"name": "http", "containerPort": 8000} in _container(template[name])["ports"]
    selector = service["spec"]["selector"]
    assert selector.items() <= template["leaderTemplate"]["metadata"]["labels"].items()
    assert not selector.items() <= template["workerTemplate"]["metadata"]["labels"].items()


def test_service_leaves_the_name_of_the_set_to_the_headless_service_of_its_controller(documents):
    # LWS_LEADER_ADDRESS is <set>-0.<set>.<namespace>: it resolves only if the Service <set> is the headless one, which the
    # controller makes unless there is a Service of that name.
    group, service = documents
    assert service["metadata"]["name"] != group["metadata"]["name"]
