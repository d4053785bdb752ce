"""gpt-oss: MXFP4 experts are what they stand for on every path, one is unpacked at a time, and what cannot be is refused."""

import gc
import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError
from quire.kernels.native import load_native
from quire.model.build import build_model, load_model, whole_prompt_logits
from quire.model.checkpoint import load_parameters, open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.parameters import parameter_shapes
from quire.model.quantized_writer import write_quantized
from quire.quant import mxfp4
from quire.quant.parameters import QuantizedStack
from quire.quant.policy import POLICIES, parameter_quantizer
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.model.mxfp4_checkpoint import write_mxfp4

PROMPT = [5, 100, 7, 44, 300, 2, 9, 250, 17, 80, 3, 3, 71, 120]

needs_native = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")


def native(folder, dtype="float32", policy=None):
    spec = read_model_spec(folder, dtype)
    model = build_model(spec, open_parameters(folder, spec), 64, 16, policy)
    assert isinstance(model, NativeDecoder)
    return model


def test_mxfp4_experts_are_the_dense_ones_of_their_numbers_and_stay_integers(tmp_path):
    quantised, dense = write_mxfp4(tmp_path)
    spec = read_model_spec(quantised)
    found, expected = load_parameters(quantised, spec), load_parameters(dense, spec)
    assert {name: tuple(value.shape) for name, value in found.items()} == parameter_shapes(spec)
    for name, tensor in expected.items():
        value = found[name]
        assert isinstance(value, QuantizedStack) == (name.endswith(".weight") and ".experts." in name)
        assert torch.equal(value if isinstance(value, torch.Tensor) else value.dequantize(), tensor), name
    assert torch.equal(whole_prompt_logits(load_model(quantised), PROMPT), whole_prompt_logits(load_model(dense), PROMPT))


@needs_native
def test_native_logits_are_those_of_the_dense_numbers_in_float32(tmp_path):
    quantised, dense = (whole_prompt_logits(native(folder), PROMPT) for folder in write_mxfp4(tmp_path))
    assert torch.equal(quantised, dense)


@needs_native
def test_native_logits_are_near_those_of_the_dense_numbers_and_weights_take_half_a_byte(tmp_path):
    quantised, dense = write_mxfp4(tmp_path)
    exact = whole_prompt_logits(load_model(dense, "float32"), PROMPT)
    model, plain = native(quantised, "bfloat16"), native(dense, "bfloat16")
    error = (whole_prompt_logits(model, PROMPT) - exact).abs().max()
    assert error <= 0.03 * (exact.max() - exact.min())
    spec, width = model.spec, 2
    num_expert_weights = sum(shape[0] * shape[1] * shape[2] for shape in parameter_shapes(spec).values() if len(shape) == 3)
    # Half a byte, and a scale of 16 bits for every 32; sizes of packed weights are whole pages of lines.
    saved = plain.weight_bytes - model.weight_bytes
    assert saved >= 0.9 * num_expert_weights * (width - 0.5 - 2 / 32)


@needs_native
def test_native_logits_of_dense_experts_are_the_reference_s_with_every_clamp_and_bias(tmp_path):
    folder = write_checkpoint(tmp_path / "dense", "gpt_oss", swiglu_limit=0.4)
    expected = whole_prompt_logits(load_model(folder), PROMPT)
    assert (whole_prompt_logits(native(folder), PROMPT) - expected).abs().max() <= 3e-5 * expected.abs().max()
    # What the clamp does is seen.
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "swiglu_limit": 0.5}))
    assert (whole_prompt_logits(native(folder), PROMPT) - expected).abs().max() > 1e-2 * expected.abs().max()


@needs_native
@pytest.mark.parametrize(
    "name", ["self_attn.sinks", "mlp.router.bias", "mlp.experts.gate_up_proj_bias", "self_attn.o_proj.bias"]
)
def test_no_parameter_is_without_effect(tmp_path, name):
    folder = write_checkpoint(tmp_path / "dense", "gpt_oss")
    before = whole_prompt_logits(native(folder), PROMPT)
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}
    tensors[f"model.layers.1.{name}"][1] += 1.5
    save_file(tensors, folder / "model.safetensors")
    assert (whole_prompt_logits(native(folder), PROMPT) - before).abs().max() > 1e-3


@needs_native
def test_one_expert_at_a_time_is_unpacked_and_each_stack_once(tmp_path, monkeypatch):
    quantised, _ = write_mxfp4(tmp_path)
    alive, counts, unpack = [], [], mxfp4.unpack_float4

    def record(*arguments):
        weight = unpack(*arguments)
        gc.collect()
        alive[:] = [codes for codes in alive if codes() is not None] + [weakref.ref(weight.codes)]
        counts.append(len(alive))
        return weight

    monkeypatch.setattr(mxfp4, "unpack_float4", record)
    spec = read_model_spec(quantised)
    parameters = open_parameters(quantised, spec)
    assert not counts
    build_model(spec, parameters, 64, 16)
    # Gate and up are rows of one, which is kept for the second.
    assert len(counts) == 2 * 2 * 4
    assert max(counts) <= 2


def test_quantised_experts_are_not_quantised_again(tmp_path):
    quantised, _ = write_mxfp4(tmp_path)
    spec = read_model_spec(quantised)
    with pytest.raises(ConfigError, match="not quantised"):
        parameter_quantizer(open_parameters(quantised, spec), spec, POLICIES["int4"])
    with pytest.raises(ConfigError, match="quantised already"):
        write_quantized(quantised, tmp_path / "out", "int4")


def test_experts_stored_transposed_are_refused_by_the_writer_of_quantised_checkpoints(tmp_path):
    with pytest.raises(UnsupportedError, match="down_proj|gate_up_proj"):
        write_quantized(write_checkpoint(tmp_path / "dense", "gpt_oss"), tmp_path / "out", "int4")


def test_mxfp4_without_its_config_is_refused_with_the_names(tmp_path):
    quantised, _ = write_mxfp4(tmp_path)
    file = quantised / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match="_proj_blocks in the form of mxfp4, but config.json has no"):
        load_parameters(quantised, read_model_spec(quantised))


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_mxfp4_of_other_sizes_is_refused_with_the_name(tmp_path, part):
    quantised, _ = write_mxfp4(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in load_file(quantised / "model.safetensors").items()}
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    tensors[name] = tensors[name][:, :32].contiguous()
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(ModelFormatError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        load_parameters(quantised, read_model_spec(quantised))
