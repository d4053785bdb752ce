"""Checkpoints of float8 on a CPU: run as they are stored, to the logits of the dense checkpoint of the same numbers."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.base.errors import ModelFormatError
from quire.contracts.config import EngineConfig
from quire.kernels.native import load_native
from quire.model.build import build_model, load_model, whole_prompt_logits
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.native_weights import WeightPacker
from quire.model.parameters import parameter_shapes
from quire.quant.float8 import Float8Weight
from quire.quant.policy import POLICIES
from quire.worker.memory import weight_bytes
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.quantized_checkpoints import write

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

PROMPT = [5, 100, 7, 44, 300, 2, 9, 11, 250, 31, 8, 77, 1, 64, 190, 23, 5, 6, 7, 21]
METHODS = ["fp8", "fp8-small", "fp8-rows", "fp8-tensor"]
F32_SHARE = 1e-5
"""Of the range of the logits: the order of sums."""
BF16_SHARE = 1.3
"""Of how far the dense weights, rounded to bfloat16, are from float32: here the weights are exact, and only inputs rounded."""


def native_model(folder, dtype="float32"):
    spec = read_model_spec(folder, dtype)
    decoder = build_model(spec, open_parameters(folder, spec), 64, 16)
    assert isinstance(decoder, NativeDecoder)
    return decoder


@pytest.mark.covering
@pytest.mark.parametrize("family", ["mistral", "qwen3", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_the_dense_weights(tmp_path, method, family):
    quantised, dense = write(tmp_path, family, method)
    want = whole_prompt_logits(load_model(dense, "float32"), PROMPT)
    exact = whole_prompt_logits(native_model(quantised), PROMPT)
    assert (exact - want).abs().max() <= F32_SHARE * (want.max() - want.min())
    short, plain = (whole_prompt_logits(native_model(folder, "bfloat16"), PROMPT) for folder in (quantised, dense))
    assert (short - want).abs().mean() <= BF16_SHARE * (plain - want).abs().mean()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("method", ["fp8", "fp8-rows"])
def test_weights_stay_in_their_bytes_as_the_plan_says(tmp_path, method, family):
    quantised, dense = write(tmp_path, family, method)
    packed, plain = (native_model(folder, "bfloat16").weight_bytes for folder in (quantised, dense))
    spec = read_model_spec(quantised, "bfloat16")
    shapes = parameter_shapes(spec)
    linears = sum(torch.Size(shape).numel() for name, shape in shapes.items() if "layers." in name and len(shape) > 1)
    routers = sum(torch.Size(shape).numel() for name, shape in shapes.items() if "router" in name)
    assert plain - packed > 0.8 * (linears - routers)
    plan = weight_bytes(EngineConfig(model=str(quantised)), spec, shapes, quantised)
    # Rows are padded to 16, which is much of four experts' router.
    assert 0.9 * packed < plan < 1.1 * packed


def test_greedy_tokens_are_those_of_the_reference(tmp_path, monkeypatch):
    quantised, _ = write(tmp_path, "qwen3", "fp8")
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for is_native in ("1", "0"):
        monkeypatch.setenv("QUIRE_NATIVE", is_native)
        llm = LLM(model=str(quantised), dtype="float32", max_model_len=64, num_kv_blocks=32)
        outputs = llm.generate([PROMPT[:9], PROMPT[3:]], sampling, use_tqdm=False)
        found.append([tuple(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]


def test_weight_that_is_quantised_otherwise_starts_from_its_numbers(tmp_path):
    quantised, dense = write(tmp_path, "qwen3", "fp8")
    logits = []
    for folder in (quantised, dense):
        spec = read_model_spec(folder, "float32")
        model = build_model(spec, open_parameters(folder, spec), 64, 16, POLICIES["int8"])
        logits.append(whole_prompt_logits(model, PROMPT))
    assert (logits[0] - logits[1]).abs().max() < 1e-5


def test_code_that_is_no_number_is_refused_with_the_name_of_its_tensor(tmp_path):
    quantised, _ = write(tmp_path, "qwen3", "fp8")
    tensors = {name: tensor.clone() for name, tensor in load_file(quantised / "model.safetensors").items()}
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(ModelFormatError, match="layers.1.mlp.up_proj.weight holds codes that are not numbers"):
        native_model(quantised)


@pytest.mark.parametrize(
    "columns, block, scale", [(30, (16, 30), 1.0), (32, (16, 6), 1.0), (32, (1, 32), 3e38)], ids=["columns", "blocks", "scale"]
)
def test_weight_that_does_not_fit_is_made_dense_and_that_said_once(columns, block, scale, caplog):
    codes = torch.randn(16, columns, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = torch.full((-(-16 // block[0]), -(-columns // block[1])), scale)
    weight, row = Float8Weight(codes, scales, block), torch.empty(columns)
    packer = WeightPacker(load_native(), torch.float32)
    with caplog.at_level("WARNING", logger="quire"):
        packer.pack(weight)
        packed = packer.pack(weight)
    assert sum("some float8 weights do not fit" in record.message for record in caplog.records) == 1
    want = weight.dequantize()
    for index in range(16):
        packed.unpack_row(index, row.data_ptr())
        assert torch.equal(row, want[index])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_float_weights_are_quantised_to_float8_by_rows_when_they_are_loaded(tmp_path, family):
    folder = write_checkpoint(tmp_path / "model", family)
    spec = read_model_spec(folder, "float32")
    policy = POLICIES["fp8"]
    quantised, plain = (build_model(spec, open_parameters(folder, spec), 64, 16, chosen) for chosen in (policy, None))
    assert quantised.weight_bytes < plain.weight_bytes
    # The reference runs the same numbers dense.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_NATIVE", "0")
        reference = build_model(spec, open_parameters(folder, spec), 64, 16, policy)
    got = whole_prompt_logits(quantised, PROMPT)
    want = whole_prompt_logits(reference, PROMPT)
    assert (got - want).abs().max() <= F32_SHARE * (want.max() - want.min())
    assert (got - whole_prompt_logits(plain, PROMPT)).abs().max() > 1e-4


def test_engine_runs_with_fp8_weights_on_a_cpu(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "qwen3")
    llm = LLM(model=str(folder), quantization="fp8", device="cpu", max_model_len=64, num_kv_blocks=16)
    [output] = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
