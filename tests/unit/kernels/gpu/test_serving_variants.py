"""All kernels that serving launches are found, and compiled, before the first request."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import quire
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from quire.kernels.triton.device_traits import DeviceTraits, using_traits
from quire.kernels.triton.tile_table import TileRule, TileTable, active_table
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.parameters import parameter_shapes
from quire.quant.policy import DEVICE_POLICIES
from quire.worker.device import variants
from quire.worker.device.launched_step import StepSizes
from quire.worker.device.precompile import CompileJob, Precompilation, _fingerprint
from quire.worker.device.variants import ServedModel
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.quantized_checkpoints import SIZES, write
from tests.unit.kernels.gpu.serving_variants import run_without_interpreter

# What Triton takes, or refuses, as its own where kernels are launched.
RESERVED = {
    "stream",
    "device",
    "device_type",
    "grid",
    "warmup",
    "debug",
    "num_warps",
    "num_stages",
    "num_ctas",
    "instrumentation_mode",
}
QUANTIZED_KERNELS = {"multiply_packed", "multiply_packed_experts", "multiply_quantized", "quantize_rows", "dequantize_rows"}
SHORT = ("attend_chunks", "attend_projected")


def test_random_steps_launch_nothing_that_was_not_found_ahead(tmp_path):
    models = run_without_interpreter(tmp_path, "plain")
    assert len(models) == 14
    assert [model for model in models if model["missing"]] == []
    assert all(20 < model["count"] < 190 for model in models)
    assert [RESERVED & set(model["parameters"]) for model in models] == [set()] * 14


def test_random_steps_of_a_rank_launch_nothing_that_was_not_found_ahead(tmp_path):
    models = run_without_interpreter(tmp_path, "ranks")
    assert len(models) == 6
    assert [model for model in models if model["missing"]] == []
    assert all("_add_parts" in model["kernels"] for model in models)


def test_random_steps_of_models_with_narrow_weights_launch_nothing_that_was_not_found_ahead(tmp_path):
    models = run_without_interpreter(tmp_path, "narrow", tmp_path / "models")
    assert len(models) == 11
    assert [model for model in models if model["missing"]] == []
    assert all(20 < model["count"] < 200 for model in models)
    kernels = {model["model"]: QUANTIZED_KERNELS.intersection(model["kernels"]) for model in models}
    assert all(kernels.values())
    assert set().union(*kernels.values()) == QUANTIZED_KERNELS


def test_random_steps_of_heads_launch_nothing_that_was_not_found_ahead(tmp_path):
    heads = run_without_interpreter(tmp_path, "heads")
    assert [head["model"] for head in heads] == ["eagle3", "eagle"]
    assert [head for head in heads if head["missing"]] == []
    assert all(20 < head["count"] < 130 for head in heads)


def test_kernels_are_found_by_the_same_keys_whichever_is_used_first(tmp_path):
    """They are compiled in one order, by several processes, and launched in another."""
    (forward,), (backward,) = (run_without_interpreter(tmp_path, "keys", order) for order in ("forward", "backward"))
    assert len(forward) > 60
    assert [name for name in forward if forward[name] != backward[name]] == []


@pytest.mark.slow
def test_what_was_found_compiles_into_the_cache_without_a_gpu(tmp_path):
    *_, compiled = run_without_interpreter(tmp_path, "compile")
    assert compiled["launched"] == compiled["hashes"][-1]  # a launch with tensors finds what was compiled without
    assert len(compiled["hashes"]) == len(set(compiled["hashes"])) > 5
    assert [failed.partition(":")[0] for failed in compiled["failed"]] == ["missing"]
    # One that cannot be compiled does not stop the others. The server compiles a small kernel for itself.
    assert compiled["num_cubins"] == len(compiled["hashes"]) - 1 + 1
    assert len(list(tmp_path.glob("*/*.cubin"))) == len(compiled["hashes"]) + 1


def kinds_of(model):
    return model.kinds()[:-1]


@pytest.mark.parametrize(
    "pattern", ["A", "AAAA", "AABBBA", "ABABAB", "ABBBBA", "AAABCCCAB", "ABCDEF"], ids=lambda pattern: pattern
)
def test_few_layers_have_the_first_the_last_and_every_layer_behind_every_one_that_it_follows(pattern):
    mlps = {letter: MlpSpec(32 * place, "silu") for place, letter in enumerate("ABCDEF", 1)}
    attention = AttentionSpec(2, 1, 16, 0.25, None)
    layers = tuple(LayerSpec(attention, mlps[letter], NormSpec("rms", 1e-6)) for letter in pattern)
    spec = ModelSpec("test", "bfloat16", 300, 32, layers, NormSpec("rms", 1e-6), 64)
    check_few_layers(spec)
    alike = replace(spec, layers=layers[:1] * len(layers))  # but for their KV formats
    few = check_few_layers(alike, tuple(pattern))
    assert len(few.kv_dtypes) == len(few.spec.layers)


def check_few_layers(spec, kv_dtypes=()):
    parameters = {name: torch.empty(shape, device="meta") for name, shape in parameter_shapes(spec).items()}
    model = ServedModel(spec, parameters, kv_dtypes=kv_dtypes)
    few = model.few_layers()
    whole, found = kinds_of(model), kinds_of(few)
    assert (found[0], found[-1]) == (whole[0], whole[-1])
    assert set(itertools.pairwise(found)) >= set(itertools.pairwise(whole))
    assert len(found) <= 2 * len(set(itertools.pairwise(whole))) + 1
    assert {name: tensor.shape for name, tensor in few.parameters.items()} == parameter_shapes(few.spec)
    return few


def test_layers_that_are_stored_or_will_be_quantised_in_other_ways_are_of_other_kinds(tmp_path):
    config = {"num_hidden_layers": 4, "torch_dtype": "bfloat16"}
    path, _ = write(tmp_path, "qwen3", "fp8", **config)
    spec = read_model_spec(path)
    model = ServedModel(spec, open_parameters(path, spec))
    assert [len(set(kinds_of(model))), len(model.few_layers().spec.layers)] == [1, 2]
    dense = write_checkpoint(tmp_path / "plain", "qwen3", **SIZES, **config)
    plain = ServedModel(spec, open_parameters(dense, spec))
    assert set(kinds_of(plain)).isdisjoint(kinds_of(model))
    first, *middle, last = kinds_of(plain._replace(policy=DEVICE_POLICIES["int4"]))
    assert first == last
    assert len({first, *middle}) == 2  # the MLPs at both ends get int8
    assert len(plain._replace(policy=DEVICE_POLICIES["int4"]).few_layers().spec.layers) == 4


def order_of(path, spec, table):
    kv, sizes = KvSpec.of(spec, 64, "bfloat16"), StepSizes(1, 4, 16)
    return CompileJob(path, spec, None, False, kv, sizes, 90, table)


def test_what_is_compiled_ahead_has_the_tiles_of_the_table_that_kernels_are_launched_with(tmp_path, monkeypatch):
    # Variants are not known where kernels are interpreted.
    monkeypatch.setattr(variants, "variant_of", lambda launch: (launch.kernel.fn.__name__, launch.num_warps))
    path = write_checkpoint(tmp_path / "plain", "qwen3", **SIZES, torch_dtype="bfloat16")
    spec = read_model_spec(path)
    tuned = TileRule({}, {"keys": 32, "num_warps": 8, "num_stages": 1})
    table = TileTable("tuned", "9.0", {"attention-decode": (tuned,)}).over(active_table())
    orders = [order_of(path, spec, chosen) for chosen in (active_table(), table)]
    shipped, found = ({num_warps for kernel, num_warps in order.variants() if kernel in SHORT} for order in orders)
    assert shipped == {4}
    assert found == {8}
    marks = {_fingerprint(order, open_parameters(path, spec)) for order in orders}
    assert len(marks) == 2


@pytest.mark.slow
def test_a_checkpoint_is_compiled_ahead_once_for_all_that_are_stored_alike(tmp_path):
    """A launch before the end waits for its own kernel, and one without a server compiles it itself."""
    cache = tmp_path / "cache"
    first, second, other = run_without_interpreter(cache, "ahead", tmp_path / "models")
    assert [one["is_needed"] for one in (first, second, other)] == [True, False, True]
    assert [one["is_compiled"] for one in (first, second, other)] == [True, True, False]
    assert 0 < first["num_at_launch"] < first["num_cubins"]
    assert first["num_cubins"] > 20
    assert other["num_cubins"] == first["num_cubins"]


def test_what_compiles_finds_the_package_wherever_the_program_is_run(tmp_path, monkeypatch):
    told = tmp_path / "told"

    class Finding(subprocess.Popen):
        def __init__(self, command, **options):
            code = "import sys, quire; open(sys.argv[1], 'w').write(quire.__file__)"
            super().__init__([sys.executable, "-S", "-c", code, str(told)], **options)  # without what is installed

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", Finding)
    path = write_checkpoint(tmp_path / "plain", "qwen3", **SIZES, torch_dtype="bfloat16")
    spec = read_model_spec(path)
    assert not Precompilation(order_of(path, spec, active_table()), open_parameters(path, spec)).wait()
    assert told.read_text() == quire.__file__


def test_steps_of_just_fewer_tokens_than_weights_are_dequantised_for_are_found_ahead(monkeypatch):
    """They may have one program for a sum where steps of few more tokens than a power of two have several, with small tiles."""

    def split_of(launch):
        return launch.kernel.fn.__name__, launch.constants.get("IS_SPLIT"), launch.constants.get("NUM_ROWS")

    monkeypatch.setattr(variants, "variant_of", split_of)
    attention = AttentionSpec(24, 8, 128, 0.1, None)
    layers = (LayerSpec(attention, MlpSpec(3072, "silu"), NormSpec("rms", 1e-6), NormSpec("rms", 1e-6)),)
    spec = ModelSpec("test", "bfloat16", 300, 3072, layers, NormSpec("rms", 1e-6), 512)
    parameters = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in parameter_shapes(spec).items()
    }
    model = ServedModel(spec, parameters, DEVICE_POLICIES["int4"])
    with using_traits(DeviceTraits.of_arch(86)):
        found = variants.serving_variants(model, KvSpec.of(spec, 64, "bfloat16"), StepSizes(4, 512, 512))
    assert {("multiply_packed", is_split, 3072) for is_split in (True, False)} <= set(found)
