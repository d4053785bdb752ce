"""Hidden states that the native decoder hands out: to the bit those of the sequence alone, and no other logit changes."""

from __future__ import annotations

import pytest
import torch

from quire.base.errors import InvariantError
from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.build import load_model
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder

BLOCK_SIZE = 16
LENGTHS = (5, 1, 20, 33)


def prompts(vocab_size):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def new_pool(decoder, sequences):
    counts = [-(-len(tokens) // BLOCK_SIZE) for tokens in sequences]
    return KvPool(KvSpec.of(decoder.spec, BLOCK_SIZE, decoder.spec.dtype), sum(counts))


def run(decoder, sequences, logit_rows, hidden_rows, keeps_all=False, kv=None):
    """Compute whole sequences in one step; return the logits asked for, and all hidden states asked for."""
    counts = [-(-len(tokens) // BLOCK_SIZE) for tokens in sequences]
    kv = kv or new_pool(decoder, sequences)
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int64)
    starts, first = [0], 0
    for index, (tokens, count) in enumerate(zip(sequences, counts, strict=True)):
        tables[index, :count] = torch.arange(first, first + count)
        first += count
        starts.append(starts[-1] + len(tokens))
    positions = torch.cat([torch.arange(len(tokens)) for tokens in sequences])
    owners = torch.arange(len(sequences)).repeat_interleave(torch.tensor([len(tokens) for tokens in sequences]))
    slots = tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    step = AttentionMetadata(slots, starts, [len(tokens) for tokens in sequences], tables)
    logits = decoder.step(torch.cat(sequences), positions, step, kv, logit_rows, keeps_all, hidden_rows)
    return logits, decoder.hidden_states(0, len(hidden_rows))


@pytest.fixture(params=["float32", "bfloat16"])
def decoder(request, tiny_family):
    if load_native() is None:
        pytest.skip("the native kernels are not built")
    spec = read_model_spec(tiny_family, request.param)
    return NativeDecoder(load_native(), spec, load_parameters(tiny_family, spec), max_model_len=64)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("keeps_all", [False, True])
def test_hidden_states_are_those_of_the_sequence_alone_in_any_batch(decoder, keeps_all, threads):
    sequences = prompts(decoder.spec.vocab_size)
    alone = [run(decoder, [tokens], [], list(range(len(tokens)))) for tokens in sequences]
    hidden = torch.cat([states for _, states in alone])
    logits = torch.cat([run(decoder, [tokens], list(range(len(tokens))), [])[0] for tokens in sequences])
    total = sum(LENGTHS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for share in (0.0, 0.1, 0.5, 1.0):
            order = torch.randperm(total, generator=torch.Generator().manual_seed(5)).tolist()
            hidden_rows, rest = order[: int(share * total)], order[int(share * total) :]
            logit_rows = rest[::3]
            found = run(decoder, sequences, logit_rows, hidden_rows, keeps_all)
            assert torch.equal(found[0], logits[logit_rows])
            assert torch.equal(found[1], hidden[hidden_rows])
            if keeps_all:
                assert torch.equal(decoder.logits_at(5, 26), logits[5:26])
                assert torch.equal(decoder.hidden_states(0, len(hidden_rows)), hidden[hidden_rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "wanted",
    [[], [58], [25], [4, 25], [4, 5, 25, 58], [3, 4, 5, 24, 25, 56, 57, 58], [25, 58, 4], [24, 58], [0, 4], [58, 58]],
    ids=str,
)
def test_last_layer_computes_few_rows_as_it_computes_all(decoder, wanted, threads):
    """Rows 4, 5, 25 and 58 are the last ones of their sequences: where all that are wanted end some, no other asks anything."""
    sequences = prompts(decoder.spec.vocab_size)
    pools = [new_pool(decoder, sequences) for _ in range(2)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected, states = run(decoder, sequences, list(range(59)), list(range(59)), True, pools[0])
        logits, _ = run(decoder, sequences, wanted, [], kv=pools[1])
        assert torch.equal(logits, expected[wanted])
        assert torch.equal(run(decoder, sequences, [], wanted)[1], states[wanted])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*arrays) for arrays in zip(*(pool.arrays() for pool in pools), strict=True))


def test_logits_do_not_change_while_they_are_held(decoder):
    sequences = prompts(decoder.spec.vocab_size)
    whole, _ = run(decoder, sequences[3:], list(range(33)), [])
    copy = whole.clone()
    part = run(decoder, sequences[2:3], list(range(20)), [])[0][7]
    part_copy = part.clone()
    for tokens in sequences:
        run(decoder, [tokens], list(range(len(tokens))), [])
    assert torch.equal(whole, copy)
    assert torch.equal(part, part_copy)


def test_logits_take_the_memory_of_those_before_when_nobody_holds_them(decoder):
    sequences = prompts(decoder.spec.vocab_size)
    address = run(decoder, sequences[2:3], list(range(20)), [])[0].data_ptr()
    assert run(decoder, sequences[:1], list(range(5)), [])[0].data_ptr() == address


def test_runs_of_hidden_states_are_parts_of_the_whole(decoder):
    rows = [7, 3, 30, 31, 32, 58]
    sequences = prompts(decoder.spec.vocab_size)
    _, whole = run(decoder, sequences, [0, 1], rows)
    assert torch.equal(
        torch.cat([decoder.hidden_states(0, 1), decoder.hidden_states(1, 4), decoder.hidden_states(4, 6)]), whole
    )


def test_native_and_torch_agree(decoder, tiny_family):
    if decoder.spec.dtype != "float32":
        pytest.skip("compared in float32")
    sequences, rows = prompts(decoder.spec.vocab_size), list(range(sum(LENGTHS)))
    reference = load_model(tiny_family, "float32")
    torch.testing.assert_close(run(decoder, sequences, [], rows)[1], run(reference, sequences, [], rows)[1], rtol=0, atol=5e-5)


def test_torch_refuses_hidden_states_when_the_step_kept_none(tiny_model):
    with pytest.raises(InvariantError, match="did not keep"):
        run(load_model(tiny_model), prompts(301), [0], [])
