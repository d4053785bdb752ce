"""Whole quantised checkpoints: what is loaded is the dense checkpoint of the same numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.model.build import load_model, whole_prompt_logits
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec, read_quantization_config
from quire.model.parameters import parameter_shapes
from quire.quant.config import AwqConfig, GptqConfig
from quire.quant.parameters import QuantizedStack
from quire.quant.weight import QuantizedWeight
from tests.needs_re2 import needs_re2
from tests.unit.model.quantised_checkpoint import CONFIGS, quantise, write_quantised

PROMPT = [5, 100, 7, 44, 300, 2, 9]


@pytest.fixture(autouse=True)
def seed():
    """Every weight that is drawn is the same in every run."""
    torch.manual_seed(0)


def _edit(folder, change):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(change(tensors), folder / "new")
    (folder / "new").replace(folder / "model.safetensors")


def _load(folder):
    return load_parameters(folder, read_model_spec(folder))


def _logits(folder):
    return whole_prompt_logits(load_model(folder), PROMPT)


def _to_mixtral(name):
    name = name.replace(".mlp.experts.", ".block_sparse_moe.experts.").replace(".mlp.gate.", ".block_sparse_moe.gate.")
    if ".experts." in name:
        for mine, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(mine, theirs)
    return name


@pytest.mark.covering
@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_logits_are_those_of_the_dense_checkpoint(tmp_path, family, method):
    quantised, dense = write_quantised(tmp_path, family, method)
    assert (_logits(quantised) - _logits(dense)).abs().max() < 1e-4
    parameters, spec = _load(quantised), read_model_spec(quantised)
    assert {name: tuple(value.shape) for name, value in parameters.items()} == parameter_shapes(spec)


@pytest.mark.parametrize("method", ["gptq", "int8", "fp8"])
def test_experts_may_have_the_names_of_mixtral(tmp_path, method):
    changes = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    changes |= {"num_experts": None, "intermediate_size": 24}
    quantised, dense = write_quantised(tmp_path, "qwen3_moe", method, "w1|w2|w3|_proj", _to_mixtral, **changes)

    def without_norms(tensors):
        return {name: tensor for name, tensor in tensors.items() if "q_norm" not in name and "k_norm" not in name}

    for folder in (quantised, dense):
        _edit(folder, without_norms)
    assert (_logits(quantised) - _logits(dense)).abs().max() < 1e-4


def test_linear_weights_stay_quantised_when_they_are_integers(tmp_path):
    parameters = _load(write_quantised(tmp_path, "qwen3_moe", "gptq")[0])
    assert isinstance(parameters["layers.0.q.weight"], QuantizedWeight)
    stack = parameters["layers.0.experts.gate_up.weight"]
    assert isinstance(stack, QuantizedStack)
    assert all(weight.columns is not None for weight in stack.weights)
    for name in ("embed.weight", "layers.0.router.weight", "final_norm.weight", "lm_head.weight"):
        assert isinstance(parameters[name], torch.Tensor)


def test_weights_are_tensors_of_the_dtype_when_the_format_has_no_integers(tmp_path):
    folder = write_quantised(tmp_path, "qwen3", "fp8")[0]
    parameters = load_parameters(folder, read_model_spec(folder, "bfloat16"))
    assert all(isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 for value in parameters.values())


def test_head_may_be_quantised(tmp_path):
    quantised, dense = write_quantised(tmp_path, "qwen3", "int8", "_proj|lm_head")
    assert isinstance(_load(quantised)["lm_head.weight"], QuantizedWeight)
    assert (_logits(quantised) - _logits(dense)).abs().max() < 1e-4


def test_head_is_used_when_it_is_quantised_and_config_says_tied(tmp_path, caplog):
    quantised, dense = write_quantised(tmp_path, "qwen3", "int8", "lm_head", tie_word_embeddings=True)
    assert isinstance(_load(quantised)["lm_head.weight"], QuantizedWeight)
    assert "lm_head.weight is used" in caplog.text
    assert (_logits(quantised) - _logits(dense)).abs().max() < 1e-4


def test_embedding_stays_quantised_when_it_is_stored_so(tmp_path):
    quantised, dense = write_quantised(tmp_path, "qwen3", "int8", "embed_tokens")
    assert torch.equal(_load(quantised)["embed.weight"].dequantize(), _load(dense)["embed.weight"])


@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_parameters_are_rows_of_one_weight_when_projections_are_fused(write_config, method):
    folder = write_config("phi3", num_hidden_layers=1, num_key_value_heads=2, quantization_config=CONFIGS[method])
    plain = {"model.embed_tokens": (101, 32), "model.norm": (32,), "lm_head": (101, 32)}
    plain |= {f"model.layers.0.{norm}_layernorm": (32,) for norm in ("input", "post_attention")}
    stored = {f"{name}.weight": torch.randn(shape) for name, shape in plain.items()}
    dense = {}
    shapes = {"self_attn.qkv": (64, 32), "self_attn.o": (32, 32), "mlp.gate_up": (96, 32), "mlp.down": (32, 48)}
    for index, (module, shape) in enumerate(shapes.items()):
        parts, dense[module] = quantise(method, torch.randn(shape), index)
        stored |= {f"model.layers.0.{module}_proj.{part}": value for part, value in parts.items()}
    save_file(stored, folder / "model.safetensors")
    parameters = _load(folder)
    rows = {"q": slice(0, 32), "k": slice(32, 48), "v": slice(48, 64)}
    expected = {name: dense["self_attn.qkv"][span] for name, span in rows.items()}
    expected |= {"up": dense["mlp.gate_up"][48:], "down": dense["mlp.down"]}
    for name, tensor in expected.items():
        value = parameters[f"layers.0.{name}.weight"]
        if isinstance(value, QuantizedWeight):
            value = value.dequantize()
        assert torch.equal(value, tensor.to(value.dtype)), name
    if method == "gptq":
        q, k = parameters["layers.0.q.weight"], parameters["layers.0.k.weight"]
        assert q.codes.untyped_storage().data_ptr() == k.codes.untyped_storage().data_ptr()


@needs_re2
def test_experts_are_dense_when_their_pieces_do_not_fit_together(tmp_path):
    quantised = write_quantised(tmp_path, "qwen3_moe", "int8")[0]
    scheme = {"type": "int", "symmetric": True, "strategy": "channel"}
    groups = {
        "a": {"targets": ["re:.*gate_proj"], "weights": {**scheme, "num_bits": 4}},
        "b": {"targets": ["Linear"], "weights": {**scheme, "num_bits": 8}},
    }
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"format": "int-quantized", "config_groups": groups}
    (quantised / "config.json").write_text(json.dumps(config))

    def narrow(tensors):
        return {
            n: t.clamp(-8, 7) if n.endswith("gate_proj.weight") and t.dtype == torch.int8 else t for n, t in tensors.items()
        }

    _edit(quantised, narrow)
    parameters = _load(quantised)
    assert isinstance(parameters["layers.0.experts.gate_up.weight"], torch.Tensor)
    assert isinstance(parameters["layers.0.experts.down.weight"], QuantizedStack)
    stored = load_file(quantised / "model.safetensors")
    prefix = "model.layers.0.mlp.experts.2.gate_proj.weight"
    expected = stored[prefix].float() * stored[f"{prefix}_scale"]
    assert torch.equal(parameters["layers.0.experts.gate_up.weight"][2, :24], expected)


def test_scales_of_activations_and_of_the_cache_are_left_out_with_a_line_in_the_log(tmp_path, caplog):
    quantised, dense = write_quantised(tmp_path, "qwen3", "int8")

    def add(tensors):
        attention = "model.layers.0.self_attn."
        names = ("k_scale", "v_scale", "q_proj.input_scale", "q_proj.input_zero_point", "k_proj.output_scale")
        return {**tensors, **{attention + name: torch.ones(1) for name in names}}

    _edit(quantised, add)
    with caplog.at_level("INFO", logger="quire"):
        assert (_logits(quantised) - _logits(dense)).abs().max() < 1e-4
    assert "5 stored scales of activations and of the KV cache are not used" in caplog.text


def test_bias_that_the_model_lacks_is_left_out_only_when_it_is_zero(tmp_path):
    quantised, dense = write_quantised(tmp_path, "qwen3", "gptq")
    name = "model.layers.0.self_attn.q_proj.bias"
    _edit(quantised, lambda tensors: {**tensors, name: torch.zeros(32)})
    assert (_logits(quantised) - _logits(dense)).abs().max() < 1e-4
    _edit(quantised, lambda tensors: {**tensors, name: torch.eye(1, 32)[0]})
    with pytest.raises(ModelFormatError, match=r"1 unexpected \(layers\.0\.self_attn\.q_proj\.bias\)"):
        _load(quantised)


def test_wrong_shape_is_found_before_anything_is_unpacked(tmp_path):
    folder = write_quantised(tmp_path, "qwen3", "gptq")[0]

    def double(tensors):
        name = "model.layers.0.mlp.up_proj"
        for part in ("qweight", "qzeros", "scales"):
            tensors[f"{name}.{part}"] = torch.cat([tensors[f"{name}.{part}"]] * 2, 1)
        return tensors

    _edit(folder, double)
    with pytest.raises(ModelFormatError, match=r"up_proj\.weight has \[96, 32\], expected \[48, 32\]"):
        _load(folder)


def test_missing_part_is_named(tmp_path):
    folder = write_quantised(tmp_path, "qwen3", "gptq")[0]
    _edit(folder, lambda tensors: {n: t for n, t in tensors.items() if n != "model.layers.1.mlp.up_proj.scales"})
    with pytest.raises(ModelFormatError, match=r"model\.layers\.1\.mlp\.up_proj\.scales is missing"):
        _load(folder)


@pytest.mark.parametrize(
    ("method", "stored"),
    [
        ("gptq", "qweight in the form of GPTQ or AWQ"),
        ("int8", "weight in the form of int8"),
        ("fp8", "weight in the form of fp8"),
    ],
)
def test_quantised_tensors_are_refused_when_no_config_speaks_of_them(tmp_path, method, stored):
    folder = write_quantised(tmp_path, "qwen3", method)[0]
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match=rf"_proj\.{stored}, but config.json has no quantization_config for it; get"):
        _load(folder)


def test_config_of_modelopt_alone_is_refused_by_name(tmp_path):
    folder = write_quantised(tmp_path, "qwen3", "fp8")[0]
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(UnsupportedError, match=r"quantised by ModelOpt, as its hf_quant_config\.json says.*take a version in"):
        _load(folder)


@pytest.mark.parametrize(
    "name, values, kind",
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "sym": True}, GptqConfig),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, AwqConfig),
    ],
)
def test_config_may_lie_in_a_file_of_its_own(write_config, name, values, kind):
    folder = write_config("llama")
    assert read_quantization_config(folder) is None
    (folder / name).write_text(json.dumps(values))
    assert isinstance(read_quantization_config(folder), kind)


def test_config_may_lie_below_text_config_or_under_its_older_name(write_config):
    folder = write_config("gemma3", text_config={"quantization_config": CONFIGS["awq"]})
    assert isinstance(read_quantization_config(folder), AwqConfig)
    folder = write_config("llama", compression_config=CONFIGS["int8"])
    assert read_quantization_config(folder) is not None


@needs_re2
def test_hostile_pattern_is_refused_when_the_spec_is_read(write_config):
    hostile = {**CONFIGS["int8"], "ignore": ["re:" + "(" * 10 + "a" + "{200})" * 10]}
    with pytest.raises(UnsupportedError, match="repetition size"):
        read_model_spec(write_config("llama", quantization_config=hostile))


def test_spec_keeps_the_dtype_that_config_names(write_config):
    assert read_model_spec(write_config("llama", torch_dtype="float16", quantization_config=CONFIGS["gptq"])).dtype == "float16"
