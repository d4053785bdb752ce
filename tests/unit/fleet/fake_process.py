"""Processes and backends of a fleet that a test controls, and a manager of them on a clock of its own."""

import asyncio
import contextlib

from quire.fleet.config import FleetConfig, ModelEntry
from quire.fleet.manager import FleetManager, ModelStartError
from quire.fleet.metrics import FleetMetrics
from quire.router.config import BackendAddress


class FakeProcess:
    """Ready, or failed, when the test says so."""

    def __init__(self, name):
        self.address = BackendAddress("localhost", 80, label=name)
        self.ready = asyncio.get_running_loop().create_future()
        self.ended = asyncio.get_running_loop().create_future()
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.num_stops = 0

    async def wait_ready(self):
        await asyncio.shield(self.ready)

    async def wait(self):
        return await asyncio.shield(self.ended)

    async def stop(self, *, hurry=False):
        self.num_stops += 1
        await self.may_stop.wait()
        if not self.ended.done():
            self.ended.set_result("exit status 0")

    def become_ready(self):
        self.ready.set_result(None)

    def fail(self, message="no weights"):
        self.ready.set_exception(ModelStartError(message))

    def crash(self):
        self.ended.set_result("signal 9 (Killed)")


class FakeBackends:
    def __init__(self):
        self.names = []
        self.busy = set()

    async def add(self, address):
        assert address.name not in self.names
        self.names.append(address.name)

    async def remove(self, name):
        if name in self.names:
            self.names.remove(name)

    def is_busy(self, name):
        return name in self.busy


class Fleet:
    """A manager with fakes around it. `sizes` are {name: memory}."""

    def __init__(self, sizes, memory, *, fields=None, **options):
        entries = tuple(
            ModelEntry(name=name, memory_bytes=size, **(fields or {}).get(name, {})) for name, size in sizes.items()
        )
        self.config = FleetConfig(models=entries, memory_bytes=memory, **options)
        self.backends = FakeBackends()
        self.launched = []
        self.now_s = 1000.0
        self.is_ready_at_once = True
        self.launch_error = None
        self.metrics = FleetMetrics()
        self.manager = FleetManager(self.config, self._launch, self.backends, self.metrics, lambda: self.now_s)

    def _launch(self, entry):
        if self.launch_error is not None:
            raise self.launch_error
        process = FakeProcess(entry.name)
        if self.is_ready_at_once:
            process.become_ready()
        self.launched.append(process)
        assert self.manager.used_bytes <= self.config.memory_bytes
        return process

    def state(self, name):
        return self.slot(name).state

    def slot(self, name):
        return next(slot for slot in self.manager.slots if slot.name == name)

    def names(self):
        """Return whose processes were started, in order."""
        return [process.address.name for process in self.launched]

    async def use(self, name):
        """Send a request that ends at once."""
        async with self.manager.hold(name):
            assert self.state(name) == "loaded"
            assert name in self.backends.names
        self.now_s += 1

    async def begin(self, name):
        """Send a request; return it and the event that ends it."""
        may_end = asyncio.Event()

        async def request():
            async with self.manager.hold(name):
                await may_end.wait()

        task = asyncio.create_task(request())
        await self.settle()
        return task, may_end

    async def later(self, name):
        """Send a request that ends at once, when its model is loaded; return it."""
        task = asyncio.create_task(self.use(name))
        await self.settle()
        return task

    async def pass_time(self, seconds):
        """Move the clock, and let the manager look at it."""
        self.now_s += seconds
        self.manager.wake.set()
        await self.settle()

    async def settle(self):
        """Let everything happen that needs no time."""
        for _ in range(30):
            await asyncio.sleep(0)

    def text(self):
        self.manager.show_metrics()
        return self.metrics.render().decode()


@contextlib.asynccontextmanager
async def running(*args, **options):
    fleet = Fleet(*args, **options)
    fleet.manager.start()
    await fleet.settle()
    try:
        yield fleet
    finally:
        for process in fleet.launched:
            process.may_stop.set()
        await fleet.manager.close()
        assert fleet.manager.used_bytes == 0
