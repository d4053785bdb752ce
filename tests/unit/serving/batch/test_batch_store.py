"""What the store of files and batches keeps: room, age, pages, a full disk, its indexes."""

import asyncio
import contextlib
import sqlite3
import time

import msgspec
import pytest

from quire.serving.batch.records import BATCH_LIFETIME_S, BatchRecord, FileRecord, StoredAmount, new_id
from quire.serving.batch.store import ENDED_AT, INPUT_FILE, IS_OPEN, BatchStore
from quire.serving.errors import ApiError
from tests.unit.serving.batch.running_batches import URL, Worker, ended, line, run, service_of, upload


async def give(service, owner, num_bytes, limit, lifetime_s=None):
    async def parts():
        yield b"x" * num_bytes

    return await service.add_file(owner, "in.jsonl", "user_data", parts(), lifetime_s, limit)


async def has_room(service, owner, num_bytes, limit):
    async with service.room_for(owner, num_bytes, limit):
        pass


def test_room_is_kept_for_uploads_that_are_on_their_way():
    limit = StoredAmount(num_files=3, num_bytes=1000)

    async def go():
        async with service_of(None, Worker()) as service:
            async with service.room_for("ann", 600, limit):
                with pytest.raises(ApiError):
                    await has_room(service, "ann", 401, limit)
                await has_room(service, "bob", 401, limit)
                async with service.room_for("ann", 400, limit), service.room_for("ann", 0, limit):
                    with pytest.raises(ApiError):
                        await has_room(service, "ann", 0, limit)
            with pytest.raises(ValueError, match="gone"):
                async with service.room_for("ann", 1000, limit):
                    raise ValueError("gone")
            await has_room(service, "ann", 1000, limit)

    asyncio.run(go())


def test_room_grows_with_an_upload_when_its_length_is_not_known():
    limit = StoredAmount(num_files=3, num_bytes=1000)

    async def go():
        async with service_of(None, Worker()) as service:
            async with service.room_for("ann", 0, limit) as grow:
                await grow(600)
                await grow(500)
                with pytest.raises(ApiError):
                    await has_room(service, "ann", 401, limit)
                with pytest.raises(ApiError) as caught:
                    await grow(1001)
                assert caught.value.code == "storage_quota_exceeded"
                await has_room(service, "ann", 400, limit)
                await grow(1000)
            await has_room(service, "ann", 1000, limit)

    asyncio.run(go())


def test_upload_is_refused_when_its_owner_has_no_room_until_something_goes(tmp_path):
    limit = StoredAmount(num_files=3, num_bytes=1000)

    async def go():
        async with service_of(tmp_path, Worker()) as service:
            first = await give(service, "ann", 600, limit)
            with pytest.raises(ApiError, match="600 bytes and may store 3 files of 1000 bytes") as caught:
                await give(service, "ann", 401, limit)
            assert (caught.value.status, caught.value.code, caught.value.param) == (400, "storage_quota_exceeded", "file")
            await give(service, "bob", 1000, limit)  # of another key
            for num_bytes in (400, 0):
                await give(service, "ann", num_bytes, limit)
            with pytest.raises(ApiError, match="3 files"):
                await has_room(service, "ann", 0, limit)
            with pytest.raises(ApiError, match="3 files"):
                await give(service, "ann", 0, limit)
            await service.delete_file("ann", first.id)
            await give(service, "ann", 600, limit)
        async with service_of(tmp_path, Worker()) as service:  # it is counted by the database, not by the process
            with pytest.raises(ApiError):
                await has_room(service, "ann", 1, limit)

    asyncio.run(go())
    assert len(list((tmp_path / "files").iterdir())) == 4  # of what was refused nothing is left


def test_expired_file_makes_room(tmp_path, monkeypatch):
    limit = StoredAmount(num_files=1, num_bytes=1000)

    async def go():
        async with service_of(tmp_path, Worker()) as service:
            await give(service, "ann", 1000, limit, lifetime_s=3600)
            with pytest.raises(ApiError):
                await has_room(service, "ann", 1, limit)
            now = time.time()
            monkeypatch.setattr(time, "time", lambda: now + 3601)
            await has_room(service, "ann", 1000, limit)
            await give(service, "ann", 1000, limit)

    asyncio.run(go())


def test_output_counts_but_is_never_refused():
    limit = StoredAmount(num_files=1, num_bytes=10_000)

    async def go():
        async with service_of(None, Worker()) as service:

            async def parts():
                yield line("a").encode()

            file = await service.add_file("ann", "in.jsonl", "batch", parts(), None, limit)
            batch = await service.add_batch("ann", file.id, URL)
            record = await ended(service, batch.id)
            found, _ = await service.files("ann", None, None, 10, False)
            return record, found, await service.call_store(BatchStore.stored, "ann")

    record, found, stored = asyncio.run(go())
    assert record.output_file_id is not None
    assert stored == StoredAmount(2, sum(file.num_bytes for file in found))


def test_file_cannot_be_deleted_while_a_batch_needs_it():
    async def go():
        gate = asyncio.Event()

        async def execute(record, body):
            await gate.wait()
            return await Worker()(record, body)

        async with service_of(None, execute) as service:
            file = await upload(service, [line("a")])
            batch = await service.add_batch("ann", file.id, URL)
            with pytest.raises(ApiError) as caught:
                await service.delete_file("ann", file.id)
            gate.set()
            await ended(service, batch.id)
            await service.delete_file("ann", file.id)
            return caught.value.code, await service.files("ann", "batch", None, 10, True)

    assert asyncio.run(go()) == ("file_in_use", ([], False))


def test_pages_hold_every_file_once():
    async def go():
        async with service_of(None, Worker()) as service:
            made = [(await upload(service, [line("a")])).id for _ in range(7)]
            pages, after = [], None
            while True:
                found, has_more = await service.files("ann", None, after, 3, ascending=False)
                pages += [record.id for record in found]
                if not has_more:
                    return made, pages
                after = pages[-1]

    made, pages = asyncio.run(go())
    assert sorted(made) == sorted(pages)
    assert len(pages) == 7


def test_upload_leaves_nothing_when_it_breaks(tmp_path):
    async def go():
        async def parts():
            yield b"x" * 1000
            raise ConnectionResetError

        async with service_of(tmp_path, Worker()) as service:
            with pytest.raises(ConnectionResetError):
                await service.add_file("ann", "f", "batch", parts(), None)
            return await service.files("ann", None, None, 10, False)

    assert asyncio.run(go()) == ([], False)
    assert list((tmp_path / "files").iterdir()) == []


def test_upload_says_that_the_disk_is_full(tmp_path, monkeypatch):
    async def go():
        async with service_of(tmp_path, Worker()) as service:

            def fail(self, record, limit):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(BatchStore, "add_file", fail)
            with pytest.raises(ApiError) as caught:
                await upload(service, [line("a")])
            return caught.value

    error = asyncio.run(go())
    assert (error.status, error.code) == (503, "storage_full")


def test_record_survives_the_store():
    record = run([line("a")])[0]
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record


class FailingOnce:
    """A connection whose next COMMIT fails and leaves its transaction open, as an I/O error may."""

    def __init__(self, connection):
        self.connection, self.has_failed = connection, False

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def execute(self, statement, *values):
        if statement == "COMMIT" and not self.has_failed:
            self.has_failed = True
            raise sqlite3.OperationalError("disk I/O error")
        return self.connection.execute(statement, *values)


def test_store_goes_on_when_a_commit_has_failed():
    store = BatchStore(None)
    store.database = FailingOnce(store.database)
    record = FileRecord(
        id=new_id("file-"),
        owner="ann",
        purpose="batch",
        filename="a",
        num_bytes=1,
        created_at=1,
        expires_at=None,
        status="processed",
    )
    with pytest.raises(sqlite3.OperationalError, match="I/O"):
        store.put_file(record)
    assert store.file("ann", record.id) is None
    store.put_file(record)
    assert store.file("ann", record.id) == record
    store.close()


def test_batch_goes_when_it_has_ended_long_ago(tmp_path, monkeypatch):
    async def go():
        async with service_of(tmp_path, Worker()) as service:
            file = await upload(service, [line("a")])
            done = await ended(service, (await service.add_batch("ann", file.id, URL)).id)
            wrong = await upload(service, ["{"])
            failed = await ended(service, (await service.add_batch("ann", wrong.id, URL)).id)
            assert (done.status, failed.status) == ("completed", "failed")
            now = max(done.completed_at, failed.failed_at)
            await service.call_store(BatchStore.delete_expired, now + BATCH_LIFETIME_S - 60)
            assert len((await service.batches("ann", None, 10))[0]) == 2
            await service.call_store(BatchStore.delete_expired, now + BATCH_LIFETIME_S + 1)
            assert (await service.batches("ann", None, 10), await service.files("ann", None, None, 10, True)) == (
                ([], False),
            ) * 2
            with pytest.raises(ApiError) as caught:
                await service.batch("ann", done.id)
            assert caught.value.status == 404

    asyncio.run(go())


def test_open_batch_and_its_input_stay_however_old_they_are():
    store = BatchStore(None)
    batch = make_batch(created_at=1, status="in_progress", in_progress_at=2)
    store.add_batch(batch, None, 1)
    store.put_file(make_file(batch.input_file_id, created_at=1, expires_at=3))
    store.delete_expired(1e10)
    assert store.batch(batch.id) is not None
    assert store.is_in_use(batch.input_file_id)
    assert store.file("ann", batch.input_file_id) is not None
    store.fail_batch(batch.id, [])
    assert not store.is_in_use(batch.input_file_id)
    store.close()


def make_batch(**changes):
    fields = {"id": new_id("batch_"), "owner": "ann", "endpoint": URL, "input_file_id": new_id("file-"), "expires_at": 9}
    return BatchRecord(**{**fields, "completion_window": "24h", "status": "validating", "created_at": 1, **changes})


def make_file(file_id, **changes):
    fields = {"owner": "ann", "purpose": "batch", "filename": "f", "num_bytes": 1, "created_at": 1, "expires_at": None}
    return FileRecord(id=file_id, status="processed", **{**fields, **changes})


def test_batch_is_refused_when_its_owner_has_as_many_as_it_may():
    async def go():
        async with service_of(None, Worker(), max_batches_of={"ann": 1, "bob": 1}.get) as service:
            file = await upload(service, [line("a")])
            first = await service.add_batch("ann", file.id, URL, idempotency_key="k")
            with pytest.raises(ApiError, match="has 1 batches") as caught:
                await service.add_batch("ann", file.id, URL)
            assert (caught.value.status, caught.value.code) == (400, "batch_quota_exceeded")
            assert (await service.add_batch("ann", file.id, URL, idempotency_key="k")).id == first.id
            await service.add_batch("bob", (await upload(service, [line("a")], "bob")).id, URL)

    asyncio.run(go())


def test_what_was_made_within_a_second_is_listed_in_its_order_page_by_page():
    store = BatchStore(None)
    names = [new_id("file-") for _ in range(30)]
    batches = [make_batch() for _ in range(30)]
    for name, batch in zip(names, batches, strict=True):
        store.put_file(make_file(name))
        store.add_batch(batch, None, 100)
    store.put_file(make_file(names[3]))  # written anew, it stays where it was
    found, after = [], None
    while page := store.files("ann", None, after, 7, ascending=True)[:7]:
        found += [record.id for record in page]
        after = found[-1]
    assert found == names
    assert [record.id for record in store.files("ann", None, None, 100, ascending=False)] == names[::-1]
    assert [record.id for record in store.batches("ann", None, 100)] == [batch.id for batch in batches[::-1]]
    assert store.unfinished() == batches
    store.close()


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        (f"SELECT 1 FROM batch WHERE {IS_OPEN} AND {INPUT_FILE}=? LIMIT 1", "batch_open_by_input"),
        (f"SELECT record FROM batch WHERE {IS_OPEN} ORDER BY created_at, rowid", "batch_open"),
        (f"DELETE FROM batch WHERE NOT ({IS_OPEN}) AND {ENDED_AT} <= ?", "batch_by_end"),
        ("SELECT id FROM file WHERE expires_at <= ?", "file_by_expiry"),
    ],
)
def test_index_is_used_when_a_table_may_be_long(tmp_path, statement, index):
    BatchStore(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db:
        plan = db.execute(f"EXPLAIN QUERY PLAN {statement}", (1,) * statement.count("?")).fetchall()
    assert any(f"INDEX {index} " in f"{row[3]} " for row in plan), plan
    assert not any("TEMP B-TREE" in row[3] for row in plan), plan


def test_database_of_before_the_indexes_gets_them_when_it_is_opened(tmp_path):
    BatchStore(tmp_path).close()
    db = sqlite3.connect(tmp_path / "batches.sqlite")
    for index in ("batch_open", "batch_open_by_input", "batch_by_end", "file_by_expiry"):
        db.execute(f"DROP INDEX {index}")
    db.commit()
    db.close()
    BatchStore(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db:
        names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='index'")}
    assert {"batch_open", "batch_open_by_input", "batch_by_end", "file_by_expiry"} <= names
