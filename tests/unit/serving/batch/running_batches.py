"""Batches without HTTP: an upload, a worker that answers like a route, and what came of it."""

import asyncio
import collections
import contextlib
import json

from quire.serving.answers import Ready
from quire.serving.batch.records import ENDED
from quire.serving.batch.service import BatchService
from quire.serving.errors import invalid

URL = "/v1/chat/completions"


def line(custom_id, body=None, **changes):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body or {"x": custom_id}, **changes})


def check_body(endpoint, body):
    if b"bad" in body:
        raise invalid("bad body", "x")


class Worker:
    """Answers like a route, after a moment; `plan` says per call what happens instead."""

    def __init__(self, delay_s=0.0, plan=None):
        self.delay_s, self.plan = delay_s, plan or {}
        self.calls = collections.Counter()
        self.num_running = self.max_running = 0

    async def __call__(self, record, body):
        name = json.loads(body)["x"]
        self.calls[name] += 1
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await asyncio.sleep(self.delay_s)
            failure = self.plan.get(name, lambda count: None)(self.calls[name])
            if failure is not None:
                raise failure
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
            return Ready(json.dumps({"echo": name, "usage": usage}).encode())
        finally:
            self.num_running -= 1


@contextlib.asynccontextmanager
async def service_of(folder, worker, window=4, **options):
    service = BatchService(folder, worker, check_body, (URL,), lambda: window, **options)
    await service.start()
    try:
        yield service
    finally:
        await service.close()


async def upload(service, lines, owner="ann"):
    async def parts():
        text = "\n".join(lines).encode()
        for start in range(0, len(text), 1000):
            yield text[start : start + 1000]

    return await service.add_file(owner, "in.jsonl", "batch", parts(), None)


async def ended(service, batch_id, owner="ann"):
    while (record := await service.batch(owner, batch_id)).status not in ENDED:
        await asyncio.sleep(0.01)
    return record


async def read(service, file_id, owner="ann"):
    if file_id is None:
        return {}
    _, pieces = await service.open_file(owner, file_id)
    found = [json.loads(text) for text in b"".join([piece async for piece in pieces]).splitlines()]
    assert len({entry["custom_id"] for entry in found}) == len(found)
    return {entry["custom_id"]: entry for entry in found}


def run(lines, worker=None, folder=None, **options):
    """Run one batch to its end; return (record, output, errors)."""

    async def go():
        async with service_of(folder, worker or Worker(), **options) as service:
            file = await upload(service, lines)
            batch = await service.add_batch("ann", file.id, URL)
            record = await ended(service, batch.id)
            return record, await read(service, record.output_file_id), await read(service, record.error_file_id)

    return asyncio.run(go())
