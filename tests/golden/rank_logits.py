"""Logits of a model on one rank and on several, compared by their bits."""

from __future__ import annotations

import numpy as np

from quire.base.errors import ConfigError
from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kernels.reference.recurrent import StateRows
from quire.kv.pool import KvPool
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.tensor_shards import ModelShard
from quire.model.token_runs import TokenRuns, address_of
from quire.quant.policy import POLICIES, parameter_quantizer
from tests.lora_adapter import load_random_adapter
from tests.rank_threads import RankThreads

BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS, NUM_STATES = 16, 131, 12, 6
LAYOUTS = {"two": (1, 1), "three": (1, 1, 1), "four": (1, 1, 1, 1), "two-to-one": (2, 1)}


def _steps(vocab_size):
    """Yield steps of two sequences: prompts, in chunks and whole, then tokens one by one: (tokens, end, count) of each."""
    rng = np.random.default_rng(7)
    first, second = (rng.integers(3, vocab_size, length).tolist() for length in (41, 23))
    yield [(first, 17)]
    yield [(first, 38), (second, 20)]
    for more in (1, 2, 3):
        yield [(first, 38 + more), (second, 20 + more)]


def state_rows(step, counts):
    """Return the rows of recurrent states of a step, the numbers of its tokens being counts, that may be computed again: it
    writes other rows than it reads. The state before the last token is kept, too, as before a draft."""
    sources, saves = [], []
    for index, count in enumerate(counts):
        is_first = step == (0 if index == 0 else 1)
        sources.append(-1 if is_first else 2 * index + (step + 1) % 2)
        saves.append([(count, 2 * index + step % 2), *([(count - 1, 4 + index)] if count > 1 else [])])
    return StateRows(sources, saves)


def _run(call, tables, vocab_size, compares_best=True, adapters=None):
    """Run the steps; return the logits of each, of the last two tokens of every sequence, and the best tokens."""
    found, done = [], {}
    for step, parts in enumerate(_steps(vocab_size)):
        token_ids, starts, ends, rows, own = [], [0], [], [], []
        for index, (tokens, end) in enumerate(parts):
            token_ids += tokens[done.get(index, 0) : end]
            done[index] = end
            starts.append(len(token_ids))
            ends.append(end)
            rows.append(len(token_ids) - 1)
            own.append(tables[index])
        runs = TokenRuns(token_ids, starts, ends, own, [address_of(table) for table in own])
        runs = runs._replace(states=state_rows(step, np.diff(starts).tolist()))
        if adapters is not None:
            runs = runs._replace(adapters=adapters[: len(parts)])
        found.append(call(runs, rows, wants_best=False))
        if compares_best:
            found.append(call(runs, rows, wants_best=True))
        found.append(call(runs, list(range(len(token_ids))), wants_best=False, keeps_all=True))
    return found


def _one_rank(spec, parameters, dtype, tables, quantize, compares_best=True, adapters=None):
    decoder = NativeDecoder(load_native(), spec, parameters(), 64, quantize)
    if adapters is not None:
        load_random_adapter(decoder, adapters[0])
    kv = KvPool(KvSpec.of(spec, BLOCK_SIZE, dtype), NUM_BLOCKS, NUM_STATES)

    def call(runs, rows, wants_best, keeps_all=False):
        logits, best = decoder.run(runs, kv, rows, wants_best=wants_best, needs_logits=not wants_best, keeps_all=keeps_all)
        return best if wants_best else logits.clone()

    return _run(call, tables, min(spec.vocab_size, VOCAB_SIZE), compares_best, adapters)


def _ranks(
    spec,
    parameters,
    dtype,
    tables,
    quantize,
    shares,
    exchanges_rows=False,
    compares_best=True,
    placements=None,
    adapters=None,
):
    ranks = RankThreads(spec, parameters, shares, 64, quantize, exchanges_rows, placements)
    pools = ranks.pools(BLOCK_SIZE, dtype, NUM_BLOCKS, NUM_STATES)
    if adapters is not None:
        ranks.call(lambda decoder, rank: load_random_adapter(decoder, adapters[0]))

    def call(runs, rows, wants_best, keeps_all=False):
        def act(decoder, rank):
            options = {"wants_best": wants_best, "needs_logits": not wants_best, "keeps_all": keeps_all}
            logits, best = decoder.run(runs, pools[rank], rows, **options)
            return best if wants_best else logits.clone()

        return ranks.call(act)

    found = _run(call, tables, min(spec.vocab_size, VOCAB_SIZE), compares_best, adapters)
    assert len(set(ranks.num_barriers)) == 1
    ranks.close()
    return found


def _fits(spec, shares):
    """Return whether a model has heads for so many ranks."""
    try:
        ModelShard.of(spec, 0, shares)
    except ConfigError:
        return False
    return True


def compare(
    folder,
    dtype,
    layouts,
    quantization=None,
    kv_dtype=None,
    exchanges_rows=False,
    load=load_parameters,
    compares_best=True,
    placements=None,
    adapters=None,
):
    """Assert that all logits and best tokens have the same bits on one rank and on several.

    layouts     names of LAYOUTS
    placements  (spec, shares) -> where the experts of each layer are; None: every expert is sharded
    adapters    keys of the LoRA adapters of both sequences, of which the first is loaded
    """
    spec = read_model_spec(folder, dtype)
    tables = [np.array([3, 7, 1, 9], np.int64), np.array([0, 5, 2, 8], np.int64)]
    quantize = None
    if quantization is not None:
        quantize = parameter_quantizer(load_parameters(folder, spec), spec, POLICIES[quantization]).quantized
    kv_dtype = kv_dtype or ("float32" if dtype == "float16" else dtype)
    arguments = spec, lambda: load(folder, spec), kv_dtype, tables, quantize
    expected = _one_rank(*arguments, compares_best, adapters)
    for layout in layouts:
        if not _fits(spec, LAYOUTS[layout]):
            continue
        placed = None if placements is None else placements(spec, LAYOUTS[layout])
        found = _ranks(*arguments, LAYOUTS[layout], exchanges_rows, compares_best, placed, adapters)
        for step, (a, b) in enumerate(zip(expected, found, strict=True)):
            if isinstance(a, list):
                assert a == b, f"best tokens of call {step} differ with {layout} ranks"
            else:
                same = a.numpy().view(np.int32) == b.numpy().view(np.int32)
                assert same.all(), f"{(~same).sum()} of {same.size} logits of call {step} differ with {layout} ranks"
