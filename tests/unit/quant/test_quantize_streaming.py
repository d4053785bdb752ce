"""Quantising parameters one at a time: what is held meanwhile, and that the model is the one of all at once."""

import gc
import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import ConfigError
from quire.model.build import build_model, whole_prompt_logits
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.quant.policy import POLICIES, iterate_quantized, parameter_quantizer, quantize_parameters
from quire.quant.weight import QuantizedWeight
from tests.tiny_checkpoint import write_checkpoint

PROMPT = list(range(40, 60))


def write_headless(folder):
    """Write the untied checkpoint of a base model, without a head: the embedding takes its place, as one object."""
    write_checkpoint(folder, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    tensors = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items() if n != "lm_head.weight"}
    save_file(tensors, folder / "headless.safetensors")
    (folder / "headless.safetensors").replace(folder / "model.safetensors")
    return folder


def write(folder, kind):
    return write_headless(folder) if kind == "headless" else write_checkpoint(folder, kind)


def test_one_parameter_at_a_time_is_taken_when_they_are_iterated(tiny_model):
    spec = read_model_spec(tiny_model)
    parameters = load_parameters(tiny_model, spec)
    names, alive = list(parameters), []
    for name, parameter in iterate_quantized(parameters, spec, POLICIES["int8"]):
        assert name == names[-len(parameters) - 1]
        assert list(parameters) == names[len(names) - len(parameters) :]
        if isinstance(parameter, QuantizedWeight):
            alive.append(weakref.ref(parameter.codes))
        del parameter
        gc.collect()
        assert all(reference() is None for reference in alive)
    assert len(alive) == 2 * 7 + 2
    assert parameters == {}


@pytest.mark.parametrize("is_head_first", [False, True])
def test_head_and_embedding_are_one_object_in_any_order_when_they_were_one(tmp_path, is_head_first):
    folder = write_headless(tmp_path / "headless")
    spec = read_model_spec(folder)
    parameters = load_parameters(folder, spec)
    if is_head_first:
        parameters = {"lm_head.weight": parameters.pop("lm_head.weight"), **parameters}
    quantized = quantize_parameters(parameters, spec, POLICIES["int4"])
    assert isinstance(quantized["embed.weight"], QuantizedWeight)
    assert quantized["lm_head.weight"] is quantized["embed.weight"]


@pytest.mark.covering
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "headless", "qwen3_moe"])
def test_model_is_that_of_parameters_quantised_at_once_when_it_quantises_them_itself(tmp_path, kind, scheme):
    folder = write(tmp_path / kind, kind)
    # In float32 weights that come quantised are made exact.
    spec, policy = read_model_spec(folder, "bfloat16"), POLICIES[scheme]
    at_once = build_model(spec, quantize_parameters(load_parameters(folder, spec), spec, policy), 64, 16)
    streamed = build_model(spec, load_parameters(folder, spec), 64, 16, policy)
    plain = build_model(spec, load_parameters(folder, spec), 64, 16)
    expected = whole_prompt_logits(at_once, PROMPT)
    assert torch.equal(whole_prompt_logits(streamed, PROMPT), expected)
    assert not torch.equal(whole_prompt_logits(plain, PROMPT), expected)


@pytest.mark.parametrize("kind, num_heads", [("headless", 0), ("gemma2", 0), ("qwen3", 1)])
def test_every_weight_is_quantised_once_when_the_native_decoder_packs_it(tmp_path, kind, num_heads):
    native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
    from quire.model.native_decoder import NativeDecoder

    folder = write(tmp_path / kind, kind)
    spec = read_model_spec(folder)
    parameters = load_parameters(folder, spec)
    weights = [name for name in parameters if name.split(".")[-2] in ("q", "k", "v", "o", "gate", "up", "down", "embed")]
    quantize, seen = parameter_quantizer(parameters, spec, POLICIES["int4"]), []

    def record(name: str, weight: Tensor):
        seen.append(name)
        return quantize(name, weight)

    NativeDecoder(native, spec, parameters, 64, record)
    assert sorted(seen) == sorted(weights + ["lm_head.weight"] * num_heads)
    assert parameters == {}


@pytest.mark.parametrize("is_native", [True, False])
def test_parameters_that_are_quantised_already_are_refused_by_every_model(tiny_model, monkeypatch, is_native):
    if not is_native:
        monkeypatch.setattr("quire.model.build.load_native", lambda: None)
    spec = read_model_spec(tiny_model)
    quantized = quantize_parameters(load_parameters(tiny_model, spec), spec, POLICIES["int8"])
    with pytest.raises(ConfigError, match="already"):
        build_model(spec, quantized, 64, 16, POLICIES["int4"])
