"""Runs of tokens: the native kernels place and compute them as torch's tensors say, and find the best tokens on the way."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from quire.model.build import build_model, load_model
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_steps import OneTokenSteps, draft_greedily
from quire.model.token_runs import TokenRuns, TreePlaces, address_of
from tests.tiny_checkpoint import write_checkpoint

BLOCK_SIZE = 16
TABLES = [np.array([5, 2, 9, 0], dtype=np.int64), np.array([7, 1, 3, 4], dtype=np.int64)]

native = load_native()
needs_native = pytest.mark.skipif(native is None, reason="the native kernels are not built")


def runs_of(parts, trees=None):
    """Return runs of (token ids, position of the first) a sequence."""
    token_ids, starts, ends = [], [0], []
    for tokens, first in parts:
        token_ids += tokens
        starts.append(len(token_ids))
        ends.append(first + len(tokens))
    tables = TABLES[: len(parts)]
    return TokenRuns(token_ids, starts, ends, tables, [address_of(table) for table in tables], trees)


@pytest.fixture(scope="module")
def decoder(tiny_model):
    spec = read_model_spec(tiny_model)
    return build_model(spec, open_parameters(tiny_model, spec), 256, BLOCK_SIZE)


def pool(decoder):
    return KvPool(KvSpec.of(decoder.spec, BLOCK_SIZE, "float32"), 12)


PROMPTS = [(list(range(30, 50)), 0), ([7, 8, 9], 0)]
MIXED = [([3, 1, 4], 20), ([5], 3)]


@needs_native
def test_runs_give_the_logits_of_the_same_tensors(decoder):
    by_runs, by_tensors = pool(decoder), pool(decoder)
    for parts, rows in ((PROMPTS, [19, 22]), (MIXED, [2, 3, 0, 1])):
        runs = runs_of(parts)
        logits, best = decoder.run(runs, by_runs, rows, wants_best=True)
        logits = logits.clone()
        expected = decoder.step(*runs.tensors(BLOCK_SIZE), by_tensors, rows)
        assert torch.equal(logits, expected)
        assert best == expected.argmax(-1).tolist()
    assert all(torch.equal(a, b) for a, b in zip(by_runs.k, by_tensors.k, strict=True))


@needs_native
@pytest.mark.parametrize("keeps_all", [False, True])
def test_best_tokens_are_those_of_the_logits_when_none_are_written(decoder, keeps_all):
    alone, with_logits = pool(decoder), pool(decoder)
    for parts, rows in ((PROMPTS, [19, 22]), (MIXED, [2, 3, 0, 1])):
        options = {"wants_best": True, "keeps_all": keeps_all}
        nothing, best = decoder.run(runs_of(parts), alone, rows, needs_logits=False, **options)
        logits, expected = decoder.run(runs_of(parts), with_logits, rows, **options)
        assert (nothing.numel(), best) == (0, expected)
        assert best == logits.argmax(-1).tolist()


@needs_native
@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_are_there_when_a_row_has_no_best_token(tiny_model, tmp_path, bad, keeps_all):
    tensors = {name: tensor.clone() for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    tensors["model.embed_tokens.weight"][77, 3] = bad
    shutil.copytree(tiny_model, tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    spec = read_model_spec(tmp_path / "model")
    broken = build_model(spec, open_parameters(tmp_path / "model", spec), 256, BLOCK_SIZE)
    parts, rows = [([1, 2, 77], 0), ([7, 8, 9], 0)], [2, 5]
    options = {"wants_best": True, "keeps_all": keeps_all}
    found, best = broken.run(runs_of(parts), pool(broken), rows, needs_logits=False, **options)
    logits, expected = broken.run(runs_of(parts), pool(broken), rows, **options)
    assert best == expected
    assert best[0] == -1 < best[1]
    assert torch.equal(found.nan_to_num(7.0), logits.nan_to_num(7.0))


@needs_native
def test_lowest_of_equally_good_tokens_is_the_best_when_no_logits_are_written(tiny_model, tmp_path):
    tensors = {name: tensor.clone() for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    head = tensors["lm_head.weight"]
    head[:] = head[5]
    shutil.copytree(tiny_model, tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    spec = read_model_spec(tmp_path / "model")
    model = build_model(spec, open_parameters(tmp_path / "model", spec), 256, BLOCK_SIZE)
    assert model.run(runs_of(PROMPTS), pool(model), [19, 22], wants_best=True, needs_logits=False)[1] == [0, 0]


@needs_native
def test_logits_that_are_capped_are_written_before_the_best_is_looked_for(tmp_path):
    # Capping makes different logits equal: the lowest of those is the best, not the largest before.
    folder = write_checkpoint(tmp_path / "model", "gemma2", final_logit_softcapping=1e-3)
    spec = read_model_spec(folder)
    model = build_model(spec, open_parameters(folder, spec), 256, BLOCK_SIZE)
    logits, best = model.run(runs_of(PROMPTS), pool(model), [19, 22], wants_best=True, needs_logits=False)
    assert best == logits.argmax(-1).tolist()
    assert ((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).all()


@needs_native
def test_trees_in_runs_stand_at_their_own_positions(decoder):
    positions = np.array([20, 21, 21, 22, 3], dtype=np.int64)
    ancestors = np.array([0, 0b1, 0b10, 0b101, 0], dtype=np.uint64)
    runs = runs_of([([3, 1, 4, 6], 20), ([5], 3)], TreePlaces(positions, np.array([3, 0], dtype=np.int32), ancestors))
    found = []
    for compute in (decoder.run, lambda runs, kv, rows: (decoder.step(*runs.tensors(BLOCK_SIZE), kv, rows), None)):
        kv = pool(decoder)
        compute(runs_of(PROMPTS), kv, [19, 22])
        found.append(compute(runs, kv, list(range(5)))[0].clone())
    assert torch.equal(*found)


def test_torch_runs_what_is_known_to_be_right(tiny_model):
    decoder = load_model(tiny_model)
    kv = pool(decoder)
    decoder.run(runs_of(PROMPTS), kv, [19, 22])
    logits, best = decoder.run(runs_of(MIXED), kv, [2, 3])
    assert best is None
    assert torch.equal(decoder.final_states([1, 0])[1], decoder.final_states([0])[0])
    tokens = PROMPTS[0][0] + MIXED[0][0]
    whole, _ = decoder.run(runs_of([(tokens, 0)]), pool(decoder), [len(tokens) - 1])
    torch.testing.assert_close(logits[:1], whole, atol=1e-5, rtol=1e-5)


@needs_native
def test_final_states_are_those_of_rows_or_of_places_with_logits(decoder):
    kv = pool(decoder)
    decoder.run(runs_of(PROMPTS), kv, [19, 22])
    few = decoder.final_states([1, 0])[:2].clone()
    decoder.run(runs_of(PROMPTS), pool(decoder), [19, 22], keeps_all=True)
    assert torch.equal(few, decoder.final_states([22, 19])[:2])


@needs_native
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ends": [65, 3]}, "leaves its table"),
        ({"ends": [19, 3]}, "begins before"),
        ({"starts": [0, 20]}, "contradict"),
        ({"starts": [0, 20, 22]}, "contradict"),
        ({"starts": [0, 23, 23]}, "begins before"),
    ],
)
def test_runs_that_cannot_be_are_refused(decoder, changes, words):
    runs = runs_of(PROMPTS)
    fields = {name: getattr(runs, name) for name in ("token_ids", "starts", "ends", "tables", "addresses")}
    with pytest.raises(ValueError, match=words):
        decoder.run(TokenRuns(**{**fields, **changes}), pool(decoder), [0])


@needs_native
def test_a_run_of_drafts_is_the_best_token_again_and_again(decoder):
    at_once, one_by_one = pool(decoder), pool(decoder)
    found = draft_greedily(decoder, at_once, runs_of(PROMPTS), [2, 5])
    assert [len(tokens) for tokens in found] == [2, 5]
    _, best = decoder.run(runs_of(PROMPTS), one_by_one, [19, 22], wants_best=True)
    drafts = [[token] for token in best]
    steps = OneTokenSteps(decoder, one_by_one, [20, 3], np.stack(TABLES), 4)
    for _ in range(4):
        for tokens, token in zip(drafts, steps.run([tokens[-1] for tokens in drafts]).argmax(-1).tolist(), strict=True):
            tokens.append(token)
    assert found == [drafts[0][:2], drafts[1]]


@needs_native
@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("vocab", [1, 17, 64, 257, 4096])
def test_best_tokens_are_the_first_of_the_largest(vocab, num_threads):
    logits = torch.randn(7, vocab + 3, generator=torch.Generator().manual_seed(vocab)).round(decimals=1)
    expected = logits[:, :vocab].argmax(1).tolist()
    assert native.best_tokens(logits.data_ptr(), vocab + 3, 7, vocab, num_threads) == expected


@needs_native
def test_rows_without_a_best_token_have_none():
    logits = torch.zeros(4, 100)
    logits[0, 99] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    assert native.best_tokens(logits.data_ptr(), 100, 4, 100, 1) == [-1, -1, -1, 0]
