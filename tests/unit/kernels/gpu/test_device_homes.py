"""Steps of sequences with homes: their order, what a rank attends to of them, and what it does of the changes before them."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from quire.model.token_runs import TreePlaces
from quire.worker.device.block_table_updates import BlockTableUpdates, change_parts
from quire.worker.device.homes import Homes, by_home, decode_at_home, step_at_home
from quire.worker.device.host_step import HostStep, fill
from quire.worker.device.mixed_step import StepShape, exact_sizes, exact_step
from quire.worker.device.staged_call import ChangeCounts
from quire.worker.device.staging import Staging
from quire.worker.step_executor import Moves

CPU, PADDING, NUM_HOMES = torch.device("cpu"), 40, 3


def random_step(rng, num_sequences, most_tokens):
    """A step whose numbers all differ, with trees and homes; one home has no sequences."""
    counts = rng.integers(1, most_tokens + 1, num_sequences)
    total, ends = int(counts.sum()), np.cumsum(counts)
    rows, lengths = (rng.permutation(np.arange(1, 30, dtype=np.int32))[:num_sequences] for _ in range(2))
    ids, positions, slots = (rng.permutation(np.arange(1, 200))[:total] for _ in range(3))
    trees = TreePlaces(positions, rng.integers(0, 3, num_sequences).astype(np.int32), ids.astype(np.uint64) << np.uint64(3))
    homes = rng.choice([0, 2], num_sequences)
    given = tuple(counts.tolist()), rows, lengths, ids, positions, slots, ends - 1, rows, ends
    return HostStep(*given, trees=trees, homes=homes)


def staged(step, order, more=()):
    """The arrays of a step, as tensors."""
    shape = StepShape.of(step, order.sequences)
    arrays = Staging(1 << 16, CPU).arrange([*exact_sizes(shape, ()).parts, *shape.parts, *more]).host
    fill(arrays, step, PADDING)
    order.fill(arrays)
    return shape, {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


@pytest.mark.parametrize("seed", range(8))
def test_each_rank_attends_to_its_own_sequences_and_all_tokens_are_at_one_place(seed):
    rng = np.random.default_rng(seed)
    step = random_step(rng, 7, 5)
    arranged, order = by_home(step, Homes(0, NUM_HOMES), PADDING)
    shape, arrays = staged(arranged, order)
    tables = torch.arange(2 * len(arranged.counts), dtype=torch.int32).view(-1, 2)
    for name in ("given_ids", "positions", "slots"):
        assert np.array_equal(arrays[name].numpy()[order.places], getattr(step, name))
    assert order.sequences == tuple(max(1, int((step.homes == home).sum())) for home in range(NUM_HOMES))
    sizes = []
    for rank in range(NUM_HOMES):
        own = step_at_home(shape, arrays, tables, Homes(rank, NUM_HOMES), None)
        sizes.append(len(own.slots))
        mine = np.flatnonzero(step.homes == rank)
        tokens = np.flatnonzero(np.repeat(step.homes, step.counts) == rank)
        if not len(mine):
            assert (own.query_counts, own.context_lens.tolist(), own.slots.tolist()) == ((1,), [0], [-1])
            continue
        alone = replace(step, counts=tuple(np.array(step.counts)[mine].tolist()), homes=np.zeros(len(mine), np.int64))
        per_token = ("given_ids", "positions", "slots")
        alone = replace(alone, **{name: getattr(step, name)[tokens] for name in per_token})
        alone = replace(alone, **{name: getattr(step, name)[mine] for name in ("rows", "context_lens")})
        trees = TreePlaces(step.positions[tokens], step.trees.num_drafts[mine], step.trees.ancestors[tokens])
        alone, there = by_home(replace(alone, trees=trees), Homes(0, 1), PADDING)
        alone_shape, expected_arrays = staged(alone, there)
        expected = exact_step(alone_shape, expected_arrays, own.block_tables, (), (), None)
        for field in fields(expected):
            if field.name in ("homes", "plans", "_tiles"):
                continue
            given, wanted = getattr(own, field.name), getattr(expected, field.name)
            assert torch.equal(given, wanted) if isinstance(wanted, torch.Tensor) else given == wanted
        first = sum(order.sequences[:rank])
        assert torch.equal(own.block_tables, tables[first : first + len(mine)])
        assert torch.equal(own.homes.places, torch.from_numpy(order.places))
    assert own.homes.sizes == tuple(sizes)


def test_decode_steps_have_as_many_sequences_of_each_home():
    rng = np.random.default_rng(3)
    step = replace(random_step(rng, 5, 1), trees=None)
    most = int(np.bincount(step.homes).max()) + 1
    arranged, order = by_home(step, Homes(0, NUM_HOMES), PADDING, most)
    assert order.sequences == (most,) * NUM_HOMES
    _, arrays = staged(arranged, order)
    tables = arrays["rows"][:, None]
    whole = exact_step(StepShape.of(arranged), arrays, tables, (), (), None)
    for rank in range(NUM_HOMES):
        own = decode_at_home(whole, arrays["home_places"], Homes(rank, NUM_HOMES))
        found = own.block_tables[:, 0].tolist()
        assert found == [*step.rows[step.homes == rank], *[PADDING] * (most - int((step.homes == rank).sum()))]
        assert own.query_starts.tolist() == [*range(most + 1)]
        assert own.homes.sizes == (most,) * NUM_HOMES


def test_a_rank_copies_and_moves_in_its_own_blocks_only():
    blocks = [(2, 0, [4, 17]), (5, 1, [31])]
    moves = Moves([35, 36, 125, 262], [33, 34, 121, 261], [0, 2, 3, 4])
    changes = BlockTableUpdates(blocks, [(3, 4), (12, 13), (25, 20)], moves)
    counts, found = ChangeCounts.of(changes), {}
    for rank in range(NUM_HOMES):
        arrays = Staging(1 << 12, CPU).arrange(change_parts(*counts))
        changes.fill(arrays, 8)
        own, on_device = Homes(rank, NUM_HOMES).own_changes(arrays, counts, (10, 10))
        host = {name: array[: len(on_device[name])].tolist() for name, array in arrays.host.items()}
        assert host["blocks"] == [4, 7, 1]
        assert (own.num_copies, own.num_moves) == (len(host["sources"]), len(host["move_sources"]))
        copies = list(zip(host["sources"], host["targets"], strict=True))
        moves = list(zip(host["move_sources"], host["move_targets"], strict=True))
        found[rank] = copies, moves, host["move_starts"]
    assert found == {
        0: ([(3, 4)], [(35, 33), (36, 34)], [0, 2, 2, 2]),
        1: ([(2, 3)], [(25, 21)], [0, 0, 1, 1]),
        2: ([(5, 0)], [(62, 61)], [0, 0, 0, 1]),
    }
