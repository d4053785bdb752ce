"""Memory, batches, layouts, costs: by hand, and by what has to hold for any plan."""

import json
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from quire.base.errors import ConfigError
from quire.planner.capacity import Objectives, Operation, Replica, cost_of, replicas_needed
from quire.planner.hardware import find_hardware
from quire.planner.html_report import frontier, render_plan, roofline_points
from quire.planner.memory import (
    Lengths,
    Limits,
    activation_bytes,
    choose_kv_format,
    divide_memory,
    usable_kv_formats,
    users_that_fit,
)
from quire.planner.model_shape import AttentionGroup, usual_weight_bytes
from quire.planner.plan import Question, find_layouts, make_plan
from quire.planner.report import describe_plan
from quire.planner.step_time import RooflineTime
from tests.unit.planner.shapes import make_shape, qwen3_06b

LENGTHS = Lengths.of([1000] * 10, [200] * 10)


def large_shape(num_parameters):
    wide = replace(qwen3_06b(), hidden_size=8192, num_layers=80, num_head=32_000 * 8192)
    return replace(wide, num_parameters=num_parameters, weight_bytes=usual_weight_bytes(num_parameters))


def make_question(**changes) -> Question:
    shape, hardware = qwen3_06b(), find_hardware("h100")
    figures = {
        "shape": shape,
        "hardware": hardware,
        "num_devices": 4,
        "lengths": LENGTHS,
        "limits": Limits.usual(hardware, shape),
        "precision": "bfloat16",
        "kv_format": "bfloat16",
        "objectives": Objectives.parse(["ttft:500", "tpot:50"]),
        "rate": 10.0,
        "price": 3.5,
    }
    return Question(**{**figures, **changes})


def test_memory_is_divided_by_hand():
    shape, hardware = qwen3_06b(), find_hardware("h100")
    limits = Limits.usual(hardware, shape)
    memory = divide_memory(shape, hardware, limits, "bfloat16", "bfloat16")
    assert memory.weight_bytes == 2 * 596_049_920
    assert memory.usable_bytes == 72 * 10**9
    room = 72 * 10**9 - memory.weight_bytes - activation_bytes(shape, limits) - 10**9
    assert memory.kv_bytes == room
    assert memory.num_kv_blocks == room // (64 * 28 * 8 * 128 * 2 * 2)
    assert memory.fits


def test_users_that_fit_are_whole_blocks_each_and_a_shared_prefix_once():
    assert users_that_fit(100, 16, 160) == 10
    assert users_that_fit(100, 16, 161) == 9  # 11 blocks each
    assert users_that_fit(100, 16, 160, num_shared_tokens=80) == (100 - 5) // 5
    assert users_that_fit(9, 16, 160) == 0


def test_windows_are_counted_in_what_sequences_use():
    groups = (AttentionGroup(None, 2, 4, 512, 512), AttentionGroup(128, 2, 4, 512, 512))
    shape = make_shape(attention=groups)
    assert shape.kv_bytes_per_token("bfloat16") == 2048
    assert shape.kv_bytes_of(100, "bfloat16") == 100 * 2048
    assert shape.kv_bytes_of(1000, "bfloat16") == 1000 * 1024 + 128 * 1024


def test_model_that_does_not_fit_is_said_to_with_what_is_missing():
    shape = large_shape(70 * 10**9)
    plan = make_plan(make_question(shape=shape, num_devices=1))
    assert plan.best is None
    assert "does not fit" in plan.reason
    missing = plan.layouts[0].memory.missing_bytes
    assert 140e9 + 1e9 - 72e9 < missing < 145e9 - 72e9
    assert "DOES NOT FIT" in plan.layouts[0].memory.describe()


def test_model_that_needs_two_devices_is_divided():
    shape = large_shape(50 * 10**9)
    plan = make_plan(make_question(shape=shape, objectives=Objectives()))
    assert plan.best is not None
    assert plan.best.layout.num_devices >= 2
    assert "1 device cannot be used" in plan.reason


def test_layouts_use_all_devices_and_divide_the_kv_heads():
    layouts = find_layouts(make_question(num_devices=6, shape=make_shape()))
    assert all(one.num_devices * one.num_replicas == 6 for one in layouts)
    assert {one.num_tensor_parallel for one in layouts} == {1, 2}  # 2 kv heads
    assert all(one.num_pipeline_stages <= 4 for one in layouts)  # 4 layers


def test_largest_batch_keeps_the_objectives_and_one_more_does_not():
    shape, hardware = qwen3_06b(), find_hardware("l4")
    limits = Limits.usual(hardware, shape, max_num_seqs=512)
    replica = Replica(shape, RooflineTime(shape, hardware, "bfloat16", "bfloat16"), limits, 3000)
    objectives = Objectives.parse(["tpot:40"])
    by_memory, by_objective = replica.largest_batch(LENGTHS, objectives)
    assert by_memory == 3000 // -(-1200 // 64)
    assert 0 < by_objective < by_memory
    assert replica.operate(by_objective, LENGTHS).meets(objectives)
    assert not replica.operate(by_objective + 1, LENGTHS).meets(objectives)


def test_throughput_grows_with_the_batch_and_speed_per_user_falls():
    plan = make_plan(make_question())
    found = frontier(plan)
    assert [batch for batch, _, _ in found] == sorted(batch for batch, _, _ in found)
    assert all(later[1] <= earlier[1] for earlier, later in pairwise(found))
    assert found[-1][2] > found[0][2]


def test_cost_is_divided_between_prompts_and_outputs():
    operation = Operation(10, step_s=0.02, decode_step_s=0.015, ttft_s=0.1, requests_per_s=5.0, output_tokens_per_s=500.0,
                          input_tokens_per_s=2000.0)  # fmt: skip
    cost = cost_of(operation, 3.6, watts=700.0)
    assert cost.per_request == pytest.approx(0.001 / 5)
    assert cost.per_user_hour == pytest.approx(3.6 / operation.num_sequences)
    assert cost.per_million_output == pytest.approx(0.001 * 0.75 / 500 * 1e6)
    assert cost.per_million_input == pytest.approx(0.001 * 0.25 / 2000 * 1e6)
    total = cost.per_million_output * 500 + cost.per_million_input * 2000
    assert total / 1e6 == pytest.approx(0.001)
    assert cost.joules_per_output_token == pytest.approx(1.4)
    assert cost.kwh_per_million_output == pytest.approx(1.4e6 / 3.6e6)
    assert cost_of(operation, 3.6, None).kwh_per_million_output is None


def test_replicas_needed_leave_a_fifth_of_their_capacity():
    assert replicas_needed(10, 5) == 3
    assert replicas_needed(8, 5) == 2
    assert replicas_needed(8.01, 5) == 3
    assert replicas_needed(1, 0) is None


def test_plan_names_the_best_layout_and_why():
    plan = make_plan(make_question())
    assert plan.best is not None
    assert plan.best.requests_per_s >= 0.99 * max(one.requests_per_s for one in plan.layouts)
    assert plan.best.layout.name in plan.reason
    text = describe_plan(plan)
    for part in ("not measured", "users p50", "best", "needed", "cost", "energy", "what would change"):
        assert part in text
    figures = json.loads(json.dumps(plan.to_dict()))
    assert figures["best"]["users_p95"] == plan.best.users_p95
    assert figures["kv_bytes_per_token"]["bfloat16"] == 28 * 8 * 128 * 2 * 2
    assert plan.changes[0].ratio != pytest.approx(1.0)


def test_objective_that_nothing_keeps_is_said():
    plan = make_plan(make_question(objectives=Objectives.parse(["tpot:0.1"])))
    assert plan.best is None
    assert "over the objectives" in plan.reason


def test_decode_is_memory_bound_and_long_prompts_are_compute_bound():
    question = make_question()
    points = {point.name: point for point in roofline_points(make_plan(question))}
    assert points["decode, batch 1"].intensity < question.hardware.ridge < points["prompt of 8192"].intensity
    for point in points.values():
        roof = min(question.hardware.flops_per_s, point.intensity * question.hardware.bytes_per_s)
        assert point.flops_per_s < roof


def test_page_is_well_formed_with_charts():
    plan = make_plan(make_question(num_devices=1))
    page = render_plan(plan)
    assert "prompt of 8192" in page
    body = page[page.index("<main>") : page.index("</main>") + len("</main>")]
    tree = ElementTree.fromstring(body)
    assert len(tree.findall(".//svg")) == 2
    assert len(tree.findall(".//circle")) == len(roofline_points(plan))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_devices": 0}, "--num must be an integer >= 1, got 0"),
        ({"rate": -1.0}, "--rate must be a number above 0, got -1.0"),
        ({"price": 0.0}, "--price must be a number above 0, got 0.0"),
        ({"hit_share": 1.0}, "--prefix-hit-share must be at least 0 and below 1, got 1.0"),
        ({"lengths": Lengths.of([50_000], [1])}, r"is 50001 tokens, but the context \(--max-model-len\) has 40960"),
    ],
)
def test_wrong_questions_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_question(**changes)


def test_kv_formats_are_those_that_an_engine_has_on_the_device():
    shape = replace(qwen3_06b(), head_dims=(96, 128))
    assert usable_kv_formats(shape, is_gpu=True) == ["int8", "fp8"]
    assert usable_kv_formats(shape, is_gpu=False) == ["int8", "fp8", "turboquant_4bit", "k8v4"]
    assert usable_kv_formats(shape, is_gpu=True, has_float8=False) == ["int8"]
    assert usable_kv_formats(replace(shape, state_bytes=100), is_gpu=True) == []
    with pytest.raises(ConfigError, match="on a GPU, heads of a power of two of values .* heads of 96"):
        choose_kv_format(shape, "k8v4", is_gpu=True)
    assert choose_kv_format(shape, "fp8", is_gpu=False, has_float8=False) == "fp8"
    half = replace(shape, dtype="float16")
    assert [choose_kv_format(half, "auto", is_gpu) for is_gpu in (False, True)] == ["float32", "float16"]


@pytest.mark.parametrize("items", [["ttft"], ["ttft:0"], ["itl:5"], ["tpot:x"], ["ttft:5", "ttft:6"]])
def test_wrong_objectives_are_refused(items):
    with pytest.raises(ConfigError, match="--slo"):
        Objectives.parse(items)


def test_wrong_formats_and_limits_are_refused():
    shape, hardware = qwen3_06b(), find_hardware("h100")
    with pytest.raises(ConfigError, match="--kv-cache-dtype must be auto or one of float32, .*, got 'int2'"):
        choose_kv_format(shape, "int2", is_gpu=True)
    assert choose_kv_format(shape, "k8v4", is_gpu=True) == "k8v4"
    with pytest.raises(ConfigError, match="--quantization must be auto or one of bfloat16, int8, int4, fp8, got 'int3'"):
        shape.check_precision("int3")
    with pytest.raises(ConfigError, match="--max-model-len must be at most 40960"):
        Limits.usual(hardware, shape, max_model_len=50_000)
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be at least max_num_seqs"):
        Limits.usual(hardware, shape, max_num_seqs=64, max_num_batched_tokens=32)
