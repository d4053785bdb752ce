"""Routing that evens out the load of experts: what it changes, what it counts, and that all ranks do the same."""

from __future__ import annotations

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.contracts.expert_options import LossyRouting
from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.resolve import resolve_model
from quire.model.token_runs import TokenRuns, address_of
from quire.parallel.expert_placement import linear_placement
from tests.rank_threads import RankThreads

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

NUM_TOKENS, NUM_EXPERTS, TOP_K = 64, 16, 2
TOKENS = np.random.default_rng(3).integers(3, 400, NUM_TOKENS).tolist()
TABLE = np.arange(4, dtype=np.int64)
FOLDER = resolve_model("demo-moe", None)
SPEC = read_model_spec(FOLDER, "bfloat16")


def _runs(tokens):
    return TokenRuns(tokens, [0, len(tokens)], [len(tokens)], [TABLE], [address_of(TABLE)])


def _run(lossy, tokens=TOKENS, times=1):
    """Return the logits of the last tokens of a prompt, its tokens by expert in layer 0, and that layer's counts."""
    decoder = NativeDecoder(load_native(), SPEC, open_parameters(FOLDER, SPEC), 128)
    if lossy:
        decoder.use_lossy_routing(lossy)
    pool = KvPool(KvSpec.of(SPEC, 16, "bfloat16"), 4)
    for _ in range(times):
        before = decoder.plan.expert_tokens()[0]
        logits = decoder.run(_runs(tokens), pool, [len(tokens) - 1])[0].clone().numpy()
    found = [now - then for now, then in zip(decoder.plan.expert_tokens()[0], before, strict=True)]
    return logits, found, decoder.plan.routing_counts()[0]


def test_a_limit_that_nothing_reaches_changes_no_bits():
    logits, tokens, counts = _run(None)
    limited, same, (moved, dropped, weak, use) = _run(LossyRouting(capacity_factor=8.0))
    assert np.array_equal(logits.view(np.int32), limited.view(np.int32))
    assert (tokens, moved, dropped, weak) == (same, 0, 0, 0)
    assert use == pytest.approx(0.01 * max(tokens) / (8 * NUM_TOKENS * TOP_K / NUM_EXPERTS))
    assert counts == (0, 0, 0, 0.0)


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_what_is_over_the_capacity_goes_to_other_experts(factor):
    logits, demand, _ = _run(None)
    limited, tokens, (moved, dropped, weak, _) = _run(LossyRouting(capacity_factor=factor))
    capacity = int(np.ceil(factor * NUM_TOKENS * TOP_K / NUM_EXPERTS))
    excess = sum(max(0, count - capacity) for count in demand)
    assert excess > 0
    assert max(tokens) <= capacity
    assert sum(tokens) + dropped == NUM_TOKENS * TOP_K
    assert moved + dropped >= excess
    assert weak == 0
    assert not np.array_equal(logits, limited)


def test_small_steps_are_not_limited():
    logits, _, _ = _run(None, TOKENS[:4])
    limited, _, (moved, dropped, _, _) = _run(LossyRouting(capacity_factor=1.0), TOKENS[:4])
    assert np.array_equal(logits, limited)
    assert (moved, dropped) == (0, 0)


def test_weak_choices_are_left_out():
    _, demand, _ = _run(None)
    _, best_only, (_, _, all_weak, _) = _run(LossyRouting(min_share=1.0))
    assert (sum(best_only), all_weak) == (NUM_TOKENS, NUM_TOKENS * (TOP_K - 1))
    assert all(kept <= wanted for kept, wanted in zip(best_only, demand, strict=True))
    _, some, (_, _, some_weak, _) = _run(LossyRouting(min_share=0.5))
    assert 0 < some_weak < all_weak
    assert sum(some) + some_weak == NUM_TOKENS * TOP_K


def test_a_bias_lowers_the_load_of_busy_experts():
    _, demand, _ = _run(None)
    _, first, _ = _run(LossyRouting(bias_rate=0.01))
    assert first == demand  # it begins with the second step
    _, tokens, _ = _run(LossyRouting(bias_rate=0.01), times=20)
    assert max(tokens) < max(demand)
    assert sum(tokens) == sum(demand)


@pytest.mark.parametrize("has_experts_whole", [True, False])
def test_all_ranks_do_the_same(has_experts_whole):
    lossy = LossyRouting(1.2, 0.01, 0.3)
    expected, tokens, counts = _run(lossy, times=3)
    placements = dict.fromkeys(range(3), linear_placement(16, (6, 5, 5))) if has_experts_whole else None
    ranks = RankThreads(SPEC, lambda: open_parameters(FOLDER, SPEC), (1, 1, 1), 128, placements=placements)
    pools = ranks.pools(16, "bfloat16", 4)
    ranks.call(lambda decoder, rank: decoder.use_lossy_routing(lossy))
    for _ in range(3):
        found = ranks.call(lambda decoder, rank: decoder.run(_runs(TOKENS), pools[rank], [NUM_TOKENS - 1])[0].clone())
    assert np.array_equal(found.numpy().view(np.int32), expected.view(np.int32))
    assert [decoder.plan.routing_counts()[0] for decoder in ranks.decoders] == [counts] * 3
    assert sum(tokens) < NUM_TOKENS * TOP_K
    ranks.close()


def test_experts_that_are_chosen_by_a_threshold_are_refused():
    native = load_native()
    plan, layer = native.Plan(16, 32, False, 1), native.PlanLayer()
    layer.router = native.Weight("f32", 16, 16)
    layer.routing.set(2)
    plan.add_layer(layer)
    with pytest.raises(ValueError, match="lossy routing does not fit experts that are chosen by a threshold"):
        plan.set_lossy_routing(1.2, 0.0, 0.0, 0.0)


def test_the_error_of_a_routing_that_does_not_fit_names_the_options(monkeypatch):
    decoder = NativeDecoder(load_native(), SPEC, open_parameters(FOLDER, SPEC), 128)

    class Refusing:
        def set_lossy_routing(self, *_):
            raise ValueError("it does not fit")

    monkeypatch.setattr(decoder, "_plan", Refusing())
    with pytest.raises(ConfigError, match="expert_capacity_factor.*it does not fit; leave them out"):
        decoder.use_lossy_routing(LossyRouting(1.2))
