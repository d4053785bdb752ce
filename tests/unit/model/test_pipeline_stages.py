"""How layers are divided among stages, and which parameters each stage has."""

import itertools
import random

import pytest

from quire.base.errors import ConfigError
from quire.model.pipeline_stages import PipelineStage, check_layers, divide_layers


@pytest.mark.parametrize(
    ("costs", "num_stages", "head", "expected"),
    [
        ([1.0] * 8, 2, 0.0, (4, 4)),
        ([1.0] * 28, 2, 9.9, (19, 9)),
        ([1.0] * 28, 1, 9.9, (28,)),
        ([1.0] * 4, 2, 9.9, (3, 1)),
        ([1.0] * 3, 3, 5.0, (1, 1, 1)),
        ([5.0, 1.0, 1.0, 1.0], 2, 0.0, (1, 3)),
        ([1.0] * 28, 4, 5.0, (8, 8, 8, 4)),
    ],
)
def test_layers_are_divided_so_that_stages_cost_the_same(costs, num_stages, head, expected):
    assert divide_layers(costs, num_stages, head) == expected


def test_layers_stay_with_those_whose_choice_they_read():
    assert divide_layers([1.0] * 8, 2, 0.0, (1, 2, 3, 4, 5)) == (6, 2)
    assert divide_layers([1.0] * 8, 3, 0.0, (1, 3, 4, 5)) == (2, 4, 2)


@pytest.mark.parametrize("seed", range(30))
def test_no_division_has_a_cheaper_dearest_stage(seed):
    rng = random.Random(seed)
    num_layers = rng.randint(1, 8)
    num_stages = rng.randint(1, num_layers)
    costs, head = [rng.choice([1.0, 2.0, rng.random() * 5]) for _ in range(num_layers)], rng.choice([0.0, 1.0, 7.0])

    def dearest(layers):
        stages = PipelineStage.all_of(layers)
        return max(sum(costs[stage.start : stage.stop]) + head * stage.is_last for stage in stages)

    found = divide_layers(costs, num_stages, head)
    assert len(found) == num_stages
    assert sum(found) == num_layers
    assert min(found) >= 1
    every = (
        [end - start for start, end in itertools.pairwise((0, *ends, num_layers))]
        for ends in itertools.combinations(range(1, num_layers), num_stages - 1)
    )
    assert dearest(found) == pytest.approx(min(map(dearest, every)))


def test_every_parameter_is_on_one_stage_and_a_tied_embedding_on_the_first_and_the_last():
    names = ["embed.weight", "pos.weight", "final_norm.weight", *(f"layers.{i}.q.weight" for i in range(5))]
    first, middle, last = PipelineStage.all_of((2, 2, 1))
    parameters = {name: name for name in names}
    assert list(first.select(parameters, is_tied=True)) == [
        "embed.weight", "pos.weight", "layers.0.q.weight", "layers.1.q.weight",
    ]  # fmt: skip
    assert middle.select(parameters, is_tied=True) == {
        "layers.0.q.weight": "layers.2.q.weight",
        "layers.1.q.weight": "layers.3.q.weight",
    }
    assert list(last.select(parameters, is_tied=True)) == ["embed.weight", "final_norm.weight", "layers.0.q.weight"]
    untied = {**parameters, "lm_head.weight": "lm_head.weight"}
    assert list(last.select(untied, is_tied=False)) == ["final_norm.weight", "layers.0.q.weight", "lm_head.weight"]
    assert [stage.whole_name("layers.0.q.weight") for stage in (first, middle, last)] == [
        "layers.0.q.weight", "layers.2.q.weight", "layers.4.q.weight",
    ]  # fmt: skip
    assert last.describe() == "stage 2 (layers 4 to 4)"


def test_layers_that_do_not_add_up_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"pipeline_layers must add up to the model's 28 layers, got 10 \+ 17 = 27"):
        check_layers((10, 17), 28)
    with pytest.raises(ConfigError, match="must be at most 4 for a model of 4 layers, got 5"):
        divide_layers([1.0] * 4, 5, 0.0)
    with pytest.raises(ConfigError, match="at most 2 for a model of 4 layers, 2 of which read what .*, got 3"):
        divide_layers([1.0] * 4, 3, 0.0, (1, 2))
