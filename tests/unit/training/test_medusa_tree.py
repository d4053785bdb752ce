"""The tree that Medusa heads draft best: the optimum over all trees, from ranks as the proposer has them."""

import itertools
import json

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.cli.main import main
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import read_parallel_head
from quire.model.heads.parallel_model import ParallelModel
from quire.speculate.medusa import MedusaProposer
from quire.training.config import DraftTraining
from quire.training.medusa_tree import calibrate_tree, choose_tree, measure_ranks, store_tree
from quire.training.target import Target
from tests.unit.speculate import head_checkpoints as heads
from tests.unit.speculate.proposers import path_to

RANKS = np.random.default_rng(0).integers(0, 3, (200, 3))


def accepted(choices, line):
    """How many tokens a tree gives at a place: those of the longest path that is right."""
    return max((len(path) for path in choices if tuple(line[: len(path)]) == path), default=0)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
def test_chosen_tree_is_the_best_of_all_of_its_size(num_nodes):
    paths = [p for length in (1, 2, 3) for p in itertools.product(range(3), repeat=length)]
    trees = [set(t) for t in itertools.combinations(paths, num_nodes) if all(p[:-1] in t or len(p) == 1 for p in t)]
    best = max(np.mean([accepted(tree, line) for line in RANKS.tolist()]) for tree in trees)
    tree = choose_tree(RANKS, num_nodes)
    assert tree.tokens_per_step - 1 == pytest.approx(np.mean([accepted(tree.choices, line) for line in RANKS.tolist()]))
    assert tree.tokens_per_step - 1 == pytest.approx(best)


def test_every_beginning_of_the_chosen_list_is_a_tree():
    choices = choose_tree(RANKS, 30).choices
    assert len(choices) == 30
    assert all(path[:-1] in choices[:place] for place, path in enumerate(choices) if len(path) > 1)


def test_ranks_are_those_of_the_tokens_that_came_in_what_the_heads_say(tiny_model, tmp_path):
    folder = heads.medusa(tmp_path / "head")
    target = Target(str(tiny_model), 24, ())
    sequences = np.random.default_rng(1).integers(0, 301, (2, 24)).astype(np.int32)
    ranks = measure_ranks(target, folder, sequences, 8)
    assert ranks.shape == (2 * (24 - 1 - 3 - 7), 3)
    model = ParallelModel(read_parallel_head(folder, target.spec), None)
    hidden = target.compute(torch.from_numpy(sequences[1:].astype(np.int64))).hidden[0]
    said = [logits[0] for logits in model.logits(hidden[9][None].float(), 3)]
    expected = [int((logits > logits[sequences[1, 11 + i]]).sum()) for i, logits in enumerate(said)]
    assert ranks[len(ranks) // 2 + 2].tolist() == expected


def test_a_stored_tree_is_drafted_unless_another_is_asked_for(tiny_model, tmp_path):
    folder = heads.medusa(tmp_path / "head")
    store_tree(folder, choose_tree(RANKS, 9))
    head = read_parallel_head(folder, read_model_spec(tiny_model))
    assert head.choices == choose_tree(RANKS, 9).choices
    said = torch.stack([torch.randn(1, 301, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    (draft,) = MedusaProposer(ParallelModel(head, None), None, choices=head.choices).grow(said, [7])
    order = [logits[0].argsort(descending=True).tolist() for logits in said]
    found = [tuple(draft.tokens[node] for node in path_to(draft, index)) for index in range(7)]
    assert found == [tuple(order[level][rank] for level, rank in enumerate(path)) for path in head.choices[:7]]

    def drafted(**options):
        config = {"method": "medusa", "model": str(folder), "num_speculative_tokens": 5, "adaptive": False, **options}
        llm = LLM(str(tiny_model), num_kv_blocks=40, speculative_config=config)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True), use_tqdm=False)
        proposer = llm.llm_engine.speculator.proposer
        llm.close()
        return proposer.choices

    assert drafted() == head.choices
    assert drafted(draft_top_k=1) is None
    assert drafted(medusa_choices=[[1], [0], [0, 1]]) == ((1,), (0,), (0, 1))
    with pytest.raises(ConfigError, match="1 to 3 ranks .*the longest path has 4"):
        drafted(medusa_choices=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])


def test_no_tree_is_stored_with_heads_that_foresaw_nothing(tmp_path):
    (tmp_path / "config.json").write_text('{"num_heads": 2}')
    store_tree(tmp_path, choose_tree(np.full((8, 2), 100), 9))
    assert json.loads((tmp_path / "config.json").read_text()) == {"num_heads": 2}


@pytest.mark.slow
def test_calibration_finds_what_the_model_writes(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("It was a cold morning when the old man went down to the river. " * 60)
    options = {"num_sequences": 8, "sequence_tokens": 64, "prompt_tokens": 32, "batch_tokens": 64, "sampled_share": 0.0}
    wanted = DraftTraining(kind="medusa", model="demo", text=text, out=tmp_path / "work", **options)
    tree = calibrate_tree(wanted, "demo-medusa", 6, show_progress=False)
    assert tree.choices[0] == (0,)
    assert tree.shares[0] > 0.25
    assert list(tree.shares) == sorted(tree.shares, reverse=True)
    arguments = [
        "--num-nodes",
        "6",
        "--num-sequences",
        "8",
        "--sequence-tokens",
        "64",
        "--prompt-tokens",
        "32",
        "--no-progress",
    ]
    assert main(["calibrate-tree", "demo", "demo-medusa", str(text), *arguments, "--no-progress"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["medusa_choices"] == [list(path) for path in tree.choices]
    with pytest.raises(ConfigError, match="1 to 64 nodes, got 65"):
        calibrate_tree(wanted, "demo-medusa", 65, show_progress=False)
