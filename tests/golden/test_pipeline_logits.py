"""Logits of every golden model have the same bits on any division into pipeline stages, of one rank or several."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.pipeline_stages import PipelineStage
from quire.model.stage_decoder import StageDecoder, StageOutputs, row_floats
from quire.model.tensor_shards import ModelShard, RankGroup
from quire.model.token_runs import TokenRuns, address_of
from quire.parallel.barrier import ProcessBarrier
from quire.parallel.shared_memory import SharedMemoryFile
from quire.quant.policy import POLICIES, parameter_quantizer
from tests.golden.make_checkpoints import CASES, STRUCTURES, TORCH_CASES
from tests.golden.rank_logits import NUM_STATES, state_rows

pytestmark = [pytest.mark.golden, pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")]

BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS = 16, 131, 12
_DIVIDED = [case for case in CASES if case in STRUCTURES and case not in TORCH_CASES]


def _steps():
    """Yield steps of two sequences: prompts, in chunks and whole, then tokens one by one: (tokens, end) of each."""
    rng = np.random.default_rng(7)
    first, second = (rng.integers(3, VOCAB_SIZE, length).tolist() for length in (41, 23))
    yield [(first, 17)]
    yield [(first, 38), (second, 20)]
    for more in (1, 2, 3):
        yield [(first, 38 + more), (second, 20 + more)]


def _run(call, tables):
    """Run the steps; return logits and best tokens of the last token of every sequence, and logits and states of all tokens."""
    found, done = [], {}
    for step, parts in enumerate(_steps()):
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
        found += [call(runs, rows, False, False), call(runs, rows, True, False), call(runs, rows, False, True)]
    return found


def _others(count, rows):
    return [row for row in range(count) if row not in rows]


def _whole(spec, parameters, dtype, tables, quantize):
    decoder = NativeDecoder(load_native(), spec, parameters, 64, quantize)
    kv = KvPool(KvSpec.of(spec, BLOCK_SIZE, dtype), NUM_BLOCKS, NUM_STATES)

    def call(runs, rows, wants_best, keeps_all):
        count = len(runs.token_ids)
        hidden = _others(count, rows)
        logits, best = decoder.run(
            runs, kv, rows, hidden, wants_best=wants_best, needs_logits=not wants_best, keeps_all=keeps_all
        )
        results = [np.array(best) if wants_best else logits.clone().numpy(), decoder.hidden_states(0, len(hidden)).numpy()]
        if -1 in (best or ()):
            results.append(logits.clone().numpy())
        return [*results, decoder.logits_at(0, count).numpy()] if keeps_all else results

    return _run(call, tables)


class _Stage:
    """The ranks of a stage, as threads; what is called on it is called on all of them."""

    def __init__(self, stage, spec, parameters, dtype, quantize, shares):
        self.stage, size = stage, len(shares)
        self._memory = SharedMemoryFile.create(ProcessBarrier.areas(size))
        ProcessBarrier.initialise(self._memory, size)
        self._rows_file, self._threads = os.memfd_create("rows"), ThreadPoolExecutor(size)
        barriers = [ProcessBarrier(self._memory, rank, size) for rank in range(size)]
        shards = [None if size == 1 else ModelShard.of(spec, rank, shares) for rank in range(size)]
        self._ranks = []
        for shard, barrier in zip(shards, barriers, strict=True):
            group, kv = None, KvSpec.of(spec, BLOCK_SIZE, dtype)
            if shard is not None:
                group = RankGroup(shard.part(stage.start, stage.stop), barrier.address, self._rows_file)
                kv = shard.kv_spec(spec, BLOCK_SIZE, dtype)
            decoder = StageDecoder(load_native(), stage, spec, dict(parameters), 64, quantize, group)
            self._ranks.append((decoder, KvPool(kv.part(stage.start, stage.stop), NUM_BLOCKS, NUM_STATES)))

    def call(self, act):
        """Return what act(decoder, pool) returns on the first rank."""
        futures = [self._threads.submit(act, *rank) for rank in self._ranks]
        results = [future.result(timeout=60) for future in futures]
        return results[0]

    @property
    def first_decoder(self):
        return self._ranks[0][0]

    def close(self):
        self._threads.shutdown()
        self._ranks.clear()
        os.close(self._rows_file)
        self._memory.close()


def _stages(spec, parameters, dtype, tables, quantize, layers, shares):
    stages = [_Stage(stage, spec, parameters, dtype, quantize, shares) for stage in PipelineStage.all_of(layers)]
    shared = torch.full((64, row_floats(load_native(), spec.hidden_size)), float("nan"))
    address = shared.data_ptr()

    def call(runs, rows, wants_best, keeps_all):
        count = len(runs.token_ids)
        logits = torch.full((len(rows), spec.vocab_size), float("nan"))
        best = []
        for stage in stages:
            outputs = None
            if stage.stage.is_last:
                wanted = rows + _others(count, rows)
                outputs = StageOutputs(wanted, len(rows), keeps_all, wants_best, not wants_best, logits.data_ptr())
            best = stage.call(lambda decoder, kv, outputs=outputs: decoder.run_stage(runs, kv, address, outputs))
        places = _others(count, rows) if keeps_all else list(range(len(rows), count))
        hidden, every = torch.empty(len(places), spec.hidden_size), torch.empty(count, spec.vocab_size)
        stages[-1].first_decoder.write_hidden_states(shared.data_ptr(), places, hidden.data_ptr())
        results = [np.array(best) if wants_best else logits.numpy(), hidden.numpy()]
        if -1 in best:
            results.append(logits.numpy())
        if not keeps_all:
            return results
        stages[-1].call(lambda decoder, _: decoder.write_logits(shared.data_ptr(), list(range(count)), every.data_ptr()))
        return [*results, every.numpy()]

    found = _run(call, tables)
    for stage in stages:
        stage.close()
    return found


def _divisions(spec):
    """Yield how the layers may be divided: a stage for each, and in two at each place; where some read what those before have
    chosen, only so that they are with them."""
    num_layers, bound = len(spec.layers), [i for i, layer in enumerate(spec.layers) if layer.attention.reads_other_layer]
    if not bound:
        yield (1,) * num_layers
    for first in range(1, num_layers):
        if first not in bound:
            yield first, num_layers - first


def _compare(folder, dtype, quantization=None, kv_dtype=None, shares=(1.0,), load=load_parameters):
    spec = read_model_spec(folder, dtype)
    tables = [np.array([3, 7, 1, 9], np.int64), np.array([0, 5, 2, 8], np.int64)]
    quantize = None
    if quantization is not None:
        quantize = parameter_quantizer(load(folder, spec), spec, POLICIES[quantization]).quantized
    kv_dtype = kv_dtype or ("float32" if dtype == "float16" else dtype)
    expected = _whole(spec, load(folder, spec), kv_dtype, tables, quantize)
    assert len(spec.layers) > 1
    for layers in dict.fromkeys(_divisions(spec)):
        found = _stages(spec, load(folder, spec), kv_dtype, tables, quantize, layers, shares)
        for step, (wanted, got) in enumerate(zip(expected, found, strict=True)):
            for a, b in zip(wanted, got, strict=True):
                assert a.dtype == b.dtype
                same = a.view(np.int32) == b.view(np.int32)
                assert same.all(), f"{(~same).sum()} of {same.size} values of call {step} differ with stages of {layers} layers"


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "case",
    [*_DIVIDED, "gemma4-dense", "gemma4-moe", "nanochat"],
)
def test_logits_are_the_same_bits_on_any_division_into_stages(checkpoint, case):
    _compare(checkpoint(case, "v5"), "float32")


@pytest.mark.parametrize(
    "case", ["nemotron-h", *(pytest.param(case, marks=pytest.mark.slow) for case in ("qwen3-next", "falcon-h1-norm"))]
)
def test_logits_of_recurrent_layers_are_the_same_bits_on_any_division_into_stages(checkpoint, case):
    _compare(checkpoint(case), "bfloat16")


@pytest.mark.covering
@pytest.mark.parametrize("case", ["llama-mqa", "qwen3-bias", "gemma2", "qwen3-moe-mlp-only", "gpt-oss", "gpt2-scaled"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_logits_of_quantised_weights_are_the_same_bits_on_any_division_into_stages(checkpoint, case, quantization):
    _compare(checkpoint(case, "v5"), "bfloat16", quantization, "int8")
    _compare(checkpoint(case, "v5"), "float16", quantization)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*_DIVIDED, "nanochat"])
def test_logits_are_the_same_bits_on_stages_of_several_ranks(checkpoint, case):
    _compare(checkpoint(case, "v5"), "bfloat16", shares=(2, 1))


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("case", ["llama-mqa", "gemma2", "qwen3-moe-mlp-only", "gpt-oss"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_logits_of_quantised_weights_are_the_same_bits_on_stages_of_several_ranks(checkpoint, case, quantization):
    _compare(checkpoint(case, "v5"), "bfloat16", quantization, "int8", (1, 1))


@pytest.mark.parametrize("shares", [(1,), (1, 1)], ids=["one-rank", "two-ranks"])
def test_a_row_without_a_best_token_gets_its_logits(checkpoint, shares):
    def load(folder, spec):
        parameters = load_parameters(folder, spec)
        name = "lm_head.weight" if "lm_head.weight" in parameters else "embed.weight"
        parameters[name] = parameters[name].float().clone()
        parameters[name][-1] = float("nan")
        return parameters

    _compare(checkpoint("llama-bias", "v5"), "float32", shares=shares, load=load)
