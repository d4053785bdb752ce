"""The Ray Serve application: its arguments. That, and replicas as actors, on a Ray that runs here, where it is installed."""

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from quire.base.environment import environment_with_quire
from quire.base.errors import ConfigError, UnsupportedError
from quire.cluster.ray_serve import build_app
from tests.ports import free_port

PATIENCE_S = 900.0
STREAMS = 2


@pytest.mark.parametrize(
    "args, message",
    [
        ({}, "missing required field `model`"),
        ({"model": "demo", "replicas": 2}, "unknown field `replicas`"),
        ({"model": "demo", "num_replicas": "two"}, "got `str` - at `$.num_replicas`"),
        ({"model": "demo", "num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"model": "demo", "num_replicas": 1, "autoscaling": {"max_replicas": 2}}, "no effect with autoscaling"),
        ({"model": "demo", "autoscaling": {"max_replicas": 2, "min_replicas": 3}}, "autoscaling: min_replicas"),
        ({"model": "demo", "autoscaling": {"max_replicas": 2, "initial_replicas": 3}}, "autoscaling.initial_replicas"),
        ({"model": "demo", "drain_timeout_s": 0}, "drain_timeout_s must be a positive number of seconds, got 0"),
        ({"model": "demo", "options": {"max-model-length": 5}}, "no option of `quire serve`"),
        ({"model": "demo", "options": {"max-model-len": "few"}}, "max-model-len"),
        ({"model": "demo", "options": {"port": 80}}, "options: 'port' cannot be set here"),
    ],
)
def test_arguments_that_are_not_right_are_named(args, message):
    with pytest.raises(ConfigError) as error:
        build_app(args)
    assert message in str(error.value)


def test_numbers_of_the_command_line_are_texts(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"needs the package ray.*quire\[ray\]"):
        build_app({"model": "demo", "num_replicas": "2", "options": {"max-model-len": 256}})


@pytest.mark.parametrize("package", ["msgspec", "starlette.requests"])
def test_packages_that_are_missing_are_named_with_the_extra(monkeypatch, package):
    monkeypatch.delitem(sys.modules, "quire.cluster.ray_serve")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=rf"needs the package {package}, which.*quire\[ray\]"):
        importlib.import_module("quire.cluster.ray_serve")


class Client:
    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def send(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def events(self, body):
        """Yield the chunks of a stream."""
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        request = urllib.request.Request(self.url + "/v1/completions", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            for line in answer:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])


class Stream(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, client, body):
        super().__init__(daemon=True)
        self.client, self.body = client, body
        self.has_begun, self.chunks, self.error = threading.Event(), [], None
        self.start()

    def run(self):
        try:
            for chunk in self.client.events(self.body):
                self.chunks.append(chunk)
                self.has_begun.set()
        except (OSError, ValueError) as error:
            self.error = error
        self.has_begun.set()


def start_ray(ray, num_tries=4):
    """Start Ray, which gives up after 30 s on a machine that is busy."""
    options = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    for number in range(num_tries):
        try:
            ray.init(address="local", _node_ip_address="127.0.0.1", **options)
        except Exception as error:
            ray.shutdown()
            if "timed out during startup" not in str(error) or number == num_tries - 1:
                raise
        else:
            return


@pytest.fixture(scope="module")
def ray_address():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'quire[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(PATIENCE_S),
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(PATIENCE_S),
            "RAY_worker_register_timeout_seconds": str(int(PATIENCE_S)),
            "RAY_worker_niceness": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
        }.items():
            patch.setenv(name, value)
        import ray

        start_ray(ray)
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()


@pytest.fixture
def ray_port(ray_address, monkeypatch):
    from ray import serve
    from ray.serve._private import api

    monkeypatch.setattr(api, "HTTP_PROXY_TIMEOUT", PATIENCE_S)
    port = free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        yield port
    finally:
        serve.shutdown()


def engine_states():
    """Return how many replicas there are in each state; nothing while the application is deployed."""
    from ray import serve

    engine = serve.status().applications["quire"].deployments.get("engine")
    return {} if engine is None else dict(engine.replica_states)


def wait_running():
    from ray import serve

    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        found = serve.status().applications.get("quire")
        assert found is None or found.status not in ("DEPLOY_FAILED", "UNHEALTHY"), (found.message, found.deployments)
        if found is not None and found.status == "RUNNING":
            return
        time.sleep(0.2)
    raise AssertionError(f"the application does not run: {found}")


@pytest.mark.slow
def test_streams_end_whole_when_a_replica_is_removed(ray_port):
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    # A change of the policy would start the replicas again, one of min_replicas does not; until then Ray keeps both.
    options = {"max_replicas": STREAMS, "down_delay_s": 0.1, "up_delay_s": 0.0, "action_timeout_s": 0.5}
    policy = {
        "policy_function": "quire.cluster.autoscale_policy:AutoscalePolicy",
        "policy_kwargs": {**options, "output_tokens_per_s": 1e9, "prompt_tokens_per_s": 1e9},
    }
    scaling = {"min_replicas": STREAMS, "max_replicas": STREAMS, "downscale_delay_s": 0.0, "policy": policy}
    engine = {"name": "engine", "autoscaling_config": scaling}
    application = {
        "name": "quire",
        "import_path": "quire.cluster.ray_serve:build_app",
        "args": {
            "model": "demo",
            "options": {"max-model-len": 1024},
            "ray_actor_options": {"num_cpus": 0.2},
            "stats_period_s": 0.2,
        },
        "deployments": [engine, {"name": "ingress", "ray_actor_options": {"num_cpus": 0.1}}],
    }

    def deploy():
        schema = ServeDeploySchema.model_validate({"applications": [application]})
        _get_global_client().deploy_apps(schema, _blocking=False)

    deploy()
    wait_running()
    client = Client(ray_port)
    assert [one["id"] for one in client.send("/v1/models")[1]["data"]] == ["demo"]
    plain = {"model": "demo", "prompt": "One day", "max_tokens": 8, "temperature": 0}
    status, whole = client.send("/v1/completions", plain)
    assert status == 200
    assert (
        "".join(chunk["choices"][0]["text"] for chunk in client.events(plain) if chunk["choices"])
        == (whole["choices"][0]["text"])
    )
    assert client.send("/openai/deployments/demo/completions?api-version=1", {"prompt": "One", "max_tokens": 1})[0] == 200
    status, refused = client.send("/v1/files")
    assert (status, refused["error"]["code"]) == (501, "not_supported")
    status, refused = client.send("/v1/responses", {"model": "demo", "input": "Hi", "previous_response_id": "resp_1"})
    assert (status, refused["error"]["param"]) == (501, "previous_response_id")
    assert client.send("/v1/completions", {"model": "other", "prompt": "One"})[0] == 404

    long = {"model": "demo", "max_tokens": 900, "ignore_eos": True, "n": 4}
    streams = [Stream(client, {**long, "prompt": f"{number} friends went to"}) for number in range(STREAMS)]
    for stream in streams:
        assert stream.has_begun.wait(PATIENCE_S)
    scaling["min_replicas"] = 1
    deploy()
    end_s = time.monotonic() + PATIENCE_S
    while engine_states().get("RUNNING") != 1 and time.monotonic() < end_s:
        time.sleep(0.05)
    num_streaming = sum(stream.is_alive() for stream in streams)
    for stream in streams:
        stream.join(PATIENCE_S)
        assert stream.error is None
        assert stream.chunks[-1]["usage"]["completion_tokens"] == 900 * 4
    assert num_streaming > 0, "the streams were too short for this test"
    while engine_states() != {"RUNNING": 1} and time.monotonic() < end_s:
        time.sleep(0.05)
    assert engine_states() == {"RUNNING": 1}
    assert client.send("/v1/completions", plain)[1]["choices"] == whole["choices"]


def engines_of_actors():
    """Return the ids of the engines' processes that actors of Ray have started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            is_engine = b"engine_client.process" in (folder / "cmdline").read_bytes()
            if is_engine and Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"ray::EngineActor"):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def wait_until(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come to pass"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_replica_that_ray_has_started_costs_its_own_requests_when_it_ends(ray_address):
    client, options = Client(free_port()), ["--data-parallel-size", "2", "--data-parallel-backend", "ray", "--num-threads", "1"]
    command = [sys.executable, "-m", "quire", "serve", "demo", *options, "--max-model-len", "1024"]
    environment = {**environment_with_quire(), "RAY_ADDRESS": ray_address}
    with subprocess.Popen([*command, "--port", client.url.rpartition(":")[2]], env=environment) as server:
        try:
            wait_until(lambda: server.poll() is not None or is_ready(client))
            long = {"model": "demo", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
            streams = [Stream(client, {**long, "prompt": f"{number} friends went to"}) for number in range(STREAMS)]
            for stream in streams:
                assert stream.has_begun.wait(PATIENCE_S)
            first, second = engines_of_actors()
            os.kill(first, signal.SIGKILL)
            for stream in streams:
                stream.join(PATIENCE_S)
            lost, whole = sorted(streams, key=lambda stream: "error" not in stream.chunks[-1])
            assert lost.chunks[-1]["error"]["code"] == "engine_error"
            assert whole.chunks[-1]["usage"]["completion_tokens"] == 900
            wait_until(lambda: [one["engine"] for one in client.send("/health")[1]["replicas"]] == ["ready", "ready"])
            assert second in engines_of_actors()
            assert first not in engines_of_actors()
            assert client.send("/v1/completions", {"model": "demo", "prompt": "One day", "max_tokens": 8})[0] == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_S) == 0
            wait_until(lambda: not engines_of_actors())
        finally:
            server.kill()


def is_ready(client):
    try:
        return client.send("/ready")[0] == 200
    except OSError:
        return False
