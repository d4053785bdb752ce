"""Which parameters of a model are quantised, and that the engine runs what was quantised."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, ConfigError, SamplingParams
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.quant.parameters import QuantizedStack
from quire.quant.policy import POLICIES, QuantizationPolicy, describe_short_rows, quantize_parameters
from quire.quant.quantize import FINE_INT4, INT4, INT8, quantize_weight
from quire.quant.weight import QuantizedWeight
from tests.tiny_checkpoint import write_checkpoint


def quantize(folder, policy):
    spec = read_model_spec(folder)
    return quantize_parameters(load_parameters(folder, spec), spec, policy)


def kinds(parameters):
    """Return name -> "int8", "int4" or "float"."""

    def kind(parameter):
        if isinstance(parameter, Tensor):
            return "float"
        weight = parameter.weights[0] if isinstance(parameter, QuantizedStack) else parameter
        return "int8" if weight.levels is None else "int4"

    return {name: kind(parameter) for name, parameter in parameters.items()}


def test_int8_takes_every_linear_embedding_and_head_and_nothing_else(tiny_model):
    found = kinds(quantize(tiny_model, POLICIES["int8"]))
    linears = {f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {name for name, kind in found.items() if kind == "int8"} == linears | {"embed.weight", "lm_head.weight"}
    assert found["layers.0.q_norm.weight"] == found["final_norm.weight"] == "float"


@pytest.mark.parametrize(("num_columns", "linears", "small", "head"), [(64, FINE_INT4, INT8, INT8), (256, INT4, INT4, INT4)])
def test_int4_keeps_what_is_narrow_or_at_an_end_at_more_bits(num_columns, linears, small, head):
    spec = POLICIES["int4"]
    found = {
        (layer, name): spec.scheme_of(f"layers.{layer}.{name}.weight", num_columns, 4)
        for layer in range(4)
        for name in ("q", "k", "v", "o", "gate", "up", "down", "experts.gate_up", "experts.down", "router", "attn_in")
    }
    for (layer, name), scheme in found.items():
        is_end = layer in (0, 3) and name in ("gate", "up", "down")
        expected = None if name in ("router", "attn_in") else INT8 if is_end else small if name in ("k", "v") else linears
        assert scheme == expected, (layer, name)
    assert spec.scheme_of("layers.1.q.bias", num_columns, 4) is None
    assert spec.scheme_of("pos.weight", num_columns, 4) is None
    assert spec.scheme_of("lm_head.weight", num_columns, 4) == head


def test_quantised_parameters_are_those_of_the_weights_and_the_float_ones_are_let_go(tiny_model):
    spec = read_model_spec(tiny_model)
    parameters = load_parameters(tiny_model, spec)
    original = dict(parameters)
    quantized = quantize_parameters(parameters, spec, POLICIES["int4"])
    assert parameters == {}
    assert list(quantized) == list(original)
    expected = quantize_weight(original["layers.1.q.weight"], FINE_INT4)
    assert torch.equal(quantized["layers.1.q.weight"].codes, expected.codes)
    assert torch.equal(quantized["layers.1.q.weight"].scale, expected.scale)


def test_experts_become_a_stack_or_stay_float_when_they_are_narrow(tmp_path):
    found = quantize(write_checkpoint(tmp_path / "moe", "qwen3_moe"), POLICIES["int4"])
    assert isinstance(found["layers.0.experts.gate_up.weight"], QuantizedStack)
    assert found["layers.0.experts.gate_up.weight"].shape == (4, 48, 32)
    assert isinstance(found["layers.0.experts.down.weight"], Tensor)  # 24 columns
    assert isinstance(found["layers.0.router.weight"], Tensor)


def test_head_stays_one_object_with_the_embedding_when_it_is_the_embedding(tmp_path):
    folder = write_checkpoint(tmp_path / "untied", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    tensors = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items() if n != "lm_head.weight"}
    save_file(tensors, folder / "headless.safetensors")
    (folder / "headless.safetensors").replace(folder / "model.safetensors")
    found = quantize(folder, POLICIES["int8"])
    assert isinstance(found["embed.weight"], QuantizedWeight)
    assert found["lm_head.weight"] is found["embed.weight"]


def test_tied_model_has_one_quantised_embedding(tmp_path):
    found = quantize(write_checkpoint(tmp_path / "tied", "gemma2"), POLICIES["int8"])
    assert "lm_head.weight" not in found
    assert isinstance(found["embed.weight"], QuantizedWeight)


def test_policy_can_leave_embedding_and_head(tiny_model):
    found = kinds(quantize(tiny_model, replace(POLICIES["int8"], embedding=None, head=INT4)))
    assert (found["embed.weight"], found["lm_head.weight"]) == ("float", "int4")


def test_weights_with_short_rows_that_get_int8_are_named():
    shapes = {
        "embed.weight": (90, 64),
        "layers.1.k.weight": (8, 64),
        "layers.1.q.weight": (8, 64),
        "layers.1.o.weight": (8, 512),
    }
    found = describe_short_rows(shapes, 9, POLICIES["int4"])
    assert found == "embed, k get int8, as their rows have fewer than 256 values"
    assert describe_short_rows(shapes, 9, POLICIES["int8"]) is None
    assert describe_short_rows({"layers.1.k.weight": (8, 512)}, 9, POLICIES["int4"]) is None


def test_parameters_that_are_quantised_already_are_refused(tiny_model):
    spec = read_model_spec(tiny_model)
    quantized = quantize(tiny_model, QuantizationPolicy(INT8))
    with pytest.raises(ConfigError, match="already"):
        quantize_parameters(quantized, spec, POLICIES["int4"])


@pytest.mark.covering
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_engine_gives_the_tokens_of_the_dequantised_checkpoint(tiny_family, tmp_path, scheme, monkeypatch):
    """The oracle is a plain float checkpoint that stores the dequantised weights under their original names.

    With the reference kernels: native ones quantise the inputs too.
    """
    monkeypatch.setattr("quire.model.build.load_native", lambda: None)
    folder = tmp_path / "dense"
    shutil.copytree(tiny_family, folder)
    spec = read_model_spec(folder)
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    names = {"embed.weight": "embed_tokens", "lm_head.weight": "lm_head"}
    parts = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    for name, weight in quantize(folder, POLICIES[scheme]).items():
        if isinstance(weight, Tensor):
            continue
        dense = weight.dequantize()
        if isinstance(weight, QuantizedStack):
            layer = name.split(".")[1]
            if spec.model_type == "gpt_oss":
                stored = f"model.layers.{layer}.mlp.experts.{'gate_up' if '.gate_up.' in name else 'down'}_proj"
                turned = dense.transpose(1, 2)
                if ".gate_up." in name:
                    turned = torch.stack(turned.chunk(2, 2), -1).flatten(2)
                tensors[stored] = turned.contiguous()
                continue
            for expert, (gate, up) in enumerate(rows.chunk(2) for rows in dense):
                prefix = f"model.layers.{layer}.mlp.experts.{expert}"
                tensors[f"{prefix}.gate_proj.weight"], tensors[f"{prefix}.up_proj.weight"] = gate.clone(), up.clone()
        elif name in names:
            tensors["lm_head.weight" if name == "lm_head.weight" else "model.embed_tokens.weight"] = dense
        else:
            _, layer, part, _ = name.split(".")
            tensors[f"model.layers.{layer}.{parts.get(part, f'mlp.{part}_proj')}.weight"] = dense
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert spec.dtype == "float32"
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)

    def generate(model, **options):
        llm = LLM(str(model), num_kv_blocks=20, **options)
        (output,) = llm.generate([list(range(40, 60))], params, use_tqdm=False)
        return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob

    tokens, logprob = generate(tiny_family, quantization=scheme)
    expected_tokens, expected_logprob = generate(folder)
    assert tokens == expected_tokens
    assert logprob == pytest.approx(expected_logprob, abs=1e-4)


def test_unknown_quantization_is_refused():
    from quire import EngineConfig

    with pytest.raises(ConfigError, match="int8"):
        EngineConfig(model="demo", quantization="int3")
