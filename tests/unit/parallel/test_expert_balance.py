"""Balancing experts: `place` and `improve` reach their bars on generated loads, and never break a placement."""

from __future__ import annotations

import numpy as np
import pytest

from quire.base.errors import ConfigError, InvariantError
from quire.parallel.expert_balance import MAX_IMBALANCE, Move, apply_moves, improve, place
from quire.parallel.expert_placement import ExpertPlacement, linear_placement, slot_counts

NUM_LAYERS = 24


def _windows(seed, num_experts, sigma=1.0, drift=0.3):
    """Yield for each layer the load of a window of steps and of a later one."""
    rng = np.random.default_rng(seed)
    for _ in range(NUM_LAYERS):
        load = np.round(1000 * rng.lognormal(0, sigma, num_experts))
        yield load, np.round(load * rng.lognormal(0, drift, num_experts))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("num_experts", "num_redundant", "num_ranks"), [(128, 16, 8), (64, 8, 4), (256, 32, 16)])
@pytest.mark.parametrize("seed", [0, 1])
def test_improve_reaches_the_limit_with_few_moves(num_experts, num_redundant, num_ranks, seed):
    counts = slot_counts(num_experts, num_redundant, (1.0,) * num_ranks)
    num_moves, before = [], []
    for load, later in _windows(seed, num_experts):
        placement = place(load, counts)
        assert placement.imbalance(load) < 1.01
        moves = improve(placement, later)
        assert apply_moves(placement, moves).imbalance(later) <= MAX_IMBALANCE
        num_moves.append(len(moves))
        before.append(placement.imbalance(later))
    assert np.mean(before) > 1.05  # there was something to improve
    assert np.mean(num_moves) <= 0.06 * sum(counts)  # of all slots of all layers
    assert max(num_moves) <= 0.1 * sum(counts)


def _routes(rng, num_experts, num_groups, num_tokens=4000):
    """Tokens choose six experts, most of them of one group, in an order that placements do not know."""
    groups = rng.permutation(num_experts).reshape(num_groups, -1)
    scores = rng.gumbel(size=(num_tokens, num_experts)) + rng.normal(0, 0.5, num_experts)
    rows = np.arange(num_tokens)[:, None]
    scores[rows, groups[rng.integers(num_groups, size=num_tokens)]] += 3.0
    return np.argsort(-scores, 1)[:, :6]


def _hosts_of_tokens(placement, routes, num_hosts):
    """Return on how many hosts a token's experts are, on average, with the fewest hosts that have copies of them all."""
    size = len(placement.ranks) // num_hosts
    has = np.zeros((num_hosts, placement.num_experts), bool)
    for rank, own in enumerate(placement.ranks):
        has[rank // size, list(own)] = True
    numbers = np.arange(1, 1 << num_hosts)
    unions = np.array([has[[number >> host & 1 == 1 for host in range(num_hosts)]].any(0) for number in numbers])
    is_enough = unions[:, routes].all(2)
    sizes = np.array([int(number).bit_count() for number in numbers])
    return np.where(is_enough, sizes[:, None], num_hosts).min(0).mean()


@pytest.mark.parametrize(("num_redundant", "num_hosts"), [(0, 2), (0, 4), (16, 2)])
def test_experts_that_are_chosen_together_are_on_one_host(num_redundant, num_hosts):
    rng = np.random.default_rng(num_hosts)
    routes, num_experts = _routes(rng, 64, 4), 64
    chosen = np.zeros((len(routes), num_experts), np.int64)
    np.put_along_axis(chosen, routes, 1, 1)
    load, pairs, counts = chosen.sum(0), chosen.T @ chosen, slot_counts(num_experts, num_redundant, (1.0,) * 8)
    flat, gathered = place(load, counts), place(load, counts, None, num_hosts, pairs)
    assert _hosts_of_tokens(gathered, routes, num_hosts) < 0.85 * _hosts_of_tokens(flat, routes, num_hosts)
    assert gathered.imbalance(load) < 1.1
    assert tuple(map(len, gathered.ranks)) == counts
    later = load * rng.lognormal(0, 0.3, num_experts)
    improved = apply_moves(gathered, improve(gathered, later, num_hosts=num_hosts))
    assert improved.imbalance(later) < gathered.imbalance(later)
    assert _hosts_of_tokens(improved, routes, num_hosts) < 0.9 * _hosts_of_tokens(flat, routes, num_hosts)


def test_hosts_of_unequal_numbers_of_ranks_are_refused():
    with pytest.raises(ConfigError, match="hosts must divide the 3 ranks, got 2"):
        improve(linear_placement(6, (2, 2, 2)), [1] * 6, num_hosts=2)


def test_improve_moves_less_than_placing_anew():
    counts = slot_counts(128, 16, (1.0,) * 8)
    for load, later in _windows(3, 128):
        placement, anew = place(load, counts), place(later, counts)
        num_new = sum(len(set(new) - set(old)) for new, old in zip(anew.ranks, placement.ranks, strict=True))
        assert len(improve(placement, later)) < num_new / 4


def test_improve_makes_no_more_moves_than_allowed_and_each_helps():
    counts = slot_counts(32, 4, (1.0,) * 4)
    load, _ = next(_windows(5, 32, sigma=2.0))
    placement = linear_placement(32, counts)
    before = placement.imbalance(load)
    for max_moves in range(8):
        moves = improve(placement, load, limit=1.0, max_moves=max_moves)
        assert len(moves) <= max_moves
        after = apply_moves(placement, moves).imbalance(load)
        assert after < before if moves else after == before


def test_improve_leaves_what_is_balanced():
    placement = linear_placement(8, (4, 4))
    assert improve(placement, [1] * 8) == []
    assert improve(placement, [0] * 8) == []


def test_a_copy_moves_to_where_it_is_needed():
    # Expert 0 needs no copy; expert 3 has half of the load.
    placement = ExpertPlacement(4, ((0, 1, 2), (0, 3)))
    moves = improve(placement, [10, 10, 10, 60])
    assert moves == [Move(0, 0, 3)]
    assert apply_moves(placement, moves).imbalance([10, 10, 10, 60]) < placement.imbalance([10, 10, 10, 60])


def test_placement_gives_copies_to_the_busiest_experts():
    load = [100, 1, 1, 1, 1, 1, 1, 50]
    placement = place(load, (3, 3, 3, 3))
    assert placement.num_copies == (4, 1, 1, 1, 1, 1, 1, 2)
    assert placement.imbalance(load) < linear_placement(8, (3, 3, 3, 3)).imbalance(load)


def test_loads_follow_the_shares():
    rng = np.random.default_rng(2)
    load = rng.lognormal(0, 1, 64)
    placement = place(load, slot_counts(64, 8, (2, 1, 1)), (2, 1, 1))
    loads = placement.rank_loads(load)
    assert placement.imbalance(load, (2, 1, 1)) < 1.05
    assert loads[0] / loads[1:].mean() == pytest.approx(2, rel=0.1)


def test_any_sizes_can_be_placed():
    rng = np.random.default_rng(11)
    for _ in range(400):
        num_experts = int(rng.integers(1, 12))
        shares = tuple(rng.choice([1, 1, 2, 4], int(rng.integers(1, min(num_experts, 5) + 1))).tolist())
        try:
            counts = slot_counts(num_experts, int(rng.integers(0, 8)), shares)
        except ConfigError:
            continue
        load = rng.lognormal(0, 2, num_experts) * (rng.random(num_experts) < 0.7)
        for placement in (place(load, counts, shares), linear_placement(num_experts, counts)):
            assert tuple(map(len, placement.ranks)) == counts
            moves = improve(placement, load, shares)
            improved = apply_moves(placement, moves)  # which checks the moves
            assert tuple(map(len, improved.ranks)) == counts
            assert improved.imbalance(load, shares) <= placement.imbalance(load, shares) + 1e-9


def test_results_depend_only_on_the_arguments():
    load, later = next(_windows(4, 64))
    counts = slot_counts(64, 8, (1.0,) * 4)
    assert place(load, counts) == place(list(load), list(counts))
    assert improve(place(load, counts), later) == improve(place(load, counts), later)


def test_slots_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="4 experts need at least as many slots"):
        place([1, 2, 3, 4], (2, 1))
    with pytest.raises(InvariantError, match="does not fit rank 1"):
        apply_moves(linear_placement(4, (2, 2)), [Move(1, 0, 2)])
