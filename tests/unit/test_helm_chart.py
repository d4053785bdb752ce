"""The Helm chart: rendered with several values, each object is valid, fits the others, and has options and routes of quire."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import pytest

from quire.cli.main import make_parser
from quire.cli.router import router_config
from quire.cli.serve import server_config
from quire.router.autoscale_targets import PATH
from quire.serving.http.system import make_endpoints
from tests.unit.helm_chart import (
    CHART,
    MAY_SKIP,
    NAMESPACE,
    PEER,
    VALUES,
    container_of,
    each_render,
    helm,
    needs_helm,
    of_kind,
    parsed,
    pod_templates,
    port_of,
    rendered,
    secret_of,
    selected,
)
from tests.unit.kubernetes_schemas import SCHEMAS

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

KUBERNETES = ("1.27", "1.34")
"""Versions of Kubernetes whose schemas the objects must fit: the chart's oldest, and a new one."""

pytestmark = needs_helm


@pytest.mark.one_in(3)
@each_render
def test_chart_passes_lint(name):
    done = helm("lint", "--strict", str(CHART), values=VALUES[name])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.one_in(3)
@each_render
def test_objects_have_names_of_their_own_and_labels_of_the_release(name):
    names = [(one["kind"], one["metadata"]["name"]) for one in rendered(name)]
    assert len(names) == len(set(names))
    for one in rendered(name):
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"
        assert "namespace" not in one["metadata"]


@pytest.mark.parametrize("version", KUBERNETES)
@each_render
def test_objects_of_kubernetes_fit_its_schemas(name, version):
    if MAY_SKIP:
        pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    import kubernetes_validate

    for one in rendered(name):
        if one["kind"] not in SCHEMAS:
            kubernetes_validate.validate(one, version, strict=True)
    for template in pod_templates(name).values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


@each_render
def test_objects_of_other_kinds_fit_their_schemas(name):
    core = ("/", "v1", "apps/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1")
    for one in rendered(name):
        assert (one["apiVersion"] in core) != (one["kind"] in SCHEMAS)
        if one["kind"] in SCHEMAS:
            jsonschema.validate(one, SCHEMAS[one["kind"]])


def test_every_kind_of_the_chart_is_rendered_here():
    kinds = {one["kind"] for name in VALUES for one in rendered(name)}
    assert kinds == {
        *("ConfigMap", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget", "Secret", "Service"),
        *("ServiceAccount", "StatefulSet", *SCHEMAS),
    }


@pytest.mark.one_in(3)
@each_render
def test_arguments_are_options_of_quire(name):
    for role, template in pod_templates(name).items():
        args = parsed(template)
        assert (args.host, args.port) == ("0.0.0.0", port_of(template, "http"))
        if role == "router":
            assert router_config(args).backends
        else:
            assert server_config(args).port == args.port


def test_values_of_options_arrive_as_they_were_given():
    args = parsed(pod_templates("fleet")["engine"])
    assert (args.model, args.served_model_name) == ("Qwen/Qwen3-0.6B", ["qwen", "small"])
    assert (args.max_model_len, args.kv_cache_memory_bytes, args.gpu_memory_utilization) == (8192, 17179869184, 0.85)
    assert (args.strict, args.page, args.goodput, args.quantization) == (True, False, ["ttft:500", "tpot:50"], "int8")
    config = container_of(pod_templates("fleet")["engine"])["args"]
    assert json.loads(config[config.index("--speculative-config") + 1]) == {"method": "ngram", "num_speculative_tokens": 6}
    router = router_config(parsed(pod_templates("fleet")["router"]))
    assert router.aliases == {"fast": "qwen", "cheap": "small"}
    assert (router.policy, router.retry_ratio) == ("least-loaded", 0.1)


@pytest.mark.parametrize("name", [name for name in VALUES if VALUES[name].get("router", {}).get("enabled", True)])
def test_router_has_the_address_of_every_engine(name):
    owner, *prefill = of_kind(name, "StatefulSet") or of_kind(name, "LeaderWorkerSet")
    set_name = owner["metadata"]["name"]
    # Pods of a StatefulSet have addresses below its serviceName, leaders of a LeaderWorkerSet below the name of the set.
    domain = owner["spec"].get("serviceName", set_name)
    scalers = of_kind(name, "HorizontalPodAutoscaler") + of_kind(name, "ScaledObject")
    most = owner["spec"].get("replicas")
    if scalers:
        assert most is None, "an upgrade would reset what the autoscaler has set"
        most = scalers[0]["spec"].get("maxReplicas") or scalers[0]["spec"]["maxReplicaCount"]
    port = port_of(pod_templates(name)["engine"], "http")
    wanted = [f"http://{set_name}-{index}.{domain}:{port}" for index in range(most)]
    for one in prefill:
        name_of_set, count = one["metadata"]["name"], one["spec"]["replicas"]
        wanted += [f"http://{name_of_set}-{index}.{one['spec']['serviceName']}:{port}" for index in range(count)]
    assert [one.url for one in router_config(parsed(pod_templates(name)["router"])).backends] == wanted
    headless = {
        one["metadata"]["name"]: one["spec"] for one in of_kind(name, "Service") if one["spec"].get("clusterIP") == "None"
    }
    if owner["kind"] == "StatefulSet":
        assert headless[domain]["publishNotReadyAddresses"] is True
    else:  # its controller makes that service unless there is one of the name
        assert domain not in {one["metadata"]["name"] for one in of_kind(name, "Service")}


@each_render
def test_services_lead_to_ports_of_pods_that_answer_clients(name):
    front = "router" if "router" in pod_templates(name) else "engine"
    for service in of_kind(name, "Service"):
        is_headless = service["spec"].get("clusterIP") == "None"
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        assert selected(name, service["spec"]["selector"]) == {component if is_headless else front}
        for port in service["spec"]["ports"]:
            for role in selected(name, service["spec"]["selector"]):
                target = port_of(pod_templates(name)[role], port["targetPort"])
                assert not is_headless or port["port"] == target
    assert len(of_kind(name, "Service")) == 2 + ("prefill" in pod_templates(name))


@each_render
def test_selectors_take_the_pods_that_they_mean(name):
    templates = pod_templates(name)
    engines = {role for role in templates if role in ("engine", "worker")}
    for one in of_kind(name, "StatefulSet") + of_kind(name, "Deployment"):
        role = one["metadata"]["labels"]["app.kubernetes.io/component"]
        assert selected(name, one["spec"]["selector"]["matchLabels"]) == {role}
    for one in of_kind(name, "PodDisruptionBudget"):
        role = one["metadata"]["labels"]["app.kubernetes.io/component"]
        assert selected(name, one["spec"]["selector"]["matchLabels"]) == (engines if role == "engine" else {role})
    for one in of_kind(name, "ServiceMonitor"):
        labels = one["spec"]["selector"]["matchLabels"].items()
        (service,) = [service for service in of_kind(name, "Service") if labels <= service["metadata"]["labels"].items()]
        assert {end["port"] for end in one["spec"]["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    for one in of_kind(name, "InferencePool"):
        assert selected(name, one["spec"]["selector"]["matchLabels"]) == {"engine"}
        assert one["spec"]["targetPorts"] == [{"number": port_of(templates["engine"], "http")}]


@each_render
def test_autoscaler_scales_the_engines(name):
    for one in of_kind(name, "HorizontalPodAutoscaler") + of_kind(name, "ScaledObject"):
        target = one["spec"]["scaleTargetRef"]
        (owner,) = of_kind(name, target["kind"])
        assert (target["apiVersion"], target["name"]) == (owner["apiVersion"], owner["metadata"]["name"])


def test_metrics_that_scale_the_engines_exist():
    from tests.unit.serving.metrics.promql import Parser
    from tests.unit.serving.metrics.test_deploy import exported

    (keda,) = of_kind("keda", "ScaledObject")
    # The labels that the Prometheus operator adds to what a ServiceMonitor scrapes.
    known = {metric: (labels | {"namespace", "service"}, counts) for metric, (labels, counts) in exported().items()}
    query = Parser(keda["spec"]["triggers"][0]["metadata"]["query"], known)
    assert query.parse().labels == set()
    services = {one["metadata"]["name"] for one in of_kind("keda", "Service")}
    for _, matchers in query.selectors:
        found = {matcher[0]: matcher[-1] for matcher in matchers}
        assert found["namespace"] == NAMESPACE
        assert found["service"] in services
    (hpa,) = of_kind("hpa", "HorizontalPodAutoscaler")
    for metric in hpa["spec"]["metrics"]:
        assert metric["pods"]["metric"]["name"].replace("quire_", "quire:", 1) in exported()


def test_keda_asks_the_autoscaler_that_runs_beside_the_router():
    (keda,) = of_kind("autoscaler", "ScaledObject")
    ((trigger,), router) = keda["spec"]["triggers"], pod_templates("autoscaler")["router"]
    container = router["spec"]["containers"][1]
    args = make_parser().parse_args(container["args"])
    assert container["command"] == ["quire"]
    assert args.router == f"http://127.0.0.1:{port_of(router, 'http')}"
    assert args.serve == "0.0.0.0:9095"
    assert (args.min_replicas, args.max_replicas) == (keda["spec"]["minReplicaCount"], keda["spec"]["maxReplicaCount"])
    assert (args.prompt_tokens_per_s, args.ttft) == (8000.0, 1.0)
    assert {one["name"] for one in container["env"]} >= {"QUIRE_ROUTER_ADMIN_KEY", "QUIRE_ROUTER_BACKEND_KEY"}
    (service,) = [one for one in of_kind("autoscaler", "Service") if len(one["spec"]["ports"]) == 2]
    address = f"http://{service['metadata']['name']}.{NAMESPACE}:9095{PATH}"
    assert trigger == {
        "type": "metrics-api",
        "metadata": {"url": address, "valueLocation": "serve", "targetValue": "1"},
    }
    assert {"name": "targets", "containerPort": 9095} in container["ports"]
    without = {"autoscaling": {"keda": {"enabled": True, "autoscaler": {"enabled": True}}}}
    refused = helm("template", "demo", str(CHART), values=without)
    assert refused.returncode != 0
    assert "router.adminKey.existingSecret" in refused.stderr


@each_render
def test_probes_ask_routes_of_the_server(name):
    routes = {one.path for one in make_endpoints((), is_metrics_enabled=True)}
    for role, template in pod_templates(name).items():
        container = container_of(template)
        probes = {probe: container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
        assert all(one["port"] == "http" and one["path"] in routes for one in probes.values())
        paths = [probes[probe]["path"] for probe in probes]
        # A worker of a group has /health only; a router must start before an engine is there.
        wanted = {
            "engine": ["/ready", "/ready", "/health"],
            "prefill": ["/ready", "/ready", "/health"],
            "worker": ["/health"] * 3,
            "router": ["/health", "/ready", "/health"],
        }
        assert paths == wanted[role]


def test_probes_ask_routes_of_the_router():
    from tests.unit.router.fake_backend import routing

    container = container_of(pod_templates("default")["router"])
    paths = {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}

    async def ask():
        async with routing(waits=False) as router:
            return {path: (await router.client.get(path)).status_code for path in paths}

    assert asyncio.run(ask()) == {"/health": 200, "/ready": 503}, "it runs without an engine, and takes no requests"


@pytest.mark.parametrize("name", ["default", "gpu", "group"])
def test_engine_may_load_and_restart_for_as_long_as_it_is_given(name):
    template = pod_templates(name)["engine"]
    args, container = parsed(template), container_of(template)
    for probe in ("startupProbe", "livenessProbe"):  # the server restarts its engine itself, and /health fails meanwhile
        assert container[probe]["periodSeconds"] * container[probe]["failureThreshold"] >= args.start_timeout


@pytest.mark.one_in(3)
@each_render
def test_pods_have_time_to_drain(name):
    for role, template in pod_templates(name).items():
        args, grace_s = parsed(template), template["spec"]["terminationGracePeriodSeconds"]
        if role == "router":
            (_, slept_s) = container_of(template)["lifecycle"]["preStop"]["exec"]["command"]
            assert grace_s >= float(slept_s) + args.drain_timeout + 5
        else:
            assert args.drain_grace > 0
            assert grace_s >= args.drain_grace + args.drain_timeout + 5


@each_render
def test_pods_are_locked_down_and_can_write_what_quire_writes(name):
    for role, template in pod_templates(name).items():
        spec, container = template["spec"], container_of(template)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        writable = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
        assert "/tmp" in writable
        values = {one["name"]: one.get("value") for one in container["env"]}
        folders = ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR") if role != "router" else ("HOME",)
        for variable in folders:
            assert "/" + values[variable].split("/")[1] in writable, variable


@each_render
def test_mounts_are_volumes_or_claims_of_the_pod(name):
    claims = {
        one["metadata"]["name"]
        for owner in of_kind(name, "StatefulSet")
        for one in owner["spec"].get("volumeClaimTemplates", ())
    }
    for role, template in pod_templates(name).items():
        volumes = {one["name"] for one in template["spec"]["volumes"]}
        containers = template["spec"]["containers"] + template["spec"].get("initContainers", [])
        mounts = {mount["name"] for one in containers for mount in one["volumeMounts"]}
        assert mounts == volumes | (claims if role in ("engine", "prefill") else set())
        assert not volumes & claims


def test_pods_of_a_group_run_one_command_with_a_rank_each():
    (group,) = of_kind("group", "LeaderWorkerSet")
    leader, worker = pod_templates("group")["engine"], pod_templates("group")["worker"]
    assert container_of(leader)["args"] == container_of(worker)["args"]
    assert parsed(leader).tensor_parallel_size == group["spec"]["leaderWorkerTemplate"]["size"] == 4
    ports = {one["name"]: one["containerPort"] for one in container_of(leader)["ports"]}
    assert {"name": "MASTER_PORT", "value": str(ports["rendezvous"])} in container_of(leader)["env"]


def test_gpus_are_limits_and_the_model_is_kept_on_claims():
    (owner,) = of_kind("gpu", "StatefulSet")
    template = pod_templates("gpu")["engine"]
    assert container_of(template)["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 2}
    assert container_of(template)["image"] == "quire:0.1.0-cuda"
    sizes = {one["metadata"]["name"]: one["spec"]["resources"]["requests"] for one in owner["spec"]["volumeClaimTemplates"]}
    assert sizes == {"models": {"storage": "200Gi"}, "data": {"storage": "10Gi"}}
    assert str(parsed(template).data_dir) == "/data"


@each_render
def test_key_is_in_a_secret_and_reaches_whoever_needs_it(name):
    key = VALUES[name].get("apiKey")
    secret = None if key is None else ("quire-key" if "existingSecret" in key else "demo-quire-api-key", "api-key")
    for role, template in pod_templates(name).items():
        assert secret_of(template, "QUIRE_ROUTER_BACKEND_KEY" if role == "router" else "QUIRE_API_KEY") == secret
    for one in of_kind(name, "ServiceMonitor"):
        credentials = [end.get("authorization", {}).get("credentials") for end in one["spec"]["endpoints"]]
        has_key = secret is not None and not one["metadata"]["name"].endswith("-router")
        assert credentials == [{"name": secret[0], "key": secret[1]} if has_key else None]
    made = {(one["metadata"]["name"], entry) for one in of_kind(name, "Secret") for entry in one["stringData"]}
    assert made == ({secret} if key and "value" in key else set())
    if key and "value" in key:
        others = [one for one in rendered(name) if one["kind"] != "Secret"]
        assert key["value"] not in json.dumps(others)


def test_engines_are_reached_from_the_router_only_when_the_network_policy_is_on():
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind("closed", "NetworkPolicy")}
    engine, router = policies["demo-quire-engine"], policies["demo-quire-router"]
    (rule,) = engine["ingress"]
    assert selected("closed", engine["podSelector"]["matchLabels"]) == {"engine"}
    assert selected("closed", rule["from"][0]["podSelector"]["matchLabels"]) == {"router"}
    assert rule["from"][1:] == [PEER]
    assert rule["ports"] == [{"protocol": "TCP", "port": port} for port in ("http", "kv-events", "kv-replay")]
    assert router["ingress"] == [{"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": "http"}]}]


def test_clients_do_not_reach_kv_events_when_they_reach_the_engines():
    (policy,) = [one["spec"] for one in of_kind("picker", "NetworkPolicy")]
    clients, peers = policy["ingress"]
    assert clients == {"ports": [{"protocol": "TCP", "port": "http"}]}
    assert peers == {"from": [PEER], "ports": [{"protocol": "TCP", "port": port} for port in ("kv-events", "kv-replay")]}


def test_router_follows_the_kv_events_that_engines_publish():
    template = pod_templates("closed")["engine"]
    args = parsed(template)
    assert args.kv_events_endpoint == f"tcp://*:{port_of(template, 'kv-events')}" == "tcp://*:6001"
    assert args.kv_events_replay_endpoint == f"tcp://*:{port_of(template, 'kv-replay')}" == "tcp://*:6002"
    sources = router_config(parsed(pod_templates("closed")["router"])).kv_events
    assert {name: (one.endpoint, one.replay_endpoint) for name, (one,) in sources.items()} == {
        f"{host}:9000": (f"tcp://{host}:6001", f"tcp://{host}:6002")
        for host in (f"demo-quire-engine-{number}.demo-quire-engine" for number in range(2))
    }
    assert "kv-events" not in json.dumps(pod_templates("default"))


def test_prefill_servers_and_engines_have_the_roles_that_they_need():
    templates = pod_templates("apart")
    engine, prefill = parsed(templates["engine"]), parsed(templates["prefill"])
    assert (engine.role, prefill.role) == ("decode", "prefill")
    assert engine.prefill_urls is None, "the router tells it"
    assert prefill.prefill_listen == f"tcp://0.0.0.0:{port_of(templates['prefill'], 'kv-transfer')}" == "tcp://0.0.0.0:7000"
    assert (engine.kv_host_bytes, prefill.kv_host_bytes) == (1 << 30, 4 << 30)
    assert (engine.num_threads, prefill.num_threads) == (4, 4)
    assert (engine.kv_events_endpoint is None, prefill.kv_events_endpoint is None) == (False, True)
    assert container_of(templates["prefill"])["resources"]["requests"] == {"cpu": "16"}
    assert templates["prefill"]["spec"]["nodeSelector"] == {"disk": "fast"}
    for role, args in (("engine", engine), ("prefill", prefill)):
        (copies,) = templates[role]["spec"]["initContainers"]  # with fsGroup, Kubernetes lets a group read the Secret's file
        *_, source, target = copies["command"]
        assert copies["command"][:3] == ["install", "-m", "600"]
        assert (source, target) == ("/secret/transfer-secret", str(args.transfer_secret_file))
        assert {"name": "transfer-secret", "secret": {"secretName": "quire-transfer"}} in templates[role]["spec"]["volumes"]
    assert "initContainers" not in pod_templates("default")["engine"]["spec"]


def test_pages_of_prefill_servers_are_for_engines_when_the_network_policy_is_on():
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind("apart", "NetworkPolicy")}
    policy = policies["demo-quire-prefill"]
    assert selected("apart", policy["podSelector"]["matchLabels"]) == {"prefill"}
    found = [(selected("apart", rule["from"][0]["podSelector"]["matchLabels"]), rule["ports"]) for rule in policy["ingress"]]
    assert found == [
        ({"router"}, [{"protocol": "TCP", "port": "http"}]),
        ({"engine"}, [{"protocol": "TCP", "port": "kv-transfer"}]),
    ]


def test_ranks_of_a_group_reach_each_other_when_the_network_policy_is_on():
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind("group", "NetworkPolicy")}
    engine = policies["demo-quire-engine"]
    assert selected("group", engine["podSelector"]["matchLabels"]) == {"engine", "worker"}
    from_router, from_ranks = engine["ingress"]
    assert selected("group", from_router["from"][0]["podSelector"]["matchLabels"]) == {"router"}
    assert "ports" not in from_ranks
    assert selected("group", from_ranks["from"][0]["podSelector"]["matchLabels"]) == {"engine", "worker"}


def test_clients_reach_the_engines_when_there_is_no_router():
    (policy,) = of_kind("gateway", "NetworkPolicy")
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": "http"}]}]
    (policy,) = of_kind("direct", "NetworkPolicy")
    assert policy["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": "http"}]}]


def test_engines_have_what_an_endpoint_picker_reads():
    template = pod_templates("gateway")["engine"]
    assert template["metadata"]["labels"]["llm-d.ai/role"] == "prefill-decode"
    assert parsed(template).metrics_names == "both"
    assert "llm-d.ai/role" not in pod_templates("default")["engine"]["metadata"]["labels"]


def test_alerts_and_dashboard_are_the_files_of_the_chart():
    (rule,) = of_kind("fleet", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "prometheus-alerts.yaml").read_text())
    (board,) = of_kind("fleet", "ConfigMap")
    assert json.loads(board["data"]["quire.json"]) == json.loads((CHART / "files" / "grafana-dashboard.json").read_text())
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
