"""Paged attention against a dense loop over positions."""

import math

import pytest
import torch

from quire.contracts.model_spec import AttentionSpec, NormSpec
from quire.contracts.sparse_spec import BlockIndexerSpec
from quire.kernels.reference import attention
from quire.kernels.reference.attention import AttentionMetadata, TreeInput, attend, store_kv
from quire.kernels.reference.block_sparse import choose_blocks

HEAD_DIM = 8


def dense(q, k, v, spec, sinks=None):
    """Attend the last len(q) positions to k and v [L, K, D] one by one, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    groups = spec.num_heads // spec.num_kv_heads
    for row in range(len(q)):
        position = len(k) - len(q) + row
        first = 0 if spec.window is None else max(0, position + 1 - spec.window)
        for head in range(spec.num_heads):
            keys, values = k[first : position + 1, head // groups].double(), v[first : position + 1, head // groups].double()
            scores = keys @ q[row, head].double() * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            out[row, head] = scores.softmax(0)[: len(values)] @ values
    return out


def make_step(lengths, counts, block_size, num_kv_heads, seed=0):
    """Return caches filled for sequences of these lengths, of which the last counts are queries, and the dense tensors."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-n // block_size) for n in lengths) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    k_cache, v_cache = (torch.full((num_blocks, num_kv_heads, block_size, HEAD_DIM), torch.nan) for _ in range(2))
    tables = torch.zeros(len(lengths), max(-(-n // block_size) for n in lengths), dtype=torch.int64)
    slots, dense_k, dense_v = [], [], []
    for index, length in enumerate(lengths):
        blocks = [order.pop() for _ in range(-(-length // block_size))]
        tables[index, : len(blocks)] = torch.tensor(blocks)
        positions = torch.arange(length)
        place = torch.tensor(blocks)[positions // block_size] * block_size + positions % block_size
        k, v = (torch.randn(length, num_kv_heads, HEAD_DIM, generator=generator) for _ in range(2))
        store_kv(k, v, k_cache, v_cache, place)
        slots.append(place[length - counts[index] :])
        dense_k.append(k)
        dense_v.append(v)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return AttentionMetadata(torch.cat(slots), starts, list(lengths), tables), k_cache, v_cache, dense_k, dense_v


CASES = {
    "decode": ([5, 17, 1, 33], [1, 1, 1, 1]),
    "whole prompts": ([7, 16, 31], [7, 16, 31]),
    "chunks after cached prefixes": ([40, 20, 18], [7, 3, 2]),
    "everything in one step": ([1, 40, 9, 23, 64, 2], [1, 7, 9, 1, 1, 2]),
}


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("lengths, counts", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("window, softcap", [(None, None), (6, None), (None, 3.0), (1, 2.0)])
def test_attend_equals_a_dense_loop(lengths, counts, heads, block_size, window, softcap):
    spec = AttentionSpec(heads[0], heads[1], HEAD_DIM, HEAD_DIM**-0.5, window=window, softcap=softcap)
    step, k_cache, v_cache, dense_k, dense_v = make_step(lengths, counts, block_size, heads[1])
    q = torch.randn(sum(counts), heads[0], HEAD_DIM, generator=torch.Generator().manual_seed(9))
    out = attend(q, k_cache, v_cache, step, spec)
    for index, count in enumerate(counts):
        rows = slice(step.query_starts[index], step.query_starts[index] + count)
        expected = dense(q[rows], dense_k[index], dense_v[index], spec)
        torch.testing.assert_close(out[rows].double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("lengths, counts", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("window, softcap", [(None, None), (6, 3.0)])
@pytest.mark.parametrize("is_softmax_f32", [True, False])
def test_sinks_take_their_share_and_give_nothing(lengths, counts, heads, window, softcap, is_softmax_f32):
    spec = AttentionSpec(
        heads[0],
        heads[1],
        HEAD_DIM,
        HEAD_DIM**-0.5,
        window=window,
        softcap=softcap,
        is_softmax_f32=is_softmax_f32,
        has_sinks=True,
    )
    step, k_cache, v_cache, dense_k, dense_v = make_step(lengths, counts, 5, heads[1])
    q = torch.randn(sum(counts), heads[0], HEAD_DIM, generator=torch.Generator().manual_seed(9))
    sinks = torch.tensor([0.0, 30.0, -torch.inf, -1e30, 2.5, 1e30])[: heads[0]]
    out = attend(q, k_cache, v_cache, step, spec, sinks)
    for index, count in enumerate(counts):
        rows = slice(step.query_starts[index], step.query_starts[index] + count)
        expected = dense(q[rows], dense_k[index], dense_v[index], spec, sinks)
        torch.testing.assert_close(out[rows].double(), expected, atol=2e-6, rtol=2e-6)
    # A head whose sink is nothing is a head without one.
    plain = attend(q, k_cache, v_cache, step, spec)
    torch.testing.assert_close(out[:, 2:4], plain[:, 2:4], atol=1e-6, rtol=1e-6)


def test_long_chunks_are_computed_in_bounded_pieces(monkeypatch):
    spec = AttentionSpec(4, 2, HEAD_DIM, HEAD_DIM**-0.5, window=9)
    step, k_cache, v_cache, dense_k, dense_v = make_step([50], [40], 4, 2)
    q = torch.randn(40, 4, HEAD_DIM, generator=torch.Generator().manual_seed(9))
    monkeypatch.setattr(attention, "_MAX_SCORE_ELEMENTS", 50 * 4 * 3)
    out = attend(q, k_cache, v_cache, step, spec)
    torch.testing.assert_close(out.double(), dense(q, dense_k[0], dense_v[0], spec), atol=2e-6, rtol=2e-6)


def test_result_of_a_sequence_does_not_change_with_its_neighbours():
    spec = AttentionSpec(4, 2, HEAD_DIM, HEAD_DIM**-0.5)
    step, k_cache, v_cache, _, _ = make_step([30, 9, 64], [1, 9, 1], 4, 2)
    q = torch.randn(11, 4, HEAD_DIM, generator=torch.Generator().manual_seed(9))
    together = attend(q, k_cache, v_cache, step, spec)
    for index, rows in enumerate((slice(0, 1), slice(1, 10), slice(10, 11))):
        single = AttentionMetadata(
            step.slots[rows], [0, rows.stop - rows.start], [step.context_lens[index]], step.block_tables[index : index + 1]
        )
        torch.testing.assert_close(attend(q[rows], k_cache, v_cache, single, spec), together[rows], atol=1e-6, rtol=1e-6)


def test_bf16_scores_and_weights_are_rounded_like_the_eager_models():
    spec = AttentionSpec(2, 1, HEAD_DIM, 1 / math.sqrt(HEAD_DIM))
    step, k_cache, v_cache, dense_k, dense_v = make_step([12], [12], 4, 1)
    q = torch.randn(12, 2, HEAD_DIM, generator=torch.Generator().manual_seed(9)).bfloat16()
    out = attend(q, k_cache.bfloat16(), v_cache.bfloat16(), step, spec)
    k, v = dense_k[0].bfloat16()[:, 0], dense_v[0].bfloat16()[:, 0]
    for head in range(2):
        scores = (q[:, head] @ k.T) * spec.scale
        scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
        expected = scores.softmax(-1, dtype=torch.float32).bfloat16() @ v
        torch.testing.assert_close(out[:, head], expected, atol=1e-2, rtol=1e-2)


PARENTS = [-1, -1, 0, 1, 2, 2, 3, 0, 4, 8]


def path_to(node):
    return [] if node < 0 else [*path_to(PARENTS[node]), node]


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("max_rows", [None, 3])
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("window, softcap", [(None, None), (6, None), (2, 3.0), (1, None)])
@pytest.mark.parametrize("sinks", [None, (0.5, 3.0, -torch.inf, -2.0)], ids=["plain", "sinks"])
def test_rows_of_a_tree_equal_their_paths_run_as_chains(window, softcap, block_size, max_rows, sinks, monkeypatch):
    sinks = None if sinks is None else torch.tensor(sinks)
    spec = AttentionSpec(4, 2, HEAD_DIM, HEAD_DIM**-0.5, window=window, softcap=softcap)
    size = len(PARENTS)
    step, k_cache, v_cache, dense_k, dense_v = make_step([9, 21, 14 + size], [1, 5, 1 + size], block_size, 2)
    ancestors = [0] * 7 + [sum(1 << one for one in path_to(node)) for node in range(size)]
    trees = TreeInput(torch.tensor([0, 0, size], dtype=torch.int32), torch.tensor(ancestors))
    step = AttentionMetadata(step.slots, step.query_starts, step.context_lens, step.block_tables, trees)
    q = torch.randn(7 + size, 4, HEAD_DIM, generator=torch.Generator().manual_seed(9))
    if max_rows is not None:
        monkeypatch.setattr(attention, "_MAX_SCORE_ELEMENTS", (14 + size) * 4 * max_rows)
    out = attend(q, k_cache, v_cache, step, spec, sinks)
    for node in range(-1, size):
        tokens = [*range(14), *(14 + one for one in path_to(node))]
        rows = [6, *(7 + one for one in path_to(node))]
        expected = dense(q[rows], dense_k[2][tokens], dense_v[2][tokens], spec, sinks)
        torch.testing.assert_close(out[rows].double(), expected, atol=2e-6, rtol=2e-6)
    for index, rows in enumerate((slice(0, 1), slice(1, 6))):
        torch.testing.assert_close(
            out[rows].double(), dense(q[rows], dense_k[index], dense_v[index], spec, sinks), atol=2e-6, rtol=2e-6
        )


def test_blocks_longer_than_the_sequence_are_one_block():
    heads, keys = torch.randn(7, 2, 8), torch.randn(7, 8)
    indexer = BlockIndexerSpec(2, 8, block_size=2**40, top_blocks=2**40, num_local=2**40, norm=NormSpec("rms", 1e-6))
    chosen = choose_blocks(heads, keys, torch.arange(7), indexer)
    assert torch.equal(chosen, torch.ones(2, 7, 7, dtype=torch.bool).tril())
