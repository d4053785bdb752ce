"""Logits have the same bits on one rank and on several that share tokens of sequences, divide rows of a step, or are homes."""

from __future__ import annotations

import numpy as np
import pytest

from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.token_runs import TokenRuns, address_of
from quire.parallel.expert_placement import linear_placement, slot_counts
from quire.worker.expert_parallel import count_experts
from tests.rank_threads import RankThreads

pytestmark = [pytest.mark.golden, pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")]

BLOCK_SIZE, CHUNK_BLOCKS, NUM_CHUNKS = 16, 16, 12  # 12 is a multiple of 1, 2, 3 and 4 places
NUM_BLOCKS, MAX_LEN, VOCAB_SIZE = NUM_CHUNKS * CHUNK_BLOCKS, 1024, 131
ENDS = (  # of two sequences after each step: prompts, whole and in chunks, then tokens one by one across the borders of chunks
    *((255, 0), (256, 40), (257, 300), (511, 512), (512, 513), (514, 514)),
    *((767, 700), (768, 767), (769, 768), (770, 769)),
)
DCP = {"two": (2, 2), "three": (3, 3), "four": (4, 4), "two-of-four": (4, 2)}
"""(ranks, ranks that share the tokens of a sequence)"""


def _tables(num_places):
    """Return the block tables of two sequences, which start at different places, as one rank and as several number them."""
    rng, per_chunk = np.random.default_rng(3), CHUNK_BLOCKS
    orders = [rng.permutation(NUM_BLOCKS // num_places) for _ in range(num_places)]
    used, tables = [0] * num_places, []
    for first in range(2):
        table = []
        for chunk in range(5):
            place = (first + chunk) % num_places
            own = orders[place][used[place] : used[place] + per_chunk]
            used[place] += per_chunk
            table += (place * (NUM_BLOCKS // num_places) + own).tolist()
        tables.append(np.array(table, np.int64))
    return tables


def _home_tables(size):
    """Return the block tables of two sequences, each in the blocks of one rank: the last and the first. Each has NUM_BLOCKS."""
    order = np.random.default_rng(3).permutation(NUM_BLOCKS)
    return [np.array(home * NUM_BLOCKS + order[:80], np.int64) for home in (size - 1, 0)]


def _run(call, tables, vocab_size, ends=ENDS):
    """Run the steps; return all logits of each, and those of the last token of every sequence."""
    rng = np.random.default_rng(7)
    sequences = [rng.integers(3, vocab_size, MAX_LEN).tolist() for _ in tables]
    found, done = [], [0, 0]
    for step in ends:
        parts = [index for index, end in enumerate(step) if end > done[index]]
        counts = [step[index] - done[index] for index in parts]
        tokens = [token for index in parts for token in sequences[index][done[index] : step[index]]]
        starts = [0, *np.cumsum(counts).tolist()]
        own = [tables[index] for index in parts]
        runs = TokenRuns(tokens, starts, [step[index] for index in parts], own, [address_of(table) for table in own])
        last = [start - 1 for start in starts[1:]]
        found.append(call(runs, last, False))
        found.append(call(runs, sorted({*last, *range(0, len(tokens), 97)}), True))
        done = list(step)
    return found


def _call_of(run):
    def call(runs, rows, keeps_all):
        logits, best = run(runs, rows, keeps_all=keeps_all, wants_best=True)
        return logits.clone().numpy().view(np.int32), best

    return call


def _one_rank(spec, parameters, kv_dtype, ends):
    decoder = NativeDecoder(load_native(), spec, parameters(), MAX_LEN)
    kv = KvPool(KvSpec.of(spec, BLOCK_SIZE, kv_dtype), NUM_BLOCKS)
    return _run(_call_of(lambda runs, rows, **more: decoder.run(runs, kv, rows, **more)), _tables(1), _vocab(spec), ends)


def _vocab(spec):
    return min(spec.vocab_size, VOCAB_SIZE)


def _ranks(spec, parameters, kv_dtype, size, num_places, num_row_groups, ends, exchanges_rows=False):
    local = NUM_BLOCKS // num_places
    context = (num_places, local)
    ranks = RankThreads(
        spec, parameters, (1,) * size, MAX_LEN, exchanges_rows=exchanges_rows, context=context, num_row_groups=num_row_groups
    )
    pools = ranks.pools(BLOCK_SIZE, kv_dtype, local)

    def run(runs, rows, **more):
        return ranks.call(lambda decoder, rank: decoder.run(runs, pools[rank], rows, **more))

    found = _run(_call_of(run), _tables(num_places), _vocab(spec), ends)
    assert size > 1 < num_row_groups or len(set(ranks.num_barriers)) == 1  # groups without rows have none of their own
    ranks.close()
    return found


def _compare(folder, dtype, layouts, kv_dtype=None, exchanges_rows=False, ends=ENDS):
    """layouts: (tensor-parallel ranks, places of the tokens of a sequence, groups of such ranks that divide rows)"""
    spec = read_model_spec(folder, dtype)
    arguments = spec, lambda: load_parameters(folder, spec), kv_dtype or dtype
    expected = _one_rank(*arguments, ends)
    for layout in layouts:
        for step, (a, b) in enumerate(zip(expected, _ranks(*arguments, *layout, ends, exchanges_rows), strict=True)):
            assert (a[0] == b[0]).all(), f"{(a[0] != b[0]).sum()} of {a[0].size} logits of call {step} differ: {layout}"
            assert a[1] == b[1]


def _compare_homes(folder, dtype, sizes, kv_dtype=None, exchanges_rows=False, ends=ENDS, placements=None):
    """sizes: (homes, ranks of each)"""
    spec = read_model_spec(folder, dtype)
    parameters, kv_dtype = (lambda: load_parameters(folder, spec)), kv_dtype or dtype
    expected = _one_rank(spec, parameters, kv_dtype, ends)
    for size, home_size in sizes:
        shares = (1,) * (size * home_size)
        placed = None if placements is None else placements(spec, shares)
        ranks = RankThreads(
            spec, parameters, shares, MAX_LEN, None, exchanges_rows, placed, context=(size, NUM_BLOCKS), home_size=home_size
        )
        pools = ranks.pools(BLOCK_SIZE, kv_dtype, NUM_BLOCKS)

        def run(runs, rows, ranks=ranks, pools=pools, **more):
            return ranks.call(lambda decoder, rank: decoder.run(runs, pools[rank], rows, **more))

        found = _run(_call_of(run), _home_tables(size), _vocab(spec), ends)
        assert len(set(ranks.num_barriers)) == 1
        ranks.close()
        for step, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert (a[0] == b[0]).all(), (
                f"{(a[0] != b[0]).sum()} of {a[0].size} logits of call {step} differ: {size} x {home_size}"
            )
            assert a[1] == b[1]


def _layouts(names):
    return [(*DCP[name], 1) for name in names]


@pytest.mark.parametrize("case", ["llama-mqa", "llama-bias"])
def test_logits_are_the_same_bits_on_ranks_that_share_the_tokens(checkpoint, case):
    _compare(checkpoint(case, "v5"), "float32", _layouts(["two"]), ends=ENDS[2:7])


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("case", ["llama-mqa", "llama-bias", "gemma2", "gpt-oss", "olmo2", "deepseek-v3", "qwen3-moe-mlp-only"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_every_kind_are_the_same_bits_on_ranks_that_share_the_tokens(checkpoint, case, dtype):
    folder = checkpoint(case, "v5")
    most = read_model_spec(folder, dtype).layers[0].attention.num_heads
    _compare(folder, dtype, _layouts([name for name in DCP if DCP[name][0] <= most]))


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "turboquant_4bit", "k8v4"])
def test_logits_with_quantised_caches_are_the_same_bits(checkpoint, kv_dtype):
    _compare(checkpoint("llama-mqa", "v5"), "bfloat16", [*_layouts(["three"]), (1, 1, 2)], kv_dtype)


def test_logits_are_the_same_bits_on_ranks_that_divide_the_rows(checkpoint):
    _compare(checkpoint("llama-mqa", "v5"), "float32", [(1, 1, 2), (2, 1, 2)], ends=ENDS[1:5])


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize(
    "case", ["llama-mqa", "gemma2", "gpt-oss", "olmo2", "deepseek-v3", "qwen3-moe-mlp-only", "gemma4-dense"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_every_kind_are_the_same_bits_on_ranks_that_divide_the_rows(checkpoint, case, dtype):
    _compare(checkpoint(case, "v5"), dtype, [(1, 1, 2), (1, 1, 3), (1, 1, 4), (2, 1, 2)])


@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 1, 2)], ids=["tokens", "rows"])
def test_logits_are_the_same_bits_where_ranks_share_no_memory(checkpoint, layout):
    _compare(checkpoint("llama-mqa", "v5"), "float32", [layout], exchanges_rows=True, ends=ENDS[2:5])


@pytest.mark.parametrize(("case", "exchanges_rows"), [("llama-mqa", False), ("llama-mqa", True), ("qwen3-moe-mlp-only", False)])
def test_logits_are_the_same_bits_where_sequences_have_homes(checkpoint, case, exchanges_rows):
    _compare_homes(checkpoint(case, "v5"), "float32", [(2, 1), (3, 1), (2, 2)], exchanges_rows=exchanges_rows, ends=ENDS[1:4])


HOME_CASES = (
    *("llama-mqa", "gemma2", "gpt-oss", "olmo2", "deepseek-v3", "cohere", "qwen2-moe", "phimoe", "qwen3-moe-mlp-only"),
    *("llama4-moe", "gpt-neox", "gemma4-moe"),
)


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("case", HOME_CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_every_kind_are_the_same_bits_where_sequences_have_homes(checkpoint, case, dtype):
    _compare_homes(checkpoint(case, "v5"), dtype, [(2, 1), (4, 1)] + [(2, 2), (2, 3)] * (case != "olmo2"), ends=ENDS[1:8])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deepseek-v3", "gpt-oss", "qwen2-moe"])
def test_logits_are_the_same_bits_where_homes_share_whole_experts(checkpoint, case):
    def place(spec, shares):
        return {index: linear_placement(count, slot_counts(count, 1, shares)) for index, count in count_experts(spec).items()}

    _compare_homes(checkpoint(case, "v5"), "bfloat16", [(2, 1), (4, 1), (2, 2)], "int8", ends=ENDS[1:8], placements=place)
