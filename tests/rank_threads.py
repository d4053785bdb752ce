"""Tensor-parallel ranks as threads of this process, so that a model on several ranks is built in milliseconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.contracts.kv_spec import KvDtype
from quire.contracts.model_spec import ModelSpec
from quire.kv.pool import KvPool
from quire.model.native_decoder import NativeDecoder
from quire.model.tensor_shards import ModelShard, RankGroup
from quire.parallel.barrier import ProcessBarrier, native_extension
from quire.parallel.row_exchange import RowExchange
from quire.parallel.shared_memory import SharedMemoryFile
from quire.parallel.shm_communicator import ShmCommunicator


class RankThreads:
    """The ranks of a model; what is called on it is called on every rank at once.

    parameters      returns the model's parameters anew: each rank empties its own
    exchanges_rows  no rank sees the rows of another, as if each were on a host of its own
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Callable[[], dict[str, Any]],
        shares: Sequence[float],
        max_model_len: int,
        quantize: Callable[..., Any] | None = None,
        exchanges_rows: bool = False,
    ) -> None:
        self.spec, self._size = spec, len(shares)
        self._memory = SharedMemoryFile.create({**ProcessBarrier.areas(self._size), **ShmCommunicator.areas(self._size)})
        ProcessBarrier.initialise(self._memory, self._size)
        self.barriers = [ProcessBarrier(self._memory, rank, self._size) for rank in range(self._size)]
        self._own_memories: list[SharedMemoryFile] = []
        self._rows_files = [os.memfd_create("rows")]
        self.shards = [ModelShard.of(spec, rank, shares) for rank in range(self._size)]
        self.decoders = []
        for shard in self.shards:
            if exchanges_rows:
                group = self._group_of_own(shard)
            else:
                group = RankGroup(shard, self.barriers[shard.rank].address, self._rows_files[0])
            self.decoders.append(NativeDecoder(native_extension(), spec, parameters(), max_model_len, quantize, group))
        self._pool = ThreadPoolExecutor(self._size)

    def _group_of_own(self, shard: ModelShard) -> RankGroup:
        """Return a group in which a rank has memory of its own; what it exchanges goes through a communicator."""
        memory = SharedMemoryFile.create(ProcessBarrier.areas(self._size))
        ProcessBarrier.initialise(memory, self._size)
        own = ProcessBarrier(memory, shard.rank, self._size)
        self._own_memories.append(memory)
        self._rows_files.append(os.memfd_create("rows"))
        exchange = RowExchange(ShmCommunicator(self._memory, self.barriers[shard.rank]), own)
        self.barriers[shard.rank] = own
        return RankGroup(shard, own.address, self._rows_files[-1], exchange=exchange)

    def pools(self, block_size: int, dtype: KvDtype, num_blocks: int) -> list[KvPool]:
        """Return a cache for each rank."""
        return [KvPool(shard.kv_spec(self.spec, block_size, dtype), num_blocks) for shard in self.shards]

    def call(self, act: Callable[[NativeDecoder, int], Any]) -> Any:
        """Return what act(decoder, rank) returns on rank 0, when all ranks have returned."""
        futures = [self._pool.submit(act, decoder, rank) for rank, decoder in enumerate(self.decoders)]
        results = [future.result(timeout=60) for future in futures]
        return results[0]

    @property
    def num_barriers(self) -> list[int]:
        """Of every rank, so far."""
        return [decoder.plan.num_barriers for decoder in self.decoders]

    def close(self) -> None:
        """End the threads and free the memory."""
        self._pool.shutdown()
        self.decoders.clear()
        for descriptor in self._rows_files:
            os.close(descriptor)
        for memory in (self._memory, *self._own_memories):
            memory.close()
