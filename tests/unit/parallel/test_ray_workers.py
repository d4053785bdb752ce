"""Workers as actors of Ray: with a module that stands in for it and starts processes, and with Ray where it is installed."""

import importlib.util
import pickle
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from quire.base.environment import environment_with_quire
from quire.base.errors import UnsupportedError, WorkerError
from quire.kernels.native import load_native
from quire.parallel import ray_workers
from quire.parallel.ray_workers import start_ray_workers
from quire.parallel.worker_group import LaunchOptions
from tests.unit.parallel.test_launch import step

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

WORKER = "tests.parallel_worker"
ACTOR = "import pickle, sys; cls, args = pickle.load(sys.stdin.buffer); sys.exit(cls().run(*args))"


class FakeRay:
    """What start_ray_workers uses of Ray; an actor is a process."""

    def __init__(self, monkeypatch, has_room=True):
        self.groups, self.options, self.processes, self.removed = [], [], [], []
        self.has_room = has_room
        module = ModuleType("ray")
        module.is_initialized = lambda: True
        module.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "this")
        module.nodes = lambda: [{"NodeID": "this", "NodeManagerAddress": "127.0.0.1"}]
        module.cluster_resources = lambda: {"CPU": 4.0}
        module.remote = lambda cls: SimpleNamespace(options=lambda **options: self._actor_of(cls, options))
        module.kill = lambda actor, no_restart: actor.process.kill()
        module.wait = self._wait
        module.get = lambda process: process.wait()
        util = ModuleType("ray.util")
        util.placement_group, util.remove_placement_group = self._placement_group, self.removed.append
        strategies = ModuleType("ray.util.scheduling_strategies")
        strategies.PlacementGroupSchedulingStrategy = lambda **fields: SimpleNamespace(**fields)
        module.util = util
        for name, each in {"ray": module, "ray.util": util, strategies.__name__: strategies}.items():
            monkeypatch.setitem(sys.modules, name, each)

    def _placement_group(self, bundles, strategy):
        self.groups.append((bundles, strategy))
        return SimpleNamespace(wait=lambda timeout_seconds: self.has_room)

    def _actor_of(self, cls, options):
        self.options.append(options)
        actor = SimpleNamespace(process=None)

        def run(*args):
            command = (sys.executable, "-c", ACTOR)
            actor.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment_with_quire())
            actor.process.stdin.write(pickle.dumps((cls, args)))
            actor.process.stdin.close()
            self.processes.append(actor.process)
            return actor.process

        actor.run = SimpleNamespace(remote=run)
        return SimpleNamespace(remote=lambda: actor)

    def _wait(self, results, num_returns, timeout):
        done = [each for each in results if each.poll() is not None]
        return done, [each for each in results if each not in done]


@pytest.mark.slow
def test_ranks_are_actors_of_one_placement_group_on_this_node(monkeypatch):
    fake = FakeRay(monkeypatch)
    with start_ray_workers(WORKER, 3, {"do": "work"}, LaunchOptions()) as workers:
        statuses = workers.wait_ready()
        assert [status.ready.get("rank") for status in statuses[1:]] == [1, 2]
        assert step(workers, 2) == [12.0] * 5
        assert sorted(workers.pids.values()) == sorted(process.pid for process in fake.processes)
    ((bundles, strategy),) = fake.groups
    assert strategy == "STRICT_PACK"
    assert bundles == [{"CPU": 1, "node:127.0.0.1": 0.001}] * 3
    assert [options["scheduling_strategy"].placement_group_bundle_index for options in fake.options] == [1, 2]
    assert len(fake.removed) == 1
    assert all(process.wait(timeout=10) is not None for process in fake.processes)


def test_a_node_without_room_is_refused_and_the_group_is_removed(monkeypatch):
    fake = FakeRay(monkeypatch, has_room=False)
    with pytest.raises(WorkerError, match=r"Ray has no room for 2 ranks of 2 cores on this node \(127.0.0.1\)"):
        start_ray_workers(WORKER, 2, {"do": "work"}, LaunchOptions())
    assert len(fake.removed) == 1
    assert fake.processes == []


@pytest.mark.slow
def test_an_actor_that_cannot_begin_ends_the_start(monkeypatch):
    fake = FakeRay(monkeypatch)
    with pytest.raises(WorkerError, match="an actor of Ray has ended with status 1"):
        start_ray_workers(WORKER + "_that_is_missing", 2, {"do": "work"}, LaunchOptions())
    assert len(fake.removed) == 1


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'quire\[ray\]'"):
        ray_workers.start_ray_workers(WORKER, 2, {}, LaunchOptions())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.parametrize("sizes", ["tensor_parallel_size=2", "pipeline_parallel_size=2"])
def test_ray_itself_starts_an_engine_of_two_ranks(sizes):
    code = (
        "import ray\n"
        "from quire import LLM, SamplingParams\n"
        "options = {'num_cpus': 2, 'object_store_memory': 80 << 20, 'include_dashboard': False}\n"
        "ray.init(address='local', _node_ip_address='127.0.0.1', **options)\n"
        f"llm = LLM('demo', {sizes}, num_threads=1, num_kv_blocks=64, distributed_executor_backend='ray')\n"
        "out = llm.generate(['It was a cold'], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)\n"
        "print(len(out[0].outputs[0].token_ids), {rank.state for rank in llm.llm_engine.stats.ranks})\n"
        "llm.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment_with_quire() | {"RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4 {'ready'}" in done.stdout
