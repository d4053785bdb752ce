"""Batches without HTTP: validation, running, restarts, cancelling, expiry, owners."""

import asyncio
import collections
import io
import json
import random
import sqlite3

import msgspec
import pytest

from quire.serving.batch.lines import MAX_LINE_BYTES, validate
from quire.serving.batch.records import ENDED, is_id
from quire.serving.batch.store import BatchStore
from quire.serving.errors import ApiError, invalid, overloaded
from tests.unit.serving.batch.running_batches import URL, Worker, check_body, ended, line, read, run, service_of, upload


def test_batch_completes_with_one_output_line_for_each_input_line():
    names = [f"r{n}" for n in range(200)]
    worker = Worker()
    record, output, errors = run([line(name) for name in names], worker)
    assert record.status == "completed"
    assert (record.num_lines, record.num_completed, record.num_failed) == (200, 200, 0)
    assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (600, 400, 200)
    assert set(output) == set(names)
    assert errors == {}
    assert record.error_file_id is None
    assert all(entry["response"]["body"]["echo"] == name and entry["error"] is None for name, entry in output.items())
    assert set(worker.calls.values()) == {1}
    assert worker.max_running <= 4
    assert msgspec.to_builtins(record.as_json())["request_counts"] == {"total": 200, "completed": 200, "failed": 0}


def test_ids_begin_with_the_servers_own_and_are_as_long_as_others():
    async def work():
        async with service_of(None, Worker(), replica_id="k3fa") as service:
            file = await upload(service, [line("a")])
            record = await service.add_batch("ann", file.id, URL)
            record = await ended(service, record.id)
            ids = {file.id: "file-", record.id: "batch_", record.output_file_id: "file-"}
            assert all(is_id(text, prefix) and text.startswith(prefix + "k3fa") for text, prefix in ids.items())
            assert len(ids) == 3

    asyncio.run(work())


def test_line_goes_to_the_error_file_when_its_request_fails():
    plan = {"b": lambda count: invalid("no", "temperature"), "c": lambda count: ApiError(500, "broken")}
    record, output, errors = run([line(name) for name in "abc"], Worker(plan=plan))
    assert record.status == "completed"
    assert (record.num_completed, record.num_failed) == (1, 2)
    assert list(output) == ["a"]
    assert errors["b"]["response"]["status_code"] == 400
    assert errors["b"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["c"]["response"]["status_code"] == 500


def test_line_is_a_server_error_and_the_others_run_when_it_raises_what_nobody_foresaw(caplog):
    worker = Worker(plan={"b": lambda count: RuntimeError("no such row")})
    record, output, errors = run([line(name) for name in "abc"], worker)
    assert record.status == "completed"
    assert (list(output), list(errors)) == (["a", "c"], ["b"])
    assert errors["b"]["response"]["status_code"] == 500
    assert errors["b"]["response"]["body"]["error"]["code"] == "internal_error"
    assert worker.calls["b"] == 1
    assert any("'b'" in entry.getMessage() and entry.exc_info[1].args == ("no such row",) for entry in caplog.records)


def test_line_waits_when_the_queue_is_full():
    plan = {"a": lambda count: overloaded("full", 0.01) if count < 4 else None}
    record, output, _ = run([line("a")], Worker(plan=plan))
    assert (record.status, list(output)) == ("completed", ["a"])


def test_line_is_given_up_when_the_engine_dies_of_it_three_times():
    died = ApiError(503, "the engine died", code="engine_error", retry_after_s=0.01)
    plan = {"a": lambda count: died, "b": lambda count: died if count < 2 else None}
    worker = Worker(plan=plan)
    record, output, errors = run([line("a"), line("b")], worker)
    assert record.status == "completed"
    assert (list(output), list(errors)) == (["b"], ["a"])
    assert worker.calls == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    "text, code",
    [
        ("{", "invalid_json_line"),
        ("[1]", "invalid_value"),
        ('{"custom_id":"a"}', "missing_required_parameter"),
        (line(5), "invalid_value"),
        (line(""), "invalid_custom_id"),
        (line("c" * 600), "invalid_custom_id"),
        (line("ok"), "duplicate_custom_id"),
        (line("x", method="GET"), "invalid_method"),
        (line("x", url="/v1/embeddings"), "invalid_url"),
        (line("x", {"x": "bad"}), "invalid_value"),
        ('{"x":' * 5000, "invalid_json_line"),
    ],
)
def test_nothing_runs_when_a_line_is_not_valid(text, code):
    worker = Worker()
    record, output, _ = run([line("ok"), "", text], worker)
    assert record.status == "failed"
    (error,) = msgspec.to_builtins(record.as_json())["errors"]["data"]
    assert (error["code"], error["line"]) == (code, 3)
    assert not worker.calls
    assert output == {}


@pytest.mark.parametrize(
    ("text", "message", "param"),
    [
        ('{"custom_id":"a"}', "method is required", "method"),
        (line(5), "custom_id: expected str, got int", "custom_id"),
        ("[1]", "the line is invalid: expected object, got array", None),
        (line("x", {"x": "bad"}), "bad body", "body.x"),
    ],
)
def test_error_of_a_line_names_its_field_in_the_words_of_the_api(text, message, param):
    record, _, _ = run([text])
    (error,) = msgspec.to_builtins(record.as_json())["errors"]["data"]
    assert (error["message"], error["param"]) == (message, param)


def test_batch_fails_when_its_file_is_empty():
    assert run([""])[0].errors[0].code == "empty_file"


def test_validation_reports_where_lines_lie_when_one_is_endless():
    good = line("a").encode()
    data = good + b"\r\n" + b"x" * (MAX_LINE_BYTES * 2 + 5) + b"\n" + line("b").encode()
    found = validate(io.BytesIO(data), (URL,), check_body)
    assert [error.code for error in found.errors] == ["line_too_long"]
    assert [data[span.offset : span.offset + span.num_bytes] for span in found.spans] == [good, line("b").encode()]


def test_finished_lines_are_kept_and_the_rest_resumes_when_the_server_restarts(tmp_path):
    names = [f"r{n}" for n in range(60)]
    random_ = random.Random(0)
    total = collections.Counter()

    async def go():
        batch_id = None
        for _ in range(50):
            worker = Worker(0.002)
            async with service_of(tmp_path, worker) as service:
                if batch_id is None:
                    file = await upload(service, [line(name) for name in names])
                    batch_id = (await service.add_batch("ann", file.id, URL)).id
                await asyncio.sleep(random_.uniform(0, 0.02))
                record = await service.batch("ann", batch_id)
            total.update(worker.calls)
            if record.status in ENDED:
                break
        async with service_of(tmp_path, Worker()) as service:
            record = await ended(service, batch_id)
            return record, await read(service, record.output_file_id)

    record, output = asyncio.run(go())
    assert (record.status, record.num_completed) == ("completed", 60)
    assert set(output) == set(names)


def test_partial_output_is_kept_when_a_batch_is_cancelled():
    async def go():
        worker = Worker(plan={"r3": lambda count: None})
        gate = asyncio.Event()

        async def execute(record, body):
            if json.loads(body)["x"] != "r0":
                await gate.wait()
            return await worker(record, body)

        async with service_of(None, execute) as service:
            file = await upload(service, [line(f"r{n}") for n in range(10)])
            batch = await service.add_batch("ann", file.id, URL)
            while (await service.batch("ann", batch.id)).num_completed < 1:
                await asyncio.sleep(0.01)
            changed = await service.cancel("ann", batch.id)
            record = await ended(service, batch.id)
            with pytest.raises(ApiError) as caught:
                await service.cancel("ann", batch.id)
            return (
                changed,
                record,
                await read(service, record.output_file_id),
                await read(service, record.error_file_id),
                caught,
            )

    changed, record, output, errors, caught = asyncio.run(go())
    assert (changed.status, record.status) == ("cancelling", "cancelled")
    assert list(output) == ["r0"]
    assert len(errors) == 9
    assert {entry["error"]["code"] for entry in errors.values()} == {"batch_cancelled"}
    assert caught.value.status == 400


@pytest.mark.slow
def test_rest_of_a_batch_expires_when_its_window_ends():
    async def go():
        async def execute(record, body):
            if json.loads(body)["x"] != "r0":
                await asyncio.Event().wait()
            return await Worker()(record, body)

        async with service_of(None, execute) as service:
            file = await upload(service, [line(f"r{n}") for n in range(3)])
            batch = await service.add_batch("ann", file.id, URL, window_s=2)
            record = await ended(service, batch.id)
            return record, await read(service, record.output_file_id), await read(service, record.error_file_id)

    record, output, errors = asyncio.run(go())
    assert record.status == "expired"
    assert list(output) == ["r0"]
    assert {entry["error"]["code"] for entry in errors.values()} == {"batch_expired"}


def test_one_batch_is_made_when_a_key_is_sent_twice():
    async def go():
        async with service_of(None, Worker()) as service:
            file = await upload(service, [line("a")])
            made = await asyncio.gather(*[service.add_batch("ann", file.id, URL, idempotency_key="k") for _ in range(5)])
            await ended(service, made[0].id)
            return {record.id for record in made}, await service.batches("ann", None, 20)

    ids, (listed, has_more) = asyncio.run(go())
    assert len(ids) == 1
    assert ([record.id for record in listed], has_more) == (list(ids), False)


def test_key_is_refused_when_it_was_used_for_another_batch():
    async def go():
        async with service_of(None, Worker()) as service:
            files = [await upload(service, [line("a")]) for _ in range(2)]
            await service.add_batch("ann", files[0].id, URL, idempotency_key="k")
            with pytest.raises(ApiError) as caught:
                await service.add_batch("ann", files[1].id, URL, idempotency_key="k")
            return caught.value

    error = asyncio.run(go())
    assert (error.status, error.param, error.code) == (400, "idempotency-key", "idempotency_key_reused")


def test_files_and_batches_of_another_owner_are_not_found():
    async def go():
        async with service_of(None, Worker()) as service:
            file = await upload(service, [line("a")])
            batch = await service.add_batch("ann", file.id, URL)
            refused = []
            for call in (
                lambda: service.file("bob", file.id),
                lambda: service.open_file("bob", file.id),
                lambda: service.delete_file("bob", file.id),
                lambda: service.batch("bob", batch.id),
                lambda: service.cancel("bob", batch.id),
                lambda: service.add_batch("bob", file.id, URL),
            ):
                with pytest.raises(ApiError) as caught:
                    await call()
                refused.append(caught.value.status)
            return refused, await service.files("bob", None, None, 10, False), await service.batches("bob", None, 10)

    refused, files, batches = asyncio.run(go())
    assert set(refused) == {404}
    assert (files, batches) == (([], False), ([], False))


@pytest.mark.parametrize("after", ["zz", "", "file-" + "a" * 26, "of another owner"])
def test_page_is_refused_when_it_is_to_begin_after_nothing(after):
    async def go():
        async with service_of(None, Worker()) as service:
            other = await upload(service, [line("a")], owner="bob")
            await upload(service, [line("a")])
            refused = []
            for call in (
                lambda place: service.files("ann", None, place, 10, False),
                lambda place: service.batches("ann", place, 10),
            ):
                with pytest.raises(ApiError) as caught:
                    await call(other.id if after.startswith("of") else after)
                refused.append((caught.value.status, caught.value.param))
            return refused

    assert asyncio.run(go()) == [(400, "after")] * 2


def test_batch_goes_on_when_the_disk_was_full(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.serving.batch.service.CHECK_INTERVAL_S", 0.2)
    real = BatchStore.save_results
    failures = iter([sqlite3.OperationalError("database or disk is full")] * 3)

    def save(self, results):
        error = next(failures, None)
        if error is not None:
            raise error
        real(self, results)

    monkeypatch.setattr(BatchStore, "save_results", save)
    record, output, _ = run([line(f"r{n}") for n in range(5)], folder=tmp_path)
    assert (record.status, len(output)) == ("completed", 5)
