"""Compaction: whatever path is accepted, its keys and values come to stand in a row, in every layer, and nothing else moves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.contracts.kv_spec import KvSpec
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.step import SequenceStart, StepPlan
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from quire.model.build import build_model, load_model
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.worker.input_batch import InputBatch

BLOCK_SIZE = 16
NUM_BLOCKS = 12
SPARE = 7  # blocks from here on belong to no sequence


@pytest.fixture(scope="module", params=["reference", "bfloat16", "int8", "float32"])
def world(request, tiny_model):
    """A decoder and the dtype of its cache."""
    if request.param == "reference":
        return load_model(tiny_model), "float32"
    if load_native() is None:
        pytest.skip("the native kernels are not built")
    spec = read_model_spec(tiny_model, "float32" if request.param == "float32" else "bfloat16")
    return build_model(spec, open_parameters(tiny_model, spec), 256, BLOCK_SIZE), request.param


def random_pool(spec, dtype):
    pool = KvPool(KvSpec.of(spec, BLOCK_SIZE, dtype), NUM_BLOCKS)
    generator = torch.Generator().manual_seed(0)
    for cache in caches(pool):
        bits = torch.randint(-100, 100, cache.shape, generator=generator)
        cache.copy_(bits)
    return pool


def caches(pool):
    return [*pool.k, *pool.v, *(scale for pair in pool.scales for scale in pair)]


@settings(max_examples=40)
@given(
    order=st.permutations(range(SPARE)),
    first=st.integers(1, 40),
    path=st.lists(st.integers(0, 63), max_size=20, unique=True).map(sorted),
)
def test_an_accepted_path_moves_to_the_front_and_nothing_else_moves(world, order, first, path):
    decoder, dtype = world
    batch = InputBatch(np.zeros((2, SPARE), np.int64), BLOCK_SIZE, decoder.spec.vocab_size)
    request = Request(request_id="0", prompt_token_ids=(1,) * (first + 1), params=SamplingParams(max_tokens=4), seed=0)
    batch.apply(StepPlan(0, {0: 1}, starts=(SequenceStart(0, request, 0, (1,) * (first + 1), first, tuple(order)),)))
    row = batch.row(0)
    pool, expected = random_pool(decoder.spec, dtype), random_pool(decoder.spec, dtype)

    batch.accept(row, path)
    moves = batch.take_moves()
    assert (moves is None) == (path == list(range(len(path))))
    if moves is not None:
        decoder.move_tokens(pool, torch.tensor(moves.sources), torch.tensor(moves.targets))
    assert batch.take_moves() is None
    assert row.num_computed_tokens == first + len(path)

    def slots(positions):
        return torch.tensor([order[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions], dtype=torch.int64)

    spare = torch.arange(SPARE * BLOCK_SIZE, SPARE * BLOCK_SIZE + len(path))
    if path:  # by way of blocks that nobody has: what is read is never written before
        decoder.move_tokens(expected, slots([first + index for index in path]), spare)
        decoder.move_tokens(expected, spare, slots(range(first, first + len(path))))
    for ours, theirs in zip(caches(pool), caches(expected), strict=True):
        assert torch.equal(ours[:SPARE], theirs[:SPARE])
