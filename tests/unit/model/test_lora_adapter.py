"""Bad LoRA adapters are refused with the file, the field and what is allowed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.model.config_reader import read_model_spec
from quire.model.lora.adapter import AdapterReader, adapter_bytes
from quire.model.parameters import parameter_shapes
from tests.lora_adapter import PREFIX, write_adapter
from tests.needs_re2 import needs_re2
from tests.tiny_checkpoint import write_checkpoint

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (32, 32), DOWN: (32, 48)}


@pytest.fixture
def reader(tmp_path):
    folder = write_checkpoint(tmp_path / "base", "qwen3")
    return AdapterReader(folder, read_model_spec(folder), max_rank=8)


def change_tensors(folder, **changes):
    """Replace tensors by names with _ for dots; None removes one."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file)


@needs_re2
def test_pairs_have_the_scale_and_canonical_names(reader, tmp_path):
    merged = write_adapter(tmp_path / "a", SHAPES, rank=4, use_rslora=True, rank_pattern={Q: 2}, alpha_pattern={DOWN: 5})
    adapter = reader.read(str(tmp_path / "a"))
    assert set(adapter.pairs) == {"layers.0.q", "layers.1.down"}
    for name, module in (("layers.0.q", Q), ("layers.1.down", DOWN)):
        pair = adapter.pairs[name]
        assert torch.allclose(pair.b @ pair.a, merged[module], atol=1e-6)
    assert adapter.rank == 4
    assert adapter.num_bytes == 4 * (2 * (32 + 32) + 4 * (32 + 48))


@needs_re2
@pytest.mark.parametrize("suffix", ["", r"|v_proj", ".*"])
def test_keys_of_rank_patterns_are_matched_as_peft_does(reader, tmp_path, suffix):
    write_adapter(tmp_path / "a", {Q: (32, 32)}, rank=2)
    file = tmp_path / "a" / "adapter_config.json"
    config = json.loads(file.read_text()) | {"r": 4, "lora_alpha": 4, "rank_pattern": {f"q_proj{suffix}": 2}}
    file.write_text(json.dumps(config))
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")[f"{PREFIX}{Q}.lora_B.weight"]
    assert torch.allclose(reader.read(str(tmp_path / "a")).pairs["layers.0.q"].b, stored * 2)


def test_a_torch_file_gives_the_same_adapter(reader, tmp_path):
    write_adapter(tmp_path / "a", SHAPES)
    first = reader.read(str(tmp_path / "a"))
    torch.save(load_file(tmp_path / "a" / "adapter_model.safetensors"), tmp_path / "a" / "adapter_model.bin")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    second = reader.read(str(tmp_path / "a"))
    assert first.key != second.key
    assert all(torch.equal(first.pairs[name].b, second.pairs[name].b) for name in first.pairs)


def test_the_key_changes_with_the_weights(reader, tmp_path):
    for index, name in enumerate(("a", "b", "c")):
        write_adapter(tmp_path / name, SHAPES, seed=index // 2)
    keys = [reader.read(str(tmp_path / name)).key for name in ("a", "b", "c")]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"r": 16}, UnsupportedError, "r is 16, but max_lora_rank is 8"),
        ({"r": 0}, ModelFormatError, "r must be an integer from 1"),
        pytest.param(
            *({"rank_pattern": {"q_proj": 9}}, UnsupportedError, "rank_pattern['q_proj'] is 9, but max_lora_rank is 8"),
            marks=needs_re2,
        ),
        ({"rank_pattern": {"(?=x)": 2}}, UnsupportedError, "(?=x)"),
        ({"rank_pattern": [2]}, ModelFormatError, "rank_pattern must be an object"),
        ({"lora_alpha": None}, ModelFormatError, "lora_alpha must be a finite number, got None"),
        ({"lora_alpha": 10**400}, ModelFormatError, "lora_alpha must be a finite number, got 1000"),
        ({"peft_type": "IA3"}, UnsupportedError, "peft_type is 'IA3'"),
        ({"use_dora": True}, UnsupportedError, "use_dora is True"),
        ({"bias": "all"}, UnsupportedError, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save is ['lm_head']"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedError, "init_lora_weights is 'pissa_niter_4'"),
        ({"use_rslora": "yes"}, ModelFormatError, "use_rslora must be true or false"),
    ],
)
def test_configs_are_refused_by_their_field(reader, tmp_path, changes, error, message):
    write_adapter(tmp_path / "a", SHAPES)
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(error) as caught:
        reader.read(str(tmp_path / "a"))
    assert message in str(caught.value)
    assert "adapter_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({Q: (32, 64)}, "64 inputs and 32 outputs, but the base model"),
        ({Q: (64, 32)}, "is for another base model"),
        ({"model.layers.7.self_attn.q_proj": (32, 32)}, "layers.7.self_attn.q_proj"),
        ({"model.layers.0.self_attn.qkv_proj": (64, 32)}, "layers.0.self_attn.qkv_proj"),
        ({"model.layers.0.mlp.experts.3.gate_proj": (32, 32)}, "layers.0.mlp.experts.3.gate_proj"),
        ({"model.layers.0.mlp.experts": (32, 32)}, "layers.0.mlp.experts"),
        ({"model.layers.0.mlp.gate": (32, 32)}, "layers.0.mlp.gate"),
    ],
)
def test_adapters_of_other_bases_are_refused(reader, tmp_path, shapes, message):
    write_adapter(tmp_path / "a", shapes)
    with pytest.raises(ModelFormatError) as caught:
        reader.read(str(tmp_path / "a"))
    assert message in str(caught.value)
    assert "some/base" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{PREFIX}{Q}.lora_B.weight", None, "lora_B.weight is missing"),
        (f"{PREFIX}{Q}.lora_A.weight", torch.zeros(3, 32), "lora_A must be [4, in]"),
        (f"{PREFIX}{Q}.lora_A.weight", torch.zeros(4, 32, dtype=torch.int8), "must be a matrix of floats"),
        (f"{PREFIX}{Q}.lora_A.weight", torch.full((4, 32), torch.nan), "not finite"),
        (f"{Q}.lora_A.weight", torch.zeros(4, 32), "twice"),
        (f"{PREFIX}model.embed_tokens.lora_embedding_A", torch.zeros(4, 32), "lora_embedding_A"),
        (f"{PREFIX}lm_head.weight", torch.zeros(4, 32), "lm_head.weight"),
    ],
)
def test_tensors_are_refused_by_their_name(reader, tmp_path, name, tensor, message):
    write_adapter(tmp_path / "a", SHAPES)
    if "twice" in message:
        change_tensors(tmp_path / "a", **{f"{Q}.lora_A.weight": tensor, f"{Q}.lora_B.weight": torch.zeros(32, 4)})
    else:
        change_tensors(tmp_path / "a", **{name: tensor})
    with pytest.raises((ModelFormatError, UnsupportedError)) as caught:
        reader.read(str(tmp_path / "a"))
    assert message in str(caught.value)


def test_layers_for_images_are_left_out(reader, tmp_path, caplog):
    merely = {"model.visual.blocks.0.attn.qkv": (96, 32)}
    write_adapter(tmp_path / "both", SHAPES | merely)
    assert len(reader.read(str(tmp_path / "both")).pairs) == len(SHAPES)
    assert "2 matrices of layers for images or sounds are left out" in caplog.text
    write_adapter(tmp_path / "images", merely)
    with pytest.raises(ModelFormatError, match="holds no matrices of the language model"):
        reader.read(str(tmp_path / "images"))


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors", ""])
def test_folders_without_an_adapter_are_refused(reader, tmp_path, missing):
    write_adapter(tmp_path / "a", SHAPES)
    if missing:
        (tmp_path / "a" / missing).unlink()
    with pytest.raises(ModelFormatError, match=missing or "no folder of this machine"):
        reader.read(str(tmp_path / ("a" if missing else "absent")))


def test_memory_is_that_of_an_adapter_of_every_layer(reader, tmp_path):
    spec = read_model_spec(tmp_path / "base")
    shapes = parameter_shapes(spec)
    modules = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in {
            **{"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)},
            **{"self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)},
        }.items()
    }
    write_adapter(tmp_path / "a", modules | {"lm_head": (spec.vocab_size, 32)})
    assert reader.read(str(tmp_path / "a")).num_bytes == adapter_bytes(shapes, 4, 4)
