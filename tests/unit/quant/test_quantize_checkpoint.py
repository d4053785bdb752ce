"""Writing a quantised checkpoint: what is in it, that it loads back as what was quantised, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError
from quire.model.build import load_model, whole_prompt_logits
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.quantized_writer import write_quantized
from quire.quant.parameters import QuantizedStack
from quire.quant.quantize import INT8, Scheme, quantize_weight
from tests.tiny_checkpoint import write_checkpoint

INT4 = Scheme("linear", 32)
STORIES = Path(__file__).resolve().parents[4] / "shared" / "data" / "checkpoints" / "stories260K"


def load(folder):
    return load_parameters(folder, read_model_spec(folder))


def assert_equal(found, expected):
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)
    assert found.levels == expected.levels


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_checkpoint_loads_back_as_what_was_quantised(tiny_model, tmp_path, scheme):
    write_quantized(tiny_model, tmp_path / "out", scheme)
    original, written = load(tiny_model), load(tmp_path / "out")
    assert list(written) == list(original)
    linears = {"q": INT8, "k": INT8, "v": INT8, "o": INT4, "gate": INT8, "up": INT8, "down": INT8}
    for name, parameter in written.items():
        module = name.split(".")[-2]
        if name.startswith("layers.") and module in linears:
            wanted = INT8 if scheme == "int8" else linears[module]
            assert_equal(parameter, quantize_weight(original[name], wanted, scale_dtype=torch.float32))
        else:
            assert isinstance(parameter, Tensor)
            assert torch.equal(parameter, original[name])


def test_weights_may_be_read_by_whom_the_configuration_may(tiny_model, tmp_path):
    write_quantized(tiny_model, tmp_path / "out", "int8")
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_experts_are_int4_and_all_else_int8_when_a_layer_has_experts(tmp_path):
    source = write_checkpoint(tmp_path / "moe", "qwen3_moe")
    write_quantized(source, tmp_path / "out", "int4")
    original, written = load(source), load(tmp_path / "out")
    stack = written["layers.1.experts.gate_up.weight"]
    assert isinstance(stack, QuantizedStack)
    for weight, dense in zip(stack.weights, original["layers.1.experts.gate_up.weight"], strict=True):
        assert_equal(weight, quantize_weight(dense, INT4, scale_dtype=torch.float32))
    assert_equal(written["layers.0.o.weight"], quantize_weight(original["layers.0.o.weight"], INT8, torch.float32))
    assert torch.equal(written["layers.0.router.weight"], original["layers.0.router.weight"])
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert [any("experts" in target for target in group["targets"]) for group in groups].count(True) == 1


def test_shards_hold_what_one_file_holds_when_the_limit_is_small(tiny_model, tmp_path):
    write_quantized(tiny_model, tmp_path / "one", "int4")
    write_quantized(tiny_model, tmp_path / "many", "int4", max_shard_bytes=20_000)
    whole = load_file(tmp_path / "one" / "model.safetensors")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert not list((tmp_path / "many").glob("*.tmp"))
    parts = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert sorted(parts) == sorted(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert load(tmp_path / "many").keys() == load(tmp_path / "one").keys()


def test_copy_works_without_the_original(tiny_model, tmp_path):
    from quire import LLM, SamplingParams

    source = tmp_path / "source"
    shutil.copytree(tiny_model, source)
    (source / "README.md").write_text("figures of the original")
    (source / "LICENSE").write_text("terms")
    report = write_quantized(source, tmp_path / "out", "int8")
    shutil.rmtree(source)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"LICENSE", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    output = LLM(str(tmp_path / "out"), num_kv_blocks=20).generate("the fox", SamplingParams(max_tokens=3), use_tqdm=False)
    assert output[0].finished
    assert report.written_bytes == sum(t.nbytes for t in load_file(tmp_path / "out" / "model.safetensors").values())
    assert report.written_bytes < report.source_bytes


def test_report_has_every_quantised_weight_with_its_noise(tiny_model, tmp_path):
    report = write_quantized(tiny_model, tmp_path / "out", "int4")
    assert len(report.layers) == 2 * 7
    by_module = {layer.module: layer for layer in report.layers}
    o_proj = by_module["model.layers.1.self_attn.o_proj"]
    assert 19 < o_proj.sqnr_db < 24 < 38 < by_module["model.layers.1.self_attn.q_proj"].sqnr_db
    # [32, 32]: 4 bits, an f32 scale per 32, and 16 bytes of shape.
    assert o_proj.bits_per_weight == pytest.approx(4 + 32 / 32 + 8 * 16 / 1024)
    assert 8 < report.bits_per_weight < 10


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_gives_the_same_logits_when_it_can_read_the_format(tmp_path, scheme, family):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors, which transformers reads the format with, is absent")
    import transformers

    if family == "llama" and not STORIES.is_dir():
        pytest.skip(f"there is no {STORIES}")
    source = STORIES if family == "llama" else write_checkpoint(tmp_path / "qwen3", "qwen3")
    write_quantized(source, tmp_path / "out", scheme)
    ids = torch.randint(5, 250, (30,), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    assert torch.allclose(whole_prompt_logits(load_model(tmp_path / "out"), ids.tolist()), expected, atol=1e-4)


def change(folder, name, make):
    file = folder / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensors[name] = make(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weight_that_is_not_finite_is_refused_by_name(tmp_path, scheme, value):
    source = write_checkpoint(tmp_path / "source", "qwen3")
    name = "model.layers.1.mlp.down_proj.weight"
    change(source, name, lambda weight: weight.index_fill(1, torch.tensor([5]), value))
    with pytest.raises(ModelFormatError, match=f"{name} holds values that are not finite"):
        write_quantized(source, tmp_path / "out", scheme)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_scales_that_float16_would_lose_are_stored_in_float32(tmp_path, scheme):
    source = write_checkpoint(tmp_path / "source", "qwen3", torch_dtype="float16")
    name = "model.layers.1.mlp.down_proj.weight"
    change(source, name, lambda weight: weight * 1e-3)
    write_quantized(source, tmp_path / "out", scheme)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    wide = [key for key, tensor in stored.items() if key.endswith("_scale") and tensor.dtype == torch.float32]
    assert f"{name}_scale" in wide
    assert len(wide) < 8
    weight = load_file(source / "model.safetensors")[name].float()
    found = load(tmp_path / "out")["layers.1.down.weight"].dequantize()
    # What rounding to integers costs, and no more.
    exact = quantize_weight(weight, INT8, torch.float32).dequantize()
    assert (found - weight).norm() <= 1.01 * (exact - weight).norm()


def test_folder_with_files_is_refused(tiny_model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        write_quantized(tiny_model, tmp_path, "int8")
    with pytest.raises(ConfigError, match="not an empty folder"):
        write_quantized(tiny_model, tmp_path / "notes.txt", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_checkpoint_that_is_quantised_already_is_refused(tiny_model, tmp_path):
    from quire import LLM

    write_quantized(tiny_model, tmp_path / "once", "int8")
    with pytest.raises(ConfigError, match="quantised already"):
        write_quantized(tmp_path / "once", tmp_path / "twice", "int4")
    with pytest.raises(ConfigError, match="already"):
        LLM(str(tmp_path / "once"), quantization="int8")
    assert not (tmp_path / "twice").exists()


def test_transposed_weights_are_refused(tmp_path):
    import transformers

    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedError, match="transposed"):
        write_quantized(tmp_path / "gpt2", tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_interrupted_writing_leaves_nothing_that_loads(tiny_model, tmp_path, monkeypatch):
    from quire.base.errors import QuireError

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("quire.model.quantized_writer.shutil.copyfile", fail)
    with pytest.raises(KeyboardInterrupt):
        write_quantized(tiny_model, tmp_path / "out", "int8")
    with pytest.raises(QuireError, match=r"config\.json"):
        read_model_spec(tmp_path / "out")
