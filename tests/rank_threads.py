"""Tensor-parallel ranks as threads of this process, so that a model on several ranks is built in milliseconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.contracts.kv_spec import KvDtype, KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.kv.pool import KvPool
from quire.model.native_decoder import NativeDecoder
from quire.model.tensor_shards import ContextPlace, ModelShard, RankGroup, RowDivision
from quire.parallel.barrier import ProcessBarrier, native_extension
from quire.parallel.expert_placement import ExpertPlacement
from quire.parallel.mesh import DeviceMesh
from quire.parallel.row_exchange import RowExchange
from quire.parallel.shared_memory import SharedMemoryFile
from quire.parallel.shm_communicator import ShmCommunicator
from quire.parallel.worker_group import attach_subgroups, initialise_subgroups, subgroup_areas
from quire.worker.parallel_build import row_subgroups


class RankThreads:
    """The ranks of a model; what is called on it is called on every rank at once.

    parameters      returns the model's parameters anew: each rank empties its own
    exchanges_rows  no rank sees the rows of another, as if each were on a host of its own
    placements      with expert parallelism: of the experts of each layer that has any
    context         (ranks that share the tokens of sequences, blocks in the cache of each)
    num_row_groups  groups of one rank for each share; each has the whole model and computes some of the tokens of a step
    home_size       ranks of a home: context is (homes, blocks in the cache of each), and each attends to sequences of its own
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Callable[[], dict[str, Any]],
        shares: Sequence[float],
        max_model_len: int,
        quantize: Callable[..., Any] | None = None,
        exchanges_rows: bool = False,
        placements: Mapping[int, ExpertPlacement] | None = None,
        context: tuple[int, int] = (1, 0),
        num_row_groups: int = 1,
        home_size: int = 0,
    ) -> None:
        self._mesh = DeviceMesh(tensor=len(shares), context=num_row_groups)
        self.spec, self._size, self._context, self._home_size = spec, self._mesh.size, context, home_size
        subgroups = row_subgroups(self._mesh)
        areas = {**ProcessBarrier.areas(self._size), **ShmCommunicator.areas(self._size), **subgroup_areas(subgroups)}
        self.memory = SharedMemoryFile.create(areas)
        initialise_subgroups(self.memory, subgroups)
        ProcessBarrier.initialise(self.memory, self._size)
        self.barriers = [ProcessBarrier(self.memory, rank, self._size) for rank in range(self._size)]
        self._own_memories: list[SharedMemoryFile] = []
        self._rows_files = [os.memfd_create("rows") for _ in range(1 + len(subgroups))]
        self.shards: list[ModelShard | None] = [None] * self._size
        if len(shares) > 1:
            size = 1 if home_size else context[0]
            self.shards = [ModelShard.of(spec, rank, shares, placements, size, home_size) for rank in range(len(shares))]
            self.shards *= num_row_groups
        self.decoders = []
        for rank, shard in enumerate(self.shards):
            if exchanges_rows:
                group = self._group_of_own(rank, shard)
            elif subgroups:
                group = self._group_of_groups(rank, shard, subgroups)
            else:
                group = self._group(rank, shard, self.barriers[rank].address, self._rows_files[0])
            self.decoders.append(NativeDecoder(native_extension(), spec, parameters(), max_model_len, quantize, group))
        self._pool = ThreadPoolExecutor(self._size)

    def _place(self, rank: int) -> ContextPlace | None:
        size, num_local_blocks = self._context
        place = rank // self._home_size if self._home_size else rank % size
        return None if size == 1 else ContextPlace(place, size, num_local_blocks)

    def _group(
        self, rank: int, shard: ModelShard | None, address: int, file: int, exchange: RowExchange | None = None
    ) -> RankGroup:
        """Return a group of ranks of one kind."""
        if shard is None:
            return RankGroup(None, exchange=exchange, division=RowDivision(rank, self._size, address, file))
        place = self._place(rank)
        return RankGroup(shard, address, file, exchange=exchange, context=place, home_size=self._home_size)

    def _group_of_groups(self, rank: int, shard: ModelShard | None, subgroups: Mapping[str, tuple[int, ...]]) -> RankGroup:
        """Return a tensor-parallel group that divides rows with others."""
        at, own = self._mesh.coordinates(rank), attach_subgroups(self.memory, rank, subgroups)
        tensor, rows = own[f"tensor{at.context}"], own[f"rows{at.tensor}"]
        division = RowDivision(
            at.context, self._mesh.context, rows.address, self._rows_files[1 + self._mesh.context + at.tensor]
        )
        return RankGroup(shard, tensor.address, self._rows_files[1 + at.context], division=division)

    def _group_of_own(self, rank: int, shard: ModelShard | None) -> RankGroup:
        """Return a group in which a rank has memory of its own; what it exchanges goes through a communicator."""
        memory = SharedMemoryFile.create(ProcessBarrier.areas(self._size))
        ProcessBarrier.initialise(memory, self._size)
        own = ProcessBarrier(memory, rank, self._size)
        self._own_memories.append(memory)
        self._rows_files.append(os.memfd_create("rows"))
        exchange = RowExchange(ShmCommunicator(self.memory, self.barriers[rank]), own)
        self.barriers[rank] = own
        return self._group(rank, shard, own.address, self._rows_files[-1], exchange)

    def pools(self, block_size: int, dtype: KvDtype, num_blocks: int, num_states: int = 0) -> list[KvPool]:
        """Return a cache for each rank, with rows of recurrent states."""
        whole = KvSpec.of(self.spec, block_size, dtype)
        shapes = [whole if one is None else one.kv_spec(self.spec, block_size, dtype) for one in self.shards]
        return [KvPool(shape, num_blocks, num_states) for shape in shapes]

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
        for memory in (self.memory, *self._own_memories):
            memory.close()
