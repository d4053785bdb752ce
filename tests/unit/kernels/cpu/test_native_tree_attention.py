"""Attention of draft trees: every row has the bits of its path run as a chain, independent of the other slots."""

import random

import pytest
import torch
from test_native_attention import (
    EACH_ISA,
    ROWS,
    SETUPS,
    Cache,
    Setup,
    address,
    attend,
    native,
    queries_of,
    same,
    sinks_of,
)


def random_parents(rng, count):
    """Return the parents of a random tree, -1 for the root: bushy, long or mixed."""
    reach = rng.choice([1, 2, 4, count])
    return [rng.randint(max(-1, node - reach), node - 1) for node in range(count)]


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def bits(parents, node):
    return sum(1 << one for one in path_to(parents, node))


class Trees:
    """Sequences whose last tokens are a draft tree."""

    def __init__(self, setup, prefixes, counts, seed, isa):
        rng = random.Random(seed)
        self.setup, self.isa, self.prefixes = setup, isa, prefixes
        self.parents = [random_parents(rng, count) for count in counts]
        self.cache = Cache(setup, [p + n for p, n in zip(prefixes, counts, strict=True)], seed=seed, isa=isa)
        # The last known token and the tree.
        self.rows = [(i, p + n, 1 + n) for i, (p, n) in enumerate(zip(prefixes, counts, strict=True))]
        self.q = queries_of(setup, self.rows, seed)

    def attend(self, num_threads=1):
        counts = [len(parents) for parents in self.parents]
        masks = [mask for parents in self.parents for mask in (0, *(bits(parents, node) for node in range(len(parents))))]
        # As the bits of u64, for which torch has no constructor.
        ancestors = torch.tensor([mask - (1 << 64) if mask >> 63 else mask for mask in masks], dtype=torch.int64)
        trees = torch.tensor(counts, dtype=torch.int32), ancestors
        return attend(
            self.cache, self.rows, self.q, sinks=sinks_of(self.setup), num_threads=num_threads, isa=self.isa, trees=trees
        )

    def attend_path(self, index, node):
        """Return the rows of the last known token and of one path, run as a chain in a cache of its own."""
        prefix, path = self.prefixes[index], path_to(self.parents[index], node)
        tokens = [*range(prefix), *(prefix + one for one in path)]
        cache = Cache(self.setup, [len(tokens)], isa=self.isa)
        cache.k[0], cache.v[0] = self.cache.k[index][tokens].contiguous(), self.cache.v[index][tokens].contiguous()
        cache.store(0, self.isa)
        start = sum(count for _, _, count in self.rows[:index])
        q = self.q[[start, *(start + 1 + one for one in path)]].contiguous()
        rows = [(0, len(tokens), len(q))]
        return attend(cache, rows, q, sinks=sinks_of(self.setup), isa=self.isa), start


@pytest.mark.covering
@EACH_ISA
@pytest.mark.parametrize("name", SETUPS)
def test_rows_of_a_tree_have_the_bits_of_their_paths_run_as_chains(name, isa):
    setup = SETUPS[name]
    prefixes, counts = [1, 16, 250, 511, 45, 300], [3, 64, 20, 9, 0, 33]
    trees = Trees(setup, prefixes, counts, 7, isa)
    out = trees.attend()
    for num_threads in (2, 3):
        assert same(out, trees.attend(num_threads))
    rng = random.Random(1)
    for index, parents in enumerate(trees.parents):
        for node in rng.sample(range(-1, len(parents)), min(1 + len(parents), 6)):
            chain, start = trees.attend_path(index, node)
            rows = [start, *(start + 1 + one for one in path_to(parents, node))]
            assert same(out[rows], chain)


@pytest.mark.covering
@EACH_ISA
@pytest.mark.parametrize("seed", range(6))
def test_rows_have_the_bits_of_chains_at_any_place_of_runs_blocks_and_chunks(seed, isa):
    rng = random.Random(seed)
    setup = Setup(
        head_dim=8, num_heads=4, kv_heads=2, window=rng.choice([0, 3, 20, 260]), cache=rng.choice(["bf16", "i8", "f32"])
    )
    prefixes = [rng.choice([rng.randint(1, 40), rng.randint(230, 280), rng.randint(500, 540)]) for _ in range(6)]
    trees = Trees(setup, prefixes, [rng.randint(1, 64) for _ in prefixes], seed, isa)
    out = trees.attend(1 + seed % 3)
    for index, parents in enumerate(trees.parents):
        for node in rng.sample(range(len(parents)), min(len(parents), 4)):
            chain, start = trees.attend_path(index, node)
            assert same(out[start + 1 + node], chain[-1])


@EACH_ISA
def test_a_long_prefix_is_the_same_bits_when_cut_over_threads(isa):
    setup = Setup(kv_heads=1, num_heads=3, head_dim=16, window=1000)
    trees = Trees(setup, [3000, 90], [30, 5], 3, isa)
    outs = [trees.attend(num_threads) for num_threads in (1, 2, 7)]
    assert all(same(outs[0], out) for out in outs[1:])
    chain, start = trees.attend_path(0, 29)
    assert same(outs[0][start + 30], chain[-1])


@EACH_ISA
def test_a_tree_without_branches_has_the_bits_of_a_chain(isa):
    setup = SETUPS["bf16"]
    trees = Trees(setup, [200], [40], 0, isa)
    trees.parents = [list(range(-1, 39))]
    assert same(trees.attend(), attend(trees.cache, trees.rows, trees.q, isa=isa))


@EACH_ISA
@pytest.mark.parametrize("cache_format", ["bf16", "f32", "i8"])
def test_wrong_siblings_that_are_not_finite_reach_no_row_but_theirs(cache_format, isa):
    setup = Setup(cache=cache_format, is_bf16=cache_format == "bf16")
    trees = Trees(setup, [30], [12], 5, isa)
    trees.parents = [[-1, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]  # two chains that alternate
    expected = trees.attend()
    for tensor in (trees.cache.k, trees.cache.v):
        tensor[0][30 + 1] = torch.nan
    trees.cache.store(0, isa)
    out = trees.attend()
    sees = torch.tensor([False, *(1 in path_to(trees.parents[0], node) for node in range(12))])
    assert out[sees].isnan().all()
    assert same(out[~sees], expected[~sees])


@EACH_ISA
@pytest.mark.parametrize("name", ["bf16", "f32", "dim80-i8-window", "dim6-f32", "k8v4-f32-dim18", "f8", "joined", "joined-r4"])
def test_moved_tokens_are_those_that_were_stored(name, isa):
    setup = SETUPS[name]
    cache = Cache(setup, [90], isa=isa)
    rng = random.Random(2)
    before = [x.clone() for x in cache.stored(0)]
    path = sorted(rng.sample(range(40, 90), 17))
    sources, targets = cache.slots[0][path].contiguous(), cache.slots[0][40 : 40 + len(path)].contiguous()
    native.move_kv(cache.layer(), address(sources), address(targets), len(path), isa)
    for old, new in zip(before, cache.stored(0), strict=True):
        assert torch.equal(new[40 : 40 + len(path)], old[path])
        assert torch.equal(new[:40], old[:40])
        assert torch.equal(new[40 + len(path) :], old[40 + len(path) :])


@EACH_ISA
def test_rows_beside_a_tree_keep_their_bits(isa):
    setup = SETUPS["i8"]
    lengths = [max(length for _, length, _ in ROWS)] * len(ROWS)
    cache = Cache(setup, lengths, isa=isa)
    q = queries_of(setup, ROWS)
    plain = attend(cache, ROWS, q, isa=isa)
    # The last sequence but one has 2 rows: make the second a draft, which stands where it stood.
    drafts = torch.zeros(len(ROWS), dtype=torch.int32)
    drafts[5] = 1
    ancestors = torch.zeros(len(q), dtype=torch.int64)
    ancestors[sum(count for _, _, count in ROWS[:6]) - 1] = 1
    assert same(plain, attend(cache, ROWS, q, isa=isa, trees=(drafts, ancestors), num_threads=2))
