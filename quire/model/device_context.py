"""Attention over keys that lie on several GPU ranks (decode context parallelism).

Chunks of CHUNK keys of a sequence are on the ranks in turn. For a few queries of a sequence every rank attends with the heads
of all ranks to its own chunks, and merges their results; those of all ranks are gathered and merged. With `is_in_order` the
results of all chunks are gathered, and merged in the order of the keys. For runs of prompts the keys are gathered instead,
which are fewer bytes where there are many queries. With `is_in_order` both give the bits that one rank gives, which attends in
chunks at the same positions.

Decode steps without host_context_lens, which are captured, have the sizes of max_context_len: the device finds the keys here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.memory import GATHERED_BYTES, GATHERED_TOKENS
from quire.contracts.model_spec import NO_ATTENTION, AttentionSpec, ModelSpec
from quire.kernels.triton.attention import (
    KvCache,
    PartialResults,
    attend_chunks_launch,
    attend_launches,
    attend_part_launches,
    merge_chunks_launch,
    partial_shape,
    tile_queries,
)
from quire.kernels.triton.launching import run_all
from quire.kernels.triton.qk_rope_store import Projections
from quire.kernels.triton.step import ChunkPlan, DeviceAttentionMetadata, SharedKeys, Tiles, list_tiles, send_together
from quire.kernels.triton.tiles import CHUNK
from quire.model.device_collectives import Collectives, gather, gather_columns
from quire.parallel.shards import HeadRange

CAPTURED_BYTES = 16 << 20
"""Of results that a layer gathers in a CUDA graph at most; estimated: 0.1 ms at 200 GB/s, less than 15 launches of 12 us."""


class _ChunkRound(NamedTuple):
    """Runs of a few queries each, whose results are gathered at once.

    own     this rank's chunks, as many for each run as any rank may have
    starts  [tiles + 1] i32 of all ranks' chunks; owners, places [items] i64: the rank of each, and its place among its chunks
    """

    tiles: Tiles
    own: ChunkPlan
    starts: Tensor
    owners: Tensor
    places: Tensor


class _KeyRound(NamedTuple):
    """Runs of prompts, whose sequences' keys are gathered at once.

    blocks  [N] i64 of this rank, as many for each sequence as any rank may have
    tables  [S, max_blocks] i32 of the gathered ones
    """

    tiles: Tiles
    blocks: Tensor
    tables: Tensor


class _Plan(NamedTuple):
    """How the runs of a step are attended to; short_tokens: [N] i64, the rows of those with few queries, None: all.

    part  a decode step of this rank's keys, see ContextRanks.part_of; None: `chunks` lists them
    """

    chunks: list[_ChunkRound]
    keys: list[_KeyRound]
    short_tokens: Tensor | None = None
    part: DeviceAttentionMetadata | None = None


class ContextRanks:
    """The ranks that share the tokens of sequences, as one of them sees them. All make the same calls in the same order.

    communicator  of these ranks, on the model's device
    place         of this rank among them
    """

    def __init__(self, communicator: Collectives, place: int) -> None:
        self.communicator, self.place, self.size = communicator, place, communicator.size

    def localize(self, step: DeviceAttentionMetadata, blocks_per_rank: int, block_size: int) -> DeviceAttentionMetadata:
        """Return a step with slots and block tables of this rank's blocks; what is on other ranks has slot -1."""
        if step.num_drafts is not None or (step.host_context_lens is None and not step.is_decode):
            raise InvariantError("keys on several ranks need lengths on the host or decode steps, and no trees")
        tables, first = step.block_tables, self.place * blocks_per_rank
        shared = SharedKeys(tables, (tables[:, 0] // blocks_per_rank).long(), blocks_per_rank)
        own = (tables - first).clamp_(0, blocks_per_rank - 1)
        slots = step.slots - first * block_size
        slots = torch.where((slots >= 0) & (slots < blocks_per_rank * block_size), slots, -1)
        return replace(step, slots=slots, block_tables=own, shared_keys=shared)

    def part_of(self, step: DeviceAttentionMetadata, block_size: int) -> DeviceAttentionMetadata:
        """Return a localized decode step over this rank's keys only: tables of its blocks one after the other, and how many
        tokens they have."""
        shared = step.shared_keys
        assert shared is not None
        per_chunk, per_round, width = CHUNK // block_size, CHUNK * self.size, step.block_tables.shape[1]
        before = (self.place - shared.firsts) % self.size  # chunks before the first one here
        lengths = step.context_lens.long()
        own = lengths // per_round * CHUNK + (lengths % per_round - before * CHUNK).clamp_(0, CHUNK)
        num_chunks = -(-width // (per_chunk * self.size))
        index = torch.arange(num_chunks * per_chunk, device=lengths.device)
        entries = (index // per_chunk * self.size + before[:, None]) * per_chunk + index % per_chunk
        tables, own = step.block_tables.gather(1, entries.clamp_(max=width - 1)), own.to(torch.int32)
        most = num_chunks * CHUNK
        return replace(step, context_lens=own, block_tables=tables, max_context_len=most, plans={}, _tiles={})

    def most_captured(self, specs: Sequence[ModelSpec], max_model_len: int) -> int:
        """Return up to how many sequences decode steps `is_in_order` are captured, 0: none; specs: what each rank runs. They
        gather results of as many chunks as contexts may have."""
        own = [layer.attention for spec in specs for layer in spec.layers if layer.attention != NO_ATTENTION]
        most = max(_result_bytes(each) * _most_chunks(each, max_model_len) for each in own)
        return CAPTURED_BYTES // (self.size * most)

    def own_blocks(self, blocks: Tensor, blocks_per_rank: int) -> Tensor:
        """Return blocks [N] i64 to copy as this rank counts them; those of others become the spare one behind its own."""
        own = blocks - self.place * blocks_per_rank
        return torch.where((own >= 0) & (own < blocks_per_rank), own, blocks_per_rank)


class LayerContext:
    """Attention of one layer over keys that lie on several ranks.

    spec   attention with the heads of this rank
    heads  of each of the ranks; own: of this one
    """

    def __init__(self, ranks: ContextRanks, spec: AttentionSpec, heads: Sequence[HeadRange]) -> None:
        self._ranks, self._own, self._heads = ranks, spec, heads
        own, first = heads[ranks.place], heads[0]
        self._columns = slice(own.heads.start - first.heads.start, own.heads.stop - first.heads.start)
        kv_first = own.kv_heads.start - first.kv_heads.start
        self._kv_heads = slice(kv_first, kv_first + own.kv_heads.size)
        num_heads = sum(each.heads.size for each in heads)
        num_kv_heads = heads[-1].kv_heads.stop - first.kv_heads.start
        self._all = replace(spec, num_heads=num_heads, num_kv_heads=num_kv_heads)
        self._sinks: Tensor | None = None

    def gather_heads(self, own: Projections) -> Projections:
        """Return q, k and v of the heads of all ranks, given those of this rank's."""
        dim = own.q.shape[2]
        sizes = [(each.heads.size * dim, *[each.kv_heads.size * dim] * 2) for each in self._heads]
        joined = torch.cat([part.flatten(1) for part in own], 1)
        parts = gather_columns(self._ranks.communicator, joined, [sum(each) for each in sizes])
        columns = parts.split([size for each in sizes for size in each], 1)
        # Key and value heads that several ranks have are taken from the first.
        kept = [i for i, each in enumerate(self._heads) if i == 0 or each.kv_heads.start >= self._heads[i - 1].kv_heads.stop]
        q = torch.cat(columns[::3], 1)
        k, v = (torch.cat([columns[3 * i + side] for i in kept], 1) for side in (1, 2))
        return Projections(*(part.unflatten(1, (-1, dim)) for part in (q, k, v)))

    def gather_queries(self, q: Tensor) -> Tensor:
        """Return the queries [T, H, D] of all ranks, given those of this rank's heads."""
        sizes = [each.heads.size * q.shape[2] for each in self._heads]
        return gather_columns(self._ranks.communicator, q.flatten(1), sizes).unflatten(1, (-1, q.shape[2]))

    def attend(
        self, q: Tensor, cache: KvCache, step: DeviceAttentionMetadata, sinks: Tensor | None, is_in_order: bool
    ) -> Tensor:
        """Return what this rank's heads give [T, H, D]; q [T, all H, D] of all ranks, the rest as for attention.attend."""
        shared = step.shared_keys
        if shared is None:
            raise InvariantError("a step of keys on several ranks does not say where they are")
        key = self._all, self._own, q.dtype, cache.k.dtype, is_in_order
        plan = shared.plans.get(key)
        if not isinstance(plan, _Plan):
            plan = shared.plans[key] = self._plan(step, shared, q, cache, is_in_order)
        merged = None
        if plan.chunks or plan.part is not None:
            attend_short = self._attend_in_order if is_in_order else self._attend_own
            merged = attend_short(q, cache, step, plan, sinks)
        if not plan.keys and merged is not None:
            return merged
        out = q.new_empty(len(q), self._own.num_heads, partial_shape(self._own, 1)[2])
        for part in plan.keys:
            there = replace(step, block_tables=part.tables, shared_keys=None, plans={}, _tiles={})
            kinds = q.dtype, cache.k.dtype
            there.place_tiles(*tile_queries(self._own, *kinds, is_in_order), Tiles(None, None, 0, 1), part.tiles)
            keys = self._gather_keys(cache, part.blocks)
            run_all(attend_launches(out, q[:, self._columns], keys, there, self._own, sinks, is_in_order))
        if merged is not None and plan.short_tokens is not None:
            out[plan.short_tokens] = merged
        return out

    def _attend_own(
        self, q: Tensor, cache: KvCache, step: DeviceAttentionMetadata, plan: _Plan, sinks: Tensor | None
    ) -> Tensor:
        """Return what this rank's heads give [N, H, D] for the short runs, of results that each rank has merged first."""
        spec, (num_kv_heads, group, dim) = self._all, partial_shape(self._own, 1)
        out = torch.empty(*q.shape[:2], dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for part in plan.chunks:
            own = _empty_results((len(part.own.tiles), *partial_shape(spec, part.tiles.num_queries)), q.device)
            attend_chunks_launch(own, q, cache, step, spec, part.tiles, part.own).run()
            merge_chunks_launch(out, own, part.own.starts, cache, step, spec, None, part.tiles, sums=sums).run()
        if plan.part is not None:
            run_all(attend_part_launches(out, sums, q, cache, plan.part, spec))
        if plan.short_tokens is not None:
            out, sums = out.index_select(0, plan.short_tokens), sums.index_select(0, plan.short_tokens)
        found = gather(self._ranks.communicator, torch.cat((out.flatten(1), sums), 1))
        results, log_sums = found.split([out.shape[1] * dim, out.shape[1]], 2)
        results = results.unflatten(2, (-1, dim))[:, :, self._columns].transpose(0, 1).contiguous()
        log_sums = log_sums[:, :, self._columns].transpose(0, 1).contiguous()
        merged = q.new_empty(len(out), self._own.num_heads, dim)
        starts = torch.arange(len(out) + 1, dtype=torch.int32, device=q.device) * self._ranks.size
        parts = PartialResults(results.view(-1, num_kv_heads, group, dim), log_sums.view(-1, num_kv_heads, group))
        rows = Tiles(None, None, len(out), 1)  # each is a run, of which no length is used
        step = replace(step, context_lens=starts)
        merge_chunks_launch(merged, parts, starts, cache, step, self._own, sinks, rows).run()
        return merged

    def _attend_in_order(
        self, q: Tensor, cache: KvCache, step: DeviceAttentionMetadata, plan: _Plan, sinks: Tensor | None
    ) -> Tensor:
        """Return what this rank's heads give [N, H, D] for the short runs, merged chunk by chunk in the order of the keys."""
        if sinks is not None and self._sinks is None:
            sizes = [each.heads.size for each in self._heads]
            self._sinks = gather_columns(self._ranks.communicator, sinks[None], sizes)[0]
        spec, chosen = self._all, None if sinks is None else self._sinks
        out = q.new_empty(*q.shape[:2], partial_shape(spec, 1)[2])
        for part in plan.chunks:
            own = _empty_results((len(part.own.tiles), *partial_shape(spec, part.tiles.num_queries)), q.device)
            attend_chunks_launch(own, q, cache, step, spec, part.tiles, part.own, True).run()
            found = (gather(self._ranks.communicator, each)[part.owners, part.places] for each in own)
            merge_chunks_launch(out, PartialResults(*found), part.starts, cache, step, spec, chosen, part.tiles, True).run()
        own_heads = out[:, self._columns]
        return own_heads if plan.short_tokens is None else own_heads.index_select(0, plan.short_tokens)

    def _gather_keys(self, cache: KvCache, blocks: Tensor) -> KvCache:
        """Return this rank's key and value heads of the blocks of all ranks."""

        def taken(part: Tensor | None) -> Tensor | None:
            if part is None:
                return None
            seen = part.view(torch.uint8) if part.itemsize == 1 else part  # not every operation knows float8
            found = gather(self._ranks.communicator, seen.index_select(0, blocks)).flatten(0, 1)
            return found[:, self._kv_heads].contiguous().view(part.dtype)

        k, k_scales = taken(cache.k), taken(cache.k_scales)
        assert k is not None
        if cache.v is cache.k:
            return KvCache(k, k, k_scales, k_scales)
        v = taken(cache.v)
        assert v is not None
        return KvCache(k, v, k_scales, taken(cache.v_scales))

    def _plan(self, step: DeviceAttentionMetadata, shared: SharedKeys, q: Tensor, cache: KvCache, is_in_order: bool) -> _Plan:
        counts, lengths = step.query_counts, step.host_context_lens
        if lengths is None:
            return self._plan_decode(step, shared, cache, is_in_order)
        assert counts is not None
        kinds = q.dtype, cache.k.dtype
        _, num_short = tile_queries(self._all, *kinds, is_in_order)
        num_queries, _ = tile_queries(self._own, *kinds, is_in_order)
        lists = list_tiles(counts, num_queries, num_short, lengths)
        short = [index for index, _ in lists.short]
        spans = {index: self._span(counts[index], lengths[index], lists.longest_short) for index in short}
        size = self._ranks.size
        num_bytes = size * _result_bytes(self._all, lists.longest_short)
        chunks = [
            self._chunk_round({index: spans[index] for index in part}, lists.longest_short, shared)
            for part in _rounds(short, lambda index: -(-len(spans[index]) // size) * num_bytes, GATHERED_BYTES)
        ]
        long = sorted({index for index, _ in lists.long})
        keys = [
            self._key_round([tile for tile in lists.long if tile[0] in part], part, lengths, num_queries, shared, cache)
            for part in _rounds(long, lambda index: lengths[index], GATHERED_TOKENS)
        ]
        if not long:
            return _Plan(chunks, keys)
        starts = np.cumsum((0, *counts))
        rows = [row for index in short for row in range(starts[index], starts[index + 1])]
        (tokens,) = send_together([torch.tensor(rows, dtype=torch.int64)], q.device)
        return _Plan(chunks, keys, tokens)

    def _plan_decode(self, step: DeviceAttentionMetadata, shared: SharedKeys, cache: KvCache, is_in_order: bool) -> _Plan:
        """Return the plan of a decode step of any lengths up to max_context_len."""
        if not is_in_order and self._all.window is None:
            return _Plan([], [], part=self._ranks.part_of(step, cache.k.shape[2]))
        count, most = len(step.context_lens), _most_chunks(self._all, step.max_context_len)
        lows = (step.context_lens.long() - (self._all.window or step.max_context_len)).clamp_(min=0) // CHUNK
        totals = count * -(-most // self._ranks.size), count * most
        tiles, counts = Tiles(None, None, count, 1), torch.full_like(lows, most)
        return _Plan([self._round(tiles, lows, shared.firsts + lows, counts, totals)], [])

    def _span(self, count: int, length: int, num_queries: int) -> range:
        """Return the chunks that a sequence of `length` tokens, the last `count` of them queries, attends to."""
        window, place = self._all.window, length - count
        first_key = 0 if window is None else max(0, place - window + 1)
        return range(first_key // CHUNK, -(-min(place + num_queries, length) // CHUNK))

    def _chunk_round(self, spans: Mapping[int, range], num_queries: int, shared: SharedKeys) -> _ChunkRound:
        """Return a round of sequences and the chunks of each."""
        columns = [torch.tensor(each, dtype=torch.int32) for each in (list(spans), [0] * len(spans))]
        wide = [torch.tensor([size for span in spans.values() for size in (len(span), span.start)])]
        there, offsets, both = send_together([*columns, *wide], shared.tables.device)
        counts, lows = both.view(-1, 2).unbind(1)
        totals = sum(-(-len(span) // self._ranks.size) for span in spans.values()), sum(map(len, spans.values()))
        firsts = shared.firsts[there.long()] + lows
        return self._round(Tiles(there, offsets, len(spans), num_queries), lows, firsts, counts, totals)

    def _round(self, tiles: Tiles, lows: Tensor, firsts: Tensor, counts: Tensor, totals: tuple[int, int]) -> _ChunkRound:
        """Return a round of runs that attend to `counts` chunks from `lows` on, of ranks `firsts` modulo their number, all
        [tiles] i64; totals: items of this rank, and of all."""
        size = self._ranks.size
        own, numbers, own_starts = _listed((counts + size - 1) // size, totals[0])
        chunks = lows[own] + (self._ranks.place - firsts[own]) % size + numbers * size
        plan = ChunkPlan(*(each.to(torch.int32) for each in (own_starts, own, chunks)))
        every, numbers, starts = _listed(counts, totals[1])
        owners, places = (firsts[every] + numbers) % size, own_starts[every] + numbers // size
        return _ChunkRound(tiles, plan, starts.to(torch.int32), owners, places)

    def _key_round(
        self,
        runs: Sequence[tuple[int, int]],
        sequences: Sequence[int],
        lengths: Sequence[int],
        num_queries: int,
        shared: SharedKeys,
        cache: KvCache,
    ) -> _KeyRound:
        size, place, block_size = self._ranks.size, self._ranks.place, cache.k.shape[2]
        per_chunk = CHUNK // block_size
        most_chunks = [-(-lengths[index] // (CHUNK * size)) for index in sequences]  # of each on a rank
        columns = [torch.tensor([run[side] for run in runs], dtype=torch.int32) for side in (0, 1)]
        wide = [torch.tensor(each) for each in (list(sequences), most_chunks)]
        there, offsets, listed, counts = send_together([*columns, *wide], shared.tables.device)
        owned, numbers, starts = _listed(counts, sum(most_chunks))
        bases, owned = torch.zeros_like(shared.firsts).index_copy_(0, listed, starts[:-1]), listed[owned]
        chunks = (place - shared.firsts[owned]) % size + numbers * size
        inside = torch.arange(per_chunk, device=chunks.device)
        entries = (chunks[:, None] * per_chunk + inside).flatten().clamp_(max=shared.tables.shape[1] - 1)
        blocks = shared.tables[owned.repeat_interleave(per_chunk), entries].long() - place * shared.blocks_per_rank
        blocks.clamp_(0, shared.blocks_per_rank - 1)  # past the end of a sequence
        most = -(-max(lengths[index] for index in sequences) // block_size)
        index = torch.arange(most, device=chunks.device)
        chunk = index // per_chunk
        owners = (shared.firsts[:, None] + chunk) % size
        tables = (owners * sum(most_chunks) + bases[:, None] + chunk // size) * per_chunk + index % per_chunk
        return _KeyRound(Tiles(there, offsets, len(runs), num_queries), blocks, tables.to(torch.int32))


def _empty_results(shape: tuple[int, ...], device: torch.device) -> PartialResults:
    return PartialResults(*(torch.empty(size, dtype=torch.float32, device=device) for size in (shape, shape[:-1])))


def _listed(counts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for so many items of each tile one after the other, `total` in all, the tile of each item, its number in the
    tile, and the first item of each tile, and the end; all i64."""
    tiles = torch.repeat_interleave(counts, output_size=total)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return tiles, torch.arange(total, device=counts.device) - starts[tiles], starts


def _result_bytes(spec: AttentionSpec, num_queries: int = 1) -> int:
    """Return the bytes of the results of a chunk for so many queries, without the logarithms of sums."""
    return 4 * int(np.prod(partial_shape(spec, num_queries)))


def _most_chunks(spec: AttentionSpec, max_context_len: int) -> int:
    """Return how many chunks the last token of a sequence attends to at most."""
    most = -(-max_context_len // CHUNK)
    return most if spec.window is None else min(most, -(-(spec.window - 1) // CHUNK) + 1)


def _rounds(items: Sequence[int], size_of: Callable[[int], int], limit: int) -> Iterator[list[int]]:
    """Yield items in rounds whose sizes add up to at most the limit, at least one in each."""
    found: list[int] = []
    total = 0
    for item in items:
        size = size_of(item)
        if found and total + size > limit:
            yield found
            found, total = [], 0
        found.append(item)
        total += size
    if found:
        yield found
