"""BatchService: the life of files and batches, from upload to output file, across restarts of server and engine."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from quire.base.logging import get_logger
from quire.serving.batch.ending import end_batch
from quire.serving.batch.lines import CheckBody, Validation, validate
from quire.serving.batch.records import (
    BATCH_LIFETIME_S,
    ENDED,
    MESSAGES_ENDPOINT,
    BatchErrorItem,
    BatchRecord,
    BatchStatus,
    FileRecord,
    StoredAmount,
    new_id,
)
from quire.serving.batch.room import StorageRoom, no_batch_room, no_room
from quire.serving.batch.runner import BatchRunner, Execute
from quire.serving.batch.store import BatchStore
from quire.serving.errors import ApiError, invalid, not_found
from quire.serving.store_thread import StoreThread

logger = get_logger(__name__)

CHECK_INTERVAL_S = 60.0
COUNT_INTERVAL_S = 5.0
WINDOW_S = 24 * 3600
PURPOSES = ("batch", "user_data")
NO_LIMIT = StoredAmount(1 << 62, 1 << 62)


class BatchService:
    """/v1/files and /v1/batches without HTTP.

    execute      runs the body of a line as its online route does, with the priority class "batch"
    check_body   checks it without running
    endpoints    urls that lines may have
    max_running  lines in flight at once
    room_for     reserves room for an upload, see StorageRoom
    call_store   runs a method of the store in its thread; raises ApiError 503 storage_full if the disk is full or broken
    report_lines  called every few seconds with the lines of unfinished batches by state: todo, completed, failed
    max_batches_of  how many batches an owner may have, including ended ones until they expire
    """

    def __init__(
        self,
        folder: Path | None,
        execute: Execute,
        check_body: CheckBody,
        endpoints: tuple[str, ...],
        max_running: Callable[[], int],
        report_lines: Callable[[str, int], None] = lambda state, count: None,
        max_batches_of: Callable[[str], int] = lambda owner: NO_LIMIT.num_files,
        replica_id: str = "",
    ) -> None:
        self.endpoints = endpoints
        self._check_body = check_body
        self.store_thread = StoreThread(lambda: BatchStore(folder), "quire-batch", storage_failed)
        self.call_store = self.store_thread.call
        self.room_for = StorageRoom(self.call_store).room_for
        self.runner = BatchRunner(self.call_store, execute, max_running)
        self._report_lines = report_lines
        self._max_batches_of = max_batches_of
        self._replica_id = replica_id
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._validating: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._housekeeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Resume the work of a former process."""
        await self.call_store(BatchStore.tidy, time.time())
        for record in await self.call_store(BatchStore.unfinished):
            self._launch(record)
        self._housekeeper = asyncio.create_task(self._run_maintenance())

    async def close(self) -> None:
        """Stop; unfinished batches continue when the server starts again."""
        tasks = [*self._tasks.values(), *([self._housekeeper] if self._housekeeper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.store_thread.close(BatchStore.close)

    # Files.

    async def add_file(
        self,
        owner: str,
        filename: str,
        purpose: str,
        parts: AsyncIterator[bytes],
        lifetime_s: int | None,
        limit: StoredAmount = NO_LIMIT,
    ) -> FileRecord:
        """Store an upload as it arrives. Raises ApiError; a failed upload leaves nothing behind."""
        if purpose not in PURPOSES:
            raise invalid(f"purpose must be one of {', '.join(PURPOSES)}, got {purpose[:50]!r}", "purpose")
        now = int(time.time())
        if lifetime_s is None and purpose == "batch":
            lifetime_s = BATCH_LIFETIME_S
        file_id = new_id("file-", self._replica_id)
        num_bytes = await self._write_parts(file_id, parts)
        record = FileRecord(
            id=file_id,
            owner=owner,
            purpose=purpose,
            filename=filename,
            num_bytes=num_bytes,
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
            status="processed",
        )
        found = await self.call_store(BatchStore.add_file, record, limit)
        if found is not None:
            raise no_room(found, limit)
        return record

    async def _write_parts(self, file_id: str, parts: AsyncIterator[bytes]) -> int:
        writing = self.store_thread.store.writing(file_id)
        file = await self.call_store(lambda _store: writing.__enter__())
        num_bytes = 0
        try:
            async for part in parts:
                num_bytes += len(part)
                await self.call_store(lambda _store, part=part: file.write(part))
        except BaseException as error:
            failure = error
            await asyncio.shield(self.call_store(lambda _store: _leave(writing, failure)))
            raise
        await self.call_store(lambda _store: _leave(writing, None))
        return num_bytes

    async def file(self, owner: str, file_id: str) -> FileRecord:
        """Return a file. Raises ApiError 404."""
        record = await self.call_store(BatchStore.file, owner, file_id)
        if record is None:
            raise not_found(f"there is no file {file_id[:100]!r}", param="file_id")
        return record

    async def files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, ascending: bool
    ) -> tuple[list[FileRecord], bool]:
        """Return a page of files, and whether there are more."""
        found = await self.call_store(BatchStore.files, owner, purpose, after, limit, ascending)
        if found is None:
            raise invalid(f"after: there is no file {(after or '')[:100]!r}", "after")
        return found[:limit], len(found) > limit

    async def open_file(self, owner: str, file_id: str) -> tuple[FileRecord, AsyncIterator[bytes]]:
        """Return a file and its bytes in pieces. Raises ApiError 404."""
        record = await self.file(owner, file_id)
        try:
            file = await self.call_store(lambda store: store.path_of(file_id).open("rb"))
        except ApiError:
            raise not_found(f"the content of the file {file_id!r} is gone", param="file_id") from None

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while piece := await self.call_store(lambda _store: file.read(1 << 20)):
                    yield piece
            finally:
                file.close()

        return record, pieces()

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises ApiError 404, and 400 while a batch needs it."""
        await self.file(owner, file_id)
        if await self.call_store(BatchStore.is_in_use, file_id):
            raise invalid(f"the file {file_id!r} is the input of a batch that has not ended", "file_id", "file_in_use")
        await self.call_store(BatchStore.delete_file, file_id)

    # Batches.

    async def add_batch(
        self,
        owner: str,
        input_file_id: str,
        endpoint: str,
        *,
        metadata: dict[str, str] | None = None,
        output_lifetime_s: int | None = None,
        idempotency_key: str | None = None,
        window_s: int = WINDOW_S,
    ) -> BatchRecord:
        """Create a batch; its input is validated and run in the background. Raises ApiError."""
        if endpoint not in (*self.endpoints, MESSAGES_ENDPOINT):
            raise invalid(f"endpoint must be one of {', '.join(self.endpoints)}, got {endpoint[:100]!r}", "endpoint")
        file = await self.call_store(BatchStore.file, owner, input_file_id)
        if file is None:
            raise not_found(f"there is no file {input_file_id[:100]!r}", param="input_file_id")
        if file.purpose != "batch":
            raise invalid(f"the file's purpose must be 'batch', got {file.purpose!r}", "input_file_id")
        now = int(time.time())
        record = BatchRecord(
            id=new_id("batch_", self._replica_id),
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=f"{WINDOW_S // 3600}h",
            status="validating",
            created_at=now,
            expires_at=now + window_s,
            metadata=metadata,
            output_expires_after_s=output_lifetime_s,
        )
        limit = self._max_batches_of(owner)
        added = await self.call_store(BatchStore.add_batch, record, idempotency_key, limit)
        if added is None:
            raise no_batch_room(limit)
        if added.id == record.id:
            self._launch(added)
        elif (added.input_file_id, added.endpoint) != (input_file_id, endpoint):
            raise invalid(
                f"idempotency-key: was used for the batch {added.id} of another file or endpoint; give a new key",
                "idempotency-key",
                "idempotency_key_reused",
            )
        return added

    async def batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises ApiError 404."""
        record = await self.call_store(BatchStore.batch, batch_id, owner)
        if record is None:
            raise not_found(f"there is no batch {batch_id[:100]!r}", param="batch_id")
        return record

    async def batches(
        self, owner: str, after: str | None, limit: int, *, of_messages: bool = False, ascending: bool = False
    ) -> tuple[list[BatchRecord], bool]:
        """Return a page of batches, the newest first unless ascending, and whether there are more.

        of_messages  message batches, instead of the others
        """
        found = await self.call_store(BatchStore.batches, owner, after, limit, of_messages, ascending)
        if found is None:
            raise invalid(f"after: there is no batch {(after or '')[:100]!r}", "after")
        return found[:limit], len(found) > limit

    async def delete_batch(self, record: BatchRecord) -> None:
        """Delete a batch that has ended, with its files. Raises ApiError 400 for one that has not."""
        if record.status not in ENDED:
            raise invalid("a batch that has not ended cannot be deleted: cancel it first", "batch_id", "batch_not_ended")
        await self.call_store(BatchStore.delete_batch, record)

    async def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        """Cancel a batch: running lines are aborted, finished ones are kept. Raises ApiError 400 if the batch has ended."""
        record = await self.batch(owner, batch_id)
        if record.status in ENDED or record.status in ("finalizing", "cancelling"):
            raise invalid(f"a batch that is {record.status} cannot be cancelled", "batch_id", "batch_not_cancellable")
        changed = await self.call_store(BatchStore.change_batch, batch_id, status="cancelling", cancelling_at=int(time.time()))
        await self._restart(changed)
        return changed

    # The work.

    def _launch(self, record: BatchRecord) -> None:
        task = asyncio.create_task(self._work(record.id), name=record.id)
        self._tasks[record.id] = task
        task.add_done_callback(lambda done: self._tasks.pop(record.id, None) if self._tasks.get(record.id) is done else None)

    async def _restart(self, record: BatchRecord) -> None:
        task = self._tasks.get(record.id)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._launch(record)

    async def _work(self, batch_id: str) -> None:
        """Run a batch to its end from its present state; while the disk is full, retry."""
        while True:
            try:
                await self._advance(batch_id)
                return
            except ApiError as error:
                logger.warning("batch %s waits: %s", batch_id, error.message)
            except Exception:
                logger.exception("batch %s failed; it is tried again", batch_id)
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # a failure during the cancellation hides it
                return
            await asyncio.sleep(CHECK_INTERVAL_S / 12)

    async def _advance(self, batch_id: str) -> None:
        record = await self.call_store(BatchStore.batch, batch_id)
        if record is None or record.status in ENDED:
            return
        if record.status == "validating":
            record = await self._validate(record)
            if record is None:
                return
        if record.status == "in_progress":
            end_status = await self._run(record)
            record = await self.call_store(
                BatchStore.change_batch, batch_id, status="finalizing", finalizing_at=int(time.time()), end_status=end_status
            )
        end_status = record.end_status or ("cancelled" if record.status == "cancelling" else "completed")
        await end_batch(self.call_store, self._write_parts, record, end_status)

    async def _validate(self, record: BatchRecord) -> BatchRecord | None:
        """Read the whole input, one at a time per owner, outside the store's thread, which other calls need."""
        path = self.store_thread.store.path_of(record.input_file_id)

        def read() -> Validation:
            try:
                with path.open("rb") as file:
                    return validate(file, (record.endpoint,), self._check_body)
            except FileNotFoundError:
                return Validation([], [BatchErrorItem("file_not_found", "the content of the input file is gone")])
            except OSError as error:
                raise storage_failed(error) from error

        turn = self._validating.setdefault(record.owner, asyncio.Lock())
        async with turn:
            found = await asyncio.to_thread(read)
        if found.errors:
            await self.call_store(BatchStore.fail_batch, record.id, found.errors)
            return None
        return await self.call_store(BatchStore.start_batch, record.id, found.spans)

    async def _run(self, record: BatchRecord) -> BatchStatus:
        """Run the remaining lines; return the final status of the batch."""
        remaining_s = record.expires_at - time.time()
        try:
            async with asyncio.timeout(max(0.0, remaining_s)):
                await self.runner.run(record)
        except TimeoutError:
            return "expired"
        return "completed"

    async def _run_maintenance(self) -> None:
        next_check_s = time.monotonic() + CHECK_INTERVAL_S
        while True:
            await asyncio.sleep(COUNT_INTERVAL_S)
            try:
                for state, count in (await self.call_store(BatchStore.count_lines)).items():
                    self._report_lines(state, count)
                if time.monotonic() >= next_check_s:
                    next_check_s += CHECK_INTERVAL_S
                    await self.call_store(BatchStore.tidy, time.time())
            except ApiError as error:
                logger.warning("the batch store could not be tidied: %s", error.message)
            except Exception:
                logger.exception("the batch store could not be tidied")


def _leave(manager: Any, error: BaseException | None) -> None:
    """Exit a context manager of the store; after an error it removes what it had written."""
    if error is None:
        manager.__exit__(None, None, None)
        return
    try:
        manager.__exit__(type(error), error, error.__traceback__)
    except type(error) as raised:
        if raised is not error:
            raise


def storage_failed(error: BaseException) -> ApiError:
    """Return a 503 for a disk that is full or broken; online requests go on."""
    logger.error("the batch store failed: %s", error)
    return ApiError(503, "the server cannot store files now", code="storage_full", retry_after_s=60)
