"""Moves of experts between ranks: the same bits before, during and after them, and what happens if one cannot be loaded."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quire.contracts.expert_options import EplbConfig
from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.native_experts import ExpertLoader
from quire.model.resolve import resolve_model
from quire.model.token_runs import TokenRuns, address_of
from quire.parallel.expert_balance import Move
from quire.parallel.expert_placement import ExpertPlacement, linear_placement, slot_counts
from quire.parallel.shm_communicator import ShmCommunicator
from quire.parallel.step_pacer import StepPacer
from quire.quant.policy import POLICIES, parameter_quantizer
from quire.worker.expert_moves import ExpertChange, ExpertMover, LoadState
from quire.worker.expert_parallel import PlacedLoads
from quire.worker.expert_rebalance import ExpertRebalancer, LoadWindow, plan_layers
from tests.no_threads import no_threads
from tests.rank_threads import RankThreads

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

PIECE_BYTES = 20_000
TOKENS, TABLE = list(range(40, 60)), np.array([1, 0], np.int64)


class _Group:
    """Ranks of the bundled mixture as threads, each with a mover; `gate` holds the loading of experts back."""

    def __init__(self, num_ranks, quantization=None, num_redundant=0, fails_on=None, idle_s=1e-4):
        folder = resolve_model("demo-moe", None)
        self.spec = read_model_spec(folder, "bfloat16")
        self.gate = threading.Event()
        self.gate.set()
        quantize = None
        if quantization is not None:
            parameters = open_parameters(folder, self.spec)
            quantize = parameter_quantizer(parameters, self.spec, POLICIES[quantization]).quantized
        shares = (1.0,) * num_ranks
        counts = slot_counts(16, num_redundant, shares)
        placements = dict.fromkeys(range(3), linear_placement(16, counts))
        load = lambda: open_parameters(folder, self.spec)  # noqa: E731
        whole = NativeDecoder(load_native(), self.spec, load(), 64, quantize)
        pool = KvPool(KvSpec.of(self.spec, 16, "bfloat16"), 2)
        self.expected = whole.run(self._runs(), pool, [len(TOKENS) - 1])[0].clone()
        self.ranks = RankThreads(self.spec, load, shares, 64, quantize, placements=placements)
        self.pools = self.ranks.pools(16, "bfloat16", 2)
        self.movers, self.pacers = [], [StepPacer(PIECE_BYTES, idle_s) for _ in range(num_ranks)]
        for rank, decoder in enumerate(self.ranks.decoders):
            loader = ExpertLoader(load_native(), self.spec, load, quantize, decoder.dense_stacks, self.pacers[rank])
            communicator = ShmCommunicator(self.ranks.memory, self.ranks.barriers[rank])
            wrapped = self._failing if rank == fails_on else self._gated(loader)
            self.movers.append(ExpertMover(decoder, wrapped, communicator, placements, self.pacers[rank]))

    def _gated(self, loader):
        def load(layer, expert):
            assert self.gate.wait(30)
            return loader.load(layer, expert)

        return load

    def _failing(self, layer, expert):
        raise OSError(f"no expert {expert}")

    def _runs(self):
        return TokenRuns(TOKENS, [0, len(TOKENS)], [len(TOKENS)], [TABLE], [address_of(TABLE)])

    def _step(self, decoder, rank):
        with self.movers[rank].during_step():
            return decoder.run(self._runs(), self.pools[rank], [len(TOKENS) - 1])[0].clone()

    def same_bits(self):
        """Return whether the logits of the ranks have the bits of one process."""
        found = self.ranks.call(self._step)
        return np.array_equal(found.numpy().view(np.int32), self.expected.numpy().view(np.int32))

    def all_switch(self):
        return self.ranks.call(lambda decoder, rank: self.movers[rank].switch())

    def prepare(self, change):
        self.ranks.call(lambda decoder, rank: self.movers[rank].prepare(change))


def _settle(act, until, seconds=60):
    end = time.monotonic() + seconds
    while not until(found := act()):
        assert time.monotonic() < end
        time.sleep(0.002)
    return found


@pytest.mark.parametrize(("num_ranks", "quantization"), [(2, None), (3, None), (4, None), (2, "int8")])
def test_logits_have_the_same_bits_during_and_after_moves(num_ranks, quantization):
    group = _Group(num_ranks, quantization, num_redundant=1)
    first, last = group.movers[0].placements[1].ranks[0], group.movers[0].placements[1].ranks[-1]
    old, new = next(e for e in first if e not in last), next(e for e in last if e not in first)
    group.gate.clear()
    group.prepare(ExpertChange(1, (Move(0, old, new), Move(num_ranks - 1, new, old))))
    assert group.same_bits()
    assert group.all_switch() is LoadState.LOADING
    assert group.same_bits()
    group.gate.set()
    assert _settle(group.all_switch, lambda state: state is not LoadState.LOADING) is LoadState.READY
    for mover in group.movers:
        assert old in mover.placements[1].ranks[-1]
        assert new in mover.placements[1].ranks[0]
    assert group.same_bits()
    group.ranks.close()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_no_step_has_more_bytes_of_moving_experts_next_to_it_than_are_allowed(quantization):
    group = _Group(2, quantization, idle_s=None)  # only steps let the loading go on
    group.prepare(ExpertChange(1, (Move(0, 0, 8), Move(1, 8, 0))))
    num_steps, largest_piece = 0, 0 if quantization is None else 4 * 128 * 128
    while group.all_switch() is LoadState.LOADING:
        for pacer in group.pacers:
            assert pacer.num_bytes <= PIECE_BYTES * (num_steps + 1) + largest_piece
        assert group.same_bits()
        num_steps += 1
    assert num_steps >= group.pacers[0].num_bytes // PIECE_BYTES - 1 > 2
    assert group.same_bits()
    group.ranks.close()


@pytest.mark.parametrize(("fails_on", "refused"), [(1, "another"), (None, "quire-load-experts")], ids=["read", "thread"])
def test_an_expert_that_cannot_be_loaded_leaves_the_placement(caplog, fails_on, refused):
    group = _Group(2, fails_on=fails_on)
    before = dict(group.movers[0].placements)
    with no_threads(refused):
        group.prepare(ExpertChange(0, (Move(0, 0, 8), Move(1, 8, 0))))
    assert _settle(group.all_switch, lambda state: state is not LoadState.LOADING) is LoadState.FAILED
    assert "expert of layer 0 can" in caplog.text
    assert [mover.placements for mover in group.movers] == [before, before]
    assert group.same_bits()
    group.prepare(ExpertChange(0, (Move(0, 0, 8), Move(1, 8, 0))))  # the group can try again
    group.ranks.close()


def test_a_placement_without_weights_is_refused():
    group = _Group(2)
    plan = group.ranks.decoders[0].plan
    copies = ([1] * 16, [0] * 16)
    with pytest.raises(ValueError, match="expert 8 has no weights"):
        plan.place_experts(0, [], *copies)
    with pytest.raises(ValueError, match="there is no layer 3"):
        plan.place_experts(3, [], *copies)
    assert group.same_bits()
    group.ranks.close()


def test_a_rebalancing_evens_out_the_window_and_logs_every_move(caplog):
    """Two ranks, one driven by the rebalancer of the leader and the other by its messages."""
    caplog.set_level("INFO")
    group = _Group(2, num_redundant=2)
    rng = np.random.default_rng(1)
    tokens = {layer: np.round(1000 * rng.lognormal(0, 1, 16)).astype(np.int64) for layer in range(3)}
    placements, saved = dict(group.movers[0].placements), []
    loads = PlacedLoads(placements, (1.0, 1.0))
    sent, worker = [], ThreadPoolExecutor(1)

    def send(change):
        mover, pool = group.movers[1], worker
        sent.append(pool.submit(mover.switch) if change is None else pool.submit(mover.prepare, change))

    rebalancer = ExpertRebalancer(
        group.movers[0], send, lambda: tokens, loads, EplbConfig(step_interval=3), lambda: saved.append(loads.placements)
    )
    with no_threads("quire-place-experts"):
        for _ in range(3):
            rebalancer.note_step()
    for _ in range(2):
        rebalancer.note_step()
        rebalancer.advance()
    assert not rebalancer.is_active
    rebalancer.note_step()
    assert rebalancer.is_active
    assert not rebalancer.start()

    def step():
        rebalancer.advance()
        for future in sent:
            future.result(60)
        return group.same_bits()

    while rebalancer.is_active:
        assert step()
    stats = [loads.stats(layer, tokens[layer].tolist()) for layer in range(3)]
    planned = plan_layers(placements, tokens, (1.0, 1.0))
    for each, plan in zip(stats, planned, strict=True):
        assert each.imbalance_before == plan.before == placements[each.layer].imbalance(tokens[each.layer])
        assert each.imbalance_after == loads.placements[each.layer].imbalance(tokens[each.layer])
        assert each.imbalance_after <= max(1.05, each.imbalance_before)
        assert each.num_moved == sum(len(change.moves) for change in plan.changes)
        assert sum(each.rank_tokens) == pytest.approx(sum(each.tokens))
    assert sum(each.num_moved for each in stats) > 0
    assert caplog.text.count("before, ") == sum(len(plan.changes) for plan in planned)
    assert group.movers[0].placements == group.movers[1].placements == loads.placements
    assert len(saved) == 1
    worker.shutdown()
    group.ranks.close()


def test_the_window_is_the_load_of_the_last_steps():
    window, total = LoadWindow(32), {0: np.zeros(2, np.int64)}
    for step in range(100):
        total = {0: total[0] + np.array([1, step])}
        window.note_step(lambda: total)  # noqa: B023
    (ones, last) = window.load(total)[0]
    assert 32 <= ones <= 34
    assert last == sum(range(100 - ones, 100))
    young = LoadWindow(1000)
    young.note_step(lambda: total)
    assert young.load(total) is total


def test_the_tokens_of_ranks_go_on_after_a_move():
    first, second = ExpertPlacement(2, ((0,), (1,))), ExpertPlacement(2, ((1,), (0,)))
    loads = PlacedLoads({0: first}, (1, 1))
    loads.switch(0, second, [30, 10], 2)
    stats = loads.stats(0, [40, 50])
    assert stats.rank_tokens == [30 + 40, 10 + 10]
    assert (stats.imbalance, stats.num_moved) == (40 / 25, 2)
