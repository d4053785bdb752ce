"""LoRA adapters are loaded in all engines or in none."""

import asyncio
from types import SimpleNamespace

import pytest

from quire.serving.core.lora_modules import LoraModules
from quire.serving.errors import ApiError, invalid
from quire.serving.openai.lora import LoraRoutes
from tests.unit.serving.fakes import make_served


class FakeEngine:
    """Loads an adapter when `may_load` is set."""

    def __init__(self, error=None):
        self.error = error
        self.state = "ready"
        self.loaded = set()
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load_adapter(self, lora):
        await self.may_load.wait()
        if self.error is not None:
            raise self.error
        self.loaded.add(lora.lora_int_id)

    def unload_adapter(self, lora_int_id):
        self.loaded.discard(lora_int_id)


def routes_of(*engines):
    return LoraRoutes(SimpleNamespace(adapters=LoraModules(), model=make_served(enable_lora=True)), engines)


def add(routes, name="a"):
    return routes.context.adapters.add(routes.context.model, name, "/adapter", routes.load)


def run(work):
    asyncio.run(asyncio.wait_for(work, 10))


def test_adapter_that_one_engine_refuses_stays_in_none():
    async def work():
        first, second = FakeEngine(), FakeEngine(invalid("no such folder", "lora_path"))
        routes = routes_of(first, second)
        with pytest.raises(ApiError, match="no such folder"):
            await add(routes)
        assert (first.loaded, routes.context.adapters.names) == (set(), ())
        second.error = None
        await add(routes)
        assert len(first.loaded) == len(second.loaded) == 1

    run(work())


def test_adapter_that_is_being_loaded_is_not_loaded_twice():
    async def work():
        engine = FakeEngine()
        engine.may_load.clear()
        routes = routes_of(engine)
        loading = asyncio.create_task(add(routes))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="is being loaded by another request"):
            await asyncio.wait_for(add(routes), 1)
        engine.may_load.set()
        await loading
        assert (len(engine.loaded), routes.context.adapters.names) == (1, ("a",))

    run(work())


def test_adapter_is_replaced_in_place_only_once_the_new_one_is_loaded():
    async def work():
        engine = FakeEngine()
        routes = routes_of(engine)
        await add(routes)
        old = set(engine.loaded)
        engine.error = invalid("no such folder", "lora_path")
        again = (routes.context.model, "a", "/other", routes.load, True)
        with pytest.raises(ApiError, match="no such folder"):
            await routes.context.adapters.add(*again)
        assert engine.loaded == old
        assert routes.context.adapters.names == ("a",)
        engine.error = None
        replaced = await routes.context.adapters.add(*again)
        assert {replaced.lora_int_id} == old
        routes.drop(replaced)
        assert len(engine.loaded) == 1
        assert engine.loaded != old
        assert routes.context.adapters.find("a").lora.lora_path == "/other"

    run(work())
