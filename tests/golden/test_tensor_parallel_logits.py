"""Logits of every golden model have the same bits on 1, 2, 3 and 4 tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from quire.model.checkpoint import load_parameters, open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.tensor_shards import ModelShard
from quire.model.token_runs import TokenRuns, address_of
from quire.quant.policy import POLICIES, parameter_quantizer
from tests.golden.make_checkpoints import ALL_CASES, INDEXED_CASES, case_params
from tests.rank_threads import RankThreads

pytestmark = [pytest.mark.golden, pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")]

BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS = 16, 131, 12
STORED_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "quantised"
STORED = sorted(path for path in STORED_FOLDER.glob("*") if path.is_dir() or path.suffix == ".gguf")
LAYOUTS = {"two": (1, 1), "three": (1, 1, 1), "four": (1, 1, 1, 1), "two-to-one": (2, 1)}


def _steps(vocab_size):
    """Yield steps of two sequences: prompts, in chunks and whole, then tokens one by one: (tokens, end, count) of each."""
    rng = np.random.default_rng(7)
    first, second = (rng.integers(3, vocab_size, length).tolist() for length in (41, 23))
    yield [(first, 17)]
    yield [(first, 38), (second, 20)]
    for more in (1, 2, 3):
        yield [(first, 38 + more), (second, 20 + more)]


def _run(call, tables, vocab_size, compares_best=True):
    """Run the steps; return the logits of each, of the last two tokens of every sequence, and the best tokens."""
    found, done = [], {}
    for parts in _steps(vocab_size):
        token_ids, starts, ends, rows, own = [], [0], [], [], []
        for index, (tokens, end) in enumerate(parts):
            token_ids += tokens[done.get(index, 0) : end]
            done[index] = end
            starts.append(len(token_ids))
            ends.append(end)
            rows.append(len(token_ids) - 1)
            own.append(tables[index])
        runs = TokenRuns(token_ids, starts, ends, own, [address_of(table) for table in own])
        found.append(call(runs, rows, wants_best=False))
        if compares_best:
            found.append(call(runs, rows, wants_best=True))
        found.append(call(runs, list(range(len(token_ids))), wants_best=False, keeps_all=True))
    return found


def _one_rank(spec, parameters, dtype, tables, quantize, compares_best=True):
    decoder = NativeDecoder(load_native(), spec, parameters(), 64, quantize)
    kv = KvPool(KvSpec.of(spec, BLOCK_SIZE, dtype), NUM_BLOCKS)

    def call(runs, rows, wants_best, keeps_all=False):
        logits, best = decoder.run(runs, kv, rows, wants_best=wants_best, needs_logits=not wants_best, keeps_all=keeps_all)
        return best if wants_best else logits.clone()

    return _run(call, tables, min(spec.vocab_size, VOCAB_SIZE), compares_best)


def _ranks(spec, parameters, dtype, tables, quantize, shares, exchanges_rows=False, compares_best=True):
    ranks = RankThreads(spec, parameters, shares, 64, quantize, exchanges_rows)
    pools = ranks.pools(BLOCK_SIZE, dtype, NUM_BLOCKS)

    def call(runs, rows, wants_best, keeps_all=False):
        def act(decoder, rank):
            options = {"wants_best": wants_best, "needs_logits": not wants_best, "keeps_all": keeps_all}
            logits, best = decoder.run(runs, pools[rank], rows, **options)
            return best if wants_best else logits.clone()

        return ranks.call(act)

    found = _run(call, tables, min(spec.vocab_size, VOCAB_SIZE), compares_best)
    assert len(set(ranks.num_barriers)) == 1
    ranks.close()
    return found


def _compare(
    folder, dtype, layouts, quantization=None, kv_dtype=None, exchanges_rows=False, load=load_parameters, compares_best=True
):
    spec = read_model_spec(folder, dtype)
    tables = [np.array([3, 7, 1, 9], np.int64), np.array([0, 5, 2, 8], np.int64)]
    quantize = None
    if quantization is not None:
        quantize = parameter_quantizer(load_parameters(folder, spec), spec, POLICIES[quantization]).narrowed
    kv_dtype = kv_dtype or ("float32" if dtype == "float16" else dtype)
    arguments = spec, lambda: load(folder, spec), kv_dtype, tables, quantize
    expected = _one_rank(*arguments, compares_best)
    for layout in layouts:
        if len(LAYOUTS[layout]) > max(layer.attention.num_heads for layer in spec.layers):
            continue
        found = _ranks(*arguments, LAYOUTS[layout], exchanges_rows, compares_best)
        for step, (a, b) in enumerate(zip(expected, found, strict=True)):
            if isinstance(a, list):
                assert a == b, f"best tokens of call {step} differ with {layout} ranks"
            else:
                same = a.numpy().view(np.int32) == b.numpy().view(np.int32)
                assert same.all(), f"{(~same).sum()} of {same.size} logits of call {step} differ with {layout} ranks"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [*case_params(case for case in ALL_CASES if case not in INDEXED_CASES), "gemma4-dense"])
def test_logits_are_the_same_bits_on_any_number_of_ranks(checkpoint, case):
    _compare(checkpoint(case, "v5"), "float32", LAYOUTS)
    _compare(checkpoint(case, "v5"), "bfloat16", ["two", "three"])


def test_an_indexer_of_keys_is_refused(checkpoint):
    spec = read_model_spec(checkpoint("deepseek-v32", "v5"), "float32")
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but an indexer of keys"):
        ModelShard.of(spec, 0, (1, 1))


@pytest.mark.covering
@pytest.mark.parametrize(
    "case",
    [
        *("llama-mqa", "qwen3-bias", "gemma2", "qwen3-moe-mlp-only", "gpt-oss", "gpt2-scaled"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("qwen2-moe", "glm4-moe", "deepseek-v3", "minicpm3")),
    ],
)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_logits_of_quantised_weights_are_the_same_bits_on_any_number_of_ranks(checkpoint, case, quantization):
    _compare(checkpoint(case, "v5"), "bfloat16", ["two", "three"], quantization, "int8")
    _compare(checkpoint(case, "v5"), "float16", ["two-to-one"], quantization)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["llama-mqa", "gemma2", "olmo2", "mixtral", "gpt-oss", "gpt2-scaled"])
def test_logits_are_the_same_bits_where_ranks_share_no_memory(checkpoint, case):
    _compare(checkpoint(case, "v5"), "float32", ["two", "three"], exchanges_rows=True)
    _compare(checkpoint(case, "v5"), "bfloat16", ["two-to-one"], exchanges_rows=True)


@pytest.mark.one_in(4)
@pytest.mark.skipif(not STORED, reason="../shared/data is not there")
@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_logits_of_stored_quantised_weights_are_the_same_bits_on_any_number_of_ranks(path):
    _compare(path, "bfloat16", ["two", "three"], load=open_parameters)
    _compare(path, "float32", ["two-to-one"], load=open_parameters)


@pytest.mark.parametrize("value", [float("nan"), 1e38], ids=["not-a-number", "too-large-for-the-dtype"])
def test_a_weight_that_is_not_finite_takes_the_same_way_on_all_ranks(checkpoint, value):
    def load(folder, spec):
        parameters = load_parameters(folder, spec)
        name = "lm_head.weight" if "lm_head.weight" in parameters else "embed.weight"
        parameters[name] = parameters[name].float().clone()
        parameters[name][-1, 0] = value  # of the last rank's part; the other logits stay finite
        return parameters

    _compare(checkpoint("llama-bias", "v5"), "float16", ["two", "three"], "int8", load=load, compares_best=False)


def test_a_step_has_four_barriers_a_layer_and_two_more(checkpoint):
    folder = checkpoint("llama-mqa", "v5")
    spec = read_model_spec(folder, "float32")
    ranks = RankThreads(spec, lambda: load_parameters(folder, spec), (1, 1), 64)
    pools = ranks.pools(BLOCK_SIZE, "float32", NUM_BLOCKS)
    table = np.array([3, 7, 1, 9], np.int64)
    runs = TokenRuns([5, 6, 7], [0, 3], [3], [table], [address_of(table)])
    ranks.call(lambda decoder, rank: decoder.run(runs, pools[rank], [2]))
    assert ranks.num_barriers == [4 * len(spec.layers) + 2] * 2
    ranks.close()
