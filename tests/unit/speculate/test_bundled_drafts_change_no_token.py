"""Drafts that are often right change no token: the bundled heads and models, with everything that samples, asks and happens.

Random heads, as in test_drafts_change_no_token.py, are hardly ever followed for more than a token.
"""

import functools

import pytest

pytest.importorskip("llguidance")

from bundled_runs import BUNDLED, REQUESTS, SAMPLERS, generate, note_runs, said, start

from quire.kernels.native import load_native
from tests.unit.engine.one_compiler import one_compiler

pytestmark = pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")

CACHES = ("auto", "int8", "turboquant_4bit")
# How the prefix is found, and how many run at once; the options of the engine, and how often all are asked for.
RUNS = {
    "cold": ({"enable_prefix_caching": False}, 1),
    "hit": ({}, 2),
    "preempted": ({"num_kv_blocks": 20}, 1),
    "cold alone": ({"enable_prefix_caching": False, "max_num_seqs": 1}, 1),
    "hit alone": ({"max_num_seqs": 1}, 2),
}
ASK_A_MODEL = ("eagle3", "mtp", "draft_model", "self")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with one_compiler():
        yield


@pytest.fixture(scope="module")
def plain():
    """Return a function of a cache and a seed: what is said to that request by itself, without any drafts."""
    engines = {cache: start(None, kv_cache_dtype=cache, enable_prefix_caching=False) for cache in CACHES}
    yield functools.cache(lambda cache, seed: said(generate(engines[cache], [seed])[0].outputs[0]))
    for llm in engines.values():
        assert llm.llm_engine.stats.num_drafts == 0
        llm.close()


def expect_same(plain, cache, kind, run, seeds, drafts_forced=True):
    """Compare a run with the plain one; return the numbers of drafts that were accepted at once, by seed."""
    options, num_rounds = RUNS[run]
    llm = start(kind, kv_cache_dtype=cache, **options)
    llm.llm_engine.draft_forced(drafts_forced)
    runs = note_runs(llm.llm_engine)
    for turn in range(num_rounds):
        outputs = generate(llm, seeds)
        assert [said(output.outputs[0]) for output in outputs] == [plain(cache, seed) for seed in seeds]
        if turn == 1:
            assert min(output.metrics.num_cached_tokens for output in outputs) >= 16
        if run == "preempted":
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
    pool = llm.llm_engine.scheduler.kv.pool
    assert pool.num_free == options.get("num_kv_blocks", 120)
    llm.close()
    return runs


def num_runs(runs, seeds, temperature=None, is_json=None):
    """Return how often two or more drafts were accepted at once."""
    chosen = [s for s in seeds if temperature in (None, REQUESTS[s][1]) and is_json in (None, REQUESTS[s][2])]
    return sum(count >= 2 for seed in chosen for count in runs[seed])


def some_seeds(index, num_each=1):
    """Return seeds of requests, so many with each sampler; four indices in a row have all of them."""
    return [4 * place + (place + index + more) % 4 for place in range(len(SAMPLERS)) for more in range(num_each)]


# A cache and a run; the slow test below has every kind.
CASES = {"eagle3": ("auto", "hit"), "lookahead": ("auto", "cold")}


@pytest.mark.parametrize("kind", CASES)
def test_same_outputs_when_runs_of_drafts_are_accepted(plain, kind):
    (cache, run), index = CASES[kind], list(CASES).index(kind)
    seeds = some_seeds(index)
    runs = expect_same(plain, cache, kind, run, seeds, drafts_forced=index % 2 == 0)
    assert num_runs(runs, seeds) >= 3
    if kind.startswith(ASK_A_MODEL):
        assert num_runs(runs, seeds, is_json=False) >= 4
        assert min(num_runs(runs, seeds, temperature) for temperature in (0, 1)) >= 2
        assert num_runs(runs, seeds, is_json=True) >= 1


# Each kind in one of the runs, each run with several kinds. Caches, whether forced tokens are drafted, and requests take turns.
COMBINED = [
    pytest.param(CACHES[(index + place) % len(CACHES)], kind, run, (index // 2 + place) % 2 == 0, index, id=f"{kind}-{run}")
    for index, kind in enumerate(BUNDLED)
    for place, run in enumerate(RUNS)
    if (place - index) % len(RUNS) == 2
]


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "kind", "run", "drafts_forced", "index"), COMBINED)
def test_same_outputs_whatever_is_combined(plain, cache, kind, run, drafts_forced, index):
    seeds = some_seeds(index, num_each=2)
    runs = expect_same(plain, cache, kind, run, seeds, drafts_forced)
    assert num_runs(runs, seeds) >= (1 if kind == "lookahead" else 5)
    if kind.startswith(ASK_A_MODEL):
        assert min(num_runs(runs, seeds, temperature, is_json) for temperature in (0, 1) for is_json in (False, True)) >= 1
