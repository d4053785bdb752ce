"""StoreThread: the only thread that uses a store, its database and its files."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from quire.serving.errors import ApiError, shutting_down

P = ParamSpec("P")
R = TypeVar("R")
StoreT = TypeVar("StoreT")


class StoreThread(Generic[StoreT]):
    """Creates a store in its own thread, in which all its methods run. Raises the errors of the creation.

    failed  makes the error for clients if the disk is full or the database broken
    """

    def __init__(self, make: Callable[[], StoreT], name: str, failed: Callable[[BaseException], ApiError]) -> None:
        self._failed = failed
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        try:
            self.store = self._thread.submit(make).result()
        except BaseException:
            self._thread.shutdown()
            raise

    async def call(self, method: Callable[Concatenate[StoreT, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of the store. Raises ApiError 503 if the disk fails, or the store is closed."""
        if self._is_closed:
            raise shutting_down()

        def call() -> R:
            try:
                return method(self.store, *args, **kwargs)
            except (OSError, sqlite3.Error) as error:
                raise self._failed(error) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def close(self, close: Callable[[StoreT], Any]) -> None:
        """Close the store after pending calls; later calls are refused."""
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, close, self.store)
        self._thread.shutdown()
