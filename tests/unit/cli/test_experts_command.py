"""`quire experts` writes placements, shows their balance, and says what is wrong with its files and options."""

from __future__ import annotations

import pytest

from quire.cli.main import main
from quire.parallel.expert_files import read_placements, write_loads

LOADS = {0: [80, 10, 10, 20, 30, 10], 3: [10, 10, 10, 10, 10, 70]}
NUM_EXPERTS = {0: 6, 3: 6}


@pytest.fixture
def load(tmp_path):
    path = str(tmp_path / "load.json")
    write_loads(path, LOADS)
    return path


def test_place_writes_a_balanced_placement(load, tmp_path, capsys):
    output = str(tmp_path / "placement.json")
    options = ["-tp", "2", "--num-redundant-experts", "2", "--output", output]
    assert main(["experts", "place", "--load", load, *options]) == 0
    found = read_placements(output, NUM_EXPERTS, 2)
    assert found[0].num_copies[0] == 2
    assert found[3].num_copies[5] == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for line, layer in zip(lines[1:], LOADS, strict=True):
        assert line.split()[:3] == [str(layer), line.split()[1], f"{found[layer].imbalance(LOADS[layer]):.3f}"]


def test_hosts_need_pairs_and_share_them(tmp_path, capsys):
    load, output = str(tmp_path / "pairs.json"), str(tmp_path / "placement.json")
    pairs = [[40 if (i - j) % 2 == 0 else 1 for j in range(4)] for i in range(4)]  # even experts together, and odd ones
    write_loads(load, {0: [40] * 4}, {0: pairs})
    options = ["-tp", "2", "--hosts", "2", "--output", output]
    assert main(["experts", "place", "--load", load, *options]) == 0
    assert {frozenset(own) for own in read_placements(output, {0: 4})[0].ranks} == {frozenset({0, 2}), frozenset({1, 3})}
    assert capsys.readouterr().out.splitlines()[1].split()[-2:] == ["0.024", "0.952"]
    assert main(["experts", "improve", "--load", load, "--placement", output, *options[2:]]) == 0


def test_improve_changes_few_slots(load, tmp_path, capsys):
    first, second, later = (str(tmp_path / name) for name in ("first.json", "second.json", "later.json"))
    assert main(["experts", "place", "--load", load, "-tp", "2", "--num-redundant-experts", "2", "-o", first]) == 0
    write_loads(later, {0: [10, 80, 10, 20, 30, 10], 3: LOADS[3]})
    assert main(["experts", "improve", "--load", later, "--placement", first, "--max-moves", "1", "-o", second]) == 0
    before, after = (read_placements(path, NUM_EXPERTS, 2) for path in (first, second))
    assert before[3] == after[3]
    assert after[0].imbalance([10, 80, 10, 20, 30, 10]) < before[0].imbalance([10, 80, 10, 20, 30, 10])
    assert "1 of 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["place", "-tp", "7"], "tensor_parallel_size must be at most 6 with enable_expert_parallel"),
        (["place", "-tp", "2", "--hosts", "2"], "has no pairs of experts of its layers: GPU ranks on several hosts count them"),
        (["place", "-tp", "3", "--hosts", "2"], "the number of hosts must divide the 3 ranks, got 2"),
        (["place", "-tp", "0"], "tensor_parallel_size must be an integer >= 1, got 0"),
        (["place", "-tp", "2", "--num-redundant-experts", "-1"], "num_redundant_experts must be an integer >= 0, got -1"),
        (["place", "-tp", "2", "--tensor-parallel-shares", "1,1,1"], "tensor_parallel_shares must have one number for each of"),
        (["improve", "--placement", "none.json"], "expert placement none.json cannot be read"),
        (["improve", "--placement", "none.json", "--limit", "0.9"], "limit must be a number >= 1, got 0.9"),
        (["improve", "--placement", "none.json", "--max-moves", "-2"], "max_moves must be an integer >= 0, got -2"),
    ],
)
def test_what_is_wrong_is_said(load, tmp_path, capsys, monkeypatch, options, text):
    monkeypatch.chdir(tmp_path)
    assert main(["experts", *options, "--load", load, "-o", "out.json"]) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
