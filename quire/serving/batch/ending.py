"""end_batch: the output files of a batch, written in parts, so that other calls can use the store in between."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from quire.base.logging import get_logger
from quire.serving.batch.records import BATCH_LIFETIME_S, BatchRecord, BatchStatus, FileRecord, output_file_id
from quire.serving.batch.runner import error_line
from quire.serving.batch.store import BatchStore, LineResult

logger = get_logger(__name__)

LINES_PER_CALL = 256
BYTES_PER_CALL = 1 << 20

CallStore = Callable[..., Awaitable[Any]]
WriteParts = Callable[[str, AsyncIterator[bytes]], Awaitable[int]]
"""Writes the bytes of the file with this id, atomically, and returns their number."""


async def end_batch(call_store: CallStore, write_parts: WriteParts, record: BatchRecord, end_status: BatchStatus) -> None:
    """Write the output files of a batch and end it. After an interruption it is repeated with the same file ids."""
    if end_status in ("expired", "cancelled"):
        await _fail_rest(call_store, record, end_status)
    now = int(time.time())
    outputs: dict[str, str] = {}
    files: list[FileRecord] = []
    for field, is_success in (("output_file_id", True), ("error_file_id", False)):
        if not await call_store(BatchStore.has_results, record.id, is_success):
            continue
        # The id follows from the batch's, so that a second attempt writes the same file.
        file_id = output_file_id(record.id, is_success)
        num_bytes = await write_parts(file_id, _results(call_store, record.id, is_success))
        lifetime_s = record.output_expires_after_s or BATCH_LIFETIME_S
        outputs[field] = file_id
        files.append(
            FileRecord(
                id=file_id,
                owner=record.owner,
                purpose="batch_output",
                filename=f"{record.id}_{'output' if is_success else 'error'}.jsonl",
                num_bytes=num_bytes,
                created_at=now,
                expires_at=now + lifetime_s,
                status="processed",
            )
        )
    num_unrun = await call_store(BatchStore.count_unrun, record.id)
    changes: dict[str, Any] = {"num_unrun": num_unrun, "status": end_status, f"{end_status}_at": now, **outputs}
    await call_store(BatchStore.end_batch, record.id, files, changes)
    logger.info("batch %s is %s", record.id, end_status)


async def _fail_rest(call_store: CallStore, record: BatchRecord, end_status: BatchStatus) -> None:
    """Record the lines that did not run as failed."""
    code = f"batch_{end_status}"
    message = "the batch expired before this line ran" if end_status == "expired" else "the batch was cancelled"

    def fail_some(store: BatchStore) -> bool:
        lines = store.todo(record.id, after=-1, limit=LINES_PER_CALL)
        store.save_results([LineResult(record.id, line.n, False, error_line(line.custom_id, code, message)) for line in lines])
        return bool(lines)

    while await call_store(fail_some):
        pass


async def _results(call_store: CallStore, batch_id: str, is_success: bool) -> AsyncIterator[bytes]:
    """Yield the lines of an output file."""
    after = -1
    while rows := await call_store(BatchStore.results, batch_id, is_success, after, BYTES_PER_CALL):
        after = rows[-1][0]
        yield b"".join([result + b"\n" for _, result in rows])
