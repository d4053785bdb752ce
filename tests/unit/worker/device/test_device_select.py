"""Which device is chosen, and what is refused there."""

import importlib.util
import logging
from types import SimpleNamespace

import pytest
import torch

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.model.pipeline_stages import PipelineStage
from quire.worker.device.device_select import check_rank_devices, choose_device
from quire.worker.device.memory import device_weight_bytes
from quire.worker.device.stages import check_device_stages, device_stages, place_of
from quire.worker.inspect import inspect_model

real_find_spec = importlib.util.find_spec


@pytest.fixture
def machine(monkeypatch):
    """A machine with these CUDA devices, with or without Triton."""

    def make(num_devices, has_triton=True, capability=(9, 0), shared_kib=227):
        properties = SimpleNamespace(shared_memory_per_block_optin=shared_kib * 1024, multi_processor_count=100)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
        found = object() if has_triton else None
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: found if name == "triton" else real_find_spec(name, *rest)
        )

    return make


def choose(device, **options):
    return choose_device(EngineConfig(model="demo", device=device, **options))


def test_auto_takes_a_gpu_only_where_there_is_one_with_triton(machine):
    machine(0)
    assert choose("auto") is None
    machine(2)
    assert choose("auto") == choose("cuda") == torch.device("cuda", 0)
    assert choose("cpu") is None
    machine(2, has_triton=False)
    assert choose("auto") is None


@pytest.mark.parametrize(
    "device, there, words",
    [
        ("cuda", {"num_devices": 0}, "finds no CUDA device"),
        ("cuda:3", {"num_devices": 2}, "there are 2 CUDA devices"),
        ("cuda", {"num_devices": 1, "has_triton": False}, "Triton is not installed: pip install"),
        (
            "cuda",
            {"num_devices": 1, "capability": (7, 5), "shared_kib": 64},
            "cuda:0 .NVIDIA X. has compute capability 7.5 .* at least 8.0",
        ),
        ("cuda:0", {"num_devices": 1, "capability": (8, 9), "shared_kib": 64}, "64 KiB of shared memory .* 99 KiB"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(machine, device, there, words):
    machine(**there)
    with pytest.raises(ConfigError, match=words):
        choose(device)


def test_the_interpreter_is_refused_when_the_environment_does_not_ask_for_it(machine, monkeypatch):
    machine(0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        choose("interpreter")


def test_methods_that_are_not_there_on_a_gpu_are_refused_by_name(machine):
    machine(1)
    message = "not supported on a GPU yet: speculative_config with method 'self' .there are ngram, suffix, .*; "
    message += "a draft by half of the layers takes half a step, that of a head one layer.*device='cpu'"
    with pytest.raises(ConfigError, match=message):
        choose("auto", speculative_config={"method": ["self", "ngram"], "skipped_layers": [1]})
    with pytest.raises(ConfigError, match="speculative_config with quantization 'int8' of a head .choose null"):
        choose("auto", speculative_config={"method": "eagle3", "model": "some-head", "quantization": "int8"})
    models = {"eagle3": "some-head", "draft_model": "some-model"}
    with pytest.raises(ConfigError, match="with eagle3 and draft_model at once .choose one of them, alone or with others"):
        choose("auto", speculative_config={"method": ["eagle3", "ngram", "draft_model"], "model": models})


@pytest.mark.parametrize(
    "config",
    [
        {"method": "lookahead"},
        {"method": "eagle", "model": "some-head", "draft_top_k": 2},
        {"method": "suffix", "suffix_decoding_use_tree_spec": True},
    ],
)
def test_trees_are_refused_on_a_gpu_when_results_are_to_be_deterministic(machine, config):
    machine(1)
    with pytest.raises(ConfigError, match="deterministic with drafts that are trees .choose one method alone, not lookahead"):
        choose("auto", speculative_config=config, deterministic=True)


ALONE = ["ngram", "suffix", "lookahead", "mtp", ["ngram", "suffix"], ["ngram", "lookahead"]]
LOADED = ["draft_model", "eagle", "eagle3", "medusa", ["eagle3", "ngram"]]


@pytest.mark.parametrize(
    "options",
    [
        *({"speculative_config": {"method": method}} for method in ALONE),
        *({"speculative_config": {"method": method, "model": "some-model"}} for method in LOADED),
        *({"quantization": name} for name in ("int4", "fp8")),
        {"deterministic": True},
        {"async_scheduling": True},
    ],
    ids=repr,
)
def test_what_is_there_on_a_gpu(machine, options):
    machine(1)
    assert choose("auto", **options) == torch.device("cuda", 0)


@pytest.mark.parametrize("option", ["quantization", "kv_cache_dtype"])
def test_fp8_is_there_on_the_cpu_too(machine, option):
    machine(0)
    assert choose("auto", **{option: "fp8"}) is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_auto_takes_a_gpu_of_any_capability_from_8_0_on(machine, capability):
    machine(1, capability=capability, shared_kib={8: 99, 12: 99}.get(capability[0], 227))
    assert choose("auto") == choose("cuda") == torch.device("cuda", 0)


def test_float8_keys_and_values_are_refused_before_capability_8_9(machine):
    machine(1, capability=(8, 6), shared_kib=99)
    with pytest.raises(ConfigError, match="needs a GPU of compute capability 8.9 .* has 8.6; choose 'auto', 'int8'"):
        choose("auto", kv_cache_dtype="fp8")
    assert choose("auto", quantization="fp8") == torch.device("cuda", 0)
    machine(1, capability=(8, 9), shared_kib=99)
    assert choose("auto", kv_cache_dtype="fp8") == torch.device("cuda", 0)


def test_a_gpu_of_another_maker_is_refused(machine, monkeypatch):
    machine(1, capability=(9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match="NVIDIA X. is a GPU of AMD; the kernels need one of NVIDIA"):
        choose("cuda")


@pytest.mark.parametrize("there", [{"capability": (7, 5), "shared_kib": 64}, {"capability": (7, 0), "shared_kib": 96}])
def test_auto_takes_the_cpu_and_says_why_when_the_gpu_is_not_one_that_the_kernels_are_made_for(machine, there, caplog):
    machine(1, **there)
    with caplog.at_level(logging.WARNING):
        assert choose("auto") is None
    assert "the CPU runs the model" in caplog.text
    assert "the kernels need at least 8.0" in caplog.text


@pytest.mark.parametrize("name", ["turboquant_4bit", "k8v4"])
def test_four_bit_keys_and_values_are_on_both_devices(machine, name):
    machine(0)
    assert choose("auto", kv_cache_dtype=name, kv_cache_dtype_skip_layers=(0,)) is None
    machine(1)
    assert choose("auto", kv_cache_dtype=name, kv_cache_dtype_skip_layers=(0,)) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"async_scheduling": True}, "async_scheduling needs a GPU"),
        ({"tile_table": "mine.json"}, "tile_table 'mine.json' is for a GPU"),
        ({"nvtx_ranges": True}, "nvtx_ranges"),
    ],
)
def test_what_is_for_a_gpu_is_refused_on_the_cpu(machine, options, words):
    machine(1)
    with pytest.raises(ConfigError, match=words):
        choose("cpu", **options)
    assert choose("cpu", async_scheduling=False) is None


@pytest.mark.parametrize(
    "options",
    [
        {"device": "gpu"},
        {"device": "cuda:x"},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.2},
        {"attention_backend": "flash"},
        {"enforce_eager": 1},
        {"nvtx_ranges": "yes"},
        {"async_scheduling": "yes"},
        {"block_size": 0},
    ],
)
def test_options_outside_their_range_are_refused_by_name(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        EngineConfig(model="demo", **options)


@pytest.mark.parametrize("name", ["flashinfer", "flash_attn"])
def test_attention_by_a_library_is_refused_on_the_cpu_and_in_deterministic_mode(name, machine):
    machine(1)
    with pytest.raises(ConfigError, match=f"{name}' needs a GPU"):
        choose("cpu", attention_backend=name)
    with pytest.raises(ConfigError, match=f"deterministic with attention_backend '{name}'"):
        choose("cuda", attention_backend=name, deterministic=True)
    assert choose("cuda", attention_backend=name) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    "device, there, words",
    [
        ("cuda:0", {"num_devices": 1}, "tensor_parallel_size is 4, but there is 1 CUDA device here.*lower .* to 1"),
        ("cuda:0", {"num_devices": 3}, "there are 3 CUDA devices here, and each rank needs one"),
        ("cuda:0", {"num_devices": 3, "stages": 2}, "tensor_parallel_size \\* pipeline_parallel_size is 4, but there are 3"),
        ("cuda:2", {"num_devices": 8}, "rank r runs on cuda:r: leave device out"),
        ("cuda:0", {"num_devices": 4, "capability": (7, 5)}, "rank 0 cannot run on cuda:0: .*capability 7.5"),
    ],
)
def test_ranks_need_a_gpu_each(machine, device, there, words):
    stages = there.pop("stages", 1)
    machine(**there)
    config = EngineConfig(model="demo", tensor_parallel_size=4 // stages, pipeline_parallel_size=stages)
    with pytest.raises(ConfigError, match=words):
        check_rank_devices(config, device)


def test_ranks_have_gpus_where_there_are_enough_and_share_the_interpreters_cpu(machine):
    machine(4)
    check_rank_devices(EngineConfig(model="demo", tensor_parallel_size=4), "cuda:0")
    machine(0)
    check_rank_devices(EngineConfig(model="demo", tensor_parallel_size=4), "interpreter")


def test_the_first_ranks_have_the_last_stage():
    config = EngineConfig(model="demo", tensor_parallel_size=2, pipeline_parallel_size=3, pipeline_layers=(4, 2, 2))
    places = [place_of(config, PipelineStage.all_of((4, 2, 2)), rank) for rank in range(6)]
    assert [(each.stage.index, each.tensor_rank) for each in places] == [(2, 0), (2, 1), (0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_lora": True}, "LoRA adapters"),
        ({"speculative_config": {"method": "mtp"}}, "method mtp, which reads hidden states .choose ngram, suffix"),
    ],
)
def test_what_stages_on_gpus_do_not_support_is_refused(options, words):
    config = EngineConfig(model="demo", pipeline_parallel_size=2, **options)
    with pytest.raises(ConfigError, match=f"stages on GPUs do not support .*{words}"):
        check_device_stages(config, inspect_model(EngineConfig(model="demo", device="cpu")).spec)


def test_stages_on_gpus_are_divided_by_what_a_step_reads_of_their_weights():
    report = inspect_model(EngineConfig(model="demo", device="cpu"))
    model = report.spec, report.parameters, report.folder
    counts = {}
    for quantization in (None, "int4"):
        config = EngineConfig(model="demo", pipeline_parallel_size=2, quantization=quantization)
        stages = device_stages(config, *model, device_weight_bytes(config, *model))
        counts[quantization] = tuple(stage.num_layers for stage in stages)
    assert all(sum(layers) == 8 and layers[0] >= layers[1] for layers in counts.values())  # the last one has the head, too
    assert counts["int4"][1] <= counts[None][1]  # which stays in 8 bits
