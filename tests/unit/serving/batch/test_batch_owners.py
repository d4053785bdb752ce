"""Batches of several owners run concurrently, and none waits for another's."""

import asyncio
import json
import threading

from quire.serving.batch import service as service_module
from quire.serving.errors import overloaded
from tests.unit.serving.batch.running_batches import URL, Worker, ended, line, service_of, upload
from tests.unit.serving.http.shell import until


class Gate(Worker):
    """Holds the lines whose names begin with one of `held` until it is opened; notes the order in which lines begin."""

    def __init__(self, *held):
        super().__init__()
        self.held, self.gate, self.begun = held, asyncio.Event(), []

    async def __call__(self, record, body):
        name = json.loads(body)["x"]
        self.begun.append(name)
        if name.startswith(self.held):
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
            await self.gate.wait()
            self.num_running -= 1
        return await super().__call__(record, body)


async def enter(service, names, owner="ann"):
    """Enter a batch of lines with these names."""
    file = await upload(service, [line(name) for name in names], owner)
    return await service.add_batch(owner, file.id, URL)


def test_batch_of_one_owner_ends_while_a_line_of_another_takes_for_ever():
    async def go():
        worker = Gate("slow")
        async with service_of(None, worker, window=2) as service:
            slow = await enter(service, ["slow", "slow_rest"])
            await until(lambda: worker.begun == ["slow"])
            other = await ended(service, (await enter(service, ["a", "b", "c"], "bob")).id, "bob")
            held = await service.batch("ann", slow.id)
            worker.gate.set()
            return other, held, await ended(service, slow.id), worker.begun

    other, held, slow, begun = asyncio.run(go())
    assert (other.status, other.num_completed) == ("completed", 3)
    assert (held.status, held.num_completed) == ("in_progress", 0)
    assert (slow.status, slow.num_completed) == ("completed", 2)
    assert begun == ["slow", "a", "b", "c", "slow_rest"]


def test_next_batch_of_an_owner_begins_when_the_last_line_of_the_one_before_has_begun():
    async def go():
        worker = Gate("last")
        async with service_of(None, worker, window=4) as service:
            first = await enter(service, ["a", "b", "c", "last"])
            second = await enter(service, ["d", "e"])
            done = await ended(service, second.id)
            held = await service.batch("ann", first.id)
            worker.gate.set()
            await ended(service, first.id)
            return done, held, worker

    done, held, worker = asyncio.run(go())
    assert (done.status, held.num_completed) == ("completed", 3)
    assert worker.begun == ["a", "b", "c", "last", "d", "e"]
    assert worker.max_running <= 3  # one place is left to other owners


def test_places_go_to_owners_in_turn_when_all_want_more_than_there_are():
    async def go():
        worker = Gate("ann", "bob")
        async with service_of(None, worker, window=4) as service:
            batches = [(await enter(service, [f"{owner}{n}" for n in range(8)], owner)).id for owner in ("ann", "bob")]
            await until(lambda: len(worker.begun) == 4)
            worker.gate.set()
            return [await ended(service, batch, owner) for batch, owner in zip(batches, ("ann", "bob"), strict=True)], worker

    records, worker = asyncio.run(go())
    assert [record.num_completed for record in records] == [8, 8]
    assert worker.max_running <= 4
    assert {name[:3] for name in worker.begun[-4:]} == {"ann", "bob"}


def test_line_that_waits_to_be_tried_again_takes_nobodys_place():
    async def go():
        worker = Gate("bob")
        refuse = Worker(plan={name: lambda count: overloaded("full", 0.05) if count < 3 else None for name in ("a", "b")})

        async def execute(record, body):
            return await (refuse if record.owner == "ann" else worker)(record, body)

        async with service_of(None, execute, window=3) as service:
            first = await enter(service, ["a", "b"])
            await until(lambda: refuse.calls["b"] == 1)
            second = await enter(service, ["bob1", "bob2"], "bob")
            await until(lambda: worker.num_running == 2)
            worker.gate.set()
            return await ended(service, first.id), await ended(service, second.id, "bob")

    first, second = asyncio.run(go())
    assert (first.num_completed, second.num_completed) == (2, 2)


def test_batch_of_one_owner_ends_while_the_file_of_another_is_validated(monkeypatch):
    is_open = threading.Event()
    of_module = service_module.validate

    def slow_validate(file, endpoints, check):
        if b"slow" in file.read():
            is_open.wait(60)
        file.seek(0)
        return of_module(file, endpoints, check)

    monkeypatch.setattr(service_module, "validate", slow_validate)

    async def go():
        async with service_of(None, Worker()) as service:
            slow = await enter(service, ["slow"])
            async with asyncio.timeout(30):
                other = await ended(service, (await enter(service, ["a"], "bob")).id, "bob")
            is_open.set()
            return other, await ended(service, slow.id)

    try:
        other, slow = asyncio.run(go())
    finally:
        is_open.set()
    assert (other.status, slow.status) == ("completed", "completed")
