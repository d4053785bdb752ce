"""Parameters that stay in their checkpoint: what is in memory while a model is built, and that it is the same model."""

import gc
import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.kernels.native import load_native
from quire.model.build import build_model, whole_prompt_logits
from quire.model.checkpoint import load_parameters, open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder
from quire.model.native_decoder import NativeDecoder
from quire.model.quantized_writer import write_quantized
from quire.quant import compressed_tensors
from quire.quant.parameters import StoredParameter
from quire.quant.policy import POLICIES
from tests.tiny_checkpoint import write_checkpoint

PROMPT = [5, 100, 7, 44, 300, 2, 9]

needs_native = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")


def write(tmp_path, family):
    """Write a checkpoint of int4 and int8 weights."""
    return write_quantized(write_checkpoint(tmp_path / "source", family), tmp_path / "quantised", "int4").folder


class Unpacked:
    """How many weights were unpacked, and how many of them were in memory at once."""

    def __init__(self):
        self.count = self.most = 0
        self._alive = []

    def add(self, weight):
        gc.collect()
        self._alive = [codes for codes in self._alive if codes() is not None] + [weakref.ref(weight.codes)]
        self.count += 1
        self.most = max(self.most, len(self._alive))


@pytest.fixture
def unpacked(monkeypatch):
    seen, load = Unpacked(), compressed_tensors.load_packed

    def record(*arguments):
        weight = load(*arguments)
        seen.add(weight)
        return weight

    monkeypatch.setattr(compressed_tensors, "load_packed", record)
    return seen


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_nothing_is_unpacked_when_parameters_are_opened(tmp_path, family, unpacked):
    folder = write(tmp_path, family)
    parameters = open_parameters(folder, read_model_spec(folder))
    assert all(isinstance(parameter, StoredParameter) for parameter in parameters.values())
    assert unpacked.count == 0


@needs_native
@pytest.mark.parametrize("family, count, most", [("qwen3", 14, 1), ("qwen3_moe", 24, 2)])
def test_one_parameter_at_a_time_is_unpacked_when_the_native_decoder_packs_them(tmp_path, family, count, most, unpacked):
    folder = write(tmp_path, family)
    spec = read_model_spec(folder)
    decoder = build_model(spec, open_parameters(folder, spec), 64, 16)
    assert isinstance(decoder, NativeDecoder)
    # Gate and up of an expert are one parameter, which is made of two weights.
    assert (unpacked.count, unpacked.most) == (count, most)


def test_one_parameter_at_a_time_is_unpacked_when_the_reference_makes_them_dense(tmp_path, unpacked):
    folder = write(tmp_path, "qwen3")
    spec = read_model_spec(folder)
    Decoder(spec, open_parameters(folder, spec), 64)
    assert (unpacked.count, unpacked.most) == (14, 1)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("policy", [None, "int8", "int4"])
def test_model_is_that_of_loaded_parameters_when_they_are_opened_one_by_one(tiny_family, dtype, policy):
    spec = read_model_spec(tiny_family, dtype)
    opened, loaded = (
        build_model(spec, parameters, 64, 16, policy and POLICIES[policy])
        for parameters in (open_parameters(tiny_family, spec), load_parameters(tiny_family, spec))
    )
    assert torch.equal(whole_prompt_logits(opened, PROMPT), whole_prompt_logits(loaded, PROMPT))


@needs_native
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_is_that_of_loaded_parameters_when_they_are_quantised(tmp_path, family, dtype):
    folder = write(tmp_path, family)
    spec = read_model_spec(folder, dtype)
    opened, loaded = (build_model(spec, read(folder, spec), 64, 16) for read in (open_parameters, load_parameters))
    assert torch.equal(whole_prompt_logits(opened, PROMPT), whole_prompt_logits(loaded, PROMPT))
    assert opened.weight_bytes == loaded.weight_bytes


def make_experts_differ(folder):
    """Say and store that one expert's weights lie in groups of 16 instead of 32."""
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    (group,) = [group for group in groups.values() if any("experts" in target for target in group["targets"])]
    other = "re:.*\\.experts\\.2\\.(gate|up|down)_proj$"
    narrow = {**group, "targets": [other], "weights": {**group["weights"], "group_size": 8}}
    config["quantization_config"]["config_groups"] = {"narrow": narrow, **groups}
    group["targets"] = [target.replace("[0-9]+", "[013]") for target in group["targets"]]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in [name for name in tensors if ".experts.2." in name and name.endswith("weight_scale")]:
        columns = int(tensors[name.replace("scale", "shape")][1])
        tensors[name] = tensors[name].repeat_interleave(columns // 8 // tensors[name].shape[1], 1).contiguous()
    save_file(tensors, folder / "new")
    (folder / "new").replace(folder / "model.safetensors")


@needs_native
@pytest.mark.parametrize("read", [open_parameters, load_parameters])
def test_experts_of_a_layer_become_dense_when_one_has_another_form(tmp_path, read, caplog):
    folder = write(tmp_path, "qwen3_moe")
    spec = read_model_spec(folder, "bfloat16")
    make_experts_differ(folder)
    native = build_model(spec, read(folder, spec), 64, 16)
    assert "different forms" in caplog.text
    # What was packed before the difference was seen is not counted.
    parameters = load_parameters(folder, spec)
    names = [name for name in parameters if name.endswith("gate_up.weight")]
    assert len(names) == 2
    parameters |= {name: parameters[name].dequantize() for name in names}
    dense = build_model(spec, parameters, 64, 16)
    assert native.weight_bytes == dense.weight_bytes
    assert torch.equal(whole_prompt_logits(native, PROMPT), whole_prompt_logits(dense, PROMPT))


@needs_native
def test_experts_become_dense_when_one_cannot_be_quantised(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "moe", "qwen3_moe")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"][0, 0] = torch.inf
    save_file(tensors, folder / "new")
    (folder / "new").replace(folder / "model.safetensors")
    spec = read_model_spec(folder)
    assert isinstance(build_model(spec, open_parameters(folder, spec), 64, 16, POLICIES["int8"]), NativeDecoder)
    assert "different forms" in caplog.text
