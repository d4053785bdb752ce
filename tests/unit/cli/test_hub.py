"""`quire pull`, `list` and `rm` with the hub's own library against a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.ranks import wait_until
from tests.unit.model.hub_server import COMMITS, running_hub

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 300_000, "README.md": b"no", "pytorch_model.bin": b"p"}


@pytest.fixture
def hub():
    with running_hub(dict(FILES)) as (hub, address):
        hub.address = address
        yield hub


@pytest.fixture
def quire(hub, tmp_path):
    """Return what runs the command in a process of its own: the hub's library reads its settings once."""

    settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    command = [sys.executable, "-m", "quire"]

    def run(*words, **more):
        environment = {**plain, **settings, **more}
        return subprocess.run([*command, *words], capture_output=True, text=True, timeout=120, env=environment)

    def start(*words):
        return subprocess.Popen([*command, *words], stderr=subprocess.DEVNULL, env={**plain, **settings})

    run.start = start
    return run


def test_pulled_model_is_listed_and_removed(quire, hub, tmp_path):
    pulled = quire("pull", "org/name")
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.startswith("org/name: 2 files, 293.0 KiB, in ")
    assert "model.safetensors" in pulled.stderr or "100%" in pulled.stderr  # the progress
    assert not any("README" in path or ".bin" in path for _, path, _ in hub.requests if "resolve" in path)
    listed = json.loads(quire("list", "--json").stdout)
    assert [(model["name"], model["revisions"], model["is_complete"]) for model in listed] == [
        ("org/name", [f"main ({COMMITS['main'][:8]})"], True)
    ]
    assert listed[0]["num_bytes"] >= 300_000
    removed = quire("rm", "org/name")
    assert removed.stdout.startswith("removed org/name, 293.")
    assert json.loads(quire("list", "--json").stdout) == []
    again = quire("rm", "org/nam")
    assert (again.returncode, "is not in the cache" in again.stderr) == (1, True)


@pytest.mark.slow
def test_interrupted_download_goes_on_with_the_files_that_are_missing(quire, hub, tmp_path):
    del hub.files["model.safetensors"]
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    hub.files |= {shards[0]: b"w" * 1000, shards[1]: b"w" * 300_000}
    hub.stalls_at = 100_000
    pulling = quire.start("pull", "org/name")
    try:
        assert wait_until(lambda: any(tmp_path.glob(f"home/hub/*/snapshots/*/{shards[0]}")))
    finally:
        pulling.kill()
        pulling.wait()
    hub.stalls_at = None
    assert "incomplete: `quire pull` goes on with it" in quire("list").stdout
    begin = len(hub.requests)
    assert quire("pull", "org/name").returncode == 0
    got = [path.rpartition("/")[2] for method, path, _ in hub.requests[begin:] if method == "GET" and "/resolve/" in path]
    assert (shards[0] in got, shards[1] in got) == (False, True)
    assert json.loads(quire("list", "--json").stdout)[0]["is_complete"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("left_out", ["model.safetensors", "model-00002-of-00002.safetensors"])
def test_model_without_all_its_weights_is_incomplete(quire, hub, tmp_path, left_out):
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    if left_out in shards:
        del hub.files["model.safetensors"]
        hub.files |= dict.fromkeys(shards, b"w")
        hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}).encode()
    assert quire("pull", "org/name").returncode == 0
    assert json.loads(quire("list", "--json").stdout)[0]["is_complete"]
    (link,) = tmp_path.glob(f"home/hub/*/snapshots/*/{left_out}")
    link.unlink()
    assert not json.loads(quire("list", "--json").stdout)[0]["is_complete"]


@pytest.mark.slow
def test_revisions_are_pulled_and_removed_one_by_one(quire, hub):
    assert quire("pull", "org/name").returncode == 0
    hub.files["config.json"] = b'{"v": 1}'
    assert quire("pull", "org/name", "--revision", "v1").returncode == 0
    assert len(json.loads(quire("list", "--json").stdout)[0]["revisions"]) == 2
    unknown = quire("rm", "org/name", "--revision", "v2")
    assert unknown.returncode == 1
    assert "revision 'v2' of org/name is not in the cache; there are main (" in unknown.stderr
    assert quire("rm", "org/name", "--revision", "v1").stdout.startswith("removed org/name at v1, 8 B")
    assert json.loads(quire("list", "--json").stdout)[0]["revisions"] == [f"main ({COMMITS['main'][:8]})"]


@pytest.mark.slow
def test_token_is_sent(quire, hub):
    hub.token = "secret"
    refused = quire("pull", "org/name")
    assert (refused.returncode, "no access to" in refused.stderr) == (1, True)
    for given in ({"QUIRE_PULL_TOKEN": "secret"}, {"HF_TOKEN": "secret"}):
        assert quire("pull", "org/name", **given).returncode == 0
        quire("rm", "org/name")
    assert quire("pull", "org/name", "--token", "secret").returncode == 0


def test_model_of_this_machine_is_not_pulled(quire, tmp_path):
    for name in ("demo", str(tmp_path)):
        refused = quire("pull", name)
        assert (refused.returncode, "is on this machine already" in refused.stderr) == (1, True)


@pytest.mark.slow
def test_name_that_is_nearly_there_is_suggested(quire):
    assert quire("pull", "org/name").returncode == 0
    refused = quire("rm", "org/nme")
    assert "'org/nme' is not in the cache of the Hugging Face hub (did you mean org/name?)" in refused.stderr
    assert "give owner/name" in quire("rm", "../../x").stderr or "such as owner/name" in quire("rm", "../../x").stderr
