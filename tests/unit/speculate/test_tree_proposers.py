"""What proposers of trees draft: merged ones, lookahead, and the model without some of its layers."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from proposers import TREES, path_to

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.contracts.request import Request
from quire.contracts.speculative import SpeculativeConfig
from quire.kernels.native import load_native
from quire.sampling.row_state import SamplingRow
from quire.speculate.acceptance import AcceptanceRecord, TreeRecord, WholeRecord
from quire.speculate.draft import ROOT, Draft, DraftBuilder, DraftedSequence
from quire.speculate.draft_controller import DraftController
from quire.speculate.forced import fit_draft
from quire.speculate.lookahead import LookaheadProposer
from quire.speculate.merged import MergedProposer
from quire.speculate.proposer import Outcome, Proposer

VOCAB = 300


def sequence(tokens):
    request = Request(request_id="0", prompt_token_ids=tuple(tokens), params=SamplingParams(max_tokens=900), seed=0)
    return DraftedSequence(0, request, 0, list(tokens), SamplingRow(request, 0, tuple(tokens), VOCAB), None)


def advance(proposer, one, follow, limit):
    """Let one step pass in a world where `follow(tokens)` comes next; return what was drafted and what of it was accepted."""
    count = proposer.num_available(one, limit)
    (draft,) = proposer.propose([(one, count)]) if count else (Draft(),)
    behind = [one.token_ids] + [one.token_ids + [draft.tokens[i] for i in path_to(draft, node)] for node in range(len(draft))]
    logits = torch.zeros(1 + len(draft), VOCAB)
    for row, tokens in enumerate(behind):
        logits[row, follow(tokens)] = 1.0
    path, tokens = [], [follow(one.token_ids)]
    while (node := draft.child(path[-1] if path else ROOT, tokens[-1])) is not None:
        path.append(node)
        tokens.append(follow(behind[1 + node]))
    one.token_ids += tokens
    if proposer.wants_logits:
        proposer.on_logits([Outcome(one, draft, tuple(path), logits, tuple(range(1 + len(draft))))])
    return draft, path


class Fixed(Proposer):
    """Drafts what it was made with."""

    def __init__(self, make):
        self.make = make

    def num_available(self, sequence, limit):
        return limit

    def propose(self, wanted):
        return [Draft.chain(tuple(self.make(one.token_ids)[:limit])) for one, limit in wanted]


def test_merged_draft_holds_each_token_once_and_the_better_proposer_first():
    right = Fixed(lambda tokens: [(tokens[-1] + 1 + i) % VOCAB for i in range(4)])
    wrong = Fixed(lambda tokens: [(tokens[-1] + 1) % VOCAB] + [(tokens[-1] + 90 + i) % VOCAB for i in range(3)])
    proposer = MergedProposer([wrong, right], 8)
    one = sequence([1, 2, 3])

    def follow(tokens):
        return (tokens[-1] + 1) % VOCAB

    first, _ = advance(proposer, one, follow, 8)
    assert len(first) == 7  # both begin alike
    assert len(set(zip(first.tokens, first.parents, strict=True))) == 7
    for _ in range(30):
        draft, path = advance(proposer, one, follow, 4)
    assert len(draft) == 4
    assert path == [0, 1, 2, 3]  # all room for the one that was right


def test_merged_draft_never_lacks_a_parent_when_cut():
    rng = random.Random(0)
    trees = [TREES["random tree"](20, {}, seed) for seed in range(3)]
    proposer = MergedProposer(trees, 20)
    one = sequence([1, 2, 3])
    for _ in range(100):
        draft, _ = advance(proposer, one, lambda tokens: rng.randrange(VOCAB), rng.randint(1, 20))  # Draft checks the parents
        assert draft.is_chain or len(draft) > 1


def test_merged_proposer_reads_what_those_that_read_the_model_read():
    reader, other, fed, others = Fixed(lambda tokens: []), Fixed(lambda tokens: []), [], []
    reader.aux_hidden_state_layers, reader.inputs_last_only = (), True
    reader.on_hidden_states = lambda *given: fed.append(given)
    other.aux_hidden_state_layers, other.on_hidden_states = (2, 5), lambda *given: others.append(given)
    proposer = MergedProposer([Fixed(lambda tokens: []), reader, other], 8)
    assert (proposer.aux_hidden_state_layers, proposer.inputs) == ((2, 5), ("last", "layers"))
    sequences, features = [sequence([1, 2, 3]), sequence([4, 5])], torch.ones(2, 4)
    proposer.on_step_states("last", [(sequences[0], 1, 1), (sequences[1], 0, 1)], features)
    proposer.on_step_states("layers", [(sequences[0], 0, 2)], torch.ones(2, 8))
    ((told, same),) = fed
    assert [(one.token_ids, first, count) for one, first, count in told] == [([1, 2, 3], 1, 1), ([4, 5], 0, 1)]
    assert same is features  # whole, so that nobody has to copy what stands together
    assert [len(places) for places, _ in others] == [1]


@pytest.mark.parametrize(("window", "ngram", "guesses"), [(5, 4, 5), (3, 2, 3), (1, 6, 1), (9, 3, 4)])
def test_lookahead_learns_what_repeats_in_the_model(window, ngram, guesses):
    """In a world where a token says which one follows, the window runs ahead of the text from step to step."""
    config = SpeculativeConfig(method="lookahead", lookahead_window=window, lookahead_ngram=ngram, lookahead_guesses=guesses)
    proposer = LookaheadProposer(config)
    one = sequence([5, 6, 7, 8])
    order = random.Random(1).sample(range(40), 40)
    accepted = 0
    for _ in range(60):
        draft, path = advance(proposer, one, lambda tokens: order[tokens[-1] % 40], config.max_tokens)
        assert len(draft) <= config.max_tokens
        accepted += len(path)
    assert accepted > 60 * 0.5 * (ngram - 1)


@pytest.mark.parametrize("limit", [6, 9, 12, 15])
def test_lookahead_learns_also_where_there_is_room_for_few_guesses(limit):
    proposer = LookaheadProposer(SpeculativeConfig(method="lookahead", num_speculative_tokens=limit))
    one = sequence([5, 6, 7, 8])
    found = [advance(proposer, one, lambda tokens: (tokens[-1] * 21 + 1) % 40, limit) for _ in range(200)]
    assert all(len(draft) <= limit for draft, _ in found)
    assert sum(len(path) for _, path in found[-60:]) > 60


@pytest.mark.parametrize("limit", [20, 34])
def test_lookahead_learns_beside_another_in_one_tree(limit):
    """What of its window was verified is found in the whole tree, whatever of it was cut and whoever else drafted it."""
    config = SpeculativeConfig(method=["lookahead", "ngram"], num_speculative_tokens=limit)
    wrong = Fixed(lambda tokens: [(tokens[-1] + 3 + i) % 40 for i in range(4)])
    merged = MergedProposer([wrong, LookaheadProposer(config)], config.max_tokens)
    order = random.Random(1).sample(range(40), 40)
    one, accepted = sequence([5, 6, 7, 8]), 0
    for _ in range(80):
        draft, path = advance(merged, one, lambda tokens: order[tokens[-1] % 40], config.max_tokens)
        assert len(draft) <= limit
        accepted += len(path)
    assert accepted > 80 * 0.4 * (config.lookahead_ngram - 1)


def test_lookahead_drafts_within_any_limit():
    proposer = LookaheadProposer(SpeculativeConfig(method="lookahead"))
    one = sequence(list(range(20)) * 3)
    rng = random.Random(0)
    for _ in range(80):
        limit = rng.randint(1, 30)
        draft, _ = advance(proposer, one, lambda tokens: (tokens[-1] * 7 + 1) % 50, limit)
        assert len(draft) <= limit


def test_builder_gives_equal_tokens_one_place():
    tree = DraftBuilder()
    first = tree.add(ROOT, 5)
    assert tree.add(ROOT, 5) == first
    assert tree.add(first, 5) == 1
    assert tree.build() == Draft((5, 5), (ROOT, 0))


def test_forced_tokens_stand_before_what_agrees_of_a_tree():
    row = SimpleNamespace(matcher=object())
    tree = Draft((5, 6, 7, 6, 8), (ROOT, ROOT, 0, 0, 3))
    assert fit_draft(row, tree, (), 9) is tree
    assert fit_draft(row, tree, (5, 6), 9) == Draft((5, 6, 8), (ROOT, 0, 1))
    assert fit_draft(row, tree, (5, 6), 2) == Draft((5, 6), (ROOT, 0))
    assert fit_draft(row, tree, (4,), 9) == Draft((4,), (ROOT,))


def test_records_of_trees_fall_from_the_start_on():
    record = TreeRecord(4, 0.95)
    for _ in range(200):
        record.note(4, [0, 2])
    shares = record.shares(record.rates())
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9
    assert abs(sum(shares) - 2) < 0.3
    whole = WholeRecord(10, 0.95)
    for _ in range(200):
        whole.note(10, [0, 5])
    assert whole.shares(whole.rates()) == pytest.approx([0.2] * 10, abs=0.02)


@pytest.mark.covering
@pytest.mark.parametrize("record", [AcceptanceRecord, TreeRecord, WholeRecord])
@pytest.mark.parametrize(("gain", "cost"), [(0.0, 0.1), (0.3, 0.2), (2.0, 0.02)])
def test_a_tree_is_drafted_where_it_pays_and_nearly_never_elsewhere(record, gain, cost):
    """A tree of ten tokens, of which `gain` are accepted on average, each of which makes a step longer by `cost`."""
    rng = random.Random(0)
    controller = DraftController(10, record)
    one = record(10, 0.95)
    count, tokens, seconds = 0, 0, 0.0
    for step in range(4000):
        num_accepted = sum(rng.random() < gain / 3 for _ in range(3)) if count >= 10 or record is not WholeRecord else 0
        num_accepted = min(num_accepted, count)
        if count:
            controller.note_verified(one, count, range(num_accepted))
        duration = 1.0 + cost * count
        controller.note_step(1, count, duration * rng.uniform(0.95, 1.05))
        if step >= 2000:
            tokens, seconds = tokens + 1 + num_accepted, seconds + duration
        count = 0 if controller.is_disabled else controller.choose([(one, 10)])[0]
    best = max(1.0, (1 + gain) / (1 + 10 * cost))
    assert tokens / seconds > (0.97 if best == 1.0 else 0.9 * best)


@pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")
def test_nothing_is_refused_when_the_layers_skipped_do_nothing(tiny_model, tmp_path):
    """With the outputs of layer 1 set to zero the model drafts as it decides."""
    from safetensors.torch import load_file, save_file

    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    for name in weights:
        if name.startswith("model.layers.1.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {"method": "self", "skipped_layers": [1], "num_speculative_tokens": 5, "adaptive": False}
    llm = LLM(str(tmp_path), num_kv_blocks=80, speculative_config=config, max_num_seqs=8)
    requests = [SamplingParams(temperature=t, seed=3, max_tokens=30, ignore_eos=True) for t in (0.0, 1.0)]
    llm.generate([[1, 2, 3], list(range(40))], requests, use_tqdm=False)
    stats = llm.llm_engine.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    llm.close()


def test_layers_that_are_not_there_are_refused(tiny_model):
    config = {"method": "self", "skipped_layers": [1, 99]}
    with pytest.raises(ConfigError, match="names layer 99, but the model has layers 0 to"):
        LLM(str(tiny_model), num_kv_blocks=20, speculative_config=config)
    everything = replace(SpeculativeConfig.read(config), skipped_layers=tuple(range(2)))
    with pytest.raises(ConfigError, match="names all 2 layers"):
        LLM(str(tiny_model), num_kv_blocks=20, speculative_config=everything)
