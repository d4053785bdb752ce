"""Models with quantised weights on the device against the dense models of the same numbers."""

import logging

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.base.gguf_file import BLOCK_SIZES, GgufTensor
from quire.contracts.config import EngineConfig
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import DTYPE_BYTES
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kv.device_pool import DeviceKvPool
from quire.model.build import whole_prompt_logits
from quire.model.checkpoint import load_parameters, open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_weights import load_on_device
from quire.model.parameters import parameter_shapes
from quire.model.quantized_writer import write_quantized
from quire.quant.gguf_blocks import device_bytes, unpack_blocks
from quire.quant.policy import DEVICE_POLICIES, parameter_quantizer
from quire.worker.device.memory import device_weight_bytes
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU
from tests.unit.kernels.gpu.quantized_checkpoints import SIZES, write
from tests.unit.model.gpt_oss_gguf import convert_gpt_oss
from tests.unit.model.mxfp4_checkpoint import write_mxfp4

DEVICE = "cuda" if HAS_GPU else "interpreter"
PROMPT = [5, 100, 7, 44, 300, 2, 9]


def device_logits(model, device, prompt=PROMPT):
    """Return the logits of every token of a prompt."""
    pool = DeviceKvPool(KvSpec.of(model.spec, 16, model.spec.dtype), 2, device)
    places = torch.arange(len(prompt))
    step = AttentionMetadata(places, [0, len(prompt)], [len(prompt)], torch.tensor([[0, 1]]))
    hidden = model.forward(torch.tensor(prompt).to(device), places.to(device), DeviceAttentionMetadata.of(step, device), pool)
    return model.logits(hidden).cpu()


def reference_logits(spec, parameters):
    return whole_prompt_logits(Decoder(spec, parameters, 64), PROMPT)


def opened(folder):
    spec = read_model_spec(folder)
    return spec, open_parameters(folder, spec)


@pytest.mark.parametrize(
    "family, method",
    [
        ("qwen3", "gptq"),
        ("qwen3", "fp8"),
        *(pytest.param("qwen3", method, marks=pytest.mark.slow) for method in ("awq", "int8", "fp8-rows", "fp8-tensor")),
        *(pytest.param("qwen3_moe", method, marks=pytest.mark.slow) for method in ("awq", "int8", "fp8", "fp8-tensor")),
    ],
)
def test_logits_are_those_of_the_dense_checkpoint_and_its_weights_stay_narrow(tmp_path, family, method, device):
    quantised, dense = write(tmp_path, family, method)
    spec, parameters = opened(quantised)
    found = device_logits(DeviceDecoder(spec, parameters, 64, device), device)
    expected = reference_logits(spec, load_parameters(dense, spec))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    weights = load_on_device(open_parameters(quantised, spec), spec, device)
    narrow = {name for name, parts in weights.linears.items() if all(isinstance(part, DeviceQuantizedWeight) for part in parts)}
    experts = family == "qwen3_moe"
    assert narrow == {
        f"layers.{i}.{name}.weight" for i in (0, 1) for name in (("qkv", "o") if experts else ("qkv", "o", "gate_up", "down"))
    }
    assert all(len(parts) == 1 for parts in weights.linears.values())
    assert all(isinstance(stack, DeviceQuantizedWeight) for stack in weights.experts.values())


@pytest.mark.slow
def test_mxfp4_experts_of_gpt_oss_stay_narrow_and_give_the_logits_of_their_numbers(tmp_path, device):
    quantised, dense = write_mxfp4(tmp_path)
    spec, parameters = opened(quantised)
    found = device_logits(DeviceDecoder(spec, parameters, 64, device), device)
    expected = reference_logits(spec, load_parameters(dense, spec))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    weights = load_on_device(open_parameters(quantised, spec), spec, device)
    assert len(weights.experts) == 4
    assert all(isinstance(stack, DeviceQuantizedWeight) and stack.is_packed for stack in weights.experts.values())
    assert torch.equal(
        weights.tensors["layers.1.experts.gate_up.bias"].cpu(), load_parameters(dense, spec)["layers.1.experts.gate_up.bias"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, method, words", [("qwen3", "fp8-small", "multiples of 32"), ("qwen3_moe", "gptq", "columns of experts")]
)
def test_what_no_kernel_runs_narrow_is_dense_and_the_log_says_so(tmp_path, family, method, words, device, caplog):
    quantised, dense = write(tmp_path, family, method)
    spec, parameters = opened(quantised)
    with caplog.at_level(logging.WARNING):
        model = DeviceDecoder(spec, parameters, 64, device)
    assert words in caplog.text
    expected = reference_logits(spec, load_parameters(dense, spec))
    assert (device_logits(model, device) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_our_own_int4_checkpoints_stay_narrow(tmp_path, device):
    dense = write_checkpoint(tmp_path / "dense", "qwen3", **SIZES)
    written = write_quantized(dense, tmp_path / "int4", "int4", 32)
    spec, parameters = opened(written.folder)
    weights = load_on_device(parameters, spec, device)
    assert all(
        isinstance(weights.linears[f"layers.0.{name}.weight"][0], DeviceQuantizedWeight) for name in ("qkv", "o", "gate_up")
    )
    assert weights.linears["layers.0.o.weight"][0].is_packed


@pytest.mark.covering
@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_that_are_quantised_while_they_are_loaded_are_those_of_the_policy(tmp_path, family, quantization, device):
    folder = write_checkpoint(tmp_path / "dense", family, **SIZES, tie_word_embeddings=family == "qwen3")
    spec, parameters = opened(folder)
    policy = DEVICE_POLICIES[quantization]
    loaded = load_parameters(folder, spec)
    quantize = parameter_quantizer(loaded, spec, policy)
    dense = {
        name: torch.stack([numbers(quantize.quantized(name, expert)) for expert in tensor])
        if tensor.ndim == 3
        else numbers(quantize.quantized(name, tensor))
        if tensor.ndim == 2
        else tensor
        for name, tensor in loaded.items()
    }
    assert any(not torch.equal(dense[name], loaded[name]) for name in dense)
    found = device_logits(DeviceDecoder(spec, parameters, 64, device, policy), device)
    expected = reference_logits(spec, dense)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def numbers(weight):
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def test_a_checkpoint_that_is_quantised_is_not_quantised_again(tmp_path, device):
    spec, parameters = opened(write(tmp_path, "qwen3", "fp8")[0])
    with pytest.raises(ConfigError, match="quantised already|is already"):
        DeviceDecoder(spec, parameters, 64, device, DEVICE_POLICIES["int8"])


def test_the_memory_plan_counts_narrow_bytes(tmp_path):
    quantised, dense = write(tmp_path, "qwen3", "fp8")
    spec = read_model_spec(dense)
    shapes = parameter_shapes(spec)
    options = {"model": "demo", "device": "auto"}
    whole = device_weight_bytes(EngineConfig(**options), spec, shapes, dense)
    assert device_weight_bytes(EngineConfig(**options), spec, shapes, quantised) < whole
    assert device_weight_bytes(EngineConfig(**options, quantization="int8"), spec, shapes, dense) < whole / 3


def test_the_memory_plan_counts_mxfp4_as_it_is_kept_on_a_device(tmp_path, device):
    folder = write_mxfp4(tmp_path, swiglu_limit=7.0)[0]
    config = EngineConfig(model="demo", device="auto")
    for path in (folder, convert_gpt_oss(folder, tmp_path / "model.gguf")):
        spec, parameters = opened(path)
        found = load_on_device(parameters, spec, device)
        linears = [part for parts in found.linears.values() for part in parts]
        parts = [*found.tensors.values(), *linears, *found.experts.values()]
        kept = sum(part.num_bytes if isinstance(part, DeviceQuantizedWeight) else part.nbytes for part in parts)
        planned = device_weight_bytes(config, spec, parameter_shapes(spec), path)
        assert kept <= planned <= 1.25 * kept


@pytest.mark.parametrize(
    "type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
)
def test_bytes_of_a_gguf_type_are_known_before_it_is_on_a_device(tmp_path, type_name, device):
    elements, num_bytes = BLOCK_SIZES[type_name]
    shape = (64, 2 * elements)
    spec = read_model_spec(write_checkpoint(tmp_path / "dense", "qwen3", **SIZES))
    stored = unpack_blocks(type_name, torch.zeros(64, 2 * num_bytes, dtype=torch.uint8), "w")
    (part,) = load_on_device({"layers.0.o.weight": stored}, spec, device, shapes={"layers.0.o.weight": shape}).linears.values()
    kept = part[0].num_bytes if isinstance(part[0], DeviceQuantizedWeight) else part[0].nbytes
    assert device_bytes([GgufTensor("w", type_name, shape, tmp_path, 0, 0)], DTYPE_BYTES[spec.dtype]) == kept


def test_the_engine_runs_a_quantised_model_from_its_options_to_its_tokens(tmp_path):
    folder = write_checkpoint(tmp_path / "dense", "qwen3", **SIZES)
    options = {"skip_tokenizer_init": True, "block_size": 16, "num_kv_blocks": 8, "max_model_len": 64, "dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    found = []
    for chosen in ({}, {"quantization": "int8"}, {"quantization": "int8", "kv_cache_dtype": "fp8"}):
        llm = LLM(str(folder), device=DEVICE, **options, **chosen)
        found.append(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)
        llm.close()
    assert all(len(tokens) == 4 for tokens in found)
    assert sum(a == b for a, b in zip(found[0], found[1], strict=True)) >= 2
