"""Best tokens of steps that look at a copy of the head: those of its logits, for any number of rows whatever the head is."""

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
from quire.model.native_model import int8_head_bytes
from quire.model.token_runs import TokenRuns, address_of
from tests.tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

BLOCK_SIZE, MAX_LEN = 16, 64
NUM_PANELS = 1400
"""More than a row has room for."""


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["float32", "bfloat16", "float16", "bfloat16-short"])
def precision(request):
    return request.param


def build(tmp_path, monkeypatch, precision, head=None):
    """Return a decoder of random weights whose head, perhaps another one, has a copy."""
    monkeypatch.setattr("quire.model.native_model._INT8_HEAD_FROM", 1)
    if precision.endswith("short"):
        monkeypatch.setattr("quire.model.native_model.SHORT_FROM", 0)
    folder = write_checkpoint(tmp_path / "model", "qwen3", vocab_size=301 if head is None else len(head))
    spec = read_model_spec(folder, precision.removesuffix("-short"))
    parameters = load_parameters(folder, spec)
    if head is not None:
        parameters["lm_head.weight"] = head.to(parameters["lm_head.weight"].dtype)
    return NativeDecoder(load_native(), spec, parameters, MAX_LEN)


class Batch:
    """Sequences that decode together, each with blocks of its own."""

    def __init__(self, decoder, num_sequences):
        self.decoder, per_sequence = decoder, MAX_LEN // BLOCK_SIZE
        dtype = "float32" if decoder.spec.dtype == "float16" else decoder.spec.dtype
        self.kv = KvPool(KvSpec.of(decoder.spec, BLOCK_SIZE, dtype), num_sequences * per_sequence)
        self.tables = [np.arange(per_sequence) + index * per_sequence for index in range(num_sequences)]

    def best(self, first, tokens, uses_int8_head, needs_logits=False):
        """Compute tokens [S][T] from position `first` on; return the logits after each last one, and the best tokens."""
        self.decoder.plan.uses_int8_head = uses_int8_head
        count = len(tokens[0])
        starts = [index * count for index in range(len(tokens) + 1)]
        addresses = [address_of(table) for table in self.tables]
        ends = [first + count] * len(tokens)
        runs = TokenRuns([token for line in tokens for token in line], starts, ends, self.tables, addresses)
        rows = [start - 1 for start in starts[1:]]
        return self.decoder.run(runs, self.kv, rows, wants_best=True, needs_logits=needs_logits)


@pytest.mark.covering
def test_best_tokens_are_those_of_the_logits(tmp_path, monkeypatch, precision):
    decoder = build(tmp_path, monkeypatch, precision)
    generator = torch.Generator().manual_seed(1)
    for num_sequences in (1, 2, 5, 17, 40):
        batch = Batch(decoder, num_sequences)
        for first, count in ((0, 7), (7, 1), (8, 1), (9, 3), (12, 1)):
            tokens = torch.randint(0, 300, (num_sequences, count), generator=generator).tolist()
            logits, _ = batch.best(first, tokens, False, needs_logits=True)
            assert batch.best(first, tokens, True)[1] == logits.argmax(1).tolist()
    assert decoder.plan.num_prefiltered == 25


def test_the_copy_is_left_alone_for_a_while_where_all_tokens_may_be_the_best(tmp_path, monkeypatch):
    decoder = build(tmp_path, monkeypatch, "bfloat16", torch.ones(16 * NUM_PANELS, 32))
    batch = Batch(decoder, 2)
    for first in range(40):
        assert batch.best(first, [[1], [2]], True)[1] == [0, 0]
    assert decoder.plan.num_prefiltered == 5  # then pauses of 2, 4, 8, 16 steps and more


def test_a_head_that_is_not_finite_has_no_copy_and_is_computed(tmp_path, monkeypatch):
    head = torch.randn(301, 32, generator=torch.Generator().manual_seed(1))
    head[77] = torch.inf
    decoder = build(tmp_path, monkeypatch, "bfloat16", head)
    _, best = Batch(decoder, 3).best(0, [[1], [2], [3]], True)
    assert best == [-1] * 3
    assert decoder.plan.num_prefiltered == 0


def test_memory_of_the_copy_is_what_was_planned(tmp_path, monkeypatch, precision):
    decoder = build(tmp_path, monkeypatch, precision)
    assert int8_head_bytes(decoder.spec) == 304 * (32 + 12)
    assert decoder.spared_bytes == decoder.head.num_bytes - int8_head_bytes(decoder.spec)


def test_a_head_whose_logits_are_scaled_has_no_copy(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.model.native_model._INT8_HEAD_FROM", 1)
    spec = read_model_spec(write_checkpoint(tmp_path / "model", "gemma2"), "bfloat16")
    decoder = NativeDecoder(load_native(), spec, load_parameters(tmp_path / "model", spec), MAX_LEN)
    assert int8_head_bytes(spec) == 0
    assert decoder.spared_bytes == 0
