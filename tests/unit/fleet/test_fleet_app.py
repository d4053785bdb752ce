"""The application of a fleet on a real socket: fake servers as the processes of models; names, keys, states, errors."""

import asyncio
import contextlib

import httpx
import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.fleet.app import FleetApp, FleetParts, RouterBackends
from quire.fleet.config import FleetConfig, ModelEntry
from quire.fleet.main import router_config
from quire.fleet.manager import FleetManager
from quire.fleet.metrics import FleetMetrics
from quire.router.config import BackendAddress
from quire.router.main import Router
from quire.serving.auth import hash_key
from quire.serving.config import ApiKey, ServerConfig
from quire.serving.http.lifecycle import listen
from tests.unit.fleet.fake_process import FakeProcess
from tests.unit.router.fake_backend import FakeBackend, begin_stream, respond, run, send_chunk

KEYS = (ApiKey("one", hash_key("secret"), is_admin=True),)


class ServedProcess(FakeProcess):
    """A fake server as a model's process; it listens until it is stopped."""

    def __init__(self, name, backend):
        super().__init__(name)
        self.backend = backend

    async def wait_ready(self):
        await self.backend.start()
        self.address = BackendAddress("127.0.0.1", self.backend.port, label=self.address.name)

    async def stop(self, *, hurry=False):
        await super().stop(hurry=hurry)
        await self.backend.stop()


class RunningFleet:
    def __init__(self, config, answers):
        self.backends = {}
        self._answers = answers
        self.sock = listen(ServerConfig(port=0))

        def launch(entry):
            self.backends[entry.name] = FakeBackend(entry.name, answer=self._answers.get(entry.name))
            self.process = ServedProcess(entry.name, self.backends[entry.name])
            return self.process

        def make_app(parts, monitor):
            metrics = FleetMetrics()
            self.manager = FleetManager(config, launch, RouterBackends(parts.table, monitor), metrics)
            return FleetApp(parts, FleetParts(config, self.manager, metrics))

        self.router = Router(router_config(config, None), self.sock, make_app)
        url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.client = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)

    async def post(self, model, path="/v1/completions", **options):
        return await self.client.post(path, json={"prompt": "x"} | ({} if model is None else {"model": model}), **options)

    async def states(self):
        listed = (await self.client.get("/v1/models")).json()["data"]
        return {entry["id"]: entry["state"] for entry in listed}


@contextlib.asynccontextmanager
async def serving(*names, memory=10, answers=None, fields=None, **options):
    entries = tuple(ModelEntry(name=name, memory_bytes=10, **(fields or {}).get(name, {})) for name in names)
    config = FleetConfig(models=entries, memory_bytes=memory, **{"drain_timeout_s": 0.2, **options})
    fleet = RunningFleet(config, answers or {})
    fleet.manager.start()
    running = asyncio.create_task(fleet.router.run())
    try:
        yield fleet
    finally:
        await fleet.client.aclose()
        fleet.router.stop()
        await running
        await fleet.manager.close()
        fleet.sock.close()


def test_model_is_loaded_by_its_first_request_and_another_one_takes_its_place():
    async def work():
        async with serving("a", "org/b") as fleet:
            assert await fleet.states() == {"a": "unloaded", "org/b": "unloaded"}
            assert (await fleet.post("a")).json()["model"] == "a"
            assert await fleet.states() == {"a": "loaded", "org/b": "unloaded"}
            assert (await fleet.post("org/b")).json()["model"] == "org/b"
            assert await fleet.states() == {"a": "unloaded", "org/b": "loaded"}
            one = await fleet.client.get("/v1/models/org/b")
            assert (one.status_code, one.json()["state"], one.json()["memory_bytes"]) == (200, "loaded", 10)

    run(work())


def test_aliases_are_listed_and_reach_their_model():
    async def work():
        async with serving("a", "b", fields={"a": {"aliases": ("gpt", "x")}}) as fleet:
            assert (await fleet.post("gpt")).json()["model"] == "a"
            assert await fleet.states() == {"a": "loaded", "b": "unloaded", "gpt": "loaded", "x": "loaded"}

    run(work())


def test_unknown_and_missing_models_are_told_without_a_load():
    async def work():
        async with serving("alpha", "beta") as fleet:
            unknown = await fleet.post("alpa")
            assert unknown.status_code == 404
            assert "did you mean 'alpha'" in unknown.json()["error"]["message"]
            missing = await fleet.post(None)
            assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")
            no_json = await fleet.client.post("/v1/completions", content=b"{")
            assert no_json.status_code == 400
            assert fleet.backends == {}

    run(work())


def test_only_model_needs_no_name():
    async def work():
        async with serving("a") as fleet:
            assert (await fleet.post(None)).status_code == 200

    run(work())


def test_keys_are_checked_before_a_model_is_loaded():
    async def work():
        async with serving("a", api_keys=KEYS) as fleet:
            for path in ("/v1/completions", "/v1/nothing"):
                assert (await fleet.post("a", path)).status_code == 401
            for path in ("/v1/models", "/metrics"):
                assert (await fleet.client.get(path)).status_code == 401
            assert fleet.backends == {}
            health = (await fleet.client.get("/health")).json()
            assert health == {"status": "ok", "is_draining": False}
            headers = {"authorization": "Bearer secret"}
            assert (await fleet.post("a", headers=headers)).status_code == 200
            assert fleet.backends["a"].requests[0]["headers"]["authorization"] == "bearer secret"  # the fake lowers headers
            assert (await fleet.client.get("/health", headers=headers)).json()["models"][0]["state"] == "loaded"

    run(work())


def test_pages_of_other_origins_load_nothing():
    async def work():
        async with serving("a") as fleet:
            assert (await fleet.post("a", headers={"origin": "http://evil.example"})).status_code == 403
            assert (await fleet.post("a", headers={"host": "evil.example"})).status_code == 403
            assert fleet.backends == {}
            own = str(fleet.client.base_url).rstrip("/")
            assert (await fleet.post("a", headers={"origin": own})).status_code == 200
            assert "origin" not in fleet.backends["a"].requests[0]["headers"]

    run(work())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/files/file-1", "/v1/messages/batches/msgbatch_1"),
        *("/v1/conversations", "/v1/conversations/conv_1/items", "/router/backends", "/", "/ui/main.mjs", "/ui/model"),
    ],
)
def test_what_a_fleet_does_not_keep_is_refused(path):
    async def work():
        async with serving("a") as fleet:
            assert (await fleet.client.get(path)).status_code == 404
            assert (await fleet.post("a")).status_code == 200
            assert (await fleet.client.get(path)).status_code == 404
            assert (await fleet.post("a", path)).status_code == 404
            assert len(fleet.backends["a"].requests) == 1

    run(work())


def test_crash_in_the_middle_of_a_stream_ends_it_and_the_next_request_is_told_to_wait():
    async def answer(request, writer):
        await begin_stream(writer)
        await send_chunk(writer, b'data: {"n": 1}\n\n')
        writer.transport.abort()

    async def work():
        async with serving("a", answers={"a": answer}) as fleet:
            broken = await fleet.client.post("/v1/completions", json={"model": "a", "stream": True})
            assert broken.text.startswith('data: {"n": 1}')
            assert "backend_failed" in broken.text
            fleet.process.crash()
            async with asyncio.timeout(30):
                while (await fleet.states())["a"] != "unloaded":
                    await asyncio.sleep(0.01)
            refused = await fleet.post("a")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_load_failed")
            assert refused.headers["retry-after"] == "1"
            health = (await fleet.client.get("/health")).json()
            assert health["models"][0]["error"] == "its process ended with signal 9 (Killed)"

    run(work())


def test_client_that_goes_while_its_model_loads_leaves_the_queue():
    async def work():
        may_answer = asyncio.Event()

        async def answer(request, writer):
            await may_answer.wait()
            await respond(writer, {})

        async with serving("a", "b", answers={"a": answer}) as fleet:
            busy = asyncio.create_task(fleet.post("a"))
            while "a" not in fleet.backends or not fleet.backends["a"].requests:
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(fleet.post("b"))
            while not fleet.manager.num_waiting:
                await asyncio.sleep(0.01)
            waiting.cancel()
            while fleet.manager.num_waiting:
                await asyncio.sleep(0.01)
            may_answer.set()
            assert (await busy).status_code == 200
            assert list(fleet.backends) == ["a"]

    run(work())


def test_ready_waits_for_preload_and_metrics_show_models():
    async def work():
        async with serving("a", "b", fields={"a": {"preload": True}}) as fleet:
            async with asyncio.timeout(30):
                while (await fleet.client.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.01)
            assert (await fleet.states())["a"] == "loaded"
            text = (await fleet.client.get("/metrics")).text
            assert 'quire_fleet:model_state{model="a",state="loaded"} 1.0' in text
            assert 'quire_fleet:memory_bytes{kind="used"} 10.0' in text
            assert 'quire_router:backend_state{backend="a",state="ready"} 1.0' in text

    run(work())


def test_clients_of_ollama_load_models_by_name_and_see_all_of_them():
    async def work():
        async with serving("a", "b") as fleet:
            assert (await fleet.post("b:latest", "/api/chat")).json()["model"] == "b"
            assert await fleet.states() == {"a": "unloaded", "b": "loaded"}
            for path, names in {"/api/tags": ["a", "b"], "/api/ps": ["b"]}.items():
                assert [one["name"] for one in (await fleet.client.get(path)).json()["models"]] == names

    run(work())
