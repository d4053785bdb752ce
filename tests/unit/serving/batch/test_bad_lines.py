"""Lines that cannot be read, or whose answers cannot be: each is its own error, and the others run."""

import asyncio
import json
import time

import pytest

from quire.serving.answers import Ready
from quire.serving.batch import runner
from quire.serving.batch.store import BatchStore
from tests.unit.serving.batch.running_batches import URL, Worker, ended, line, read, run, service_of, upload

NAMES = ["a", "odd", "c"]


def run_changed(change, worker=None):
    """Run a batch whose input is changed after it was validated; return (record, output, errors)."""

    async def go():
        begun, gate = asyncio.Event(), asyncio.Event()
        inner = worker or Worker()

        async def execute(record, body):
            begun.set()
            await gate.wait()
            return await inner(record, body)

        # A window of one: the first line waits while the others have not been read.
        async with service_of(None, execute, window=1) as service:
            file = await upload(service, [line(name) for name in NAMES])
            batch = await service.add_batch("ann", file.id, URL)
            await begun.wait()
            change(service.store_thread.store.path_of(file.id))
            gate.set()
            async with asyncio.timeout(20):
                record = await ended(service, batch.id)
            return record, await read(service, record.output_file_id), await read(service, record.error_file_id)

    return asyncio.run(go())


@pytest.mark.parametrize("text", ["odd\x00", "{}}}"], ids=["no_text", "no_json"])
def test_line_is_an_error_when_it_is_not_what_was_validated(text):
    def spoil(path):
        data = path.read_bytes()
        start = data.index(b"\n") + 1
        path.write_bytes(data[:start] + text.encode() + data[start + len(text) :])

    record, output, errors = run_changed(spoil)
    assert (record.status, record.num_completed, record.num_failed) == ("completed", 2, 1)
    assert (list(output), list(errors)) == (["a", "c"], ["odd"])
    assert errors["odd"]["response"]["status_code"] == 400
    assert errors["odd"]["response"]["body"]["error"]["code"] == "invalid_json_line"


def test_line_is_an_error_when_it_cannot_be_read_again_and_again(monkeypatch):
    monkeypatch.setattr(runner, "FIRST_WAIT_S", 0.001)
    tries = []
    of_store = BatchStore.read_line

    def read_line(store, file_id, todo):
        if todo.custom_id == "odd":
            tries.append(todo)
            raise OSError(5, "Input/output error")
        return of_store(store, file_id, todo)

    monkeypatch.setattr(BatchStore, "read_line", read_line)
    record, output, errors = run([line(name) for name in NAMES])
    assert (record.status, list(output), list(errors)) == ("completed", ["a", "c"], ["odd"])
    assert errors["odd"]["response"]["body"]["error"]["code"] == "line_unreadable"
    assert len(tries) == runner.MAX_TRIES


@pytest.mark.parametrize(
    "usage", ["no object", {"prompt_tokens": None}, {"prompt_tokens": 1.5}, {"prompt_tokens_details": [1]}]
)
def test_line_is_answered_when_its_usage_cannot_be_read(usage, caplog):
    async def execute(record, body):
        answer = {"echo": json.loads(body)["x"], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        if answer["echo"] == "odd":
            answer["usage"] = usage
        return Ready(json.dumps(answer).encode())

    record, output, errors = run([line(name) for name in NAMES], execute)
    assert (record.status, list(output), errors) == ("completed", NAMES, {})
    assert (record.input_tokens, record.output_tokens) == (6, 4)
    assert any("usage" in entry.getMessage() and "odd" in entry.getMessage() for entry in caplog.records)


def test_line_is_an_error_when_its_answer_cannot_be_written_as_one(monkeypatch):
    of_module = runner.answer_line

    def answer_line(custom_id, answer):
        if custom_id == "odd":
            raise UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates not allowed")
        return of_module(custom_id, answer)

    monkeypatch.setattr(runner, "answer_line", answer_line)
    record, output, errors = run([line(name) for name in NAMES])
    assert (record.status, list(output), list(errors)) == ("completed", ["a", "c"], ["odd"])
    assert errors["odd"]["error"]["code"] == "internal_error"


def test_server_closes_when_lines_fail_as_they_are_stopped():
    async def go():
        begun = asyncio.Event()

        async def execute(record, body):
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                raise KeyError("on the way out")

        async def fail(*arguments):
            raise OSError("no store")

        async with service_of(None, execute) as service:
            file = await upload(service, [line(name) for name in NAMES])
            await service.add_batch("ann", file.id, URL)
            await begun.wait()
            service.runner.call_store = fail  # nothing can be saved either
            left_s = time.monotonic()
        return time.monotonic() - left_s

    assert asyncio.run(go()) < 4


def test_batch_runs_when_its_file_begins_with_a_byte_order_mark():
    async def go():
        async with service_of(None, Worker()) as service:
            file = await upload(service, ["\ufeff" + line("a"), line("b")])
            batch = await service.add_batch("ann", file.id, URL)
            async with asyncio.timeout(20):
                record = await ended(service, batch.id)
            return record, await read(service, record.output_file_id)

    record, output = asyncio.run(go())
    assert record.status == "completed"
    assert sorted(output) == ["a", "b"]
