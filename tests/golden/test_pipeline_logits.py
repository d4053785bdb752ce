"""Logits of every golden model have the same bits on any division of its layers into pipeline stages."""

from __future__ import annotations

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
from quire.model.token_runs import TokenRuns, address_of
from quire.quant.policy import POLICIES, parameter_quantizer
from tests.golden.make_checkpoints import CASES, INDEXED_CASES

pytestmark = [pytest.mark.golden, pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")]

BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS = 16, 131, 12


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
    for parts in _steps():
        token_ids, starts, ends, rows, own = [], [0], [], [], []
        for index, (tokens, end) in enumerate(parts):
            token_ids += tokens[done.get(index, 0) : end]
            done[index] = end
            starts.append(len(token_ids))
            ends.append(end)
            rows.append(len(token_ids) - 1)
            own.append(tables[index])
        runs = TokenRuns(token_ids, starts, ends, own, [address_of(table) for table in own])
        found += [call(runs, rows, False, False), call(runs, rows, True, False), call(runs, rows, False, True)]
    return found


def _others(count, rows):
    return [row for row in range(count) if row not in rows]


def _whole(spec, parameters, dtype, tables, quantize):
    decoder = NativeDecoder(load_native(), spec, parameters, 64, quantize)
    kv = KvPool(KvSpec.of(spec, BLOCK_SIZE, dtype), NUM_BLOCKS)

    def call(runs, rows, wants_best, keeps_all):
        count = len(runs.token_ids)
        hidden = _others(count, rows)
        logits, best = decoder.run(
            runs, kv, rows, hidden, wants_best=wants_best, needs_logits=not wants_best, keeps_all=keeps_all
        )
        results = [np.array(best) if wants_best else logits.clone().numpy(), decoder.hidden_states(0, len(hidden)).numpy()]
        return [*results, decoder.logits_at(0, count).numpy()] if keeps_all else results

    return _run(call, tables)


def _stages(spec, parameters, dtype, tables, quantize, layers):
    native = load_native()
    stages = PipelineStage.all_of(layers)
    decoders = [StageDecoder(native, stage, spec, dict(parameters), 64, quantize) for stage in stages]
    pools = [KvPool(KvSpec.of(stage.spec(spec), BLOCK_SIZE, dtype), NUM_BLOCKS) for stage in stages]
    shared = torch.full((64, row_floats(native, spec.hidden_size)), float("nan"))

    def call(runs, rows, wants_best, keeps_all):
        count = len(runs.token_ids)
        logits = torch.full((len(rows), spec.vocab_size), float("nan"))
        best = []
        for decoder, kv in zip(decoders, pools, strict=True):
            outputs = None
            if decoder.stage.is_last:
                wanted = rows + _others(count, rows)
                outputs = StageOutputs(wanted, len(rows), keeps_all, wants_best, not wants_best, logits.data_ptr())
            best = decoder.run_stage(runs, kv, shared.data_ptr(), outputs)
        places = _others(count, rows) if keeps_all else list(range(len(rows), count))
        hidden, every = torch.empty(len(places), spec.hidden_size), torch.empty(count, spec.vocab_size)
        decoders[-1].write_hidden_states(shared.data_ptr(), places, hidden.data_ptr())
        results = [np.array(best) if wants_best else logits.numpy(), hidden.numpy()]
        if not keeps_all:
            return results
        decoders[-1].write_logits(shared.data_ptr(), list(range(count)), every.data_ptr())
        return [*results, every.numpy()]

    return _run(call, tables)


def _divisions(num_layers):
    """Yield how the layers may be divided: a stage for each, and in two at each place."""
    yield (1,) * num_layers
    for first in range(1, num_layers):
        yield first, num_layers - first


def _compare(folder, dtype, quantization=None, kv_dtype=None):
    spec = read_model_spec(folder, dtype)
    tables = [np.array([3, 7, 1, 9], np.int64), np.array([0, 5, 2, 8], np.int64)]
    quantize = None
    if quantization is not None:
        quantize = parameter_quantizer(load_parameters(folder, spec), spec, POLICIES[quantization]).narrowed
    kv_dtype = kv_dtype or ("float32" if dtype == "float16" else dtype)
    expected = _whole(spec, load_parameters(folder, spec), kv_dtype, tables, quantize)
    assert len(spec.layers) > 1
    for layers in dict.fromkeys(_divisions(len(spec.layers))):
        found = _stages(spec, load_parameters(folder, spec), kv_dtype, tables, quantize, layers)
        for step, (wanted, got) in enumerate(zip(expected, found, strict=True)):
            for a, b in zip(wanted, got, strict=True):
                assert a.dtype == b.dtype
                same = a.view(np.int32) == b.view(np.int32)
                assert same.all(), f"{(~same).sum()} of {same.size} values of call {step} differ with stages of {layers} layers"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [*(case for case in CASES if case not in INDEXED_CASES), "gemma4-dense"])
def test_logits_are_the_same_bits_on_any_division_into_stages(checkpoint, case):
    _compare(checkpoint(case, "v5"), "float32")
    _compare(checkpoint(case, "v5"), "bfloat16")


@pytest.mark.covering
@pytest.mark.parametrize("case", ["llama-mqa", "qwen3-bias", "gemma2", "qwen3-moe-mlp-only", "gpt-oss", "gpt2-scaled"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_logits_of_quantised_weights_are_the_same_bits_on_any_division_into_stages(checkpoint, case, quantization):
    _compare(checkpoint(case, "v5"), "bfloat16", quantization, "int8")
    _compare(checkpoint(case, "v5"), "float16", quantization)
