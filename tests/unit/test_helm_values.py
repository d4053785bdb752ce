"""The values of the Helm chart: wrong ones are refused by name, all are described, and those of the guide work."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import jsonschema
import pytest

from tests.unit.helm_chart import (
    CHART,
    DEPLOY,
    VALUES,
    container_of,
    helm,
    needs_helm,
    of_kind,
    pod_templates,
    secret_of,
)

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

pytestmark = needs_helm


@pytest.mark.parametrize("name", ["default", "fleet", "group", "gateway", "apart"])
def test_notes_name_the_service_and_the_secret(name, tmp_path):
    chart = tmp_path / "quire"
    shutil.copytree(CHART, chart)  # links become files
    shutil.copy(CHART / "templates" / "NOTES.txt", chart / "notes")
    # `helm template` leaves the notes out, and `helm install` needs a cluster.
    shown = 'apiVersion: v1\nkind: Notes\nmetadata: {name: notes}\ntext: {{ tpl (.Files.Get "notes") . | toJson }}\n'
    (chart / "templates" / "notes.yaml").write_text(shown)
    done = helm("template", "demo", str(chart), "--show-only", "templates/notes.yaml", values=VALUES[name])
    assert done.returncode == 0, done.stderr
    text = yaml.safe_load(done.stdout)["text"]
    services = {one["metadata"]["name"] for one in of_kind(name, "Service") if one["spec"].get("clusterIP") != "None"}
    assert set(re.findall(r"service/(\S+)", text)) == services
    key = secret_of(pod_templates(name)["engine"], "QUIRE_API_KEY")
    assert set(re.findall(r"get secret (\S+)", text)) == (set() if key is None else {key[0]})
    assert ("There is no API key" in text) == (key is None)


def test_values_of_the_guide_are_accepted():
    page = (DEPLOY.parent / "docs" / "guides" / "kubernetes.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    given = [block for block in blocks if "rules" not in block]  # that one is for prometheus-adapter
    assert len(given) >= 6
    for values in given:
        done = helm("template", "quire", str(CHART), values=values)
        assert done.returncode == 0, done.stderr


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"engine": {"replica": 2}}, ["engine", "replica", "not allowed"]),
        ({"engin": {}}, ["engin", "not allowed"]),
        ({"router": {"drain": {"timeout": 3}}}, ["router.drain", "timeout", "not allowed"]),
        ({"engine": {"port": 70000}}, ["engine.port", "65535"]),
        ({"engine": {"replicas": "two"}}, ["engine.replicas", "integer", "string"]),
        ({"engine": {"options": {"--max-model-len": 8}}}, ["engine.options", "--max-model-len"]),
        ({"model": {"storage": {"type": "hostPath"}}}, ["model.storage.type", "claimPerPod"]),
        ({"model": {"storage": {"type": "existingClaim"}}}, ["model.storage.existingClaim must name a claim"]),
        ({"model": {"storage": {"existingClaim": "a"}}}, ["model.storage.type is emptyDir"]),
        ({"model": {"storage": {"type": "claimPerPod"}}}, ["model.storage.size must be set"]),
        (
            {"autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True}}},
            ["hpa.enabled", "keda.enabled", "at most one"],
        ),
        ({"autoscaling": {"minReplicas": 5}}, ["autoscaling.minReplicas", "got 5 and 4"]),
        ({"apiKey": {"existingSecret": "a", "value": "b"}}, ["apiKey.existingSecret and apiKey.value"]),
        ({"leaderWorkerSet": {"enabled": True}, "engine": {"gpu": {"count": 1}}}, ["engine.gpu.count is 1", "CPUs only"]),
        ({"leaderWorkerSet": {"enabled": True}, "engine": {"dataVolume": {"enabled": True}}}, ["engine.dataVolume.enabled"]),
        ({"inferencePool": {"enabled": True, "create": True}}, ["inferencePool.endpointPicker.name"]),
        ({"prefill": {"enabled": True}}, ["prefill.enabled needs apiKey"]),
        ({"prefill": {"enabled": True}, "router": {"enabled": False}}, ["prefill.enabled needs router.enabled"]),
        ({"prefill": {"enabled": True}, "apiKey": {"value": "a"}}, ["prefill.transferSecret.existingSecret"]),
        (
            {
                "prefill": {"enabled": True, "transferSecret": {"existingSecret": "a"}},
                "apiKey": {"value": "a"},
                "engine": {"gpu": {"count": 1}},
            },
            ["prefill.enabled is not supported with", "engine.gpu.count"],
        ),
        ({"prefill": {"port": 0}}, ["prefill.port"]),
        (
            {
                "prefill": {"enabled": True, "transferSecret": {"existingSecret": "a"}, "options": {"role": "both"}},
                "apiKey": {"value": "a"},
            },
            ["prefill.options.role is set by the chart", "prefill"],
        ),
        ({"inferencePool": {"create": True}}, ["inferencePool.create needs inferencePool.enabled"]),
        ({"engine": {"options": {"port": 3}}}, ["engine.options.port", "engine.port"]),
        ({"engine": {"options": {"api-key": "k"}}}, ["engine.options.api-key", "apiKey"]),
        ({"router": {"options": {"backend": ["http://a:1"]}}}, ["router.options.backend", "engine.replicas"]),
        (
            {"leaderWorkerSet": {"enabled": True}, "engine": {"options": {"tensor-parallel-size": 3}}},
            ["engine.options.tensor-parallel-size", "leaderWorkerSet.size"],
        ),
        (
            {"engine": {"kvEvents": {"enabled": True}, "options": {"data-parallel-size": 2}}},
            ["kvEvents", "data-parallel-size 1"],
        ),
        ({"engine": {"kvEvents": {"enabled": True}}, "router": {"options": {"policy": "round-robin"}}}, ["kvEvents", "prefix"]),
    ],
    ids=lambda one: one[0][:40] if isinstance(one, list) else None,
)
def test_wrong_value_is_refused_with_its_name(values, words):
    done = helm("template", "demo", str(CHART), values=values)
    assert done.returncode != 0
    assert all(word in done.stderr for word in words), done.stderr


def test_options_that_the_chart_sets_are_refused_in_the_map_of_options():
    for role, key in (("engine", "engine"), ("router", "router")):
        given = [one for one in container_of(pod_templates("default")[role])["args"] if one.startswith("--")]
        for option in set(given):
            done = helm("template", "demo", str(CHART), values={key: {"options": {option[2:]: "1"}}})
            assert f"{key}.options.{option[2:]} is set by the chart" in done.stderr


def leaves(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> set[str]:
    """Return the paths of all values, down to the maps whose fields are open."""
    found = set()
    for key, value in values.items():
        one = schema["properties"][key]
        if "properties" in one:
            found |= leaves(value, one, f"{path}{key}.")
        else:
            found.add(path + key)
    return found


def test_schema_has_every_value_and_refuses_all_others():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(values, schema)

    def compare(one, known, path):
        assert known["additionalProperties"] is False, path
        assert set(one) == set(known["properties"]) - ({"global"} if path == "" else set()), path
        for key, value in known["properties"].items():
            if "properties" in value and key in one:
                compare(one[key], value, f"{path}{key}.") if value["additionalProperties"] is False else None

    # Maps of resources have fields of their own that need not be given.
    for role in ("engine", "router"):
        del schema["properties"][role]["properties"]["resources"]["properties"]
    compare(values, schema, "")
    assert len(leaves(values, schema)) > 80


def test_every_value_has_a_comment():
    lines = (CHART / "values.yaml").read_text().splitlines()
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    paths, stack, commented = leaves(values, schema), [], set()
    for before, line in zip(["", *lines], lines, strict=False):
        text = line.strip()
        if not text or text.startswith(("#", "- ")):
            continue
        depth = (len(line) - len(text)) // 2
        stack = [*stack[:depth], text.partition(":")[0]]
        if before.strip().startswith("#"):
            commented.add(".".join(stack))
    parents = {"engine.resources", "router.resources"}
    missing = {path for path in paths if path not in commented and path.rpartition(".")[0] not in parents}
    assert not missing
