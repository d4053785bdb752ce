"""Which tiles the kernels get, where their table comes from, and how `quire tune` finds better ones."""

import json
from collections import Counter

import pytest
import torch

from quire.base.errors import ConfigError
from quire.bench.tuning import Limits, TuningCase, choose_cases, tune, tune_device, tuning_cases
from quire.cli.tune import KERNELS
from quire.kernels.triton import tile_table, tiles
from quire.kernels.triton.compiling import CompiledKernel
from quire.kernels.triton.device_traits import DeviceTraits, using_traits
from quire.kernels.triton.launching import run_all
from quire.kernels.triton.tile_table import TileRule, TileTable, active_table, choose_table, read_tables, user_path, using

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
H200 = "NVIDIA H200"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """No table of the user, and the table in use is that of before again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(tile_table.VARIABLE, raising=False)
    with using(active_table()):
        yield


def linear_table(tokens, device=H200, **when):
    tile = {"rows": 64, "tokens": tokens, "num_warps": 4, "num_stages": 3}
    return TileTable(device, "9.0", {"linear": (TileRule(when, tile),)})


def write(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table.to_json()))
    return path


def test_every_shape_has_a_tile_in_the_shipped_table():
    for dtype in (torch.float32, BF16, torch.float16):
        for head_dim in (16, 64, 80, 128, 192, 256):
            for kv_dtype in (dtype, torch.int8, FP8):
                assert tiles.prefill_attention_tile(head_dim, dtype, kv_dtype).keys >= 16
                assert tiles.prompt_tile(head_dim, dtype, kv_dtype) == (128, 2, False)
                for group in (1, 3, 7, 8, 32):
                    tile = tiles.decode_attention_tile(head_dim, group, dtype, kv_dtype)
                    assert tiles.CHUNK % tile.keys == 0
        for count in (1, 16, 17, 10**6):
            assert tiles.linear_tile(count, dtype, 100, False).tokens >= 16
            assert tiles.large_batch_tile(count, dtype, 100) is None  # has not run on a GPU
            assert tiles.expert_tile(count, 8, dtype).pairs >= 16
            assert tiles.float8_tile(count).tokens >= 16
            assert tiles.fused_quantized_tile(count, 100, 64, True, False).rows >= 4


def test_the_first_rule_that_holds_counts():
    rules = (TileRule({"max_tokens": 8, "kind": "a"}, {"x": 1}), TileRule({"min_tokens": 4}, {"x": 2}))
    table = TileTable("d", "9.0", {"k": rules})
    assert table.find("k", {"tokens": 8, "kind": "a"}) == {"x": 1}
    assert table.find("k", {"tokens": 8, "kind": "b"}) == {"x": 2}
    for kernel, shape in (("k", {"tokens": 3}), ("k", {}), ("other", {"tokens": 8})):
        with pytest.raises(ConfigError, match="has none for"):
            table.find(kernel, shape)


def test_tables_are_taken_from_the_option_the_environment_and_the_user_in_this_order(tmp_path, monkeypatch):
    def tokens():
        return tiles.linear_tile(5, BF16, 100, False).tokens

    choose_table(H200, "9.0")
    assert tokens() == 16
    write(user_path(H200), linear_table(32))
    choose_table(H200, "9.0")
    assert tokens() == 32
    monkeypatch.setenv(tile_table.VARIABLE, str(write(tmp_path / "environment.json", linear_table(64))))
    choose_table(H200, "9.0")
    assert tokens() == 64
    choose_table(H200, "9.0", str(write(tmp_path / "option.json", linear_table(128, max_tokens=5))))
    assert tokens() == 128
    assert tiles.linear_tile(6, BF16, 100, False).tokens == 16  # what a table does not have is as shipped


def test_a_table_of_an_earlier_version_stops_neither_engines_where_nobody_named_it_nor_tuning(monkeypatch, caplog):
    own, shipped = write(user_path(H200), linear_table(32)), read_tables(tile_table.SHIPPED)[0].rules
    own.write_text('{"version": 1, "tables": []}')
    assert choose_table(H200, "9.0").rules == shipped
    assert "version 1, not 2; create it again with quire tune" in caplog.text
    monkeypatch.setenv(tile_table.VARIABLE, str(own))
    assert choose_table(H200, "9.0", is_strict=False).rules == shipped
    with pytest.raises(ConfigError, match="version 1"):
        choose_table(H200, "9.0")


def test_a_device_without_a_table_gets_the_shipped_one():
    assert choose_table("another", "8.0").rules == read_tables(tile_table.SHIPPED)[0].rules


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "cannot be read"),
        ('{"version": 1}', "version 1"),
        ('{"version": 2, "tables": [{"device": "d"}]}', "another form"),
        (json.dumps(TileTable("d", "9.0", {"k": (TileRule({}, {"x": "a"}),)}).to_json()), "not whole"),
        (json.dumps(linear_table(16, "NVIDIA L4").to_json()), "is for NVIDIA L4, not for NVIDIA H200"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_used_are_refused_with_the_reason(text, message, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        choose_table(H200, "9.0", str(path))


def compiled(shared_bytes=0, stack_bytes=0):
    return CompiledKernel(64, stack_bytes, shared_bytes, Counter(), 0)


def fake_case(candidates):
    """A case whose launches are the tile in use."""
    when = {"dtype": "bfloat16", "max_tokens": 16}
    return TuningCase("linear", when, lambda: [tiles.linear_tile(16, BF16, 100, False)], candidates)


def test_tuning_takes_the_fastest_tile_within_the_limits():
    base = read_tables(tile_table.SHIPPED)[0]
    present = base.find("linear", {"dtype": "bfloat16", "tokens": 16})
    fast, spilled, large, slow = ({**present, "num_stages": stages} for stages in (5, 6, 7, 8))
    seconds = {4: 1.0, 5: 0.9, 6: 0.1, 7: 0.1, 8: 2.0}
    measured = []

    def measure(launches):
        measured.append(launches[0].num_stages)
        return seconds[launches[0].num_stages]

    def inspect(launch):
        return compiled(300_000 if launch.num_stages == 7 else 0, 8 if launch.num_stages == 6 else 0)

    found = tune([fake_case([slow, spilled, large, fast])], base, Limits(232_448), measure, inspect)
    assert found.rules == {"linear": (TileRule({"dtype": "bfloat16", "max_tokens": 16}, fast),)}
    assert measured == [4, 8, 5]


def test_tuning_leaves_out_tiles_that_do_not_compile_or_run_and_saves_what_it_has_after_each_case(caplog):
    base = read_tables(tile_table.SHIPPED)[0]
    present, saved = base.find("linear", {"dtype": "bfloat16", "tokens": 16}), []
    broken, failing, fine = ({**present, "num_stages": stages} for stages in (5, 6, 7))

    def measure(launches):
        if launches[0].num_stages in (4, 6):
            raise RuntimeError("CUDA error")
        return 1.0

    def inspect(launch):
        if launch.num_stages == 5:
            raise ValueError("does not compile")
        return compiled()

    cases = [fake_case([broken, failing]), fake_case([broken, failing, fine])]
    found = tune(cases, base, Limits(1), measure, inspect, saved.append)
    assert [rule.tile for rule in found.rules["linear"]] == [fine]
    assert [table.rules for table in saved] == [found.rules]
    assert "left out: ValueError: does not compile" in caplog.text
    assert "no tile of linear" in caplog.text


def test_tuning_compares_the_product_for_hopper_with_what_is_used_otherwise(device):
    for case in (case for case in tuning_cases(device, is_tiny=True) if case.kernel == "linear-large-batch"):
        for launch in case.make():
            launch.run()
        assert all(tile["is_specialized"] for tile in case.candidates)


def test_tuning_keeps_the_present_tile_when_the_gain_may_be_chance():
    base = read_tables(tile_table.SHIPPED)[0]
    present = base.find("linear", {"dtype": "bfloat16", "tokens": 16})
    case = fake_case([{**present, "num_stages": 5}])
    found = tune([case], base, Limits(1), lambda launches: 1.0 - launches[0].num_stages / 1000, lambda launch: compiled())
    assert found.rules["linear"][0].tile == present


def test_what_is_tuned_can_be_read_back_and_launched(tmp_path, device):
    kernels = ("linear", "fused-quantized", "float8", "experts", "fused-linear", "fused-attention")
    cases = [case for case in tuning_cases(device, is_tiny=True) if case.kernel in kernels]
    base = read_tables(tile_table.SHIPPED)[0]
    times = iter(range(10**6, 0, -1))
    cut = [case._replace(candidates=case.candidates[:2]) for case in cases]
    found = tune(cut, base, Limits(232_448), lambda launches: float(next(times)) ** 3, lambda launch: compiled())
    table = choose_table(H200, "9.0", str(write(tmp_path / "tuned.json", found)))
    assert set(table.rules) == set(KERNELS)
    assert [len(table.rules[kernel]) - len(base.rules[kernel]) for kernel in kernels] == [3, 8, 2, 4, 3, 1]
    for kernel in ("linear", "fused-quantized", "fused-linear", "fused-attention"):
        run_all(next(case for case in cases if case.kernel == kernel).make())


def test_a_kernel_is_compared_with_the_tiles_that_were_found_before_it():
    seen = []

    def case(kernel, values):
        return TuningCase(kernel, {}, lambda: seen.append(active_table().find("first", {})) or [], values)

    base = TileTable("d", "9.0", {"first": (TileRule({}, {"x": 1}),), "second": (TileRule({}, {"y": 1}),)})
    times = iter((3.0, 2.0, 1.0))
    tune(
        [case("first", [{"x": 2}]), case("second", [])],
        base,
        Limits(1),
        lambda launches: next(times),
        lambda launch: compiled(),
    )
    assert seen == [{"x": 1}, {"x": 2}, {"x": 2}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune")
def test_tuning_is_refused_without_a_gpu(tmp_path):
    with pytest.raises(ConfigError, match="finds none here"):
        tune_device(tmp_path / "table.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arch", [80, 86])
def test_what_a_gpu_does_not_compile_is_not_tuned_on_it(arch, device):
    with using_traits(DeviceTraits.of_arch(arch)):
        cases = tuning_cases(device, is_tiny=True)
        launches = [launch for case in cases if case.kernel.startswith("attention") for launch in case.make()]
    assert not {"float8", "attention-prefill-hopper", "linear-large-batch"} & {case.kernel for case in cases}
    dtypes = {value.dtype for launch in launches for value in launch.arguments.values() if isinstance(value, torch.Tensor)}
    assert torch.int8 in dtypes
    assert FP8 not in dtypes


def test_a_kernel_that_is_not_tuned_is_refused_beside_others():
    with pytest.raises(ConfigError, match="--kernel must be one of linear on NVIDIA H200, got lineal$"):
        choose_cases([fake_case([])], ["linear", "lineal"], H200)
