"""The keys that an indexer chooses on the device are those of the torch reference."""

from dataclasses import replace

import pytest
import torch

from quire.contracts.model_spec import AttentionSpec, IndexerSpec, LatentSpec, NormSpec
from quire.contracts.sparse_spec import BlockIndexerSpec
from quire.kernels.reference.attention import AttentionMetadata, TreeInput
from quire.kernels.reference.block_sparse import attend_blocks as attend_blocks_by_torch
from quire.kernels.reference.compressed_attention import EntryCache
from quire.kernels.reference.indexed_attention import IndexQueries, attend_indexed, choose_all
from quire.kernels.triton import indexer, tiles
from quire.kernels.triton.attention import KvCache
from quire.kernels.triton.block_indexer import HeadsOfRank, attend_blocks
from quire.kernels.triton.device_traits import HOPPER
from quire.kernels.triton.indexer import IndexInputs, attend_chosen, choose, choose_keys
from quire.kernels.triton.step import DeviceAttentionMetadata

NORM = NormSpec("rms", 1e-6)
# Chains: a chunk after a prefix, a decode step and a prompt; and a sequence with a draft tree, whose third draft does not see
# the second.
CHAINS = ([21, 9, 3], [3, 1, 3], None)
TREES = ([12], [4], TreeInput(torch.tensor([3], dtype=torch.int32), torch.tensor([0, 1, 3, 5])))


def make_case(lengths, counts, trees, block_size, top_k):
    generator = torch.Generator().manual_seed(5)
    spec = IndexerSpec(8, 20, top_k, NORM)  # so many heads that no two scores are equal
    latent = AttentionSpec(4, 1, 44, 44**-0.5, latent=LatentSpec(None, 36, 12, 8, 16, NORM, indexer=spec))
    widths = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(widths), generator=generator).split(widths)
    tables = torch.zeros(len(lengths), max(widths), dtype=torch.int64)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = own
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    step = AttentionMetadata(torch.zeros(sum(counts), dtype=torch.int64), starts, lengths, tables, trees)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    caches = normal(sum(widths), 1, block_size, 44), normal(sum(widths), 1, block_size, 20)
    index = IndexQueries(normal(starts[-1], 8, 20), normal(starts[-1], 8))
    return normal(starts[-1], 4, 44), index, caches, step, latent, spec


@pytest.mark.parametrize(
    ("case", "block_size", "top_k", "scores_at_once", "is_in_order"),
    [
        (CHAINS, 4, 5, 50, False),
        (TREES, 4, 6, 1 << 26, False),
        pytest.param(CHAINS, 64, 5, 1 << 26, True, marks=pytest.mark.slow),
        pytest.param(CHAINS, 4, 64, 1 << 26, False, marks=pytest.mark.slow),
        pytest.param(TREES, 4, 64, 50, True, marks=pytest.mark.slow),
    ],
)
def test_queries_attend_to_the_keys_that_the_reference_chooses(
    case, block_size, top_k, scores_at_once, is_in_order, device, monkeypatch
):
    monkeypatch.setattr(indexer, "SCORES_AT_ONCE", scores_at_once)
    q, index, caches, step, latent, spec = make_case(*case, block_size, top_k)
    expected = attend_indexed(q, choose_all(index, caches[1], step, spec), caches[0], step, latent)[..., 8:]
    inputs = IndexInputs(*(part.to(device) for part in (index.heads, index.weights, caches[1])))
    there = DeviceAttentionMetadata.of(step, device)
    found = attend_chosen(q.to(device), choose_keys(inputs, block_size, there, spec), caches[0].to(device), latent, is_in_order)
    torch.testing.assert_close(found.cpu(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("is_in_order", [False, True])
def test_chosen_keys_are_split_unless_queries_fill_the_device(is_in_order, device, monkeypatch):
    q, index, caches, step, latent, spec = make_case([300], [7], None, 64, 280)
    expected = attend_indexed(q, choose_all(index, caches[1], step, spec), caches[0], step, latent)[..., 8:]
    inputs = IndexInputs(*(part.to(device) for part in (index.heads, index.weights, caches[1])))
    found = {}
    for count in (1, 132):
        traits = replace(HOPPER, num_multiprocessors=count)
        monkeypatch.setattr(tiles, "device_traits", lambda traits=traits: traits)
        chosen = choose_keys(inputs, 64, DeviceAttentionMetadata.of(step, device), spec)
        found[count] = attend_chosen(q.to(device), chosen, caches[0].to(device), latent, is_in_order)
        torch.testing.assert_close(found[count].cpu(), expected, atol=2e-6, rtol=2e-6)
        assert len(chosen[0].plans) == (count > 1)
    assert not is_in_order or torch.equal(found[1], found[132])


def test_lower_keys_come_first_where_scores_are_equal(device):
    inf = torch.inf
    scores = torch.tensor([[1.0, 2.0, 1.0, 1.0], [0.0, 0.0, -inf, -inf], [-inf] * 4, [3.0, 0.0, 0.0, 0.0]], device=device)
    chosen, counts = choose(scores, 3)
    assert [row[:count] for row, count in zip(chosen.tolist(), counts.tolist(), strict=True)] == [
        [0, 1, 2],
        [0, 1],
        [],
        [0, 1, 2],
    ]
    assert choose(scores, 9)[0].shape == (4, 4)


def test_heads_attend_to_the_blocks_that_the_reference_chooses(device, monkeypatch):
    monkeypatch.setattr(indexer, "SCORES_AT_ONCE", 600)
    torch.manual_seed(7)
    tables, starts = torch.randperm(24).view(3, 8), [0, 3, 12, 13]
    step = AttentionMetadata(torch.zeros(13, dtype=torch.int64), starts, [61, 9, 33], tables)
    q, index_q, new_keys = torch.randn(13, 8, 24), torch.randn(13, 2, 20), torch.randn(13, 20)
    keys, caches = torch.randn(24, 1, 8, 20), torch.randn(2, 24, 4, 8, 24)
    spec = AttentionSpec(8, 4, 24, 24**-0.5, block_indexer=BlockIndexerSpec(2, 20, 6, 3, 1, NORM))
    entries = EntryCache(keys, tables, 20, rate=1)
    expected = attend_blocks_by_torch(q, (index_q, new_keys), entries, (caches[0], caches[1]), step, spec)
    cache = KvCache(*(part.to(device) for part in caches))
    inputs = IndexInputs(index_q.to(device), None, keys.to(device))
    found = attend_blocks(q.to(device), inputs, cache, DeviceAttentionMetadata.of(step, device), spec, HeadsOfRank(0, 8))
    torch.testing.assert_close(found.cpu(), expected, atol=2e-6, rtol=2e-6)
