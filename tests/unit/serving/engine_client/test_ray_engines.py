"""Engines that Ray starts, with a module that stands in for it: an actor's method is a thread, its engine a process."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
import zmq

from quire.base.errors import ConfigError, UnsupportedError
from quire.contracts.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.serving.engine_client.fleet import open_engine
from quire.serving.engine_client.kv_events import KvEventOptions
from quire.serving.engine_client.messages import Start
from quire.serving.engine_client.ray_engines import RayLauncher, Resources, threads_of_each
from quire.serving.engine_client.supervisor import LinkOptions
from quire.serving.errors import ApiError
from tests.unit.serving.engine_client import fake_engine as fake
from tests.unit.serving.engine_client.test_client_faults import counted, read, request, text_of, with_client
from tests.unit.serving.http.shell import until


class FakeRay(ModuleType):
    """What RayLauncher, its processes and actors use of Ray."""

    def __init__(self, monkeypatch, cpus=(2,)):
        super().__init__("ray")
        self.actors, self.connected = [], []
        self.exceptions = SimpleNamespace(RayError=LookupError, RayActorError=KeyError)
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.nodes = lambda: [
            {"NodeID": number, "Alive": True, "Resources": {"CPU": float(each)}} for number, each in enumerate(cpus)
        ]
        self.is_initialized = lambda: bool(self.connected)
        self.init = lambda **options: self.connected.append(options)
        self.cluster_resources = lambda: {"CPU": float(sum(cpus))}
        self.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: 0)
        self.remote = lambda kind: SimpleNamespace(options=lambda **options: self._maker(kind, options))
        self.wait = lambda results, timeout: ([one for one in results if one.has_ended.is_set()], [])
        self.get = lambda result: result.value
        self.kill = lambda actor: None
        monkeypatch.setitem(sys.modules, "ray", self)

    def _maker(self, kind, options):
        self.actors.append(options)
        methods = kind()
        place = SimpleNamespace(remote=lambda: self.call(methods.place, ()))
        run = SimpleNamespace(remote=lambda *args: self.call(methods.run, args))
        return SimpleNamespace(remote=lambda: SimpleNamespace(place=place, run=run))

    def call(self, call, args):
        result = SimpleNamespace(has_ended=threading.Event(), value=None)

        def run():
            result.value = call(*args)
            result.has_ended.set()

        threading.Thread(target=run, daemon=True).start()
        return result


def test_a_lost_engine_costs_its_own_requests_and_is_started_again(monkeypatch):
    ray = FakeRay(monkeypatch)
    launcher = RayLauncher.connect(shows_log=False)

    async def scenario(client):
        assert text_of(await read(client.submit(request(max_tokens=4)))) == counted(4)
        with pytest.raises(ApiError, match=r"the engine stopped while the request ran \(killed by SIGKILL\)"):
            await read(client.submit(request("lost", code=fake.KILL)))
        await until(lambda: client.state == "ready" and client.num_restarts == 1)
        assert text_of(await read(client.submit(request("b", max_tokens=3)))) == counted(3)

    with_client(scenario, config={"num_threads": 1, "data_parallel_backend": "ray"}, launcher=launcher)
    assert ray.connected == [{"log_to_driver": False}]
    assert ray.actors == [{"num_cpus": 1, "num_gpus": 0, "scheduling_strategy": "SPREAD"}] * 2


def test_nobody_without_the_key_of_the_start_message_can_connect(monkeypatch):
    class Eavesdropper(FakeRay):
        def call(self, call, args):
            if args:
                address = msgspec.msgpack.decode(args[0], type=Start).address
                self.stranger = zmq.Context.instance().socket(zmq.PAIR)
                self.stranger.setsockopt(zmq.LINGER, 0)
                self.stranger.connect(address)
                self.stranger.send(b"before the engine")
            return super().call(call, args)

    ray = Eavesdropper(monkeypatch)

    async def scenario(client):
        assert text_of(await read(client.submit(request(max_tokens=4)))) == counted(4)
        assert not ray.stranger.poll(0)

    with_client(
        scenario, config={"num_threads": 1, "data_parallel_backend": "ray"}, launcher=RayLauncher.connect(shows_log=False)
    )
    ray.stranger.close()


@pytest.mark.parametrize(
    "cpus, size, each",
    [((8,), 2, 4), ((8, 4), 3, 4), ((8, 4), 2, 4), ((3, 3), 4, 1), ((16, 2), 3, 5), ((1, 1), 3, 0), ((), 1, 0)],
)
def test_cpus_of_nodes_are_divided_evenly(cpus, size, each):
    assert threads_of_each(cpus, size) == each


def test_a_node_is_shared_by_as_many_engines_as_it_has_room_for():
    assert Resources(2, 0).most_on({"CPU": 8.0}) == 4
    assert Resources(2, 1).most_on({"CPU": 64.0, "GPU": 8.0}) == 8
    assert Resources(4, 0).most_on({"CPU": 2.0}) == 1


def test_replicas_get_their_threads(monkeypatch):
    launcher = RayLauncher(FakeRay(monkeypatch, cpus=(8, 4)), "127.0.0.1")

    def threads(**options):
        config = EngineConfig(model="demo", data_parallel_backend="ray", **options)
        return [setup.config.num_threads for setup in launcher.setups(config)]

    assert threads(data_parallel_size=3) == [4, 4, 4]
    assert threads(data_parallel_size=2, num_threads=999) == [999, 999]  # the cores are those of other hosts
    assert threads(data_parallel_size=2, data_parallel_threads=(5, 1)) == [5, 1]
    assert threads() == [8]
    with pytest.raises(ConfigError, match="data_parallel_size is 13, but Ray's nodes have 12 CPUs"):
        threads(data_parallel_size=13)


def test_what_ray_cannot_do_is_refused(monkeypatch):
    config = EngineConfig(model="demo", data_parallel_backend="ray", data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"kv_events_endpoint is 'tcp://\*:5557', but data_parallel_backend 'ray'"):
        open_engine(config, LinkOptions(kv_events=KvEventOptions("tcp://*:5557")))
    with pytest.raises(ConfigError, match="data_parallel_backend is 'ray', which is for `quire serve`"):
        LLMEngine("demo", data_parallel_backend="ray")
    with pytest.raises(ConfigError, match="data_parallel_backend must be one of"):
        EngineConfig(model="demo", data_parallel_backend="slurm")
    with pytest.raises(ConfigError, match="prefill_listen is '0.0.0.0:9000' and data_parallel_backend 'ray'"):
        EngineConfig(model="demo", data_parallel_backend="ray", prefill_listen="0.0.0.0:9000")
    with pytest.raises(ConfigError, match="data_parallel_backend and distributed_executor_backend are both 'ray'"):
        EngineConfig(model="demo", data_parallel_backend="ray", distributed_executor_backend="ray", tensor_parallel_size=2)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'quire\[ray\]'"):
        open_engine(config, LinkOptions())
