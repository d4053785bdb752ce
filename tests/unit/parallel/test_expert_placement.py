"""ExpertPlacement, the number of slots of each rank, and the files of placements and loads."""

from __future__ import annotations

import pytest

from quire.base.errors import ConfigError
from quire.parallel.expert_files import read_loads, read_placements, write_loads, write_placements
from quire.parallel.expert_placement import ExpertPlacement, linear_placement, slot_counts


def test_copies_divide_the_tokens_of_an_expert():
    placement = ExpertPlacement(3, ((1, 0), (0, 2), (0,)))
    assert placement.ranks == ((0, 1), (0, 2), (0,))
    assert (placement.num_slots, placement.num_copies) == (5, (3, 1, 1))
    assert [placement.own_copies(rank) for rank in range(3)] == [(0, 0, -1), (1, -1, 0), (2, -1, -1)]
    assert placement.rank_loads([30, 5, 7]).tolist() == [15, 17, 10]
    assert placement.imbalance([30, 5, 7]) == pytest.approx(17 / 14)
    assert placement.imbalance([30, 5, 7], (2, 1, 1)) == pytest.approx(max(15 / 1.5, 17 / 0.75) / 14)
    assert placement.imbalance([0, 0, 0]) == 1


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (((0, 1), ()), "rank 1 has no expert"),
        (((0, 1), (2, 2)), "rank 1 has expert 2 2 times; allowed: once"),
        (((0, 1), (3,)), "rank 1 has expert 3; allowed: 0 to 2"),
        (((0, 1), (0,)), "expert 2 is on no rank"),
    ],
)
def test_placements_that_cannot_run_are_refused(ranks, text):
    with pytest.raises(ConfigError, match=text):
        ExpertPlacement(3, ranks)


def test_slots_follow_the_shares():
    assert slot_counts(8, 0, (1, 1, 1)) == (3, 3, 2)
    assert slot_counts(8, 2, (1, 1)) == (5, 5)
    assert slot_counts(8, 0, (3, 1)) == (6, 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at most 2 with enable_expert_parallel.*got 3"):
        slot_counts(2, 0, (1, 1, 1))
    with pytest.raises(ConfigError, match="num_redundant_experts must be at most 4 for 4 experts on 2 ranks.*got 5"):
        slot_counts(4, 5, (1, 1))
    with pytest.raises(ConfigError, match="num_redundant_experts must be at most 0 for 4 experts on 1 ranks"):
        slot_counts(4, 1, (1,))


def test_linear_placement_starts_over_with_copies():
    assert linear_placement(4, (2, 2)).ranks == ((0, 1), (2, 3))
    assert linear_placement(4, (3, 3)).ranks == ((0, 1, 2), (0, 1, 3))


def test_files_return_what_was_written(tmp_path):
    path = str(tmp_path / "placement.json")
    placements = {1: ExpertPlacement(3, ((0, 1), (0, 2))), 12: ExpertPlacement(2, ((0,), (1,)))}
    write_placements(path, placements)
    assert read_placements(path, {1: 3, 12: 2}, 2) == placements
    loads = str(tmp_path / "load.json")
    write_loads(loads, {1: [5, 0, 7], 12: [1, 2]})
    assert read_loads(loads, {1: 3, 12: 2}) == {1: [5, 0, 7], 12: [1, 2]}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["load.json", "placement.json"]


HEAD = '{"kind": "expert placement", "version": 1, "layers": '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", 'is not a file with "kind": "expert placement"'),
        ('{"kind": "expert load", "version": 1, "layers": {}}', 'is not a file with "kind": "expert placement"'),
        ('{"kind": "expert placement", "version": 2, "layers": {}}', '"version": 1'),
        (HEAD + "{}}", "lacks layer 0"),
        (HEAD + '{"0": [], "7": []}}', "has layer 7"),
        (
            '{"kind": "expert placement", "version": 1, "layers": {"0": [[0, 1]]}}',
            "is for 1 ranks, but tensor_parallel_size is 2",
        ),
        (HEAD + '{"0": [0, 1]}}', "must be a list with the list of experts"),
        (
            '{"kind": "expert placement", "version": 1, "layers": {"0": [[0], [true]]}}',
            "must be a list with the list of experts",
        ),
        (HEAD + '{"0": [[0], [4]]}}', "layer 0: rank 1 has expert 4"),
    ],
)
def test_files_that_are_no_placement_of_the_model_are_refused(tmp_path, text, message):
    path = tmp_path / "placement.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_placements(str(path), {0: 2}, 2)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ('{"0": [1]}', "has 1 experts, but the model has 2 there"),
        ('{"0": [1, -1]}', "must be a list of integers >= 0"),
        ('{"0": [1, 0.5]}', "must be a list of integers >= 0"),
        ('{"0": 3}', "must be a list of integers >= 0"),
    ],
)
def test_files_that_are_no_load_of_the_model_are_refused(tmp_path, layers, message):
    path = tmp_path / "load.json"
    path.write_text(f'{{"kind": "expert load", "version": 1, "layers": {layers}}}')
    with pytest.raises(ConfigError, match=message):
        read_loads(str(path), {0: 2})


def test_files_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_loads(str(tmp_path / "none.json"), {0: 2})
    with pytest.raises(ConfigError, match="cannot be written to .*: No such file"):
        write_loads(str(tmp_path / "none" / "load.json"), {0: [1]})
