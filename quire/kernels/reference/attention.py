"""Attention over the paged KV cache: whole prompts, chunks, cached prefixes and decode steps in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec
from quire.kernels.reference.recurrent import StateRows
from quire.kernels.reference.run_skips import RunSkips, cap

_MAX_SCORE_ELEMENTS = 1 << 24
"""Maximum number of scores held at once, over all heads: long chunks are split by queries to bound the memory."""


@dataclass(frozen=True, slots=True)
class TreeInput:
    """Which tokens form draft trees, and their ancestors. A draft attends to its ancestors as if they were consecutive.

    num_drafts  [S] i32, number of last tokens of a sequence that form a tree, at most 64; 0: all causal. The first ones may be
                cached from previous steps; the others, at least one, are the last rows
    ancestors   [T] u64 as i64, bit i: whether the sequence's draft i is an ancestor of this one, itself included; 0 for others
    """

    num_drafts: Tensor
    ancestors: Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Positions and block tables of the tokens of one step, for all layers.

    slots           [T] i64, block * block_size + offset where token t's KV is stored
    query_starts    S + 1 offsets: sequence s owns tokens [query_starts[s], query_starts[s + 1]), at least one
    context_lens    S lengths: tokens of s in the cache after this step is stored, so its last query is at position
                    context_lens[s] - 1
    block_tables    [S, max_blocks] i64; entries past the context are ignored but must be valid blocks
                    both on the device of the caches; all else is on the CPU
    trees           None: every sequence is causal
    decode_groups   cache of _decode_groups
    short_ropes     [T] bool, tokens of sequences with the short variant of the rope (ModelSpec.rope_switch_len); None: none
    states          which rows of recurrent states are read and written; None: all sequences start, and nothing is kept
    window          the same for layers of the window group, with its slots and block tables; None: there is no such group
    adapters        key of a LoRA adapter -> the tokens that use it; None: all use the base model
    skips           which tokens skip runs in layers without a window; None: none
    """

    slots: Tensor
    query_starts: list[int]
    context_lens: list[int]
    block_tables: Tensor
    trees: TreeInput | None = None
    decode_groups: dict[tuple[int | None, int], list[DecodeGroup]] = field(default_factory=dict)
    short_ropes: Tensor | None = None
    states: StateRows | None = None
    window: AttentionMetadata | None = None
    adapters: Mapping[str, Tensor] | None = None
    skips: RunSkips | None = None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token sequences of similar length, computed as one padded batch.

    tokens   [S'] rows of q
    blocks   [S', N] blocks to read
    is_seen  [S', N * block_size]: the positions that the query attends to
    distances  [S', N * block_size]: how far they are before the query
    """

    tokens: Tensor
    blocks: Tensor
    is_seen: Tensor
    distances: Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write k and v [T, K, D] into the caches [num_blocks, K, block_size, D] at `slots` [T]."""
    blocks, offsets = slots // k_cache.shape[2], slots % k_cache.shape[2]
    k_cache[blocks, :, offsets] = k
    v_cache[blocks, :, offsets] = v


def move_kv(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy keys and values of the slots `sources` [N] to `targets` [N]; all are read before any is written. They may be one."""
    size = k_cache.shape[2]
    for cache in (k_cache,) if v_cache is k_cache else (k_cache, v_cache):
        cache[targets // size, :, targets % size] = cache[sources // size, :, sources % size]


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, step: AttentionMetadata, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """Attend every query to its sequence's cached keys, itself included; causally, unless the spec says otherwise.

    Where attention is not causal, the step has whole sequences.

    q                 [T, H, D]; H = num_heads, a multiple of K
    k_cache, v_cache  [num_blocks, K, block_size, D], q's dtype; this step's KV is already stored
    sinks             [H], an attention sink per head: a logit in the softmax without a value; None: none
    Returns           [T, H, D] in q's dtype. Scores are in q's dtype, softmax sums in f32. Does not write the cache.
    """
    out = torch.empty_like(q)
    for group in _decode_groups(step, spec.window, k_cache.shape[2]):
        out[group.tokens] = _attend_decode(q[group.tokens], k_cache, v_cache, group, spec, sinks, step.skips)
    starts = step.query_starts
    for index, context_len in enumerate(step.context_lens):
        if not _is_decode(step, index):
            rows = slice(starts[index], starts[index + 1])
            paths = None if step.trees is None else _paths(step.trees, index, rows)
            place = _ChunkPlace(step.block_tables[index], context_len, paths)
            skips = None if step.skips is None else RunSkips(step.skips.gaps[rows], step.skips.counts)
            out[rows] = _attend_chunk(q[rows], k_cache, v_cache, place, spec, sinks, skips)
    return out


def hidden_keys(step: AttentionMetadata, sequence: int) -> Tensor:
    """Return which of a sequence's cached tokens are masked for each of its queries, [Q, N] bool."""
    rows = slice(step.query_starts[sequence], step.query_starts[sequence + 1])
    paths = None if step.trees is None else _paths(step.trees, sequence, rows)
    length = step.context_lens[sequence]
    return _ChunkPlace(step.block_tables[sequence], length, paths).is_hidden(slice(0, rows.stop - rows.start), 0, length, None)


@dataclass(frozen=True, slots=True)
class _Paths:
    """The tree at the end of a chunk: ancestors of each query among the drafts [Q, N], and the depths of these [N], from 1."""

    is_ancestor: Tensor
    depths: Tensor


@dataclass(frozen=True, slots=True)
class _ChunkPlace:
    """Location of one sequence: its block table, its length in the cache, and possibly a tree at its end."""

    block_table: Tensor
    context_len: int
    paths: _Paths | None

    def positions(self, first: int, last: int) -> Tensor:
        """Return the positions of the cached tokens [first, last); drafts of a tree have positions by depth."""
        found = torch.arange(first, last)
        begin = max(first, self.tree_start)
        if self.paths is not None and begin < last:
            depths = self.paths.depths[begin - self.tree_start : last - self.tree_start]
            found[begin - first :] = self.tree_start - 1 + depths
        return found

    def is_outside(self, queries: slice, first: int, window: int | None) -> Tensor:
        """Return what some queries of a whole sequence do not see of tokens from `first` on: those outside of the window."""
        distance = torch.arange(queries.start, queries.stop)[:, None] - torch.arange(first, self.context_len)
        return distance.abs() >= (self.context_len if window is None else window)

    def distances(self, queries: slice, first: int, last: int) -> Tensor:
        """Return how far tokens [first, last) are before some queries of the chunk, the last of them just before `last`."""
        begin = last - (queries.stop - queries.start)
        return self.positions(begin, last)[:, None] - self.positions(first, last)

    def is_hidden(self, queries: slice, first: int, last: int, window: int | None) -> Tensor:
        """Return which of tokens [first, last) are masked for some queries of the chunk, the last of them just before
        `last`."""
        distance = self.distances(queries, first, last)
        is_hidden = distance < 0
        tree_start = max(first, self.tree_start)
        if self.paths is not None and tree_start < last:
            columns = slice(tree_start - self.tree_start, last - self.tree_start)
            is_hidden[:, tree_start - first :] = ~self.paths.is_ancestor[queries, columns]
        return is_hidden if window is None else is_hidden | (distance >= window)

    @property
    def tree_start(self) -> int:
        """Index of the tree's first token; the length if there is none."""
        return self.context_len - (0 if self.paths is None else self.paths.depths.shape[0])


def _paths(trees: TreeInput, index: int, rows: slice) -> _Paths | None:
    num_drafts = int(trees.num_drafts[index])
    if num_drafts == 0:
        return None
    is_ancestor = (trees.ancestors[rows, None] >> torch.arange(num_drafts)) & 1 == 1
    # Parents come first, so the depth of a draft is its number of ancestors among the earlier drafts of any path through it.
    return _Paths(is_ancestor, (is_ancestor.cumsum(1) * is_ancestor).amax(0))


def _is_decode(step: AttentionMetadata, index: int) -> bool:
    """Return whether a sequence has one query that attends to all tokens before it."""
    has_tree = step.trees is not None and int(step.trees.num_drafts[index]) > 1
    return step.query_starts[index + 1] - step.query_starts[index] == 1 and not has_tree


def _decode_groups(step: AttentionMetadata, window: int | None, block_size: int) -> list[DecodeGroup]:
    """Return the groups of single-token sequences, computed once per step and window and shared by the layers."""
    key = (window, block_size)
    if key not in step.decode_groups:
        step.decode_groups[key] = _make_decode_groups(step, window, block_size)
    return step.decode_groups[key]


def _make_decode_groups(step: AttentionMetadata, window: int | None, block_size: int) -> list[DecodeGroup]:
    spans = []  # (number of blocks, first block, sequence)
    for index, length in enumerate(step.context_lens):
        if _is_decode(step, index):
            first = 0 if window is None else max(0, length - window) // block_size
            spans.append((-(-length // block_size) - first, first, index))
    spans.sort()
    groups: list[DecodeGroup] = []
    while spans:
        # Lengths within a group differ by less than 2x, so padding at most doubles the work.
        longest = 2 * spans[0][0]
        size = next((i for i, span in enumerate(spans) if span[0] > longest), len(spans))
        group, spans = spans[:size], spans[size:]
        sequences = torch.tensor([index for _, _, index in group])
        first = torch.tensor([start for _, start, _ in group])
        lengths = torch.tensor([step.context_lens[index] for _, _, index in group])[:, None]
        columns = first[:, None] + torch.arange(group[-1][0])
        blocks = step.block_tables[sequences[:, None], columns.clamp(max=step.block_tables.shape[1] - 1)]
        positions = first[:, None] * block_size + torch.arange(group[-1][0] * block_size)
        is_seen = positions < lengths
        if window is not None:
            is_seen &= positions >= lengths - window
        tokens = torch.tensor([step.query_starts[index] for _, _, index in group])
        groups.append(DecodeGroup(tokens, blocks, is_seen.to(blocks.device), lengths - 1 - positions))
    return groups


def _attend_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    group: DecodeGroup,
    spec: AttentionSpec,
    sinks: Tensor | None,
    skips: RunSkips | None,
) -> Tensor:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]

    def gather(cache: Tensor) -> Tensor:
        return cache[group.blocks].transpose(1, 2).reshape(num_rows, num_kv_heads, -1, head_dim)

    q = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys = gather(k_cache)
    scores = cap((q @ keys.transpose(-1, -2)) * spec.scale, spec)
    scores = _lose_by_distance(scores, group.distances[:, None, None], spec, (1, num_kv_heads, -1, 1))
    scores = scores.masked_fill(~group.is_seen[:, None, None, :], -torch.inf)
    if skips is not None and spec.window is None:
        tokens, ends = (of.repeat_interleave(num_kv_heads)[:, None, None] for of in (group.tokens, group.distances[:, 0] + 1))
        flat = [of.flatten(0, 1) for of in (scores, q, keys)]
        scores = skips.hide(flat[0][:, :, None], flat[1][:, :, None], flat[2][:, None], tokens, ends, spec).view_as(scores)
    # Slots past a context may hold anything, including NaN of a failed sequence: 0 * NaN must not reach the sum.
    v = gather(v_cache).masked_fill_(~group.is_seen[:, None, :, None], 0)
    sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
    return (_softmax(scores, spec, sinks) @ v).reshape(num_rows, num_heads, head_dim)


def _attend_chunk(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    place: _ChunkPlace,
    spec: AttentionSpec,
    sinks: Tensor | None,
    skips: RunSkips | None,
) -> Tensor:
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    context_len = place.context_len
    out = torch.empty_like(q)
    sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1, 1)
    num_rows = max(1, _MAX_SCORE_ELEMENTS // (num_heads * context_len))
    for begin in range(0, num_queries, num_rows):
        end = min(begin + num_rows, num_queries)
        first_position = context_len - num_queries + begin
        stop = context_len - num_queries + end if spec.is_causal else context_len
        first_block = 0
        if spec.window is not None:
            nearest = first_position if not spec.is_causal else int(place.positions(first_position, stop).min())
            first_block = max(0, nearest + 1 - spec.window) // block_size
        blocks = place.block_table[first_block : -(-stop // block_size)]
        start = first_block * block_size
        k = k_cache[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, : stop - start]
        v = v_cache[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, : stop - start]
        queries = q[begin:end].view(end - begin, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = cap((queries @ k.transpose(-1, -2)[:, None]) * spec.scale, spec)
        rows = slice(begin, end)
        scores = _lose_by_distance(scores, place.distances(rows, start, stop), spec, (num_kv_heads, -1, 1, 1))
        if spec.is_causal:
            is_hidden = place.is_hidden(rows, start, stop, spec.window)
        else:
            is_hidden = place.is_outside(rows, start, spec.window)
        scores = scores.masked_fill(is_hidden.to(scores.device), -torch.inf)
        if skips is not None and spec.window is None and place.paths is None:
            tokens = torch.arange(begin, end)
            scores = skips.hide(scores, queries, k[:, None], tokens, tokens + first_position + 1 - begin, spec)
        weights = _softmax(scores, spec, sinks)
        out[begin:end] = (weights @ v[:, None]).permute(2, 0, 1, 3).reshape(end - begin, num_heads, head_dim)
    return out


def _lose_by_distance(scores: Tensor, distances: Tensor, spec: AttentionSpec, shape: tuple[int, ...]) -> Tensor:
    """Return scores with what ALiBi takes off; shape: of the slopes of all heads beside scores and distances."""
    if not spec.alibi_slopes:
        return scores
    slopes = torch.tensor(spec.alibi_slopes).view(shape)
    if spec.alibi_scale is None:
        return (scores - slopes * distances).to(scores.dtype)
    positions = distances[..., :1] - distances  # of keys, the first of which has the position 0: there is no window
    return scores + (slopes.bfloat16() * positions).to(scores.dtype) * spec.alibi_scale


def _softmax(scores: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [..., keys]; sinks, whose last dimension is 1, are one more score of each row."""
    if sinks is None:
        return _weights(scores, spec)
    scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    if not spec.is_softmax_f32:
        scores = scores - scores.amax(-1, keepdim=True)  # this rounds, as gpt-oss does
    return _weights(scores, spec)[..., :-1]


def _weights(scores: Tensor, spec: AttentionSpec) -> Tensor:
    if spec.is_softmax_f32:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
    return torch.softmax(scores, dim=-1)
