"""The container files: what they pin, install and run as."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from quire.cli.main import make_parser
from tests.unit.helm_chart import (
    CHART,
    DEPLOY,
)

yaml = pytest.importorskip("yaml", reason="needs PyYAML")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_container_file_is_pinned_and_not_root(name):
    path = DEPLOY / "container" / f"{name}.Dockerfile"
    lines = path.read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert len(bases) == 2
    assert all(base.partition(":")[2].count(".") == 2 for base in bases), "a full version is pinned"
    user = next(line.split()[1] for line in lines if line.startswith("USER "))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert user == f"{values['podSecurityContext']['runAsUser']}:{values['podSecurityContext']['runAsGroup']}"
    command = json.loads(next(line for line in lines if line.startswith("CMD ")).removeprefix("CMD "))
    assert make_parser().parse_args(command).host == "0.0.0.0"
    ignored = path.with_name(path.name + ".dockerignore").read_text().splitlines()
    for kept in (line[1:] for line in ignored if line.startswith("!")):
        assert (DEPLOY.parent / kept).exists(), kept


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_container_file_installs_extras_that_exist_and_the_torch_of_the_readme(name):
    text = (DEPLOY / "container" / f"{name}.Dockerfile").read_text()
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert {"server", *(["gpu"] if name == "cuda" else [])} <= set(extras.split(",")) <= set(project["optional-dependencies"])
    (pinned,) = re.findall(r"torch==([\w.]+)", text)
    assert f"torch=={pinned} " in (DEPLOY.parent / "README.md").read_text()
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert version == project["version"]
