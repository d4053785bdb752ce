"""StorageRoom: storage quotas per key, including uploads in progress."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from quire.serving.batch.records import BATCH_LIFETIME_S, StoredAmount
from quire.serving.batch.store import BatchStore
from quire.serving.errors import ApiError, invalid

Grow = Callable[[int], Awaitable[None]]
"""Reserves room for the bytes of a file that have arrived. Raises ApiError 400 if there is none."""


class CallStore(Protocol):
    """Runs a function with the store in the store's thread."""

    def __call__(self, method: Callable[[BatchStore], StoredAmount]) -> Awaitable[StoredAmount]: ...


class StorageRoom:
    """Used from the event loop. The database counts stored files; this object counts uploads in progress."""

    def __init__(self, call_store: CallStore) -> None:
        self._call_store = call_store
        self._coming: dict[str, StoredAmount] = {}  # by owner

    @contextlib.asynccontextmanager
    async def room_for(self, owner: str, num_bytes: int, limit: StoredAmount) -> AsyncGenerator[Grow]:
        """Reserve room for one more file of an owner during its upload. Raises ApiError 400 if there is none.

        num_bytes  the declared size; the yielded function reserves more, and raises the same error
        """
        await self._keep(owner, 1, num_bytes, limit)
        num_kept = num_bytes

        async def grow(num_come: int) -> None:
            nonlocal num_kept
            if num_come > num_kept:
                await self._keep(owner, 0, num_come - num_kept, limit)
                num_kept = num_come

        try:
            yield grow
        finally:
            self._coming[owner] = self._coming[owner].plus(-1, -num_kept)
            if not self._coming[owner].num_files:
                del self._coming[owner]

    async def _keep(self, owner: str, num_files: int, num_bytes: int, limit: StoredAmount) -> None:
        def stored(store: BatchStore) -> StoredAmount:
            store.delete_expired(time.time())
            return store.stored(owner)

        found = await self._call_store(stored)
        coming = self._coming.get(owner, StoredAmount()).plus(num_files, num_bytes)
        if not limit.has_room_for(found.plus(coming.num_files, coming.num_bytes)):
            raise no_room(found, limit)
        self._coming[owner] = coming


def no_room(stored: StoredAmount, limit: StoredAmount) -> ApiError:
    """Return the error for an owner that already has `stored`."""
    return invalid(
        f"file: this key stores {stored.num_files} files of {stored.num_bytes} bytes and may store {limit.num_files} files of "
        f"{limit.num_bytes} bytes: delete some, or let them expire",
        "file",
        "storage_quota_exceeded",
    )


def no_batch_room(limit: int) -> ApiError:
    """Return the error for an owner that already has `limit` batches."""
    return invalid(
        f"this key has {limit} batches, as many as it may have: wait until some go, {BATCH_LIFETIME_S // 86_400} days after "
        "their end, put more lines into one batch, or have the server's max_stored_batches raised",
        code="batch_quota_exceeded",
    )
